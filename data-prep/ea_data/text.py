"""Reading text that others made: UTF-8 or refused, one line per "\\n" and nothing else.

Python's str.splitlines also breaks lines at U+2028, U+0085, form feeds and lone carriage returns, and files opened as
text break at the last. One of those in one language would put the two sides out of step. So everything here works on
bytes and splits at b"\\n" alone.
"""

from __future__ import annotations

import gzip
import tarfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, cast

from ea_artifacts.command import UserError
from ea_artifacts.files import wide_encoding

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
AGAIN = "delete it and run this again, or fetch it again where you gave it by --raw"


@contextmanager
def reading(path: Path | str) -> Iterator[None]:
    """Turns the errors of a damaged compressed file into a UserError that names it."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise UserError(f"{path}: truncated or damaged ({error}); {AGAIN}") from error


def open_bytes(path: Path) -> IO[bytes]:
    """A file's bytes, decompressed if its name ends in .gz."""
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def checked_lines(lines: Iterable[bytes], name: str, keep_nul: bool = False) -> Iterator[bytes]:
    """Lines of `name` as UTF-8, each ending in one b"\\n".

    CRLF becomes LF, a lone carriage return a space, and a byte-order mark at the start is dropped. Bytes that are not
    UTF-8, and NUL bytes unless `keep_nul` says that a later step removes them, raise UserError with the line's number.
    """
    lines, number = iter(lines), 0
    while batch := list(islice(lines, 2000)):
        if number == 0 and batch[0].startswith(BOM):
            batch[0] = batch[0].removeprefix(BOM)
        if number == 0:
            _refuse_other_forms(batch[0], name)
        block = b"".join(batch)
        try:
            block.decode()  # one call a block: a call a line would take as long as the whole rest of this function
        except UnicodeDecodeError:
            _refuse_undecodable(batch, name, number)
        if b"\0" in block and not keep_nul:
            at = next(i for i, line in enumerate(batch, number + 1) if b"\0" in line)
            raise UserError(f"{name}, line {at}: a NUL byte; is the file damaged?")
        if b"\r" in block or not block.endswith(b"\n"):
            batch = [_end(line) for line in batch]
        number += len(batch)
        yield from batch


def _refuse_other_forms(line: bytes, name: str) -> None:
    """Refuse a file that begins as compressed by gzip, as UTF-16 or as UTF-32."""
    if line.startswith(GZIP):
        raise UserError(f"{name}: is compressed by gzip; let its name end in .gz, or decompress it: gunzip < {name}")
    if encoding := wide_encoding(line):
        raise UserError(f"{name}: is {encoding}, not UTF-8; convert it first: iconv -f {encoding} -t UTF-8")


def lower_case_lines(lines: Iterable[bytes], name: str) -> Iterator[bytes]:
    """Lines of `name`, of which the first that is not lower-case raises UserError with its number."""
    for number, line in enumerate(lines, 1):
        if (text := line.decode()) != text.lower():
            raise UserError(
                f"{name}, line {number}: is not lower-case, as --lowercase states of text in subwords; leave that "
                f"option out, or lower-case the text before it is split: {text.strip()[:60]}"
            )
        yield line


def _end(line: bytes) -> bytes:
    body = line.removesuffix(b"\n").removesuffix(b"\r")
    return body.replace(b"\r", b" ") + b"\n"


def _refuse_undecodable(batch: list[bytes], name: str, number: int) -> None:
    for at, line in enumerate(batch, number + 1):
        try:
            line.decode()
        except UnicodeDecodeError as error:
            wrong = line[error.start : error.end].hex(" ")
            encoding = "UTF-16LE" if b"\0" in line else "ISO-8859-1"
            raise UserError(
                f"{name}, line {at}: byte {error.start + 1} (hex {wrong}) is not UTF-8; "
                f"convert it first, for example: iconv -f {encoding} -t UTF-8"
            ) from error


def count_lines(path: Path) -> int:
    """How many b"\\n" a file has."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
