"""A run: the folder that a training fills, with its model and its copy of the preparation."""

from __future__ import annotations

import atexit
import functools
import json
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .average import average, holds, save
from .checkpoints import EPOCH, UPDATE, numbered, updates_of
from .command import MissingError, UserError
from .files import writable, write_json
from .preparation import Preparation

#: RUN/model.json: {"checkpoint": "average10.pt"}. Training and averaging write it; scoring never does.
RECORD = "model.json"
#: The number of last checkpoints to average, as in the papers: "the final 10 checkpoints".
AVERAGED = 10


@dataclass(frozen=True)
class Run:
    """The run in a folder; or an export of a run, which has no checkpoints."""

    path: Path

    @property
    def is_export(self) -> bool:
        """Whether the folder is what export.sh wrote, in whatever state."""
        return any((self.path / name).exists() for name in ("encoder.onnx", "decoder.onnx"))

    def preparation(self) -> Preparation | None:
        """The preparation of its training's text; None where plain fairseq-train made the run."""
        return Preparation.at(self.path) if self.is_export else Preparation.kept_by(self.path)

    def model(self) -> Path:
        """The checkpoint that is the run's model: the one that RUN/model.json names.

        A run without that file: its average*.pt of the most updates, else checkpoint_best.pt, else checkpoint_last.pt.
        The largest number in a name decides among averages with equal updates; file times never do.

        Raises:
            MissingError, UserError: there is no such checkpoint, RUN/model.json is damaged, or the folder is an
                export; the message begins with the folder.
        """
        run = self.path
        if self.is_export:
            raise UserError(f"{run}: is an exported model; give the run that it came from")
        if self.has_model_recorded:
            name = self._recorded()
            if not (run / name).is_file():
                raise MissingError(
                    f"{run}: {RECORD} names {name}, which is not there; name a checkpoint, average anew with "
                    f"scripts/average_checkpoints.sh, or remove {RECORD}"
                )
            return run / name
        averages = sorted(run.glob("average*.pt"), key=_age, reverse=True)
        for path in [*averages, run / "checkpoint_best.pt", run / "checkpoint_last.pt"]:
            if path.is_file():
                return path
        raise MissingError(f"{run}: {'has no checkpoint' if run.is_dir() else 'no such folder'}")

    def choose(self, tell: Callable[[str], None]) -> Path:
        """``model``, after `tell` was given its name, and a note where the training went on after it was averaged."""
        model = self.model()
        tell(f"the model of {self.path} is {model.name}")
        last = model.with_name("checkpoint_last.pt")
        if not model.name.startswith("checkpoint") and last.is_file():
            before, after = updates_of(model), updates_of(last)
            if 0 <= before < after:
                tell(f"note: {model} was made after {before:,} updates, and the training went on to {after:,}")
        return model

    def _recorded(self) -> str:
        try:
            name = json.loads((self.path / RECORD).read_text(encoding="utf-8"))["checkpoint"]
        except (ValueError, LookupError, TypeError):
            name = None
        if not isinstance(name, str):
            raise UserError(
                f"{self.path}: {RECORD} does not name a checkpoint; remove it, or average anew with "
                "scripts/average_checkpoints.sh"
            )
        return name

    @property
    def has_model_recorded(self) -> bool:
        """Whether the run has a record of which checkpoint is its model."""
        return (self.path / RECORD).is_file()

    def record_model(self, name: str) -> None:
        """Make a checkpoint in the folder the run's model."""
        write_json(self.path / RECORD, {"checkpoint": name})

    def forget_model(self) -> None:
        """Take the record of the model away: the training goes on, and the model at its end is another."""
        (self.path / RECORD).unlink(missing_ok=True)

    def last(self, count: int) -> list[Path]:
        """At most `count` of the last checkpoints, oldest first: of epochs, or of updates where these are more."""
        files = list(self.path.iterdir())
        by_epoch, by_update = ([path for _, path in numbered(files, pattern)][-count:] for pattern in (EPOCH, UPDATE))
        return by_epoch if len(by_epoch) >= len(by_update) else by_update

    def averaged(self, count: int) -> tuple[Path, list[Path]]:
        """The average of the last `count` checkpoints, which is made if need be, and the checkpoints.

        It never changes which checkpoint is the run's model. Where RUN/averageN.pt is another average, the file is in
        RUN/eval. Where that cannot be written, it is in a temporary folder until this process ends.

        Raises:
            UserError: there are fewer.
        """
        run, paths = self.path, self.last(count)
        if (present := len(paths)) < count:
            hint = f"give --average {present}, or --best for the best one" if present else "train it first"
            if (kept := run / f"average{count}.pt").exists():  # and the checkpoints that it is made of were removed
                hint = f"give --checkpoint {kept}"
            raise UserError(f"{run}: expected {count} checkpoints to average, found {present}; {hint}")
        output, state = run / f"average{count}.pt", average(paths)
        if not holds(output, state):
            folder = run / "eval"
            output = (folder if writable(folder) else _temporary_folder()) / output.name
            save(state, output)
        return output, paths


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="average-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _age(average: Path) -> tuple[int, int, str]:
    number = re.search(r"\d+", average.stem)
    return updates_of(average), int(number[0]) if number else 0, average.name
