"""Train the draft's image classifiers from nothing (Predictive Attention Transformer, 4.2.1, table 3, B.3.1).

    python -m examples.images.cifar cifar-10-batches-bin       # or cifar-100-binary: the binary version of the authors
    python -m examples.images.cifar digits                     # scikit-learn's, a fold, in small

Twelve blocks; after each three the picture is halved and the width doubled. Attention stands beside the convolution
where pictures have at most 8 x 8 pixels. A block reads all blocks of its stage before it, as in DenseNet.

Axes: B pictures, C channels, H x W pixels, K heads.
"""

import itertools
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_artifacts.command import Parser, positive
from evolving_attention import EvolvingAttention, Geometry
from examples.common import accuracy, fit, report
from examples.images import digits
from examples.images.resnet import RelativePositions2d

HEADS, STAGES, LARGEST = 4, 4, 8
#: system -> settings of ``Evolution``, or None: no attention. PA's alpha is the draft's, EA's shares are our choice.
SYSTEMS = {
    "CNN": None,
    "Conv-Transformer": {"alpha": 0.0, "beta": 0.0},
    "PA-Conv-Transformer": {"rule": "predictive", "alpha": 0.01},
    "EA-Conv-Transformer": {"alpha": 0.1, "beta": 0.1},
}


class Block(nn.Module):
    """A 1 x 1 convolution to half of the width, a 3 x 3 one beside attention, and two feed-forward layers.

    ``attention`` has settings of ``EvolvingAttention``, or is None: no attention.
    """

    def __init__(self, channels: int, width: int, side: int, attention: dict | None, dropout: float) -> None:
        super().__init__()
        half = width // 2
        attended = 0 if attention is None else half // 2
        self.enter = nn.Sequential(nn.BatchNorm2d(channels), nn.ReLU(), nn.Conv2d(channels, half, 1, bias=False))
        self.convolution = nn.Sequential(nn.Conv2d(half, half - attended, 3, padding=1), nn.Dropout(dropout))
        self.attention = None
        if attention is not None:
            self.attention = EvolvingAttention(Geometry.ENCODER_SELF, attended, HEADS, **attention)
            self.attention.relative_positions = RelativePositions2d(side, side, attended // HEADS)
            for name in ("q_proj", "k_proj", "v_proj"):
                setattr(self.attention, name, nn.Linear(half, attended))
        self.feed_forward = nn.Sequential(
            *(nn.BatchNorm2d(half), nn.ReLU(), nn.Conv2d(half, width, 1)),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(dropout), nn.Conv2d(width, width, 1)),
        )

    def forward(self, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """B x channels x H x W -> B x width x H x W, and A_logit, B x K x H W x H W, or None."""
        x, a_logit = self.enter(x), None
        parts = [self.convolution(x)]
        if self.attention is not None:
            pixels = x.flatten(2).transpose(1, 2)  # B x H W x C
            attended, a_logit, *_ = self.attention(pixels, previous=previous)
            parts.append(attended.transpose(1, 2).unflatten(2, x.shape[2:]))
        return self.feed_forward(torch.cat(parts, dim=1)), a_logit


class Classifier(nn.Module):
    """Pictures, B x 3 x side x side, to scores, B x classes."""

    def __init__(self, system: str, classes: int, side: int = 32, width: int = 64, dropout: float = 0.2) -> None:
        super().__init__()
        self.enter, channels, self.stages = nn.Conv2d(3, width, 3, padding=1), width, nn.ModuleList()
        for stage in range(STAGES):
            attention = SYSTEMS[system] if side <= LARGEST else None
            wide, blocks = width * 2**stage, nn.ModuleList()
            for number in range(3):
                if attention is not None:
                    # CIFAR-100's attention has no dropout (appendix B.3.1).
                    attention = {**attention, "dropout": 0.0 if classes == 100 else dropout, "first": number == 0}
                blocks.append(Block(channels + number * wide, wide, side, attention, dropout))
            self.stages.append(blocks)
            channels, side = wide, side // 2
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for number, blocks in enumerate(self.stages):
            outputs, a_logit = [F.avg_pool2d(x, 2) if number else x], None
            for block in blocks:
                x, a_logit = block(torch.cat(outputs, dim=1), a_logit)
                outputs.append(x)
        return self.head(x.mean((2, 3)))


def read(folder: Path, training: bool) -> tuple[Tensor, Tensor]:
    """Pictures, N x 3 x 32 x 32, from -1 to 1, and classes, N, of the binary CIFAR-10 or CIFAR-100."""
    labels = 2 if (folder / "train.bin").exists() else 1  # CIFAR-100 has the coarse class first
    names = ["train.bin" if training else "test.bin"]
    if labels == 1:
        names = sorted(path.name for path in folder.glob("data_batch_*.bin")) if training else ["test_batch.bin"]
    rows = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names]).reshape(-1, labels + 3 * 32 * 32)
    pictures = torch.from_numpy(rows[:, labels:]).view(-1, 3, 32, 32).float() / 127.5 - 1
    return pictures, torch.from_numpy(rows[:, labels - 1].astype(np.int64))


def changed(x: Tensor, cutout: int) -> Tensor:
    """Each picture mirrored or not, moved by up to an eighth of its side, and with a square of zeros."""
    side, pad, count = x.size(-1), x.size(-1) // 8, len(x)
    places = torch.arange(side, device=x.device)

    def drawn(most: int) -> Tensor:
        return torch.randint(most, (count, 1), device=x.device)

    wide = F.pad(torch.where(drawn(2)[..., None, None] == 0, x.flip(3), x), [pad] * 4)
    rows, columns = (places + drawn(2 * pad + 1) for _ in range(2))  # B x side
    pictures = torch.arange(count, device=x.device)[:, None, None]
    moved = wide[pictures, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
    tall, broad = ((places - drawn(side) + cutout // 2).div(cutout, rounding_mode="floor") == 0 for _ in range(2))
    return moved.masked_fill((tall[:, :, None] & broad[:, None, :])[:, None], 0)


def train(model: nn.Module, x: Tensor, classes: Tensor, epochs: int, cycle: int, cutout: int) -> None:
    """Train by SGD, its rate from 0.05 to 0.0001 along cosines of ``cycle``, 2 ``cycle``, ... epochs (equation 7)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, cycle, 2, eta_min=1e-4)

    def loss(rows: Tensor) -> Tensor:
        return F.cross_entropy(model(changed(x[rows], cutout)), classes[rows])

    fit(model, loss, len(x), 50, epochs, optimizer, schedule)


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("data", metavar="DIR", help='the binary CIFAR-10 or CIFAR-100, or "digits"')
    parser.add_argument("--epochs", type=positive, metavar="N", help="(default: 630; CIFAR-100 620; digits 10)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="(default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    folder, device = Path(args.data), "cuda" if torch.cuda.is_available() else "cpu"
    if args.data == "digits":
        x, classes = digits.pictures(16)
        x = 2 * x.expand(-1, 3, -1, -1) - 1
        known, tests = ((x[rows], classes[rows]) for rows in digits.folds(classes, 1)[0])
        epochs, cycle, cutout, sizes = 10, 10, 4, {"side": 16, "width": 16}
    else:
        if not any(folder.glob("*.bin")):
            parser.error(f"{folder}: expected data_batch_*.bin or train.bin, the binary version of CIFAR")
        known, tests = (read(folder, training) for training in (True, False))
        epochs, cycle, cutout, sizes = 630, 10, 8, {}
    count = int(known[1].max()) + 1
    if count == 100:
        epochs, cycle = 620, 20
    scores: dict[str, list[float]] = {system: [] for system in SYSTEMS}
    parameters = {}
    for system, seed in itertools.product(SYSTEMS, args.seeds):
        torch.manual_seed(seed)
        model = Classifier(system, count, **sizes).to(device)
        train(model, *(one.to(device) for one in known), args.epochs or epochs, cycle, cutout)
        scores[system].append(accuracy(model, *(one.to(device) for one in tests)))
        parameters[system] = sum(one.numel() for one in model.parameters())
    report(scores, args.out, parameters=parameters)


if __name__ == "__main__":
    main()
