"""The common part of all commands: the repository's root, quiet libraries, files that appear when they are whole."""

import contextlib
import json
import logging
import os
import shlex
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

# Commands take these from here.
from ea_data.command_line import Parser, UserError, at_least, finite, positive, reporting, say  # noqa: F401

#: The folder that holds scripts/, recipes/, data/, runs/ and results/.
REPO = Path(__file__).resolve().parents[2]
#: in a line of JSON; an item of a list is never broken
MOST_LETTERS = 120


def ignore_warnings() -> None:
    """Hide warnings inside fairseq, hydra and PyTorch's exporter: users cannot change their causes."""
    warnings.filterwarnings("ignore", category=UserWarning, module="hydra|fairseq")
    warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
    messages = r"\n'config' is validated|'pin_memory' argument|Support for mismatched key_padding_mask|.*LeafSpec"
    warnings.filterwarnings("ignore", message=messages)


def quiet() -> None:
    """Hide fairseq's and hydra's warnings, and their reports while they start."""
    ignore_warnings()
    logging.disable(logging.INFO)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler's


def replaceable(path: Path, flag: str = "") -> Path | None:
    """The file that replaces `path`, or the target of a link; None for a pipe or a device.

    Raises:
        UserError: it is a folder; the message begins with `flag`.
    """
    if path.is_dir():
        raise UserError(f"{flag}{path}: is a folder; give the name of a file")
    if path.exists() and not path.is_file():
        return None
    return Path(os.path.realpath(path))


@contextlib.contextmanager
def replacing(path: Path | str) -> Iterator[Path]:
    """Give a temporary name beside `path`. It becomes `path` at the end, or is gone.

    A link stays one, and its target is replaced. A pipe or a device cannot be replaced, and is written to.
    """
    target = replaceable(Path(path))
    if target is None:
        yield Path(path)
        return
    path = target
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: it is empty, torn or something else; the message names it.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, which appears under its name only when it is whole. A path becomes its text."""
    with replacing(path) as temporary:
        # Names of files need not be UTF-8.
        temporary.write_text(json_text(content), encoding="utf-8", errors="backslashreplace")


def json_text(content: Any) -> str:
    """JSON: what fits stands on one line, and so does each item of a list, however long."""
    return "\n".join(_json_lines(content, "", "")) + "\n"


def _json_lines(value: Any, indent: str, name: str) -> Iterator[str]:
    """The lines of a value; `name` is what precedes it on its first line."""
    line = indent + name + _json_line(value)
    if not isinstance(value, (dict, list, tuple)) or not value or (indent and len(line) < MOST_LETTERS):
        yield line
        return
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    yield indent + name + opening
    inner = indent + " "
    if isinstance(value, dict):
        items = [list(_json_lines(each, inner, f"{_json_line(str(key))}: ")) for key, each in value.items()]
    else:
        items = [[inner + _json_line(each)] for each in value]
    for number, lines in enumerate(items, 1):
        yield from lines[:-1]
        yield lines[-1] + ("," if number < len(items) else "")
    yield indent + closing


def _json_line(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, default=os.fspath)


def portable(command: Iterable[str]) -> str:
    """A command as it can be run from the repository's folder on any machine."""
    return shlex.join(command).replace(f"{REPO}/", "")


def listed(words: Iterable, between: str = ", ") -> str:
    """Words one after the other: "1, 2, 3"."""
    return between.join(map(str, words))
