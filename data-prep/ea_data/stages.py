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
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_artifacts.command import UserError

STAMP = ".stamp.json"
NAMES = ("tokens", "subwords", "binary")
EARLIER = ("extract", "clean", "tokenise", "learn", "apply", "filter", "binarise")  # stages of earlier versions
SUMS = "SHA256SUMS"  # in NAME.work, of the public files; in sha256sum's format: `sha256sum -c SHA256SUMS` works
LOCK = "lock"  # in NAME.work, from its beginning: a folder without it was not made here
REPLACED, GONE = "replaced.tmp", ".gone.tmp"
#: Left-overs in NAME.work of a killed run, and of earlier versions.
LEFT_OVER = (
    *(REPLACED, f"{SUMS}.tmp"),
    *(pattern for name in (*NAMES, *EARLIER) for pattern in (f"?-{name}{GONE}", f"{name}.*.tmp")),
    *(f"{number}-{name}" for number, name in enumerate(EARLIER, 1)),
)


def work_folder(out: Path) -> Path:
    """The folder for the stages of the finished folder `out`."""
    return out.with_name(out.name + ".work")


def refuse_others(out: Path) -> None:
    """Refuse to work where `out` or the folder of its stages holds something that was not made here."""
    work = work_folder(out)
    made_here = {out: read_stamp(out) is not None, work: (work / LOCK).exists()}
    for folder, ours in made_here.items():
        if folder.exists() and any(folder.iterdir()) and not ours:
            raise UserError(f"{folder}: exists and was not made here; move it away or choose another --out")


def read_stamp(folder: Path) -> dict | None:
    """The stamp of a finished stage; None where there is none, or something else in its place."""
    try:
        stamp = json.loads((folder / STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stamp if isinstance(stamp, dict) and {"key", "report"} <= stamp.keys() else None


def _refuse_own_files(folder: Path) -> None:
    """Refuse to replace a stage's folder that holds files of somebody else; earlier versions' stamps name no files."""
    made = (read_stamp(folder) or {}).get("files")
    if made is not None and (others := sorted({*_files(folder)} - {*made, STAMP})):
        raise UserError(f"{folder / others[0]}: was not made here, and would be lost; move it away first")


def _files(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()]


@dataclass
class Stage:
    """`make(folder)` fills an empty folder and returns what there is to report; `options` decide its result."""

    name: str
    options: Any
    make: Callable[[Path], dict]
    folder: Path  # its final name
    work: Path  # where it is filled, under another name; on the same file system
    key: str = ""

    def report(self) -> dict[str, Any] | None:
        """The report of the finished stage, or None if it has to be made (again)."""
        stamp = read_stamp(self.folder)
        return stamp["report"] if stamp and stamp["key"] == self.key else None


def chain(stages: list[Stage]) -> None:
    """Gives every stage the key that depends on all that comes before it."""
    key = ""
    for stage in stages:
        key = stage.key = hashlib.sha256(json.dumps([key, stage.name, stage.options]).encode()).hexdigest()


def run(stages: list[Stage], force: str | None, say: Callable[[str], None]) -> None:
    """Makes the missing stages. `force` names a stage to make again, with all that follow it."""
    chain(stages)
    if not force and stages[-1].report() is not None:
        say("nothing to do: made before, with the same options from the same text")
        return
    _refuse_own_files(stages[-1].folder)
    forced = False
    for position, stage in enumerate(stages):
        forced = forced or stage.name == force
        if not forced and stage.report() is not None:
            say(f"{stage.name}: done already")
            continue
        for later in stages[position:-1]:  # the last stage's folder is the user's: it stays until it is replaced
            _remove(later.folder)
        say(stage.name)
        _make(stage)


def _make(stage: Stage) -> None:
    """Make a stage: fill a folder, which gets its name when it is complete."""
    # A new name for every process: one that a killed run left must not write into this one.
    temporary = stage.work / f"{stage.name}.{os.getpid()}.tmp"
    temporary.mkdir()
    try:
        report = stage.make(temporary)
        stamp = {"key": stage.key, "report": report, "files": sorted(_files(temporary))}
        (temporary / STAMP).write_text(json.dumps(stamp, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        stage.folder.parent.mkdir(parents=True, exist_ok=True)
        replaced = stage.work / REPLACED
        if stage.folder.exists():
            stage.folder.rename(replaced)
        temporary.rename(stage.folder)
        shutil.rmtree(replaced, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _remove(folder: Path) -> None:
    """Removes a folder so that it is never seen half-removed under its own name."""
    if folder.exists():
        gone = folder.with_name(folder.name + GONE)
        shutil.rmtree(gone, ignore_errors=True)
        folder.rename(gone)
        shutil.rmtree(gone)


@contextmanager
def alone(work: Path) -> Iterator[None]:
    """Keeps a second run out of the same folder, and removes the leftovers of a killed one or an earlier version."""
    work.mkdir(parents=True, exist_ok=True)
    with (work / LOCK).open("w") as lock:
        for patience in range(50, -1, -1):  # the workers of a killed run take a moment to go
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if not patience:
                    raise UserError(f"{work}: another run is at work here; wait for its end") from error
                time.sleep(0.1)
        for left in [path for pattern in LEFT_OVER for path in work.glob(pattern)]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        try:
            yield
        finally:
            if {path.name for path in work.iterdir()} <= {LOCK, SUMS}:  # nothing was made: leave no trace
                shutil.rmtree(work)
