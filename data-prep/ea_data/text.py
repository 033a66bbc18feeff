"""Raw text that others made: plain files, .gz files, members of archives. UTF-8 or refused; only "\\n" ends a line.

Python's str.splitlines also breaks lines at U+2028, U+0085, form feeds and lone carriage returns, and files opened as
text break at the last. One of those in one language would put the two sides out of step. So everything here works on
bytes and splits at b"\\n" alone.

Three forms of text are known:

    plain     every line is a sentence
    ted       IWSLT's train.tags files: <url>, <talkid> and <keywords> lines are dropped, <title> and <description>
              unwrapped; any other tag stays, as in the standard recipe
    segments  .sgm and IWSLT's .xml: what stands between <seg id="..."> and </seg>; XML entities stay as they are
"""

from __future__ import annotations

import gzip
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, cast

from ea_artifacts.command import UserError
from ea_artifacts.files import decode

from .corpora import Part

GZIP = b"\x1f\x8b"
BOM = b"\xef\xbb\xbf"
AGAIN = "delete it and run this again, or fetch it again where you gave it by --raw"
ARCHIVES = (".tgz", ".tar.gz", ".tar")
DROPPED_TAGS = (b"<url>", b"<talkid>", b"<keywords>")
UNWRAPPED_TAGS = re.compile(rb"</?(?:title|description)>")
SEGMENT_TAGS = re.compile(rb'<seg id="[0-9]*">\s*|\s*</seg>\s*')


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
    """Lines of `name` as UTF-8, each ending in one b"\\n"; the first that is something else raises UserError.

    As ``decode`` has it, CRLF becomes LF, a lone carriage return a space, and a mark at the beginning is dropped. With
    `keep_nul` a NUL byte becomes another control character, since a later step makes all of these spaces.
    """
    lines, number = iter(lines), 0
    while batch := list(islice(lines, 2000)):
        if not number and batch[0].startswith(GZIP):
            raise UserError(f"{name}: is compressed by gzip; let its name end in .gz, or decompress it")
        if not _is_plain(b"".join(batch)):  # one call a block: a call a line would take much longer
            text = (line.replace(b"\0", b"\1") if keep_nul else line for line in batch)
            batch = [decode(line, name, at).encode() + b"\n" for at, line in enumerate(text, number + 1)]
        number += len(batch)
        yield from batch


def _is_plain(block: bytes) -> bool:
    """Whether lines are UTF-8 and would stay as they are."""
    try:
        block.decode()
    except UnicodeDecodeError:
        return False
    return block.endswith(b"\n") and not any(mark in block for mark in (b"\0", b"\r", BOM))


def count_lines(path: Path) -> int:
    """How many b"\\n" a file has."""
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


class Side:
    """One side of a part: the file or archive below `raw` that holds it.

    Raises UserError if there is none.
    """

    def __init__(self, part: Part, lang: str, role: str, raw: Path) -> None:
        self.member = part.member.format(lang=lang, role=role)
        self.form = part.form
        self.url = part.url.format(lang=lang)
        self.part = part
        self.path = self._locate(raw)

    def __str__(self) -> str:
        return f"{self.path}:{self.member}" if self.archived else str(self.path)

    @property
    def archived(self) -> bool:
        return self.path.name.endswith(ARCHIVES)

    @property
    def public(self) -> bool:
        """Whether `path` is the file at `url`, as everybody gets it."""
        return self.path.name == Path(self.url).name

    def _locate(self, raw: Path) -> Path:
        names = [self.member, self.member + ".gz"]
        if self.url:
            basename = Path(self.member).name
            names += [basename, basename + ".gz", Path(self.url).name]
        names = list(dict.fromkeys(names))
        for name in names:
            if (raw / name).is_file():
                return raw / name
        where = f"; download it from {self.url}" if self.url else ""
        folder = (raw / self.member).with_suffix("")
        if folder.is_dir():
            where += f"; {folder} is a folder: give what its two files' names begin with, as in {folder}/train"
        has = "there is" if Path(self.member).is_absolute() else f"{raw}: has"
        raise UserError(f"{has} no {' and no '.join(names)}{where}")

    def fingerprint(self) -> list:
        """Changes when the file is replaced."""
        status = self.path.stat()
        return [self.form, str(self.path), self.member, status.st_size, status.st_mtime_ns]

    def lines(self) -> Iterator[bytes]:
        """The sentences, as bytes; line ends and bytes are as they are in the file."""
        with reading(self.path):
            yield from FORMS[self.form](self._archived_lines() if self.archived else _file_lines(self.path))

    def _archived_lines(self) -> Iterator[bytes]:
        wanted = {self.member, self.member + ".gz"}
        with tarfile.open(self.path, "r|*") as archive:  # a stream: one pass, up to the member
            for entry in archive:
                name = entry.name.removeprefix("./")
                if name in wanted and entry.isfile():
                    with cast(IO[bytes], archive.extractfile(entry)) as file:  # None of a folder alone
                        yield from gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
                    return
        raise UserError(f"{self.path}: has no member {self.member}")


def _file_lines(path: Path) -> Iterator[bytes]:
    with open_bytes(path) as file:
        yield from file


def _ted(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        if not any(tag in line for tag in DROPPED_TAGS):
            yield UNWRAPPED_TAGS.sub(b"", line)


def _segments(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        if b"<seg id" in line:
            yield SEGMENT_TAGS.sub(b"", line).rstrip(b"\r\n") + b"\n"


FORMS: dict[str, Callable[[Iterator[bytes]], Iterator[bytes]]] = {"plain": iter, "ted": _ted, "segments": _segments}
