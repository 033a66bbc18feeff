"""A digest of files, by which they are known again."""

import hashlib
from collections.abc import Iterable
from pathlib import Path


def digest_of(folder: Path, paths: Iterable[Path]) -> str:
    """Of the names below ``folder`` and the contents of these files, in their order: 64 hexadecimal digits."""
    found = hashlib.sha256()
    for path in paths:
        found.update(str(path.relative_to(folder)).encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
