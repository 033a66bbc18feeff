"""Read and describe fairseq checkpoints, safely: a checkpoint is weights and settings, never code.

fairseq's checkpoints hold their options in a Namespace and, with --eval-bleu, counts in NumPy arrays. All of these are
data. Nothing that could run code belongs in the list of what may be read.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import pickle
import re
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .command import MissingError, UserError
from .files import read_lines
from .preparation import Preparation, file_difference

# fairseq's own file names: --keep-last-epochs and --keep-interval-updates write these.
EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")

# Settings that decide the meaning of the weights although keys and shapes may agree: heads, alpha, pre-norm and so on.
_STRUCTURE_PREFIXES = ("ea_", "encoder_", "decoder_", "share_", "adaptive_softmax_")
_STRUCTURE = set(
    "_name arch activation_fn cross_self_attention layernorm_embedding no_cross_attention no_scale_embedding "
    "no_token_positional_embeddings source_lang target_lang".split()
)

#: fairseq's tasks whose data have one language.
ONE_LANGUAGE = ("language_modeling", "masked_lm", "denoising")

#: Errors of reading a file that holds something else, or that the machine cannot read.
UNREADABLE = (
    *(RuntimeError, EOFError, ValueError, LookupError, TypeError, AttributeError, struct.error),
    *(OSError, MemoryError),
)


class DamagedError(UserError):
    """A file that is torn, empty or no checkpoint, as a kill or a full disk leaves it."""


@functools.cache
def safe_globals() -> list[Any]:
    """The one list of what ``torch.load(weights_only=True)`` may read beside tensors and plain values."""
    import numpy
    from numpy._core import multiarray  # private; NumPy pickles its arrays by these two functions

    return [
        argparse.Namespace,
        numpy.ndarray,
        numpy.dtype,
        multiarray._reconstruct,
        multiarray.scalar,
        *{type(numpy.dtype(code)) for code in "?bhilqBHILQefd"},  # bool, and every size of integer and float
    ]


def allow_in_checkpoints() -> None:
    """Let ``torch.load(weights_only=True)`` read ``safe_globals`` in this process."""
    import torch

    torch.serialization.add_safe_globals(safe_globals())


def peek(path: Path | str) -> dict[str, Any]:
    """``load``, but tensors are read from the file only when they are used."""
    return load(path, mmap=zipfile.is_zipfile(path))


def load(path: Path | str, mmap: bool = False) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Anything but weights and settings is refused, and none of it is run.

    Raises:
        DamagedError: the file is not a whole checkpoint.
        MissingError: there is no such file.
        UserError: it references something that no checkpoint needs, or the machine could not read it.
    """
    import torch

    path = Path(path)
    if not path.is_file():
        fault = "is a folder" if path.is_dir() else "no such file"
        raise MissingError(f"{path}: {fault}; expected a checkpoint, such as RUN/checkpoint_best.pt")
    allow_in_checkpoints()
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        asked = re.search(r"(?:GLOBAL|unrecognized (?:function|class)) (\S+)", str(error))
        if not asked:
            raise DamagedError(f"{path}: torn or damaged, or not a checkpoint") from None
        allowed = "A checkpoint may hold only tensors and settings. No code of it was run"
        raise UserError(f"{path}: refused: it references {asked[1]}. {allowed}") from None
    except UNREADABLE as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if _of_the_machine(error):
            raise UserError(f"{path}: could not be read ({reason}); the file may be intact") from None
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


def updates_of(checkpoint: Path) -> int:
    """How many updates a checkpoint has seen; -1 where it does not say, or cannot be read."""
    try:
        return peek(checkpoint)["optimizer_history"][-1]["num_updates"]
    except Exception:  # torn, or no checkpoint; loading it gives the error
        return -1


def numbered(paths: Iterable[Path], pattern: re.Pattern) -> list[tuple[int, Path]]:
    """The (number, path) pairs among `paths` whose names match EPOCH or UPDATE, lowest number first."""
    matches = ((pattern.fullmatch(Path(path).name), Path(path)) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def settings(state: dict) -> dict[str, Any]:
    """Every model setting of a checkpoint as one flat dict, whichever way fairseq stored it."""
    return _options(state.get("args")) or section(state, "model")


def section(state: dict, name: str) -> dict[str, Any]:
    """One section of a checkpoint's configuration ("common", "task", ...); {} where there is none."""
    return _options((state.get("cfg") or {}).get(name))


def _options(stored: argparse.Namespace | dict[str, Any] | None) -> dict[str, Any]:
    return dict(vars(stored)) if isinstance(stored, argparse.Namespace) else dict(stored or {})


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


def told_apart(checkpoints: Sequence[Path]) -> list[str]:
    """RUN/checkpoint.pt of each, or with as many of the folders above as tell them apart."""
    parts = [path.absolute().parts for path in checkpoints]
    most = max(map(len, parts))
    names = (["/".join(part[-count:]) for part in parts] for count in range(2, most + 1))
    return next((short for short in names if len(set(short)) == len(set(parts))), [str(path) for path in checkpoints])


def check_dictionaries(data: Preparation, checkpoint: Path | str, state: dict) -> None:
    """Refuse a checkpoint whose embeddings are not of the size of this folder's dictionaries."""
    for side, language in zip(("encoder", "decoder"), data.languages, strict=True):
        path, weight = data.folder / f"dict.{language}.txt", state["model"].get(f"{side}.embed_tokens.weight")
        entries = len(read_lines(path)) + 4  # fairseq's own four: <s>, <pad>, </s>, <unk>
        if weight is not None and len(weight) != entries:
            raise UserError(
                f"{checkpoint} was not trained on {data.folder}: its {side} knows {len(weight)} tokens, {path} has "
                f"{entries}"
            )


def of_model(checkpoint: Path, state: dict, run: Path | None = None, data: Preparation | None = None) -> Preparation:
    """The preparation of text for the model in a checkpoint, whose contents are `state`.

    Args:
        run: the run's folder (default: the checkpoint's).
        data: prepared data that the model is to be used with; refused unless they fit the model.
    """
    if task_of(state)["_name"] in ONE_LANGUAGE:
        return _of_one_language(checkpoint, state, data)
    run = run or checkpoint.parent
    if kept := Preparation.kept_by(run):
        others = [data] if data else []
        own = checkpoint.parent  # another run's, where the checkpoint is one
        if own.resolve() != run.resolve() and (there := Preparation.kept_by(own)):
            others.append(there)
        for other in others:
            kept.require_same(other, run)
    preparation = kept or data or Preparation.at(trained_on(checkpoint, state))
    task, prepared = task_of(state), preparation.languages
    trained = (task.get("source_lang"), task.get("target_lang"))
    if all(trained) and trained != prepared:
        raise UserError(
            f"{checkpoint} translates {'-'.join(map(str, trained))}, and {preparation.folder} is {'-'.join(prepared)}; "
            "give the data of its training"
        )
    check_dictionaries(preparation, checkpoint, state)
    return preparation


def _of_one_language(checkpoint: Path, state: dict, data: Preparation | None) -> Preparation:
    """The preparation of text for a model of one language, of which runs keep no copy."""
    if data is None:
        return Preparation.at(trained_on(checkpoint, state))
    dictionary = Path(task_of(state).get("data") or "") / "dict.txt"
    if dictionary.is_file() and (difference := file_difference(dictionary, data.folder / "dict.txt")):
        raise UserError(f"{data.folder} is not what {checkpoint} was trained on: {difference}")
    return data


@contextlib.contextmanager
def fitting(checkpoint: Path, data: Path) -> Iterator[None]:
    """Inside, a checkpoint is read with the dictionaries of these data; where they do not fit, it is a UserError."""
    try:
        yield
    except RuntimeError as error:
        if wrong := re.search(r"size mismatch for .*", str(error)):
            raise UserError(f"{checkpoint} was not trained on {data}: {wrong[0]}") from None
        raise
