"""Reports of the examples: a table to read, a JSON file with every score, a picture of representations."""

import argparse
import json
import platform
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from sklearn.manifold import TSNE


def positive(text: str) -> int:
    """An argparse type: a whole number above 0."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return int(text)


def origin() -> dict[str, str]:
    """The commit and the device of a measurement."""
    commit = ""
    if shutil.which("git"):
        command = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
    return {"commit": commit, "device": device, "torch": torch.__version__}


def deviation(scores: list[float]) -> float:
    """The standard deviation between seeds or folds; 0 where there is one."""
    return statistics.stdev(scores) if len(scores) > 1 else 0.0


def report(scores: dict[str, list[float]], out: Path | None, **settings: Any) -> None:
    """Print a table of each system's scores; write them to ``out``.

    Args:
        scores: system -> its score in each fold, or with each seed.
        out: a file, or None.
        settings: more entries of the file.
    """
    print("| system | mean | standard deviation | each |\n|---|---|---|---|")
    for system, values in scores.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"| {system} | {statistics.mean(values):.2f} | {deviation(values):.2f} | {each} |")
    if out:
        write(out, {**origin(), **settings, "scores": scores})


def write(path: Path, content: Any) -> None:
    """Write JSON; a kill leaves the file that was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(content, default=str, indent=1) + "\n")
    partial.replace(path)


def class_distance(values: np.ndarray, classes: np.ndarray) -> float:
    """AvgWCD: the mean distance of representations, n x size, to the centre of their class (journal, equation 13)."""
    labels, numbers = np.unique(classes, return_inverse=True)
    centres = np.stack([values[numbers == number].mean(0) for number in range(len(labels))])
    return float(np.linalg.norm(values - centres[numbers], axis=1).mean())


def draw_classes(representations: dict[str, np.ndarray], classes: np.ndarray, path: Path) -> None:
    """t-SNE of each system's representations, n x size, with their ``class_distance``."""
    figure = Figure(figsize=(4 * len(representations), 4), layout="constrained")
    plots = figure.subplots(1, len(representations), squeeze=False)[0]
    for axes, (system, values) in zip(plots, representations.items(), strict=True):
        _, numbers = np.unique(classes, return_inverse=True)
        axes.scatter(*TSNE(random_state=0).fit_transform(values).T, c=numbers, cmap="tab10", s=8)
        axes.set_title(f"{system}: AvgWCD {class_distance(values, classes):.2f}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
