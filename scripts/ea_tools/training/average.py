"""Average the weights of the last checkpoints of a run, as the papers do before they translate.

An average that is written into the run's own folder becomes its model, which RUN/model.json names: scripts/translate.sh
and the other commands use it.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from ea_artifacts.average import average, save
from ea_artifacts.checkpoints import EPOCH, UPDATE, numbered
from ea_artifacts.command import Parser, UserError, listed, positive, reporting
from ea_artifacts.run import Run

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
            Run(output.parent).record_model(output.name)
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
    pattern, kind = (EPOCH, "epoch") if num_epochs else (UPDATE, "update")
    wanted = num_epochs or num_updates or 0
    files = numbered(folders[0].iterdir(), pattern)
    candidates = [(number, path) for number, path in files if number <= (upper_bound or number)]
    if len(candidates) < wanted:
        bound = f" up to {kind} {upper_bound}" if upper_bound else ""
        raise UserError(f"{folders[0]}: expected {wanted} {kind} checkpoints{bound}, found {len(candidates)}")
    return [path for _, path in candidates[-wanted:]]


if __name__ == "__main__":
    main()
