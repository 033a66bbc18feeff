"""run.json: whose a run's folder is, and each start of its training. In results/logs it is the first line of a log."""

from __future__ import annotations

from pathlib import Path
from typing import NotRequired, TypedDict

from ea_artifacts.files import read_json

FILE = "run.json"


class Start(TypedDict):
    """One start of a training; the first versions recorded the flags alone."""

    flags: dict[str, str]
    updates: NotRequired[int]  # that were done before
    commit: NotRequired[str | None]
    device: NotRequired[str]
    processes: NotRequired[int]


class Record(TypedDict):
    """The content of the file."""

    identity: dict[str, str]  # what must not change while a run goes on: recipe, arch, data, flags of the model
    command: NotRequired[str]  # which began the run
    starts: NotRequired[list[Start]]  # version 0.1.0 recorded none


def read(path: Path) -> Record:
    """The record in run.json."""
    return read_json(path)
