"""Classify scikit-learn's digits with a small ViT and EA-ViT, in five folds.

    python -m examples.images.vit --folds 5

Each picture of 8 x 8 pixels is 16 patches of 2 x 2 and the class token, so a map has 17 rows and 17 columns. The class
token is row 0 and column 0 of the map, and the convolution reads it as it reads every other pixel. Each fold trains on
four fifths and tests on the rest after a fixed number of epochs, so no choice is made on the test.
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
from transformers import ViTConfig, ViTForImageClassification

from evolving_attention.huggingface import evolve

#: name -> alpha and beta; EA-ViT has the journal paper's
SYSTEMS = {"ViT": None, "EA-ViT": {"alpha": 0.1, "beta": 0.3}}
BATCH = 64


def build(settings: dict[str, float] | None) -> ViTForImageClassification:
    """A ViT of four layers, 64 wide, with four heads; with settings its attention evolves."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(**sizes, image_size=8, patch_size=2, num_channels=1, num_labels=10)
    model = ViTForImageClassification(config)
    return model if settings is None else evolve(model, **settings)


def pictures() -> tuple[Tensor, Tensor]:
    """Pictures, 1,797 x 1 x 8 x 8, from -1 to 1, and classes, 1,797."""
    images, classes = load_digits(return_X_y=True)
    return torch.from_numpy(images).float().view(-1, 1, 8, 8) / 8 - 1, torch.from_numpy(classes)


def train(
    x: Tensor, classes: Tensor, settings: dict[str, float] | None, epochs: int, seed: int
) -> ViTForImageClassification:
    """A model trained on pictures, B x 1 x 8 x 8, by AdamW with a cosine schedule."""
    torch.manual_seed(seed)
    model = build(settings).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for _ in range(epochs):
        for chosen in torch.randperm(len(x)).split(BATCH):
            optimizer.zero_grad()
            F.cross_entropy(model(x[chosen]).logits, classes[chosen]).backward()
            optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: ViTForImageClassification, x: Tensor, classes: Tensor) -> float:
    """Percent of the pictures whose class has the highest score."""
    return 100 * (model(x).logits.argmax(1) == classes).float().mean().item()


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folds", type=int, default=5, metavar="N", help="how many of the five (default: 5)")
    parser.add_argument("--epochs", type=int, default=20, metavar="N", help="(default: 20)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table here")
    args = parser.parse_args(words)
    x, classes = pictures()
    folds = list(StratifiedKFold(5, shuffle=True, random_state=0).split(x, classes))[: args.folds]
    lines = ["| system | parameters | accuracy, mean | standard deviation | each fold |", "|---|---|---|---|---|"]
    for system, settings in SYSTEMS.items():
        scores = []
        for number, (some, others) in enumerate(tqdm(folds, system, disable=None)):
            model = train(x[some], classes[some], settings, args.epochs, seed=number)
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
