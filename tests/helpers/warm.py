"""Python commands without the six seconds of processor time in which each of them would import PyTorch and fairseq.

``Popen`` and ``run`` are subprocess's. A command of this Python is forked from the process that starts it, which has
the libraries, and runs the program in place of exec; so do the commands that it starts itself. Its modules of this
repository are imported anew. Every command also has a test that starts it coldly.
"""

import atexit
import contextlib
import gc
import io
import logging
import multiprocessing.util
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import traceback
from pathlib import Path

from helpers import REPO

#: What is imported anew. ea_fairseq registers models with fairseq, which takes each of them once.
OURS = {"ea_tools", "ea_data", "fairseq_cli", "helpers", "__main__"}
#: Environment variables that Python or PyTorch reads at its start: where they differ, the start is a cold one.
READ_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG", "TRITON_INTERPRET")
ALLOWED = {"PYTHONUNBUFFERED", "PYTHONIOENCODING"}  # which a process that is forked obeys too

#: For commands. A forked process has one thread, since OpenMP's others are not forked.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
DOOR = re.compile(r'^tool (\S+) ?(.*)"\$@"$', re.MULTILINE)  # the last line of the doors in scripts/

cold_execve = os.execve


class Popen(subprocess.Popen):
    """subprocess.Popen, that forks where it can."""

    def __init__(self, args, *, env=None, **options):
        environment = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env)}
        if program := program_of(args, environment):
            options["preexec_fn"] = lambda: become(program, environment)
        super().__init__(args, env=env, **options)


def run(*arguments, **options):
    """subprocess.run."""
    with use():
        return subprocess.run(*arguments, **options)


@contextlib.contextmanager
def use():
    """What is started in here by subprocess's functions is started warm."""
    before, subprocess.Popen = subprocess.Popen, Popen
    try:
        yield
    finally:
        subprocess.Popen = before


def program_of(words, environment):
    """(kind, name or code, arguments) of a Python command; None where it cannot be forked."""
    read = {name for name in {*environment, *os.environ} if name.startswith(READ_AT_THE_START)} - ALLOWED
    same = all(environment.get(name) == os.environ.get(name) for name in read)
    if not same or environment["OMP_NUM_THREADS"] != "1" or isinstance(words, str) or _has_gpu():
        return None
    command, *words = map(os.fspath, words)
    if command == "bash" and words:
        command, *words = words
    path = Path(shutil.which(command) or command).absolute()
    if path.parent == REPO / "scripts" and (door := DOOR.search(path.read_text())):
        return "module", f"ea_tools.{door[1]}", [*shlex.split(door[2]), *words]
    if path.parent.resolve() != Path(sys.executable).parent.resolve():
        return None
    if path.name.startswith("fairseq-"):
        return "file", str(path), words
    if not path.name.startswith("python"):
        return None
    while words and words[0] in ("-u", "-P"):
        words.pop(0)
    if len(words) > 1 and words[0] in ("-m", "-c"):
        return {"-m": "module", "-c": "code"}[words[0]], words[1], words[2:]
    return ("file", words[0], words[1:]) if words and words[0].endswith(".py") else None


def _has_gpu():
    """CUDA cannot be used in a forked process."""
    import torch

    return torch.cuda.is_available()


def become(program, environment):
    """Be this program, in a process that was just forked, and end."""
    status = 254
    try:
        os.closerange(3, 2**16)
        _begin(environment)
        status = _run(*program)
    finally:
        _end(status)


def _begin(environment):
    """The environment, streams, signals and settings that a new program has."""
    import torch

    os.environ.clear()
    os.environ.update(environment)
    unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw = open(number, f"{mode}b", buffering=0 if unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if name == "stderr" else "strict"
        options = {"line_buffering": name == "stderr" or os.isatty(number), "write_through": unbuffered}
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors, **(options if mode == "w" else {})))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    atexit._clear()
    logging.disable(logging.NOTSET)
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    torch.set_num_threads(1)
    for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
        del sys.modules[name]
    subprocess.Popen, os.execve = Popen, _execve


def _execve(path, words, environment):
    """os.execve of a process that was forked."""
    program = program_of(words, {"OMP_NUM_THREADS": "1", **environment})
    sys.stdout.flush()
    sys.stderr.flush()
    if program is None:
        cold_execve(path, words, environment)
    _begin({**environment, **({"PYTHONUNBUFFERED": "1"} if "-u" in words else {})})
    _end(_run(*program))


def _run(kind, what, arguments):
    """Run a program; its exit status."""
    sys.argv = [{"code": "-c"}.get(kind, what), *arguments]
    try:
        if kind == "module":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "file":
            runpy.run_path(what, run_name="__main__")
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        traceback.print_exc()
        return -signal.SIGINT
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(status):
    """End this process as Python ends: with its threads, its exit functions and what is not written yet."""
    with contextlib.suppress(BaseException):
        threading._shutdown()
        multiprocessing.util._exit_function()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    if status == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(status & 255)


def collect_rarely():
    """Look for circles of garbage a hundred times less often than Python does: it takes a tenth of a short program."""
    gc.set_threshold(70_000, 20, 20)
