"""Stages that stop and go on: each fills a folder, which gets its name only when it is complete.

    NAME.work/1-tokens/.stamp.json    {"key": ..., "report": ..., "files": [...]}
    NAME.work/2-subwords/...
    NAME/.stamp.json                  of the last stage

A stage's key is a digest of its options and of the key of the stage before it. A folder with the right key is done;
any other is made again, and so is everything after it. The next run removes the temporary folders of a killed one.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from ea_artifacts.command import UserError, say

STAMP = ".stamp.json"
NAMES = ("tokens", "subwords", "binary")
LOCK = "lock"  # in NAME.work, from its beginning: a folder without it was not made here


def work_folder(out: Path) -> Path:
    """The folder for the stages of the finished folder `out`."""
    return out.with_name(out.name + ".work")


def _read_stamp(folder: Path) -> dict | None:
    """The stamp of a finished stage; None where there is none, or something else in its place."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and {"key", "report"} <= stamp.keys() else None


def _files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir())


@dataclass
class Stage:
    """`make(folder)` fills an empty folder and returns what there is to report; `key` tells its result from others."""

    name: str
    key: str
    make: Callable[[Path], dict]
    folder: Path  # its final name
    work: Path  # where it is filled, under another name; on the same file system

    def report(self) -> dict[str, Any] | None:
        """The report of the finished stage, or None if it has to be made (again)."""
        stamp = _read_stamp(self.folder)
        return stamp["report"] if stamp and stamp["key"] == self.key else None

    def refuse_own_files(self) -> None:
        """Refuse to replace a folder that holds other files than its stage's; earlier stamps name no files."""
        made = (_read_stamp(self.folder) or {}).get("files")
        if made is not None and (others := {*_files(self.folder)} - {*made, STAMP}):
            raise UserError(f"{self.folder / min(others)}: was not made here, and would be lost; move it away first")

    def run(self) -> None:
        """Fill a folder, which gets its name when it is complete."""
        with TemporaryDirectory(dir=self.work, prefix=f"{self.name}.", suffix=".tmp") as temporary:
            new = Path(temporary, "new")
            new.mkdir()
            stamp = {"report": self.make(new), "key": self.key, "files": _files(new)}
            (new / STAMP).write_text(json.dumps(stamp, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            if self.folder.exists():
                self.folder.rename(Path(temporary, "replaced"))
            new.rename(self.folder)


def chain(out: Path, makers: Mapping[str, Callable[[Path], dict]], options: Mapping[str, list]) -> list[Stage]:
    """The stages for the finished folder `out`, by name; `options` decide the result of each."""
    work, key, stages = work_folder(out), "", []
    for number, (name, make) in enumerate(makers.items(), 1):
        key = hashlib.sha256(json.dumps([key, name, options[name]]).encode()).hexdigest()
        stages.append(Stage(name, key, make, out if name == NAMES[-1] else work / f"{number}-{name}", work))
    return stages


def run(stages: list[Stage]) -> None:
    """Makes the missing stages, and all that follow the first of them."""
    if stages[-1].report() is not None:
        say("nothing to do: made before, with the same options from the same text")
        return
    stages[-1].refuse_own_files()
    for position, stage in enumerate(stages):
        if stage.report() is not None:
            say(f"{stage.name}: done already")
            continue
        for later in stages[position:-1]:  # the last stage's folder is the user's: it stays until it is replaced
            (later.folder / STAMP).unlink(missing_ok=True)  # first: a folder that is half removed is not done
            shutil.rmtree(later.folder, ignore_errors=True)
        say(stage.name)
        stage.run()


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keeps a second run out of `out` and its stages' folder, and refuses them where they hold other files."""
    work = work_folder(out)
    for folder, ours in ((out, _read_stamp(out)), (work, (work / LOCK).exists())):
        if folder.exists() and any(folder.iterdir()) and not ours:
            raise UserError(f"{folder}: exists and was not made here; move it away or choose another --out")
    with locked(work):
        yield


def _opened(lock: Path) -> IO[str]:
    """The file, made where it is missing. A finished corpus may be read-only: to lock a file, one need not write it."""
    try:
        return lock.open("w")
    except OSError:
        if not lock.exists():
            raise
        return lock.open()


@contextmanager
def locked(work: Path) -> Iterator[None]:
    """Keeps a second run out of a folder, and removes the leftovers of a killed one."""
    work.mkdir(parents=True, exist_ok=True)
    with _opened(work / LOCK) as lock:
        for patience in range(50, -1, -1):  # the workers of a killed run take a moment to go
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not patience:
                    raise UserError(f"{work}: another run is at work here; wait for its end") from error
                time.sleep(0.1)
        for left in [path for name in NAMES for path in work.glob(f"{name}.*.tmp")]:
            shutil.rmtree(left)
        try:
            yield
        finally:
            if {path.name for path in work.iterdir()} == {LOCK}:  # nothing was made: leave no trace
                shutil.rmtree(work)
