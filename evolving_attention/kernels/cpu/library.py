"""``kernel.c`` and ``dropout.c``, compiled with the machine's own compiler when first needed, and called.

It takes some seconds, and is kept in the user's cache folder. If that fails, one line is logged.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from ctypes import byref
from pathlib import Path

import torch

from ...private import constant

logger = logging.getLogger(__name__)

_SOURCES = [Path(__file__).with_name(name) for name in ("kernel.c", "dropout.c")]
_INCLUDED = Path(__file__).with_name("vectors.h")
_FLAGS = "-O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared".split()
_COMPILING_TAKES_AT_MOST = 300  # seconds


def call(function: str, argument: ctypes.Structure) -> int:
    """The result of a C function of a structure of structures.py, on as many threads as PyTorch uses."""
    return getattr(library(), function)(byref(argument), torch.get_num_threads())


@constant
def is_there() -> bool:
    """Whether the C files could be compiled."""
    return library() is not None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The C files, compiled; None where that is not possible, and one line of the log says why."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        built = cache_folder() / f"cpu_kernel-{_fingerprint(compiler)}.so"
        if not built.exists():
            _compile(compiler, built)
        return ctypes.CDLL(str(built))
    except Exception as error:
        logger.warning("evolving attention falls back to slower PyTorch operations on the CPU: %s", _reason(error))
        return None


def _compile(compiler: list[str], built: Path) -> None:
    """Into a temporary folder first, because several processes may compile at the same time."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / "made.so"
        command = [*compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILING_TAKES_AT_MOST)
        with made.open("rb") as written:
            os.fsync(written.fileno())
        made.replace(built)


def _reason(error: Exception) -> str:
    """One line that says what went wrong: the compiler's first error where there is one."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (said or str(error) or type(error).__name__).splitlines()
    return next((line for line in lines if "error" in line), lines[-1])


def cache_folder() -> Path:
    """The folder of the files that later processes use again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evolving_attention"


def _fingerprint(compiler: list[str]) -> str:
    """Changes with source, compiler and its version, flags, C library and kind of processor.

    Homes are shared by machines of several kinds.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    version = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, text=True, timeout=_COMPILING_TAKES_AT_MOST
    ).stdout
    parts = [
        *(path.read_text() for path in (*_SOURCES, _INCLUDED)),
        *compiler,
        version,
        *_FLAGS,
        *platform.libc_ver(),
        platform.machine(),
        processor,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
