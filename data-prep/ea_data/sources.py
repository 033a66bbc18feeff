"""The sources of raw text: plain files, .gz files, members of archives; in a folder, or downloaded into one.

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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, cast

from ea_artifacts.command import UserError

from .corpus import Part
from .text import open_bytes, reading

ARCHIVES = (".tgz", ".tar.gz", ".tar")
DROPPED_TAGS = (b"<url>", b"<talkid>", b"<keywords>")
UNWRAPPED_TAGS = re.compile(rb"</?(?:title|description)>")
SEGMENT_TAGS = re.compile(rb'<seg id="[0-9]*">\s*|\s*</seg>\s*')


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
        wanted, members = {self.member, self.member + ".gz"}, list[str]()
        with tarfile.open(self.path, "r|*") as archive:  # a stream: one pass, up to the member
            for entry in archive:
                name = entry.name.removeprefix("./")
                if name in wanted and entry.isfile():
                    with cast(IO[bytes], archive.extractfile(entry)) as file:  # None of a folder alone
                        yield from gzip.GzipFile(fileobj=file) if name.endswith(".gz") else file
                    return
                if entry.isfile():
                    members.append(name)
        listing = ", ".join(members[:20]) + (", ..." if len(members) > 20 else "")
        raise UserError(f"{self.path}: has no member {self.member}; it has {listing or 'none'}")


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
