"""Shared by the examples: training, accuracy, and reports (a table, a JSON file, a picture of representations)."""

import platform
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from tqdm import tqdm

from ea_artifacts.command import UserError
from ea_artifacts.files import read_json, write_json


def fit(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    count: int,
    batch: int,
    epochs: int,
    optimizer: Optimizer,
    schedule: LRScheduler | None = None,
) -> None:
    """Train on ``count`` rows in batches of random order; ``loss`` is given a batch's numbers of rows."""
    model.train()
    for epoch in range(1, epochs + 1):
        batches = torch.randperm(count).split(batch)
        for rows in tqdm(batches, f"epoch {epoch} of {epochs}", disable=None, leave=False):
            optimizer.zero_grad()
            loss(rows).backward()
            optimizer.step()
        if schedule:
            schedule.step()
    model.eval()


def logits(model: nn.Module, x: Tensor) -> Tensor:
    """The classes' scores, B x classes, of a model of ours or of ``transformers``."""
    output = model(x)
    return getattr(output, "logits", output)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, classes: Tensor) -> float:
    """Percent of the rows whose class has the highest score."""
    predicted = torch.cat([logits(model, part).argmax(1) for part in x.split(400)])
    return 100 * (predicted == classes).float().mean().item()


def origin() -> dict[str, str]:
    """The commit and the device of a measurement."""
    git = subprocess.run("git rev-parse --short HEAD", shell=True, capture_output=True, text=True)  # "" without git
    device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
    return {"commit": git.stdout.strip(), "device": device, "torch": torch.__version__}


def deviation(scores: list[float]) -> float:
    """The standard deviation between seeds or folds; 0 where there is one."""
    return statistics.stdev(scores) if len(scores) > 1 else 0.0


def report(scores: dict[str, list[float]], out: Path | None, **settings: Any) -> None:
    """Print a table of each system's scores with each seed or fold; write them to ``out``, with the settings."""
    print("| system | mean | standard deviation | each |\n|---|---|---|---|")
    for system, values in scores.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"| {system} | {statistics.mean(values):.2f} | {deviation(values):.2f} | {each} |")
    if out:
        write_json(out, {**origin(), **settings, "scores": scores})


def check_settings(path: Path, settings: dict[str, Any]) -> None:
    """Raise UserError where a file is of other settings than these."""
    before = read_json(path)["settings"] if path.exists() else settings
    if differ := [name for name in settings if settings[name] != before.get(name)]:
        raise UserError(f"{path}: has other {', '.join(differ)}; choose another --out")


def class_distance(values: np.ndarray, classes: np.ndarray) -> float:
    """AvgWCD: the mean distance of representations, n x size, to the centre of their class (journal, equation 13)."""
    offsets = values - pandas.DataFrame(values).groupby(classes).transform("mean")
    return float(np.linalg.norm(offsets, axis=1).mean())


def draw_classes(representations: dict[str, np.ndarray], classes: np.ndarray, path: Path) -> None:
    """t-SNE of each system's representations, n x size, with their ``class_distance``."""
    figure = Figure(figsize=(4 * len(representations), 4), layout="constrained")
    plots = figure.subplots(1, len(representations), squeeze=False)[0]
    _, numbers = np.unique(classes, return_inverse=True)
    for axes, (system, values) in zip(plots, representations.items(), strict=True):
        axes.scatter(*TSNE(random_state=0).fit_transform(values).T, c=numbers, cmap="tab10", s=8)
        axes.set_title(f"{system}: AvgWCD {class_distance(values, classes):.2f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
