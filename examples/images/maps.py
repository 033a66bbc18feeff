"""Classify the attention maps of trained models: ICML 2021, section 5.1, table 7 and appendix B.1, on digits.

    python -m examples.images.maps --out scores.json
    python -m examples.images.maps --draw maps.png      # figures 4 and 7 to 10

AA-ResNet and EA-AA-ResNet are trained as in digits.py, on larger pictures: their maps have 8 x 8 pixels. A DenseNet is
then trained on one layer's maps alone: the attention of the centre pixel, in all heads. The better it tells the digits
apart, the more of their shape the maps hold. Training and test pictures are those of the fold.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from tqdm import tqdm

from ea_artifacts.command import Parser, positive
from examples.common import accuracy, report
from examples.images import digits
from examples.images.resnet import HEADS, EvolvingResNet

SIDE, MAP_SIDE, CLASSES = 128, 8, 10
SYSTEMS = {"AA-ResNet": digits.resnet(SIDE, alpha=0.0, beta=0.0), "EA-AA-ResNet": digits.resnet(SIDE)}
CHAIN = range(1, 9)
LAYERS = (6, 7, 8)  # of ten, the last with maps of 8 x 8 pixels; the paper's are 16, 17 and 18 of 26
#: A tenth of the paper's 256, and doubled at each pooling, as there.
WIDTH = 24


class DenseNet(nn.Sequential):
    """Twelve dense layers; pictures are halved after the fourth and the seventh."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(HEADS, WIDTH, 3, padding=1))
        for number, layers in enumerate((4, 3, 5)):
            width = WIDTH * 2**number
            growth = width // 4
            self.extend(Dense(width + place * growth, growth) for place in range(layers))
            channels = width + layers * growth
            self.extend([nn.BatchNorm2d(channels), nn.ReLU()])
            if number < 2:
                self.extend([nn.Conv2d(channels, 2 * width, 1), nn.AvgPool2d(2, ceil_mode=True)])
        self.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES)])


class Dense(nn.Sequential):
    """A layer whose output stands beside its input: channels -> channels + growth."""

    def __init__(self, channels: int, growth: int) -> None:
        convolution = nn.Conv2d(channels, growth, 3, padding=1, bias=False)
        super().__init__(nn.BatchNorm2d(channels), nn.ReLU(), convolution)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, super().forward(x)], dim=1)


#: how a DenseNet is trained on one layer's maps
RECIPE = digits.Recipe(DenseNet, MAP_SIDE, 30, partial(torch.optim.SGD, lr=0.05, momentum=0.9), last_rate=1e-4)


@torch.no_grad()
def centre_maps(model: EvolvingResNet, x: Tensor, layers: Sequence[int] = LAYERS) -> list[Tensor]:
    """The attention of the centre pixel in these layers, B x K x 8 x 8 each, a uniform one being 1."""
    model(x, maps=(maps := []))
    centre = MAP_SIDE // 2 * (MAP_SIDE + 1)
    rows = (maps[layer - 1][:, :, centre].softmax(-1) for layer in layers)  # B x K x N
    return [row.unflatten(2, (MAP_SIDE, MAP_SIDE)) * MAP_SIDE**2 for row in rows]


def draw(models: dict[str, EvolvingResNet], x: Tensor) -> Figure:
    """The centre pixel's attention, a mean over heads, through a chain's layers; a row for each picture and model."""
    maps = {system: [layer.mean(1) for layer in centre_maps(model, x, CHAIN)] for system, model in models.items()}
    figure = Figure(figsize=(1.4 * (1 + len(CHAIN)), 1.6 * len(x) * len(maps)), layout="constrained")
    rows = iter(figure.subplots(len(x) * len(maps), 1 + len(CHAIN), squeeze=False))
    for number, picture in enumerate(x):
        for system, layers in maps.items():
            first, *panels = next(rows)
            first.imshow(picture[0], cmap="gray")
            first.set_title(system, fontsize=9)
            for layer, axes, of_layer in zip(CHAIN, panels, layers, strict=True):
                axes.imshow(of_layer[number], cmap="viridis", vmin=0)
                axes.set_title(f"layer {layer}", fontsize=9)
            for axes in (first, *panels):
                axes.set_axis_off()
    return figure


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--folds", type=positive, default=3, metavar="N", help="how many of five (default: 3)")
    parser.add_argument("--epochs", type=positive, default=30, metavar="N", help="of the DenseNet (default: 30)")
    parser.add_argument("--draw", type=Path, metavar="FILE", help="draw three test digits of the first fold, and end")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    x, classes = digits.pictures(SIDE)
    if args.draw:
        (some, others), *_ = digits.folds(classes, 1)
        models = {system: digits.train(recipe, x[some], classes[some], 0) for system, recipe in SYSTEMS.items()}
        draw(models, x[others[:3]]).savefig(args.draw, dpi=100)
        return
    reader, scores = RECIPE._replace(epochs=args.epochs), {}
    for system, recipe in SYSTEMS.items():
        for seed, (some, others) in enumerate(tqdm(digits.folds(classes, args.folds), system, disable=None)):
            model = digits.train(recipe, x[some], classes[some], seed)
            for layer, maps in zip(LAYERS, centre_maps(model, x), strict=True):
                network = digits.train(reader, maps[some], classes[some], seed)
                score = accuracy(network, maps[others], classes[others])
                scores.setdefault(f"{system}, layer {layer}", []).append(score)
    report(scores, args.out)


if __name__ == "__main__":
    main()
