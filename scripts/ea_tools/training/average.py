"""Average the weights of the last checkpoints of a run, as the papers do before they translate.

An average that is written into the run's own folder becomes its model, which RUN/model.json names: scripts/translate.sh
and the other commands use it.
"""

from __future__ import annotations

import argparse
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from ea_tools.checkpoints import EPOCH, UPDATE, DamagedError, load, numbered, record_model, section, settings, structure
from ea_tools.common import Parser, UserError, listed, positive, replacing, reporting, say

#: Names that fairseq gives to checkpoints while it trains.
_OF_TRAINING = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|_last|\.best_.*)\.pt")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: choose the checkpoints, average them, write one that fairseq-generate loads."""
    args = parse(arguments)
    with reporting("average_checkpoints"):
        paths = select(
            args.inputs, args.num_epoch_checkpoints, args.num_update_checkpoints, args.checkpoint_upper_bound
        )
        output, runs = Path(args.output), {path.parent.resolve() for path in paths}
        if output.resolve() in {path.resolve() for path in paths}:
            raise UserError(f"--output {output}: is one of the checkpoints to average; give it another name")
        _refuse_trainings_own(output, runs)
        save(average(paths), output)
        print(f"wrote {output}, the average of {len(paths)} checkpoints")
        if runs == {output.parent.resolve()}:
            record_model(output)
            print(f"it is the model of {output.parent} from here on")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags of fairseq's own script of this name."""
    parser = Parser(prog="average_checkpoints.sh", description=__doc__)
    parser.add_argument("--inputs", required=True, nargs="+", metavar="PATH", help="a run folder, or checkpoint files")
    parser.add_argument("--output", required=True, metavar="FILE", help="where the averaged checkpoint goes")
    count = parser.add_mutually_exclusive_group()
    count.add_argument("--num-epoch-checkpoints", type=positive, metavar="N", help="the last N of checkpointE.pt")
    count.add_argument("--num-update-checkpoints", type=positive, metavar="N", help="the last N of checkpoint_E_U.pt")
    parser.add_argument(
        "--checkpoint-upper-bound", type=positive, metavar="M", help="none later than epoch (or update) M"
    )
    args = parser.parse_args(arguments)
    counted = args.num_epoch_checkpoints or args.num_update_checkpoints
    if args.checkpoint_upper_bound and not counted:
        parser.error("--checkpoint-upper-bound needs --num-epoch-checkpoints or --num-update-checkpoints")
    return args


def _refuse_trainings_own(output: Path, runs: Collection[Path]) -> None:
    """Refuse to write over a checkpoint of a training, or to put something in a run that looks like one."""
    for path in (output, output.resolve()):
        if _OF_TRAINING.fullmatch(path.name) and (path.exists() or path.parent.resolve() in runs):
            raise UserError(
                f"--output {output}: {path.name} is a name of training's own checkpoints; give the average another, "
                "such as average10.pt"
            )


def select(
    inputs: Iterable[Path | str],
    num_epochs: int | None = None,
    num_updates: int | None = None,
    upper_bound: int | None = None,
) -> list[Path]:
    """The checkpoint files to average, oldest first: all the files named, or the last N by epoch or by update."""
    paths = [Path(path) for path in inputs]
    for path in paths:
        if not path.exists():
            raise UserError(f"{path}: no such file or folder")
    if twice := next((path for at, path in enumerate(paths) if path.resolve() in map(Path.resolve, paths[:at])), None):
        raise UserError(f"--inputs {twice}: is given twice, which would count it twice")
    folders = [path for path in paths if path.is_dir()]
    if num_epochs is None and num_updates is None:
        if folders:
            raise UserError(
                f"{folders[0]}: is a folder; say how many of its checkpoints with "
                "--num-epoch-checkpoints N or --num-update-checkpoints N"
            )
        return paths
    if len(paths) != 1 or not folders:
        raise UserError(
            f"--inputs {listed(paths, ' ')}: the last N checkpoints are those of one run; give its folder alone, or "
            "name every checkpoint, without a number"
        )
    pattern, wanted, kind = (EPOCH, num_epochs, "epoch") if num_epochs else (UPDATE, num_updates, "update")
    files = numbered(folders[0].iterdir(), pattern)
    candidates = [(number, path) for number, path in files if number <= (upper_bound or number)]
    if len(candidates) < wanted:
        bound = f" up to {kind} {upper_bound}" if upper_bound else ""
        raise UserError(f"{folders[0]}: expected {wanted} {kind} checkpoints{bound}, found {len(candidates)}")
    return [path for _, path in candidates[-wanted:]]


def last(run: Path, count: int) -> list[Path]:
    """At most `count` of a run's last checkpoints, oldest first: of epochs, or of updates where these are more."""
    files = list(run.iterdir())
    by_epoch, by_update = ([path for _, path in numbered(files, pattern)][-count:] for pattern in (EPOCH, UPDATE))
    return by_epoch if len(by_epoch) >= len(by_update) else by_update


def average(paths: Sequence[Path]) -> dict[str, Any]:
    """The mean of all weights; the rest is the last checkpoint's, without the optimizer's state.

    Sums are in float64, so that the order does not matter and equal checkpoints average to themselves, bit for bit.
    The mean of 16-bit weights is kept in 32: ten of them together say more than 16 bits hold. Counters and indices are
    the last checkpoint's. Tied tensors stay tied.
    """
    import torch

    sums, updates, reference = {}, {}, None
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
        kept = load(path)["model"] if path.is_file() else {}
    except DamagedError:
        return False
    weights = state["model"]
    return kept.keys() == weights.keys() and all(kept[key].equal(value) for key, value in weights.items())


#: Options of a task that may change while a training goes on: they neither change what a model reads nor how.
_MAY_CHANGE = {"data", "dataset_impl", "num_batch_buckets", "train_subset", "upsample_primary", "truncate_source"}


def _skeleton(state: dict) -> dict[str, dict]:
    """Averaged checkpoints must share these: settings, seed, the task's options, and each key's shape and type."""
    # Learnt shares of older checkpoints have no axis, and a run may have gone on since.
    tensors = {key: f"{tuple(value.shape) or (1,)} {value.dtype}" for key, value in state["model"].items()}
    task = section(state, "task").items()
    of_task = {name: value for name, value in task if name not in _MAY_CHANGE and not name.startswith("eval_")}
    seed = section(state, "common").get("seed", settings(state).get("seed"))
    return {"settings": {**of_task, **structure(state), "seed": seed}, "tensors": tensors}


def _refuse_twice(updates: dict[int, Path], state: dict, path: Path) -> None:
    """Refuse a second checkpoint of the same number of updates: the same one, or another training's."""
    done = (state.get("optimizer_history") or [{}])[-1].get("num_updates")
    if done is not None and (other := updates.setdefault(done, path)) is not path:
        raise UserError(f"{other} and {path} were both made after {done:,} updates; give one of them")


def _require_same(one: dict, one_path: Path, other: dict, other_path: Path) -> None:
    """Refuse two checkpoints that are not of one model, naming both files and the first difference."""
    for kind in ("settings", "tensors"):
        for name in sorted(one[kind].keys() | other[kind].keys()):
            left, right = (side[kind].get(name, "absent") for side in (one, other))
            if left != right:
                raise UserError(
                    f"not checkpoints of one training: {name} is {left} in {one_path} but {right} in {other_path}"
                )


if __name__ == "__main__":
    main()
