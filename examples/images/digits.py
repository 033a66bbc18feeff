"""Classify scikit-learn's digits with ResNets and ViTs, plain and evolving, in five folds.

    python -m examples.images.digits --out scores.json

Each fold trains on four fifths and tests on the rest after a fixed number of epochs: no choice is made on the test.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from tqdm import tqdm
from transformers import ResNetConfig, ViTConfig, ViTForImageClassification

from evolving_attention.huggingface import evolve
from examples.images.resnet import EvolvingResNet
from examples.report import positive, report

SIDE, BATCH = 32, 64


class Recipe(NamedTuple):
    """A model and its training by AdamW with a cosine schedule."""

    build: Callable[[], nn.Module]
    side: int
    epochs: int
    rate: float
    decay: float


def resnet(blocks: int = 2, **options: float | bool) -> Recipe:
    """A ResNet of three stages of basic blocks, with 16, 32 and 64 channels; ``blocks`` in the first, else two."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 32, 64], "depths": [blocks, 2, 2]}
    config = ResNetConfig(layer_type="basic", num_channels=1, num_labels=10, **sizes)
    return Recipe(lambda: EvolvingResNet(config, SIDE, **options), SIDE, epochs=8, rate=3e-3, decay=0.01)


def vit(alpha: float | None = None, beta: float | None = None) -> Recipe:
    """A ViT 64 wide with four heads; with alpha and beta its attention evolves."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}

    def build() -> nn.Module:
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10))
        return model if alpha is None else evolve(model, alpha, beta)

    return Recipe(build, 8, epochs=20, rate=2e-3, decay=0.05)


#: name -> recipe; alpha and beta are the papers', for ResNets those of 34 and 50 layers
SYSTEMS = {
    "ResNet": resnet(augment=False),
    "AA-ResNet": resnet(alpha=0.0, beta=0.0),
    "EA-AA-ResNet": resnet(alpha=0.5, beta=1.0),
    "ViT": vit(),
    "EA-ViT": vit(alpha=0.1, beta=0.3),
}


def pictures(side: int) -> tuple[Tensor, Tensor]:
    """Pictures, 1,797 x 1 x side x side, from 0 to 1, and classes, 1,797."""
    images, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(images).float().view(-1, 1, 8, 8) / 16
    return F.interpolate(images, side, mode="bilinear"), torch.from_numpy(classes)


def folds(classes: Tensor, count: int) -> list:
    """The first ``count`` of five divisions into training and test."""
    return list(StratifiedKFold(5, shuffle=True, random_state=0).split(classes, classes))[:count]


def train(recipe: Recipe, x: Tensor, classes: Tensor, seed: int) -> nn.Module:
    """A model trained on pictures, B x 1 x side x side."""
    torch.manual_seed(seed)
    model = recipe.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.rate, weight_decay=recipe.decay)
    return fit(model, x, classes, optimizer, recipe.epochs)


def fit(
    model: nn.Module, x: Tensor, classes: Tensor, optimizer: torch.optim.Optimizer, epochs: int, last_rate: float = 0.0
) -> nn.Module:
    """The model after training in which the rate falls along a cosine."""
    model.train()
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs, last_rate)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(_scores(model, x[chosen]), classes[chosen]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, classes: Tensor) -> float:
    """Percent of the pictures whose class has the highest score."""
    return 100 * (_scores(model, x).argmax(1) == classes).float().mean().item()


def _scores(model: nn.Module, x: Tensor) -> Tensor:
    output = model(x)
    return output if isinstance(output, Tensor) else output.logits


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=positive, default=5, metavar="N", help="how many of the five (default: 5)")
    parser.add_argument("--epochs", type=positive, metavar="N", help="(default: 8 for ResNets, 20 for ViTs)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    scores, sizes = {}, {}
    for system, recipe in SYSTEMS.items():
        x, classes = pictures(recipe.side)
        recipe = recipe._replace(epochs=args.epochs or recipe.epochs)
        scores[system] = []
        for seed, (some, others) in enumerate(tqdm(folds(classes, args.folds), system, disable=None)):
            model = train(recipe, x[some], classes[some], seed)
            scores[system].append(accuracy(model, x[others], classes[others]))
        sizes[system] = sum(parameter.numel() for parameter in model.parameters())
    report(scores, args.out, parameters=sizes)


if __name__ == "__main__":
    main()
