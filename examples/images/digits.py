"""Classify scikit-learn's digits with ResNet, AA-ResNet and EA-AA-ResNet of eight layers, in five folds.

    python -m examples.images.digits --folds 5

The pictures of 8 x 8 pixels are enlarged to 32 x 32. Each fold trains on four fifths and tests on the rest after a
fixed number of epochs, so no choice is made on the test.
"""

import argparse
import statistics
from pathlib import Path

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor
from tqdm import tqdm
from transformers import ResNetConfig

from examples.images.resnet import EvolvingResNet

#: name -> arguments of EvolvingResNet; alpha and beta of the paper for 34 and 50 layers
SYSTEMS = {
    "ResNet": {"augment": False},
    "AA-ResNet": {"alpha": 0.0, "beta": 0.0},
    "EA-AA-ResNet": {"alpha": 0.5, "beta": 1.0},
}
SIDE, BATCH = 32, 64


def small_config() -> ResNetConfig:
    """A ResNet of three stages with two basic blocks each, of 16, 32 and 64 channels."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [2, 2, 2]}
    return ResNetConfig(layer_type="basic", num_channels=1, num_labels=10, **sizes)


def pictures() -> tuple[Tensor, Tensor]:
    """Pictures, 1,797 x 1 x 32 x 32, and classes, 1,797."""
    images, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    return F.interpolate(images, SIDE, mode="bilinear"), torch.from_numpy(classes)


def train(x: Tensor, classes: Tensor, options: dict, epochs: int, seed: int) -> EvolvingResNet:
    """A model trained on pictures, B x 1 x 32 x 32, by AdamW with a cosine schedule."""
    torch.manual_seed(seed)
    model = EvolvingResNet(small_config(), SIDE, **options).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]), classes[chosen]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: EvolvingResNet, x: Tensor, classes: Tensor) -> float:
    """Percent of the pictures whose class has the highest score."""
    return 100 * (model(x).argmax(1) == classes).float().mean().item()


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5, metavar="N", help="how many of the five (default: 5)")
    parser.add_argument("--epochs", type=int, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table here")
    args = parser.parse_args(words)
    x, classes = pictures()
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(x, classes))[: args.folds]
    lines = ["| system | parameters | accuracy, mean | standard deviation | each fold |", "|---|---|---|---|---|"]
    for system, options in SYSTEMS.items():
        scores = []
        for number, (some, others) in enumerate(tqdm(folds, system, disable=None)):
            model = train(x[some], classes[some], options, args.epochs, seed=number)
            scores.append(accuracy(model, x[others], classes[others]))
        count = sum(parameter.numel() for parameter in model.parameters())
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        each = " ".join(f"{score:.2f}" for score in scores)
        lines.append(f"| {system} | {count:,} | {statistics.mean(scores):.2f} | {spread:.2f} | {each} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
