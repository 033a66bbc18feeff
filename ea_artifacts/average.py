"""The average of checkpoints of one training, as the papers take it before they translate."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .checkpoints import DamagedError, load, section, settings, structure
from .command import UserError, listed, say
from .files import replacing

#: Options of a task that may change during a training: the model reads the same text in the same way.
_MAY_CHANGE = {"data", "dataset_impl", "num_batch_buckets", "train_subset", "upsample_primary", "truncate_source"}


def average(paths: Sequence[Path]) -> dict[str, Any]:
    """The mean of all weights; the rest is the last checkpoint's, without the optimizer's state.

    Sums are in float64, so that the order does not matter and equal checkpoints average to themselves, bit for bit.
    The mean of 16-bit weights is kept in 32: ten of them together say more than 16 bits hold. Counters and indices are
    the last checkpoint's. Tied tensors stay tied.
    """
    import torch

    sums: dict[str, torch.Tensor] = {}
    updates: dict[int, Path] = {}
    reference = None
    say(f"averaging {listed(path.name for path in paths)}")
    for path in paths:
        state = load(path)
        if reference is None:
            reference, reference_path = _skeleton(state), path
        _require_same(reference, reference_path, _skeleton(state), path)
        _refuse_twice(updates, state, path)
        for key, value in state["model"].items():
            if value.is_floating_point():
                value = value.to(torch.float64)
                sums[key] = sums[key] + value if key in sums else value
    shared = {}
    for key, value in state["model"].items():
        if key in sums:
            # One object per stored tensor: tied embeddings share memory when loaded, and must when saved.
            identity = (value.untyped_storage().data_ptr(), value.storage_offset(), value.shape, value.stride())
            if identity not in shared:
                mean = sums[key] / len(paths)
                shared[identity] = mean if value.dtype == torch.float64 else mean.float()
            state["model"][key] = shared[identity]
            if not torch.isfinite(shared[identity]).all():
                raise UserError(f"{path} or one before it: {key} holds NaN or infinity")
    state.pop("last_optimizer_state", None)
    state.get("extra_state", {})["averaged"] = [str(path) for path in paths]
    return state


def save(state: dict[str, Any], path: Path | str) -> None:
    """Write a checkpoint; the file appears under its name only when it is complete."""
    import torch

    try:
        with replacing(path) as temporary:
            torch.save(state, temporary)
    except RuntimeError as error:  # PyTorch's error for a full disk
        reason, free = str(error).strip().splitlines()[0], shutil.disk_usage(Path(path).parent).free / 2**20
        raise UserError(
            f"{path}: could not be written ({reason}); {free:,.0f} MiB are free there: make room and run it again"
        ) from None


def holds(path: Path, state: dict[str, Any]) -> bool:
    """Whether a checkpoint file has these weights."""
    try:
        stored = load(path)["model"] if path.is_file() else {}
    except DamagedError:
        return False
    weights = state["model"]
    return stored.keys() == weights.keys() and all(stored[key].equal(value) for key, value in weights.items())


def _skeleton(state: dict) -> dict[str, Any]:
    """Averaged checkpoints must share these: settings, seed, the task's options, and each key's shape and type."""
    tensors = {key: f"{tuple(value.shape)} {value.dtype}" for key, value in state["model"].items()}
    task = section(state, "task").items()
    of_task = {name: value for name, value in task if name not in _MAY_CHANGE and not name.startswith("eval_")}
    seed = section(state, "common").get("seed", settings(state).get("seed"))
    return {**of_task, **structure(state), "seed": seed, **tensors}


def _refuse_twice(updates: dict[int, Path], state: dict, path: Path) -> None:
    """Refuse a second checkpoint of the same number of updates: the same one, or another training's."""
    done = (state.get("optimizer_history") or [{}])[-1].get("num_updates")
    if done is not None and (other := updates.setdefault(done, path)) is not path:
        raise UserError(f"{other} and {path} were both made after {done:,} updates; give one of them")


def _require_same(one: dict, one_path: Path, other: dict, other_path: Path) -> None:
    """Refuse two checkpoints that are not of one model, naming both files and the first difference."""
    for name in {**one, **other}:
        left, right = (side.get(name, "absent") for side in (one, other))
        if left != right:
            raise UserError(
                f"not checkpoints of one training: {name} is {left} in {one_path} but {right} in {other_path}"
            )
