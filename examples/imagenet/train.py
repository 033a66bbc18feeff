"""Train ResNet, AA-, EA-AA- or PA-AA-ResNet on ImageNet with the papers' recipe (ICML 2021, sections 4.1 and A.1).

    torchrun --nproc-per-node 8 -m examples.imagenet.train FOLDER --layers 34 --out runs/ea-aa-resnet34

FOLDER/train/CLASS/ and FOLDER/val/CLASS/ hold the pictures. After each epoch the state is kept in --out; the same
command goes on from there.

Axes: B pictures of a batch, H x W pixels.
"""

import argparse
import json
import math
import os
import random
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from datasets import DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from PIL import Image, ImageOps
from torch import Tensor, nn
from transformers import EvalPrediction, ResNetConfig, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from evolving_attention.evolution import RULES
from examples.images.resnet import EvolvingResNet
from examples.report import positive, write

SIDE = 224
SETTINGS = ("layers", "alpha", "beta", "rule", "kernel_size", "conv_layers", "plain", "batch")
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
    """train and validation: pictures and their classes.

    Raises:
        ValueError: no such folder, or other classes in one part.
    """
    expected = f"{folder}: expected pictures of the same classes in train/CLASS/ and val/CLASS/"
    try:
        data = load_dataset("imagefolder", data_dir=str(folder), drop_labels=False)
    except (OSError, DatasetsError) as error:
        raise ValueError(f"{expected} ({error})") from error
    if set(data) != {"train", "validation"} or len({frozenset(part.unique("label")) for part in data.values()}) > 1:
        raise ValueError(expected)
    for name, part in data.items():
        part.set_transform(partial(tensors, training=name == "train"))
    return data


def tensors(rows: dict[str, list], training: bool) -> dict[str, list]:
    """Pixels, 3 x H x W each: for training a random part of a picture, mirrored at random; else its centre."""
    return {"pixels": [_pixels(picture, training) for picture in rows["image"]], "labels": rows["label"]}


def _pixels(picture: Image.Image, training: bool) -> Tensor:
    picture = picture.convert("RGB")
    if training:
        box = random_part(*picture.size)
        picture = picture.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box)
        picture = ImageOps.mirror(picture) if random.random() < 0.5 else picture
    else:
        # The centre of a picture whose shorter side has 256 / 224 of SIDE.
        border = (1 - 224 / 256) / 2
        picture = ImageOps.fit(picture, (SIDE, SIDE), Image.Resampling.BILINEAR, border)
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
    """Hugging Face's Trainer of a model that gives scores, B x classes."""

    def compute_loss(
        self, model: nn.Module, inputs: dict[str, Tensor], return_outputs: bool = False, **_: Any
    ) -> Tensor | tuple[Tensor, dict[str, Tensor]]:
        """The cross entropy."""
        scores = model(inputs["pixels"])
        loss = F.cross_entropy(scores, inputs["labels"])
        return (loss, {"scores": scores}) if return_outputs else loss

    def evaluate(self, *arguments: Any, **options: Any) -> dict[str, float]:
        """Score the model that is saved: its batch normalisation has the first process's statistics."""
        if dist.is_initialized():
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        return super().evaluate(*arguments, **options)


def accuracies(prediction: EvalPrediction) -> dict[str, float]:
    """Percent of the pictures whose class is the first, and among the first five."""
    hits = prediction.predictions == prediction.label_ids[:, None]  # N x 5
    return {"top-1": 100 * float(hits[:, 0].mean()), "top-5": 100 * float(hits.any(1).mean())}


def fit(args: argparse.Namespace, data: DatasetDict) -> None:
    """Train, or go on from the state in ``args.out``; print the accuracies after each epoch.

    Raises:
        ValueError: the state is of other settings, or no model has these.
    """
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
        label_names=["labels"],
        report_to="none",
        seed=0,
    )
    classes = data["train"].features["label"].num_classes
    torch.manual_seed(0)
    config, evolution = configuration(args.layers, classes), (args.alpha, args.beta, args.rule, args.kernel_size)
    model = EvolvingResNet(config, SIDE, *evolution, args.conv_layers, augment=not args.plain)
    settings = {name: getattr(args, name) for name in SETTINGS} | {"processes": options.world_size}
    file = args.out / "settings.json"
    if file.exists() and (before := json.loads(file.read_text())) != settings:
        raise ValueError(f"--out {args.out}: is of a training with {before}, this one has {settings}")
    if options.process_index == 0:
        write(file, settings)
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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, choices=DEPTHS, default=34, help="(default: 34)")
    parser.add_argument("--alpha", type=float, metavar="A", help="(default: 0.5; evolving, 101 and 152 layers: 0.7)")
    parser.add_argument("--beta", type=float, default=1.0, metavar="B", help="with --alpha 0 --beta 0: AA-ResNet")
    parser.add_argument("--rule", choices=RULES, default="evolving-from-second", help="predictive: PA-AA-ResNet")
    parser.add_argument("--kernel-size", type=positive, default=3, metavar="K", help="(default: 3)")
    parser.add_argument("--conv-layers", type=positive, default=1, metavar="N", help="PA-AA-ResNet's (default: 1)")
    parser.add_argument("--plain", action="store_true", help="ResNet, without attention")
    parser.add_argument("--batch", type=positive, default=32, metavar="N", help="pictures of a process (default: 32)")
    parser.add_argument("--epochs", type=positive, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="that read pictures (default: 8)")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="keep the state here")
    args = parser.parse_args(words)
    if args.alpha is None:
        args.alpha = 0.7 if args.layers > 100 and args.rule != "predictive" else 0.5
    if torch.cuda.device_count() > 1 and "RANK" not in os.environ:
        parser.error("several GPUs need torchrun; see README.md")
    try:
        fit(args, read(args.folder))
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
