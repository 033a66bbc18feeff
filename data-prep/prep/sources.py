"""Where raw text comes from: files below --raw, plain or .gz."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from .recipe import Part
from .text import PrepError, open_bytes, reading


def locate(part: Part, lang: str, role: str, raw: Path) -> Path:
    """The file below `raw` that holds one side of `part`."""
    member = part.member.format(lang=lang, role=role)
    names = [member, member + ".gz"]
    for name in names:
        if (raw / name).is_file():
            return raw / name
    raise PrepError(f"{raw}: has neither {' nor '.join(names)}")


def lines(part: Part, lang: str, role: str, raw: Path) -> Iterator[bytes]:
    """The lines of one side of `part`, as they are in the file."""
    path = locate(part, lang, role, raw)
    with reading(path), open_bytes(path) as file:
        yield from file


def fingerprint(part: Part, lang: str, role: str, raw: Path) -> list:
    """Changes when the file that holds one side of `part` is replaced."""
    path = locate(part, lang, role, raw)
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_mtime_ns]
