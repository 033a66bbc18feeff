"""Memory that a training on the CPU frees and needs again in the next step."""

from __future__ import annotations

import ctypes
import os

#: Parameters of glibc's mallopt(3): the most blocks mapped singly; the free memory above which some is returned (-1:
#: never). A threshold must be below 2 GiB, and a step of R-Drop frees more.
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory. Returns whether it could be asked to.

    glibc gives freed blocks of more than 32 MiB back to the system. When the next step maps them again, the system
    clears every page: docs/performance.md has the cost. A variable MALLOC_* is the user's own decision.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, -1))
