"""Classify the nodes of a graph, with and without evolving attention maps.

Data sets: ``karate`` is Zachary's karate club, 34 nodes, 4 communities, one label of each is given. ``digits`` is
scikit-learn's handwritten digits, each joined to its nearest neighbours; 10 labels of each class are given. A tenth
of the other nodes chooses the epoch (digits) and the rest are the test. Each seed has its own split.

    python -m examples.graphs.classify digits --seeds 1 2 3 4 5
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_undirected
from tqdm import tqdm

from ea_artifacts.command import Parser, positive
from examples.common import report
from examples.graphs.model import EvolvingGAT

SYSTEMS = {"GAT": (0.0, 0.0), "Evolving GAT": (0.1, 0.1), "Evolving GAT, alpha 0.5": (0.5, 0.1)}


def karate() -> tuple[Tensor, Tensor, Tensor]:
    """Nodes' values N x N (one-hot), edges 2 x E and classes N of the karate club."""
    graph = KarateClub()[0]
    return graph.x, graph.edge_index, graph.y


def digits(neighbours: int = 10) -> tuple[Tensor, Tensor, Tensor]:
    """Pixels N x 64, the edges 2 x E of the nearest neighbours' graph, and classes N of scikit-learn's digits."""
    pixels, classes = load_digits(return_X_y=True)
    rows, columns = kneighbors_graph(pixels, neighbours).nonzero()
    edges = torch.stack([torch.from_numpy(columns), torch.from_numpy(rows)]).long()
    return torch.from_numpy(pixels).float() / 16, to_undirected(edges), torch.from_numpy(classes)


#: name -> (data, labels of each class that are given, share of the others that choose the epoch)
DATA = {"karate": (karate, 1, 0.0), "digits": (digits, 10, 0.1)}


def split(classes: Tensor, given: int, share: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of the nodes for training, validation and test, N bool each."""
    order = torch.randperm(len(classes), generator=torch.Generator().manual_seed(seed))
    train = torch.zeros(len(classes), dtype=torch.bool)
    for label in classes.unique():
        train[order[classes[order] == label][:given]] = True
    others = order[~train[order]]
    valid = torch.zeros_like(train)
    valid[others[: int(share * len(others))]] = True
    return train, valid, ~train & ~valid


def run(name: str, alpha: float, beta: float, seed: int, epochs: int) -> float:
    """Train a model; its percent of the test nodes at the validation nodes' best epoch, without these at the last."""
    load, given, share = DATA[name]
    x, edges, classes = load()
    train, valid, test = split(classes, given, share, seed)
    torch.manual_seed(seed)
    model = EvolvingGAT(x.size(1), len(classes.unique()), alpha, beta)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    best, tested = torch.tensor(-1.0), torch.tensor(0.0)
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[train], classes[train]).backward()
        optimizer.step()
        with torch.no_grad():
            hits = (model.eval()(x, edges).argmax(1) == classes).float()
        if not valid.any() or hits[valid].mean() > best:
            best, tested = hits[valid].mean(), hits[test].mean()
    return 100 * tested.item()


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    parser.add_argument("--epochs", type=positive, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    scores = {
        system: [run(args.data, *shares, seed, args.epochs) for seed in tqdm(args.seeds, system, disable=None)]
        for system, shares in SYSTEMS.items()
    }
    report(scores, args.out, data=args.data, seeds=args.seeds)


if __name__ == "__main__":
    main()
