"""A digest of files, by which they are known again."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def sha256(path: Path) -> str:
    """The digest of a file, which may be large: 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(folder: Path, paths: Iterable[Path]) -> str:
    """The digest of the names below ``folder`` and these files' contents, in order: 64 hexadecimal digits."""
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path.relative_to(folder)).encode() + b"\0" + bytes.fromhex(sha256(path)))
    return found.hexdigest()
