"""Memory that a training on the CPU frees and needs again in the next step."""

from __future__ import annotations

import ctypes
import os

#: Names of glibc's mallopt(3) for what it maps by itself, and for what it gives back.
M_MMAP_MAX, M_TRIM_THRESHOLD = -4, -1


def keep_freed_memory() -> bool:
    """Have the C library keep freed memory. Returns whether it could be asked to.

    glibc gives blocks of more than 32 MiB back to the system when they are freed, and the system clears every page of
    them when the next step maps them again: docs/performance.md has the cost. Where a variable whose name begins
    with MALLOC_ is set, the user has decided already.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries have none
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))
