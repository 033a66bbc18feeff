"""Commands of this Python without the seconds in which each of them would import PyTorch and fairseq.

``Popen`` and ``run`` are subprocess's. They replace a command of this Python by a small client, which hands its words,
folder, environment and streams to a server. The server has imported the libraries, and forks. The client ends as the
fork does. Every command also has a test that starts it coldly.
"""

import atexit
import fcntl
import json
import logging
import multiprocessing
import os
import re
import runpy
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
#: The server imports these, and nothing of this repository: each process imports its modules anew.
LIBRARIES = "matplotlib.figure torch torch._dynamo fairseq fairseq.options sacrebleu sacremoses subword_nmt.apply_bpe"
#: Python, or PyTorch when it is imported, reads variables with such names: where they differ, the start is a cold one.
READ_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "GOMP_", "TRITON_INTERPRET")
ALLOWED = {"PYTHONUNBUFFERED", "PYTHONIOENCODING"}
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
DOOR = re.compile(r'^tool (\S+) ?(.*)"\$@"$', re.MULTILINE)  # the last line of the doors in scripts/
SERVER = {}  # "address" of the socket, and "process"; empty until the first warm start

Cold = subprocess.Popen


class Popen(Cold):
    """subprocess.Popen, warm where it can be."""

    def __init__(self, args, **options):
        environment = {"OMP_NUM_THREADS": "1", **(options.pop("env", None) or os.environ)}
        super().__init__(_warm_words(args, environment), env=environment, **options)


def run(*arguments, **options):
    """subprocess.run, warm where it can be."""
    cold, subprocess.Popen = subprocess.Popen, Popen
    try:
        return subprocess.run(*arguments, **options)
    finally:
        subprocess.Popen = cold


def two_ranks(words):
    """The outputs of two processes of distributed training. words: rank and "HOST:PORT" -> a process's command."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    ranks = [Popen([*map(str, words(rank, address))], **options) for rank in (0, 1)]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs[0] + outputs[1]
    return outputs


def _warm_words(args, environment):
    """The command of the client for this command; the command itself where it must start coldly."""
    if isinstance(args, (str, os.PathLike)) or not _can_be_warm(words := [*map(os.fspath, args)], environment):
        return args
    if not SERVER:
        address = f"{tempfile.mkdtemp(prefix='warm-')}/socket"
        code = "import sys; from helpers import warm; warm.serve(sys.argv[1])"
        command = [sys.executable, "-P", "-c", code, address]
        process = Cold(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, env=ENVIRONMENT)
        assert process.stdout.readline() == b"ready\n", "the server of warm processes does not start"
        SERVER.update(address=address, process=process)
    return client_words(SERVER["address"], words)


def client_words(address, words):
    """The command that has the server at this address run these words."""
    return [sys.executable, "-I", "-S", __file__, address, *words]


def client(address, *words):
    """Have the server run a command, pass on signals, and end with its status."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as link:
        link.connect(address)
        socket.send_fds(link, [json.dumps([words, str(Path.cwd()), dict(os.environ)]).encode()], [0, 1, 2])
        pid = int(link.recv(100))
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, _: os.kill(pid, number))
        os._exit(int(link.recv(100) or 137))  # without a status it was killed


def _can_be_warm(words, environment):
    """Whether this is a command of Python, with this process's values of all variables that are read at the start."""
    read = {name for name in {*environment, *ENVIRONMENT} if name.startswith(READ_AT_THE_START)} - ALLOWED
    return all(environment.get(name) == ENVIRONMENT.get(name) for name in read) and _program(words) is not None


def _program(words):
    """(kind, module or file or code, its arguments) of a command of this Python, else None."""
    command, *words = words[1:] if words[0] == "bash" else words
    path = Path(command)
    if path.parent == REPO / "scripts" and (door := DOOR.search(path.read_text())):
        return "module", "ea_tools", [door[1], *shlex.split(door[2]), *words]
    if path.parent == Path(sys.executable).parent and path.name.startswith("fairseq-"):
        return "file", command, words
    while words and words[0] in ("-u", "-P"):
        words.pop(0)
    if command != sys.executable or not words:
        return None
    if words[0] in ("-m", "-c"):
        return {"-m": "module", "-c": "code"}[words[0]], words[1], words[2:]
    return ("file", words[0], words[1:]) if words[0].endswith(".py") else None


def serve(address):
    """Fork for each client, until the process that started this one is gone. Each fork returns when it has ended."""
    for name in LIBRARIES.split():
        __import__(name)
    SERVER["address"] = address
    parent = os.getppid()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks leave no zombies
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(address)
        listener.listen(100)
        listener.settimeout(1)
        print("ready", flush=True)
        while os.getppid() == parent:
            try:
                link, _ = listener.accept()
            except TimeoutError:
                continue
            if not os.fork():
                break
            link.close()
        else:
            return
    _begin(link)


def _begin(link):
    """Take the client's streams, folder and environment, and run its program."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    message, streams, *_ = socket.recv_fds(link, 2**18, 3)
    link.send(str(os.getpid()).encode())
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    fcntl.fcntl(link, fcntl.F_SETOWN, os.getpid())  # a client that is killed takes this process with it, by SIGIO
    fcntl.fcntl(link, fcntl.F_SETFL, fcntl.fcntl(link, fcntl.F_GETFL) | os.O_ASYNC)
    words, folder, environment = json.loads(message)
    os.chdir(folder)
    subprocess.Popen, os.execve = Popen, _become
    status = []

    def finish():  # registered first, this is the last of the exit functions but for those of the libraries
        for child in multiprocessing.active_children():  # workers that load data would hold the streams for seconds
            child.terminate()
        sys.stdout.flush()
        sys.stderr.flush()
        link.send(str(status[-1]).encode())
        os._exit(status[-1])

    atexit.register(finish)
    status.append(_run(words, environment))


def _become(path, words, environment):
    """os.execve, warm where it can be."""
    if not _can_be_warm([*map(os.fspath, words)], environment):
        sys.exit(Cold(words, executable=path, env=environment).wait())  # the client waits for this process's status
    sys.exit(_run([*map(os.fspath, words)], environment))


def _run(words, environment):
    """Run a program in this process as a new one would begin; its status."""
    kind, what, arguments = _program(words)
    for present in (os.environ, ENVIRONMENT):
        present.clear()
        present.update(environment)
    sys.stdin, sys.stdout, sys.stderr = (
        open(number, mode, buffering, encoding="utf-8", errors=errors, closefd=False)  # noqa: SIM115
        for number, mode, buffering, errors in ((0, "r", -1, None), (1, "w", -1, None), (2, "w", 1, "backslashreplace"))
    )
    sys.stdout.reconfigure(write_through="-u" in words or "PYTHONUNBUFFERED" in environment)
    # Where a command becomes another, fairseq keeps what ea_fairseq has registered, so that stays, too.
    for name in [name for name in sys.modules if name.partition(".")[0] in ("ea_tools", "fairseq_cli")]:
        del sys.modules[name]
    logging.root.handlers.clear()
    logging.root.setLevel(logging.WARNING)
    logging.disable(logging.NOTSET)
    sys.argv = ["-c" if kind == "code" else what, *arguments]
    try:
        if kind == "module":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        elif kind == "file":
            runpy.run_path(what, run_name="__main__")
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return 1 if isinstance(end.code, str) else end.code or 0
    except KeyboardInterrupt:
        return 130
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    client(*sys.argv[1:])
