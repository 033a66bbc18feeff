"""Classify scikit-learn's digits with ResNets and ViTs, plain and evolving, in five folds.

    python -m examples.images.digits --out scores.json
    python -m examples.images.digits --table ablations      # or grid: ICML 2021, table 2 and figure 6, on digits

Each fold trains on four fifths and tests on the rest after a fixed number of epochs: no choice is made on the test.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch import Tensor, nn
from tqdm import tqdm
from transformers import ResNetConfig, ViTConfig, ViTForImageClassification

from ea_artifacts.command import Parser, positive
from evolving_attention.huggingface import evolve
from examples.common import accuracy, fit, logits, report
from examples.images.resnet import EvolvingResNet

SIDE, BATCH = 64, 64


class Recipe(NamedTuple):
    """A model and its training, in which the rate falls along a cosine."""

    build: Callable[[], nn.Module]
    side: int
    epochs: int
    optimizer: Callable[..., torch.optim.Optimizer]
    last_rate: float = 0.0


def resnet(side: int = SIDE, **options: Any) -> Recipe:
    """ResNet-34's chain in small: basic blocks, ten attentions, the first eight with maps of one shape."""
    sizes = {"embedding_size": 16, "hidden_sizes": [16, 16, 32, 64], "depths": [1, 2, 2, 1]}
    config = ResNetConfig(layer_type="basic", num_channels=1, num_labels=10, **sizes)
    optimizer = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.01)
    return Recipe(lambda: EvolvingResNet(config, side, **options), side, 8, optimizer)


def vit(**shares: float) -> Recipe:
    """A ViT 64 wide with four heads; with alpha and beta its attention evolves.

    The first layer has no convolution: the FLOPs of the journal's table 10 fit 11 of 12 layers, and 23 of 24.
    """
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}

    def build() -> nn.Module:
        model = ViTForImageClassification(ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10))
        return evolve(model, **shares, rule="evolving-from-second") if shares else model

    return Recipe(build, 8, 20, partial(torch.optim.AdamW, lr=2e-3, weight_decay=0.05))


SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
#: name of a table -> name of a system -> recipe. Alpha and beta are the papers': 0.5 and 1 for ResNets of 34 and 50
#: layers, which are the defaults.
TABLES = {
    "systems": {
        "ResNet": resnet(augment=False),
        "AA-ResNet": resnet(alpha=0.0, beta=0.0),
        "PA-AA-ResNet": resnet(rule="predictive"),
        "EA-AA-ResNet": resnet(),
        "ViT": vit(),
        "EA-ViT": vit(alpha=0.1, beta=0.3),
    },
    "ablations": {
        "EA-AA-ResNet": resnet(),
        "without convolution": resnet(beta=0.0),
        "without skip connection": resnet(alpha=0.0),
        "1 x 1": resnet(kernel_size=1),
        "5 x 5": resnet(kernel_size=5),
    },
    "grid": {
        **{f"alpha {alpha}, beta 1": resnet(alpha=alpha) for alpha in (0.0, *SHARES)},
        **{f"alpha 0.5, beta {beta}": resnet(beta=beta) for beta in (0.0, *SHARES)},
    },
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
    """A model trained on pictures, B x channels x side x side."""
    torch.manual_seed(seed)
    model = recipe.build()
    optimizer = recipe.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs, recipe.last_rate)

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(logits(model, x[rows]), classes[rows])

    fit(model, loss, len(x), BATCH, recipe.epochs, optimizer, schedule)
    return model


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--table", choices=TABLES, default="systems", help="what is compared (default: systems)")
    parser.add_argument("--folds", type=positive, default=5, metavar="N", help="how many of the five (default: 5)")
    parser.add_argument("--epochs", type=positive, metavar="N", help="(default: 8 for ResNets, 20 for ViTs)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    scores: dict[str, list[float]] = {}
    sizes = {}
    for system, recipe in TABLES[args.table].items():
        recipe = recipe._replace(epochs=args.epochs or recipe.epochs)
        x, classes = pictures(recipe.side)
        for seed, (some, others) in enumerate(tqdm(folds(classes, args.folds), system, disable=None)):
            model = train(recipe, x[some], classes[some], seed)
            scores.setdefault(system, []).append(accuracy(model, x[others], classes[others]))
        sizes[system] = sum(parameter.numel() for parameter in model.parameters())
    report(scores, args.out, parameters=sizes)


if __name__ == "__main__":
    main()
