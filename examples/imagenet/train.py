"""Train ResNet, AA-, EA-AA- or PA-AA-ResNet on ImageNet with the papers' recipe (ICML 2021, sections 4.1 and A.1).

    torchrun --nproc-per-node 8 -m examples.imagenet.train FOLDER --layers 34 --out runs/ea-aa-resnet34

FOLDER/train/CLASS/ and FOLDER/val/CLASS/ hold the pictures. After each epoch the state is kept in --out; the same
command goes on from there.

Axes: B pictures of a batch, H x W pixels.
"""

import argparse
import math
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from PIL import Image, ImageOps
from torch import Tensor
from transformers import EvalPrediction, ResNetConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from ea_artifacts.command import Parser, UserError, positive, reporting
from ea_artifacts.files import write_json
from evolving_attention.evolution import RULES
from examples.common import check_settings
from examples.images.resnet import EvolvingResNet

SIDE = 224
EVOLUTION = ("alpha", "beta", "rule", "kernel_size", "conv_layers")
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
    """A ResNet of 34, 50, 101 or 152 layers."""
    kind, depths = DEPTHS[layers]
    sizes = [64, 128, 256, 512] if kind == "basic" else [256, 512, 1024, 2048]
    return ResNetConfig(layer_type=kind, depths=depths, hidden_sizes=sizes, num_labels=classes)


def read(folder: Path) -> DatasetDict:
    """train and validation: pictures and their classes."""
    expected = f"{folder}: expected pictures of the same classes in train/CLASS/ and val/CLASS/"
    try:
        data = load_dataset("imagefolder", data_dir=str(folder), drop_labels=False)
    except (OSError, DatasetsError) as error:
        raise UserError(f"{expected} ({error})") from error
    if set(data) != {"train", "validation"} or len({frozenset(part.unique("label")) for part in data.values()}) > 1:
        raise UserError(expected)
    for name, part in data.items():
        part.set_transform(partial(tensors, training=name == "train"))
    return data


def tensors(rows: dict[str, list], training: bool) -> dict[str, list]:
    """Pixels, 3 x H x W each: for training a random part of a picture, mirrored at random; else its centre."""
    return {"pixel_values": [_pixels(picture, training) for picture in rows["image"]], "labels": rows["label"]}


def _pixels(picture: Image.Image, training: bool) -> Tensor:
    picture = picture.convert("RGB")
    if training:
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, random_part(*picture.size))
        picture = ImageOps.mirror(picture) if random.random() < 0.5 else picture
    else:
        # The centre of a picture whose shorter side has 256 / 224 of SIDE.
        picture = ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BILINEAR, (1 - 224 / 256) / 2)
    return ((torch.from_numpy(np.array(picture)) / 255 - MEANS) / DEVIATIONS).permute(2, 0, 1)


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


class PictureTrainer(Trainer):
    """Hugging Face's Trainer, which scores the model that it saves."""

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Score with the first process's statistics of batch normalisation, as they are saved."""
        if dist.is_initialized():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        return super().evaluate(*arguments, **options)


def accuracies(prediction: EvalPrediction) -> dict[str, float]:
    """Percent of the pictures whose class is the first, and among the first five."""
    hits = prediction.predictions == prediction.label_ids[:, None]  # N x 5
    return {"top-1": 100 * float(hits[:, 0].mean()), "top-5": 100 * float(hits.any(1).mean())}


def fit(args: argparse.Namespace, data: DatasetDict) -> None:
    """Train, or go on from the state in ``args.out``; print the accuracies after each epoch."""
    options = TrainingArguments(
        str(args.out),
        num_train_epochs=args.epochs,
        per_device_train_batch_size=args.batch,
        per_device_eval_batch_size=args.batch,
        dataloader_num_workers=args.workers,
        dataloader_pin_memory=torch.cuda.is_available(),
        use_cpu=not torch.cuda.is_available(),  # else its processes would not find each other there
        max_grad_norm=0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=1,
        remove_unused_columns=False,
        report_to="none",
        seed=0,
    )
    classes = data["train"].features["label"].num_classes
    torch.manual_seed(0)
    evolution = {name: getattr(args, name) for name in EVOLUTION}
    try:
        model = EvolvingResNet(configuration(args.layers, classes), SIDE, augment=not args.plain, **evolution)
    except ValueError as error:
        raise UserError(str(error)) from None
    others = {"layers": args.layers, "plain": args.plain, "batch": args.batch, "processes": options.world_size}
    settings, file = {**others, **evolution}, args.out / "settings.json"
    check_settings(file, settings)
    if options.process_index == 0:
        write_json(file, {"settings": settings})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.128, momentum=0.9, weight_decay=1e-4)
    updates = math.ceil(len(data["train"]) / (args.batch * options.world_size))  # of an epoch
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step / updates))
    trainer = PictureTrainer(
        model,
        options,
        train_dataset=data["train"],
        eval_dataset=data["validation"],
        compute_metrics=accuracies,
        preprocess_logits_for_metrics=lambda scores, _: scores.topk(min(5, classes)).indices,
        optimizers=(optimizer, schedule),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(args.out)))


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path)
    add("--layers", type=int, choices=DEPTHS, default=34, help="(default: 34)")
    add("--alpha", type=float, metavar="A", help="(default: 0.5; evolving, 101 and 152 layers: 0.7)")
    add("--beta", type=float, default=1.0, metavar="B", help="with --alpha 0 --beta 0: AA-ResNet")
    add("--rule", choices=RULES, default="evolving-from-second", help="predictive: PA-AA-ResNet")
    add("--kernel-size", type=positive, default=3, metavar="K", help="(default: 3)")
    add("--conv-layers", type=positive, default=1, metavar="N", help="PA-AA-ResNet's (default: 1)")
    add("--plain", action="store_true", help="ResNet, without attention")
    add("--batch", type=positive, default=32, metavar="N", help="pictures of a process (default: 32)")
    add("--epochs", type=positive, default=100, metavar="N", help="(default: 100)")
    add("--workers", type=int, default=8, metavar="N", help="that read pictures (default: 8)")
    add("--out", type=Path, required=True, metavar="DIR", help="keep the state here")
    args = parser.parse_args(words)
    if args.alpha is None:
        args.alpha = 0.7 if args.layers > 100 and args.rule != "predictive" else 0.5
    if torch.cuda.device_count() > 1 and "RANK" not in os.environ:
        parser.error("several GPUs need torchrun; see README.md")
    with reporting("train"):
        fit(args, read(args.folder))


if __name__ == "__main__":
    main()
