"""Train AA-, EA-AA- or PA-AA-ResNet on ImageNet with the papers' recipe (ICML 2021, sections 4.1 and A.1).

    torchrun --nproc-per-node 8 -m examples.imagenet.train FOLDER --layers 34 --out state.pt

FOLDER/train/CLASS/ and FOLDER/val/CLASS/ hold the pictures. After each epoch the state is kept in the file; the same
command goes on from there.

Axes: B pictures of a batch, H x W pixels.
"""

import argparse
import math
import os
import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from PIL import Image, ImageOps
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset
from transformers import ResNetConfig

from evolving_attention.evolution import RULES
from examples.images.resnet import EvolvingResNet
from examples.report import positive

SIDE = 224
SETTINGS = ("layers", "alpha", "beta", "rule", "kernel_size", "batch")
#: layers -> kind of block and blocks of each stage
DEPTHS = {
    34: ("basic", [3, 4, 6, 3]),
    50: ("bottleneck", [3, 4, 6, 3]),
    101: ("bottleneck", [3, 4, 23, 3]),
    152: ("bottleneck", [3, 8, 36, 3]),
}
#: Means and standard deviations of ImageNet's red, green and blue.
MEANS, DEVIATIONS = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])


def configuration(layers: int, classes: int) -> ResNetConfig:
    """Of a ResNet of 34, 50, 101 or 152 layers."""
    kind, depths = DEPTHS[layers]
    sizes = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    return ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=sizes, num_labels=classes)


class Pictures(Dataset):
    """The pictures FOLDER/CLASS/*: for training a random part of each, mirrored at random; else the centre."""

    def __init__(self, folder: Path, training: bool) -> None:
        known = Image.registered_extensions()
        self.files = sorted(file for file in folder.glob("*/*") if file.suffix.lower() in known)
        self.training = training
        self.classes = sorted({file.parent.name for file in self.files})

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        """3 x H x W, and the number of the class."""
        with Image.open(self.files[number]) as file:
            picture = file.convert("RGB")
        if self.training:
            box = random_part(*picture.size)
            picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
            picture = ImageOps.mirror(picture) if random.random() < 0.5 else picture
        else:
            # The centre of a picture whose shorter side has 256 / 224 of SIDE.
            border = (1 - 224 / 256) / 2
            picture = ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BILINEAR, border)
        pixels = (torch.from_numpy(np.array(picture)) / 255 - MEANS) / DEVIATIONS  # H x W x 3
        return pixels.permute(2, 0, 1), self.classes.index(self.files[number].parent.name)


def random_part(width: int, height: int) -> tuple[float, float, float, float]:
    """Left, top, right, bottom of 8% to 100% of the area, of a shape between 3:4 and 4:3 where that fits."""
    area = width * height * random.uniform(0.08, 1)
    shape = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
    wide, high = min(width, math.sqrt(area * shape)), min(height, math.sqrt(area / shape))
    left, top = random.uniform(0, width - wide), random.uniform(0, height - high)
    return left, top, left + wide, top + high


def share_of_rate(epoch: float) -> float:
    """From 0 to 1 in five epochs; a tenth of it from epochs 30, 60, 80 and 90 on."""
    return min(1, epoch / 5) * 0.1 ** sum(epoch >= fall for fall in (30, 60, 80, 90))


@torch.no_grad()
def accuracies(model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: str) -> list[float]:
    """Percent of all processes' pictures whose class is the first, and among the first five."""
    model.eval()
    counts = torch.zeros(3, device=device)
    for x, classes in batches:
        scores = model(x.to(device))
        hits = scores.topk(min(5, scores.size(1))).indices == classes.to(device)[:, None]  # B x 5
        counts += torch.stack([hits[:, 0].sum(), hits.sum(), torch.tensor(len(x), device=device)])
    dist.all_reduce(counts)
    return (100 * counts[:2] / counts[2]).tolist()


def fit(args: argparse.Namespace, train: Pictures, valid: Pictures) -> None:
    """Train, or go on from the state in ``args.out``; print the accuracies after each epoch."""
    rank, processes = dist.get_rank(), dist.get_world_size()
    device = f"cuda:{rank % torch.cuda.device_count()}" if torch.cuda.is_available() else "cpu"
    sampler = DistributedSampler(train)
    options = {"batch_size": args.batch, "num_workers": args.workers, "pin_memory": device != "cpu"}
    draws = torch.Generator()  # of parts and mirrorings, in the processes that read pictures
    batches = DataLoader(train, sampler=sampler, drop_last=True, generator=draws, **options)
    if not len(batches):
        raise SystemExit(
            f"train: {len(train):,} pictures give no batch of {args.batch} for each of {processes} processes"
        )
    tests = DataLoader(Subset(valid, range(rank, len(valid), processes)), **options)
    config = configuration(args.layers, len(train.classes))
    torch.manual_seed(0)
    model = EvolvingResNet(config, SIDE, args.alpha, args.beta, args.rule, args.kernel_size).to(device)
    parallel = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.128, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step / len(batches)))
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    state = {"epochs": 0}
    settings = {name: getattr(args, name) for name in SETTINGS} | {"processes": processes}
    if args.out.exists():
        state = torch.load(args.out, map_location=device, weights_only=True)
        if state["settings"] != settings:
            raise SystemExit(f"--out {args.out}: is of a training with {state['settings']}, this one has {settings}")
        for name, part in parts.items():
            part.load_state_dict(state[name])
    for epoch in range(state["epochs"], args.epochs):
        sampler.set_epoch(epoch)
        draws.manual_seed(processes * epoch + rank)
        random.seed(processes * epoch + rank)  # where this process itself reads them
        parallel.train()
        for x, classes in batches:
            optimizer.zero_grad()
            F.cross_entropy(parallel(x.to(device)), classes.to(device)).backward()
            optimizer.step()
            schedule.step()
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)  # batch normalisation's: score the model that is saved
        top1, top5 = accuracies(model, tests, device)
        if rank == 0:
            print(f"epoch {epoch + 1}: top-1 {top1:.2f}, top-5 {top5:.2f}", flush=True)
            partial = args.out.with_name(f"{args.out.name}.partial")  # a kill while it is written loses nothing
            states = {name: part.state_dict() for name, part in parts.items()}
            torch.save({"epochs": epoch + 1, "settings": settings, **states}, partial)
            partial.replace(args.out)


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, choices=DEPTHS, default=34, help="(default: 34)")
    parser.add_argument("--alpha", type=float, metavar="A", help="(default: 0.5; evolving, 101 and 152 layers: 0.7)")
    parser.add_argument("--beta", type=float, default=1.0, metavar="B", help="with --alpha 0 --beta 0: AA-ResNet")
    parser.add_argument("--rule", choices=RULES, default="evolving-from-second", help="predictive: PA-AA-ResNet")
    parser.add_argument("--kernel-size", type=positive, default=3, metavar="K", help="(default: 3)")
    parser.add_argument("--batch", type=positive, default=32, metavar="N", help="pictures of a process (default: 32)")
    parser.add_argument("--epochs", type=positive, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="that read pictures (default: 8)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="keep the state here")
    args = parser.parse_args(words)
    if args.alpha is None:
        args.alpha = 0.7 if args.layers > 100 and args.rule != "predictive" else 0.5
    train, valid = Pictures(args.folder / "train", True), Pictures(args.folder / "val", False)
    if not train.classes or train.classes != valid.classes:
        parser.error(f"{args.folder}: expected pictures of the same classes in train/CLASS/ and val/CLASS/")
    if "RANK" not in os.environ:
        parser.error("start it with torchrun; see README.md")
    dist.init_process_group()
    fit(args, train, valid)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
