"""Reading a run without fairseq: its model, and the contents that a checkpoint may have.

fairseq's checkpoints hold their options in a Namespace and, with --eval-bleu, counts in NumPy arrays. All of these are
data. Nothing that could run code belongs here. This file imports nothing of fairseq, so that tools may read it alone.
"""

import argparse
import contextlib
import json
import re
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

#: The one list of what ``torch.load(weights_only=True)`` may read beside tensors and plain values.
SAFE_GLOBALS = [
    argparse.Namespace,
    numpy.ndarray,
    numpy.dtype,
    numpy._core.multiarray._reconstruct,
    numpy._core.multiarray.scalar,
    *{type(numpy.dtype(code)) for code in "?bhilqBHILQefd"},  # bool, and every size of integer and float
]

#: RUN/model.json: {"checkpoint": "average10.pt"}. Training and averaging write it; scoring never does.
RECORD = "model.json"


def allow_in_checkpoints() -> None:
    """Let ``torch.load(weights_only=True)`` read ``SAFE_GLOBALS`` in this process."""
    torch.serialization.add_safe_globals(SAFE_GLOBALS)


@contextlib.contextmanager
def checkpoints_allowed() -> Iterator[None]:
    """Let ``torch.load(weights_only=True)`` read ``SAFE_GLOBALS`` inside the block."""
    # Only the missing ones: at its end the context forbids all its types, even those allowed before.
    missing = set(SAFE_GLOBALS) - set(torch.serialization.get_safe_globals())
    with torch.serialization.safe_globals(list(missing)):
        yield


def model_of(run: Path) -> Path:
    """The checkpoint that is a run's model: the one that RUN/model.json names.

    A run without that file: its average*.pt of the most updates, else checkpoint_best.pt, else checkpoint_last.pt. Of
    averages with equal updates, the largest number in a name decides. File times have no say.

    Raises:
        FileNotFoundError, ValueError: there is no such checkpoint, RUN/model.json is damaged, or the folder is an
            export; the message begins with the folder.
    """
    if (run / "decoder.onnx").is_file():
        raise ValueError(f"{run}: is an exported model; give the run that it came from")
    if (run / RECORD).is_file():
        name = _recorded(run / RECORD)
        if not (run / name).is_file():
            raise FileNotFoundError(
                f"{run}: {RECORD} names {name}, which is not there; name a checkpoint, average anew with "
                f"scripts/average_checkpoints.sh, or remove {RECORD}"
            )
        return run / name
    averages = sorted(run.glob("average*.pt"), key=_age, reverse=True)
    for path in [*averages, run / "checkpoint_best.pt", run / "checkpoint_last.pt"]:
        if path.is_file():
            return path
    raise FileNotFoundError(f"{run}: {'has no checkpoint' if run.is_dir() else 'no such folder'}")


def trained_further(model: Path) -> str:
    """A note where a run's training went on after this checkpoint of it was averaged; else ""."""
    last = model.with_name("checkpoint_last.pt")
    if model.name.startswith("checkpoint") or not last.is_file():
        return ""
    before, after = updates_of(model), updates_of(last)
    if before < 0 or after <= before:
        return ""
    return f"{model} was made after {before:,} updates, and the training went on to {after:,}"


def updates_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen; -1 where it does not say, or cannot be read."""
    try:
        return peek(checkpoint)["optimizer_history"][-1]["num_updates"]
    except Exception:  # torn, or no checkpoint; loading it gives the error
        return -1


def peek(checkpoint: Path) -> dict[str, Any]:
    """A checkpoint whose tensors are read from the file only when they are used."""
    with checkpoints_allowed():
        return torch.load(checkpoint, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(checkpoint))


def _recorded(record: Path) -> str:
    try:
        return json.loads(record.read_text(encoding="utf-8"))["checkpoint"]
    except (ValueError, LookupError, TypeError):
        raise ValueError(
            f"{record.parent}: {RECORD} does not name a checkpoint; remove it, or average anew with "
            "scripts/average_checkpoints.sh"
        ) from None


def _age(average: Path) -> tuple[int, int, str]:
    number = re.search(r"\d+", average.stem)
    return updates_of(average), int(number[0]) if number else 0, average.name
