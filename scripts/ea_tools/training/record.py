"""run.json: whose a run's folder is, and each start of its training. In results/logs it is the first line of a log."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing has none that pydantic takes before Python 3.12

from ea_artifacts.command import UserError
from ea_artifacts.files import read_json
from ea_tools.forms import first_fault

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


_FORM = TypeAdapter(Record)


def read(path: Path) -> Record:
    """The record in a file of its own; a UserError for another file's content."""
    return checked(read_json(path), path)


def checked(content: Any, where: Path) -> Record:
    """The content of a record, or a UserError that names the entry that no record has."""
    try:
        _FORM.validate_python(content, strict=True)
    except ValidationError as error:
        raise UserError(f"{first_fault(where, error)}; scripts/train.sh writes it otherwise") from None
    return content
