"""A refusal of the system as a sentence: the file, the fault, and the remedy."""

from __future__ import annotations

import errno
import os

ADVICE = {
    errno.ENOENT: "check the path",
    errno.EISDIR: "give the name of a file",
    errno.ENOTDIR: "a file stands where a folder is wanted; choose another path, or move the file away",
    errno.EEXIST: "a file stands where a folder is wanted; choose another path, or move the file away",
    errno.EACCES: "change its permissions, or choose another path",
    errno.EPERM: "change its permissions, or choose another path",
    errno.EROFS: "choose another path",
    errno.ENAMETOOLONG: "choose a shorter one",
    errno.ENOSPC: "make room and run it again",
    errno.EDQUOT: "make room and run it again",
}


def explained(error: OSError) -> str:
    """The message for the person who has to put it right."""
    if not error.strerror:  # raised by a library, in its words
        return str(error)
    names = [name for name in (error.filename, error.filename2) if isinstance(name, str | bytes)]  # not a file's number
    files = " -> ".join(map(os.fsdecode, names))
    said = f"{files}: {error.strerror}" if files else str(error.strerror)
    return f"{said}; {ADVICE[error.errno]}" if error.errno in ADVICE else said
