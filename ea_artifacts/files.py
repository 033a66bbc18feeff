"""Files that appear under their name only when they are whole; JSON; lines of text, or an error that names the line."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .command import UserError, explained

#: in a line of JSON; an item of a list is never broken
MOST_LETTERS = 120
#: Marks at the beginning of a file, longest first -> iconv's name of the encoding.
WIDE = {b"\xff\xfe\0\0": "UTF-32", b"\0\0\xfe\xff": "UTF-32", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16"}


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


def writable(folder: Path) -> bool:
    """Whether files can be made in a folder, which need not be there yet: others' runs may be read-only."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    return os.access(nearest, os.W_OK | os.X_OK, effective_ids=True)


def read_json(path: Path) -> Any:
    """The content of a JSON file.

    Raises:
        UserError: it is empty, torn or something else; the message names it.
    """
    try:
        return parse_json(path.read_text(encoding="utf-8"), path)
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from None


def parse_json(text: str, where: Path | str) -> Any:
    """The content of JSON, or a UserError that names its place."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON: {error}") from None


def write_json(path: Path, content: Any) -> None:
    """Write a JSON file, which appears under its name only when it is whole. A path becomes its text."""
    with replacing(path) as temporary:
        # Names of files need not be UTF-8.
        temporary.write_text(json_text(content), encoding="utf-8", errors="backslashreplace")


def json_text(content: Any) -> str:
    """JSON: what fits stands on one line, and so does each item of a list, however long."""
    return _json(content) + "\n"


_json_line = functools.partial(json.dumps, ensure_ascii=False, default=os.fspath)


def _json(value: Any, indent: str = "", name: str = "") -> str:
    """A value behind its name, in lines of which all but the first begin with the indent."""
    line = name + _json_line(value)
    if not isinstance(value, (dict, list, tuple)) or not value or (indent and len(indent + line) < MOST_LETTERS):
        return line
    inner = indent + " "
    if isinstance(value, dict):
        items = [_json(each, inner, f"{_json_line(str(key))}: ") for key, each in value.items()]
    else:
        items = list(map(_json_line, value))
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    body = ",\n".join(inner + item for item in items)
    return f"{name}{opening}\n{body}\n{indent}{closing}"


def read_lines(path: Path | str) -> list[str]:
    """The lines of a UTF-8 file without their ends; only a line feed ends a line (never U+2028 or its relatives)."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(explained(error)) from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return [decode(line, path, number) for number, line in enumerate(lines, 1)]


def decode(line: bytes, path: Path | str, number: int) -> str:
    """One line of bytes as text without its end, or an error that names the file and the line's number.

    A carriage return inside the line becomes a space, as in prepared data.
    """
    if number == 1 and (encoding := wide_encoding(line)):
        raise UserError(f"{path}:{number}: not UTF-8 but {encoding}; convert it first: iconv -f {encoding} -t UTF-8")
    if b"\0" in line:
        raise UserError(
            f"{path}:{number}: a NUL byte; is the file damaged? If it is UTF-16: iconv -f UTF-16LE -t UTF-8"
        )
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").replace(b"\r", b" ").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    return text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark is no part of the text


def batches(lines: Iterable[bytes], name: Path | str, size: int, done: int = 0) -> Iterator[tuple[int, list[str]]]:
    """The lines after the first `done`, `size` at a time, with the number of the first of each batch, from 1.

    The lines before one that is no text are given first.
    """
    first, batch = done + 1, []
    try:
        for number, line in enumerate(lines, 1):
            if number <= done:
                continue
            batch.append(decode(line, name, number))
            if len(batch) == size:
                yield first, batch
                first, batch = number + 1, []
    except UserError:
        if batch:
            yield first, batch
        raise
    if batch:
        yield first, batch


def wide_encoding(line: bytes) -> str | None:
    """iconv's name for the encoding of a file that begins with the mark of UTF-16 or UTF-32, else None."""
    return next((encoding for mark, encoding in WIDE.items() if line.startswith(mark)), None)


def digest(lines: Sequence[str]) -> str:
    """A digest that tells two texts apart, such as the references of two scores."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def sha256(path: Path) -> str:
    """The digest of a file, which may be large: 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
