"""Python commands without the six seconds of processor time in which each of them would import PyTorch and fairseq.

``Popen`` and ``run`` are subprocess's, but for commands of this Python: a server, which has imported the libraries and
done nothing else, forks for each of them. What runs is a process of its own, with its own number, output, folder and
environment; it can be killed, and what it starts itself is started in the same way. Whatever tests did before, it
begins as a new process does, but for two things: the libraries are there already, whoever forgot to import them, and
strings have the same hashes in all processes. So every command also has a test that starts it coldly.
"""

import atexit
import contextlib
import gc
import importlib
import io
import json
import logging
import multiprocessing.util
import os
import re
import runpy
import select
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import NamedTuple

from helpers import REPO

#: What the server imports. Nothing of this repository: its modules are imported anew in every process.
LIBRARIES = (
    "matplotlib.figure torch torch._dynamo fairseq sacrebleu sacremoses subword_nmt.apply_bpe sentencepiece tqdm"
).split()
OURS = {"ea_tools", "ea_fairseq", "ea_data", "fairseq_cli", "helpers", "__main__"}
#: Environment variables that Python, or PyTorch when it is imported, reads: where they differ, the start is a cold one.
READ_AT_THE_START = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "TRITON_INTERPRET")
ALLOWED = {"PYTHONUNBUFFERED", "PYTHONIOENCODING"}  # which a process that is forked obeys too

#: What the server is started with.
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

DOOR = re.compile(r'^tool (\S+) ?(.*)"\$@"$', re.MULTILINE)  # the last line of the doors in scripts/

Cold, execve = subprocess.Popen, os.execve


class Popen(Cold):
    """subprocess.Popen, that has the server fork where it can. What is overridden is CPython 3.11's and 3.12's."""

    _link = None  # to the server, which sends the number of the process, and its status when it has ended

    def _execute_child(
        self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
        p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *others,
    ):  # fmt: skip
        words = [args] if isinstance(args, (str, os.PathLike)) else args
        words = [os.fspath(word) for word in words]
        environment = {"OMP_NUM_THREADS": "1", **(os.environ if env is None else env)}
        pipes = (p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        if shell or executable or preexec_fn or pass_fds or Program.of(words, environment) is None:
            super()._execute_child(
                args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell,
                *pipes, *others,
            )  # fmt: skip
            return
        new_session = others[-2]
        request = {"words": words, "environment": environment, "new_session": new_session}
        request["folder"] = str(Path(cwd or ".").absolute())
        streams = [number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))]
        self._link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._link.connect(Server.address())
        socket.send_fds(self._link, [json.dumps(request).encode()], streams)
        self.pid = int(self._link.recv(100))
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags):
        if self._link is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._link], [], [], 0)[0]:
            return 0, 0
        status = self._link.recv(100)
        assert status, "the server of warm processes is gone"
        self._link.close()
        return self.pid, int(status)

    def _internal_poll(self, *arguments, **options):
        if self._link is None:
            return super()._internal_poll(*arguments, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid == self.pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def run(*arguments, **options):
    """subprocess.run."""
    with use():
        return subprocess.run(*arguments, **options)


@contextlib.contextmanager
def use():
    """What is started in here by subprocess's functions is started warm."""
    cold, subprocess.Popen = subprocess.Popen, Popen
    try:
        yield
    finally:
        subprocess.Popen = cold


class Program(NamedTuple):
    """What a command line of Python's runs: a module, a file or code. The folder that one is in has no say in it."""

    kind: str
    what: str
    arguments: list[str]

    @classmethod
    def of(cls, words, environment):
        """The program of a command, or None where a warm process cannot be what this command's process would be."""
        read = {name for name in {*environment, *ENVIRONMENT} if name.startswith(READ_AT_THE_START)} - ALLOWED
        if any(environment.get(name) != ENVIRONMENT.get(name) for name in read):
            return None
        command, *words = words if words[0] != "bash" else words[1:]
        if Path(command).parent == REPO / "scripts" and (door := DOOR.search(Path(command).read_text())):
            return cls("module", f"ea_tools.{door[1]}", [*shlex.split(door[2]), *words])
        if Path(command).parent == Path(sys.executable).parent and Path(command).name.startswith("fairseq-"):
            return cls("file", command, words)
        if command != sys.executable:
            return None
        while words and words[0] in ("-u", "-P"):
            words.pop(0)
        if len(words) > 1 and words[0] in ("-m", "-c"):
            return cls({"-m": "module", "-c": "code"}[words[0]], words[1], words[2:])
        if words and words[0].endswith(".py"):
            return cls("file", words[0], words[1:])
        return None

    def run(self):
        """Be this program, in a process that is to have none of what ran in it before; and end."""
        for name in [name for name in sys.modules if name.partition(".")[0] in OURS]:
            del sys.modules[name]
        logging.root.handlers.clear()
        logging.root.setLevel(logging.WARNING)
        sys.argv = [{"code": "-c"}.get(self.kind, self.what), *self.arguments]
        status = 0
        try:
            if self.kind == "module":
                runpy.run_module(self.what, run_name="__main__", alter_sys=True)
            elif self.kind == "file":
                runpy.run_path(self.what, run_name="__main__")
            else:
                exec(compile(self.what, "<string>", "exec"), {"__name__": "__main__"})
        except SystemExit as end:
            status = end.code
            if not isinstance(status, int | None):
                print(status, file=sys.stderr)
                status = 1
        except KeyboardInterrupt:
            traceback.print_exc()
            status = -signal.SIGINT
        except BaseException:
            traceback.print_exc()
            status = 1
        finish(status or 0)


def collect_rarely():
    """Look for circles of garbage a hundred times less often than Python does: it takes a tenth of a short program."""
    gc.set_threshold(70_000, 20, 20)


def finish(status):
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


def become(path, words, environment):
    """In the place of os.execve."""
    program = Program.of([os.fspath(word) for word in words], environment)
    if program is None:
        execve(path, words, environment)
    sys.stdout.flush()
    sys.stderr.flush()
    begin(environment, "-u" in words)
    program.run()


def begin(environment, unbuffered=False):
    """The environment, the streams and the signals of a new program."""
    os.environ.clear()
    os.environ.update(environment)
    unbuffered = unbuffered or bool(environment.get("PYTHONUNBUFFERED"))
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        raw = open(number, f"{mode}b", buffering=0 if unbuffered and mode == "w" else -1, closefd=False)  # noqa: SIM115
        errors = "backslashreplace" if name == "stderr" else "strict"
        options = {"line_buffering": name == "stderr" or os.isatty(number), "write_through": unbuffered}
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", errors, **(options if mode == "w" else {})))
        setattr(sys, f"__{name}__", getattr(sys, name))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Server:
    """The process that forks: one for each process that runs tests, from its first warm start to its end."""

    _address = None
    _process = None

    @classmethod
    def address(cls):
        """Of the server's socket; the first call starts it."""
        if cls._address is None:
            address = f"{tempfile.mkdtemp(prefix='warm-')}/socket"
            command = [
                sys.executable,
                "-P",
                "-c",
                "import sys; from helpers import warm; warm.Server.serve(sys.argv[1])",
            ]
            # It ends when its standard input does, which is when this process ends, however that happens.
            cls._process = Cold([*command, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)
            assert cls._process.stdout.readline() == b"ready\n", "the server of warm processes does not start"
            cls._address = address
        return cls._address

    @classmethod
    def serve(cls, address):
        """Fork for each request, and tell whoever asked the status of his process when it has ended."""
        for name in LIBRARIES:
            importlib.import_module(name)
        cls._read_a_configuration()
        gc.freeze()  # what is there now is looked at by no collection in a process that is forked
        collect_rarely()
        cls._address = address
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener, selectors.DefaultSelector() as events:
            listener.bind(address)
            listener.listen(100)
            os.write(1, b"ready\n")
            events.register(listener, selectors.EVENT_READ)
            events.register(0, selectors.EVENT_READ)
            while True:
                for event, _ in events.select():
                    if event.fileobj == 0:
                        shutil.rmtree(Path(address).parent)
                        return
                    if event.fileobj is listener:
                        link, _ = listener.accept()
                        pid = cls._fork(link)
                        events.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, link))
                    else:
                        pid, link = event.data
                        events.unregister(event.fileobj)
                        os.close(event.fileobj)
                        with link, contextlib.suppress(BrokenPipeError):  # whoever asked may be gone
                            link.send(str(os.waitpid(pid, 0)[1]).encode())

    @staticmethod
    def _read_a_configuration():
        """As fairseq's commands do at their start: hydra's parser is slow for the first time only."""
        from fairseq import options
        from fairseq.dataclass.utils import convert_namespace_to_omegaconf

        parser = options.get_generation_parser()
        convert_namespace_to_omegaconf(options.parse_args_and_arch(parser, ["data", "--path", "model.pt"]))

    @classmethod
    def _fork(cls, link):
        """Start what the next message on this link asks for; the number of the process, which the asker is told."""
        message, streams, *_ = socket.recv_fds(link, 2**18, 3)
        pid = os.fork()
        if pid:
            for fd in streams:
                os.close(fd)
            link.send(str(pid).encode())
            return pid
        try:
            request = json.loads(message)
            for number, fd in enumerate(streams):
                os.dup2(fd, number)
            os.closerange(3, 2**16)
            if request["new_session"]:
                os.setsid()
            os.chdir(request["folder"])
            program = Program.of(request["words"], request["environment"])
            begin(request["environment"], "-u" in request["words"])
            subprocess.Popen, os.execve = Popen, become
            program.run()
        finally:
            os._exit(254)  # only what is wrong with this file leads here
