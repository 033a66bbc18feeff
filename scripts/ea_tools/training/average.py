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
        paths = select(args.inputs, args.num_epoch_checkpoints, args.num_update_checkpoints)
        output, runs = Path(args.output), {path.parent.resolve() for path in paths}
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
    return parser.parse_args(arguments)


def _refuse_trainings_own(output: Path, runs: Collection[Path]) -> None:
    """Refuse to write over a checkpoint of a training, or to put something in a run that looks like one."""
    for path in (output, output.resolve()):
        if _OF_TRAINING.fullmatch(path.name) and (path.exists() or path.parent.resolve() in runs):
            raise UserError(
                f"--output {output}: {path.name} is a name of training's own checkpoints; give the average another, "
                "such as average10.pt"
            )


def select(inputs: Iterable[Path | str], num_epochs: int | None = None, num_updates: int | None = None) -> list[Path]:
    """The checkpoint files to average, oldest first: all the files named, or the last N by epoch or by update."""
    paths, wanted = [Path(path) for path in inputs], num_epochs or num_updates
    if wanted is None:
        if folder := next(filter(Path.is_dir, paths), None):
            raise UserError(f"{folder}: is a folder; add --num-epoch-checkpoints N or --num-update-checkpoints N")
        return paths
    if len(paths) != 1:
        raise UserError(f"--inputs {listed(paths, ' ')}: the last N checkpoints are those of one run; name it alone")
    pattern, kind = (EPOCH, "epoch") if num_epochs else (UPDATE, "update")
    files = numbered(paths[0].iterdir(), pattern)
    if len(files) < wanted:
        raise UserError(f"{paths[0]}: expected {wanted} {kind} checkpoints, found {len(files)}")
    return [path for _, path in files[-wanted:]]
