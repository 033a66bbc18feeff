"""Read, find and describe fairseq checkpoints, safely: a checkpoint is weights and settings, never code."""

from __future__ import annotations

import argparse
import errno
import functools
import importlib.util
import pickle
import re
import struct
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from ea_tools.common import REPO, UserError, say, write_json
from ea_tools.text import read_lines

# fairseq's own file names: --keep-last-epochs and --keep-interval-updates write these.
EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")

# Settings that decide the meaning of the weights although keys and shapes may agree: heads, alpha, pre-norm and so on.
_STRUCTURE_PREFIXES = ("ea_", "encoder_", "decoder_", "share_", "adaptive_softmax_")
_STRUCTURE = set(
    "_name arch activation_fn cross_self_attention layernorm_embedding no_cross_attention no_scale_embedding "
    "no_token_positional_embeddings source_lang target_lang".split()
)

#: Errors of reading a file that holds something else, or that the machine cannot read.
UNREADABLE = (
    *(RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, struct.error),
    *(OSError, MemoryError),
)


class DamagedError(UserError):
    """A file that is torn, empty or no checkpoint, as a kill or a full disk leaves it."""


def load(path: Path | str) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Anything but weights and settings is refused, and none of it is run.

    Raises:
        DamagedError: the file is not a whole checkpoint.
        UserError: there is no such file, it asks for something that no checkpoint needs, or the machine could not read
            it, which says nothing of the file.
    """
    import torch

    path = Path(path)
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "no such file"
        raise UserError(f"{path}: {fault}; expected a checkpoint, such as RUN/checkpoint_best.pt")
    if path.stat().st_size == 0:
        raise DamagedError(f"{path}: the file is empty")
    try:
        with _loading().checkpoints_allowed():
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        asked = re.search(r"(?:GLOBAL|unrecognized (?:function|class)) (\S+)", str(error))
        if not asked:
            raise DamagedError(f"{path}: torn or damaged, or not a checkpoint") from None
        reason = f"it asks for {asked[1]}, which is neither weights nor settings"
        raise UserError(f"{path}: refused, and nothing of it was run: {reason}") from None
    except UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if _of_the_machine(error):
            raise UserError(f"{path}: could not be read, which says nothing of the file itself: {reason}") from None
        raise DamagedError(f"{path}: torn or damaged, or not a checkpoint ({reason})") from None
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise DamagedError(f"{path}: not a fairseq checkpoint: it has no model weights")
    return state


def _of_the_machine(error: Exception) -> bool:
    """Whether reading failed by the disk, a permission or too little memory, and not by the file's content."""
    if isinstance(error, OSError):
        # EINVAL: PyTorch looks for the list at an archive's end, which lies before the beginning of a file cut short.
        return error.errno not in (None, errno.EINVAL)
    return isinstance(error, MemoryError) or "can't allocate memory" in str(error)


@functools.cache
def _loading() -> ModuleType:
    """ea_fairseq/loading.py, read alone: the package around it imports fairseq."""
    spec = importlib.util.spec_from_file_location("ea_fairseq_loading", REPO / "ea_fairseq" / "loading.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbered(paths: Iterable[Path], pattern: re.Pattern) -> list[tuple[int, Path]]:
    """The (number, path) pairs among `paths` whose names match EPOCH or UPDATE, lowest number first."""
    matches = ((pattern.fullmatch(Path(path).name), Path(path)) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def settings(state: dict) -> dict[str, Any]:
    """Every model setting of a checkpoint as one flat dict, whichever way fairseq stored it."""
    stored = state.get("args") or (state.get("cfg") or {}).get("model") or {}
    return dict(vars(stored)) if isinstance(stored, argparse.Namespace) else dict(stored)


def longest(state: dict, side: str = "source") -> int:
    """The most subwords that a model reads (or writes: side "target"): one position is for the end of the sentence."""
    return (settings(state).get(f"max_{side}_positions") or 1024) - 1


def section(state: dict, name: str) -> dict[str, Any]:
    """One section of a checkpoint's configuration ("common", "task", ...); {} where there is none."""
    stored = (state.get("cfg") or {}).get(name) or {}
    return dict(vars(stored)) if isinstance(stored, argparse.Namespace) else dict(stored)


def task_of(state: dict) -> dict[str, Any]:
    """The options of the task that a checkpoint was trained for, its name among them as "_name"."""
    options = section(state, "task") or settings(state)  # older checkpoints hold all options in one place
    return {**options, "_name": options.get("_name") or options.get("task")}


def trained_on(checkpoint: Path, state: dict) -> Path:
    """The folder of data that a checkpoint was trained on; a UserError where it is gone."""
    data = task_of(state).get("data") or "data that it does not name"
    if not Path(data).is_dir():
        raise UserError(f"{checkpoint} was trained on {data}, which is not there any more; say where by --data")
    return Path(data)


def structure(state: dict) -> dict[str, Any]:
    """The settings in which two checkpoints must agree for their weights to mean the same thing."""
    return {
        name: value
        for name, value in settings(state).items()
        if name in _STRUCTURE or (name.startswith(_STRUCTURE_PREFIXES) and not name.endswith("layerdrop"))
    }


def is_export(folder: Path | None) -> bool:
    """Whether a folder is what export.sh wrote, in whatever state."""
    return folder is not None and any((folder / name).exists() for name in ("encoder.onnx", "decoder.onnx"))


def choose(run: Path) -> Path:
    """The checkpoint that is a run's model, by ea_fairseq's one rule; says on standard error which it is."""
    try:
        path = _loading().model_of(run)
    except (FileNotFoundError, ValueError) as error:
        raise UserError(f"--run {error}") from None
    say(f"the model of {run} is {path.name}")
    if note := _loading().trained_further(path):
        say(f"note: {note}")
    return path


def record_model(model: Path) -> None:
    """Make a checkpoint the model of the run in whose folder it is."""
    write_json(model.parent / _loading().RECORD, {"checkpoint": model.name})


def forget_model(run: Path) -> None:
    """Take the record of a run's model away: its training goes on, and the model at its end is another."""
    (run / _loading().RECORD).unlink(missing_ok=True)


def has_model_recorded(run: Path) -> bool:
    """Whether the run has a record of which checkpoint is its model."""
    return (run / _loading().RECORD).is_file()


def told_apart(checkpoints: Sequence[Path]) -> list[str]:
    """RUN/checkpoint.pt of each, or with as many of the folders above as tell them apart."""
    parts = [path.absolute().parts for path in checkpoints]
    most = max(map(len, parts))
    names = (["/".join(part[-count:]) for part in parts] for count in range(2, most + 1))
    return next((short for short in names if len(set(short)) == len(set(parts))), [str(path) for path in checkpoints])


def check_dictionaries(data: Path, prep: dict[str, Any], checkpoint: Path | str, state: dict) -> None:
    """Refuse a checkpoint whose embeddings are not of the size of this folder's dictionaries."""
    for side, language in (("encoder", prep["source_lang"]), ("decoder", prep["target_lang"])):
        path, weight = data / f"dict.{language}.txt", state["model"].get(f"{side}.embed_tokens.weight")
        entries = len(read_lines(path)) + 4  # fairseq's own four: <s>, <pad>, </s>, <unk>
        if weight is not None and len(weight) != entries:
            raise UserError(
                f"{checkpoint} was not trained on {data}: its {side} knows {len(weight)} tokens, {path} has {entries}"
            )
