"""``kernel.c`` and ``dropout.c``, compiled with the machine's own compiler when first needed, and called.

It takes some seconds, and is kept in the user's cache folder. If that fails, one line is logged.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
import threading
from ctypes import byref
from pathlib import Path

import torch

logger = logging.getLogger(__name__)

_SOURCES = [Path(__file__).with_name(name) for name in ("kernel.c", "dropout.c")]
_INCLUDED = Path(__file__).with_name("vectors.h")
_FLAGS = "-O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared".split()
_COMPILING_TAKES_AT_MOST = 300  # seconds

_loading = threading.Lock()


def call(function: str, argument: ctypes.Structure, maps: tuple[int, int, int, int]) -> None:
    """Call a function of the C file with a structure of structures.py, on as many threads as PyTorch uses."""
    if getattr(library(), function)(byref(argument), torch.get_num_threads()):
        raise MemoryError("not enough memory for attention maps of {1} x {2} x {3}".format(*maps))


@torch.compiler.assume_constant_result
def is_there() -> bool:
    """Whether the C files could be compiled."""
    return library() is not None


def library() -> ctypes.CDLL | None:
    """The C files, compiled; None where that is not possible. Tried once, while other threads wait."""
    with _loading:
        return _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    """Whatever stops this is named in one line of the log: there is a way without the kernel."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        return _open(compiler, _cache(), f"cpu_kernel-{_fingerprint(compiler)}")
    except Exception as error:
        logger.warning("evolving attention takes its slower way on the CPU: %s", _reason(error))
        return None


def _open(compiler: list[str], cache: Path, name: str) -> ctypes.CDLL:
    """The library of this name, compiled where there is none. One that does not load is compiled again, once.

    Its size stands in its file's name, for to load a part of it, as a full disk may leave it, would end the process.
    """
    for built in cache.glob(f"{name}.*.so"):
        if built.name == _file_name(name, built):
            with contextlib.suppress(OSError):
                return ctypes.CDLL(str(built))
    return ctypes.CDLL(str(_compile(compiler, cache, name)))


def _file_name(name: str, built: Path) -> str:
    return f"{name}.{built.stat().st_size}.so"


def _compile(compiler: list[str], cache: Path, name: str) -> Path:
    """Into a temporary folder first, because several processes may compile at the same time."""
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        made = Path(folder) / "made.so"
        command = [*compiler, *_FLAGS, "-o", str(made), *map(str, _SOURCES), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILING_TAKES_AT_MOST)
        with made.open("rb") as written:
            os.fsync(written.fileno())
        return made.replace(cache / _file_name(name, made))


def _reason(error: Exception) -> str:
    """One line that says what went wrong: the compiler's first error where there is one."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (said or str(error) or type(error).__name__).splitlines()
    return next((line for line in lines if "error" in line), lines[-1])


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "evolving_attention"


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
        "".join(_c_library()),
        platform.machine(),
        processor,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _c_library() -> tuple[str, str]:
    """The C library's name and version, as far as they can be known."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "", ""
    except (AttributeError, ValueError, OSError):
        return platform.libc_ver()
