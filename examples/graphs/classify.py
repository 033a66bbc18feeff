"""Classify the nodes of a graph, with and without evolving attention maps.

Data sets: ``karate`` is Zachary's karate club, 34 nodes, 4 communities, one label of each is given. ``digits`` is
scikit-learn's handwritten digits, each joined to its nearest neighbours; 10 labels of each class are given. A tenth
of the other nodes chooses the epoch (digits) and the rest are the test. Each seed has its own split.

    python -m examples.graphs.classify digits --seeds 1 2 3 4 5
"""

import argparse
import copy
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.neighbors import kneighbors_graph
from torch import Tensor
from torch_geometric.datasets import KarateClub
from torch_geometric.utils import to_undirected
from tqdm import tqdm

from examples.graphs.model import EvolvingGAT, accuracy, evaluate
from examples.report import positive, report

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
    """Train one model; its accuracy on the test nodes, at the best epoch of the validation nodes if there are any."""
    load, given, share = DATA[name]
    x, edges, classes = load()
    train, valid, test = split(classes, given, share, seed)
    torch.manual_seed(seed)
    model = EvolvingGAT(x.size(1), 8, len(classes.unique()), alpha=alpha, beta=beta)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    best, state = -1.0, model.state_dict()
    for _ in range(epochs):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x, edges)[train], classes[train]).backward()
        optimizer.step()
        if valid.any() and (score := accuracy(evaluate(model, x, edges), classes, valid)) > best:
            best, state = score, copy.deepcopy(model.state_dict())
    model.load_state_dict(state if valid.any() else model.state_dict())
    return accuracy(evaluate(model, x, edges), classes, test)


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", choices=DATA)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    parser.add_argument("--epochs", type=positive, default=200, metavar="N", help="(default: 200)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    scores = {
        system: [100 * run(args.data, *shares, seed, args.epochs) for seed in tqdm(args.seeds, system, disable=None)]
        for system, shares in SYSTEMS.items()
    }
    report(scores, args.out, data=args.data, seeds=args.seeds)


if __name__ == "__main__":
    main()
