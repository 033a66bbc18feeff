"""The report of an example: a table to read, and a JSON file with every score, the commit and the device."""

import json
import platform
import statistics
import subprocess
from pathlib import Path
from typing import Any

import torch


def origin() -> dict[str, str]:
    """The commit and the device of a measurement."""
    head = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    device = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}, threads: {torch.get_num_threads()}"
    return {"commit": head.stdout.strip(), "device": device, "torch": torch.__version__}


def deviation(scores: list[float]) -> float:
    """The standard deviation between seeds or folds; 0 where there is one."""
    return statistics.stdev(scores) if len(scores) > 1 else 0.0


def report(scores: dict[str, list[float]], out: Path | None, **settings: Any) -> None:
    """Print a table of each system's scores; write them to ``out``.

    Args:
        scores: system -> its score in each fold, or with each seed.
        out: a file, or None.
        settings: what else to write there.
    """
    print("| system | mean | standard deviation | each |\n|---|---|---|---|")
    for system, values in scores.items():
        each = " ".join(f"{value:.2f}" for value in values)
        print(f"| {system} | {statistics.mean(values):.2f} | {deviation(values):.2f} | {each} |")
    if out:
        out.write_text(json.dumps({**origin(), **settings, "scores": scores}, indent=1) + "\n")
