"""What tests start warm (helpers/warm.py) is a process of its own, that begins and ends as Python's processes do."""

import json
import os
import signal
import subprocess
import sys

import pytest
from helpers import warm

ABOUT = """
import json, os, sys
about = [os.getcwd(), sys.argv, os.environ.get("THERE"), sys.stdin.read(), "torch" in sys.modules]
print(json.dumps([os.getpid(), *about]))
print("error", file=sys.stderr)
"""


def run(code, *arguments, **options):
    return warm.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, **options)


def test_it_has_a_folder_streams_and_an_environment(tmp_path):
    environment = {**warm.ENVIRONMENT, "THERE": "yes"}
    result = run(ABOUT, "one", "two words", cwd=tmp_path, env=environment, input="read")
    number, *others = json.loads(result.stdout)
    assert number != os.getpid()
    assert others == [str(tmp_path), ["-c", "one", "two words"], "yes", "read", True]
    assert (result.returncode, result.stderr) == (0, "error\n")


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [
        ("raise SystemExit('what is wrong')", 1, "what is wrong\n"),
        ("raise ValueError('broken')", 1, "ValueError: broken\n"),
        ("import atexit, sys; atexit.register(print, 'at last', file=sys.stderr)", 0, "at last\n"),
        ("import os; os.kill(os.getpid(), 9)", -9, ""),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt\n"),
        ("import os, sys; os.execve(sys.executable, [sys.executable, '-c', 'exit(5)'], os.environ)", 5, ""),
        ("import subprocess, sys; exit(subprocess.call([sys.executable, '-c', 'exit(6)']))", 6, ""),
    ],
)
def test_it_ends_as_a_cold_one(code, status, said):
    command = [sys.executable, "-c", code]
    results = [by.run(command, capture_output=True, text=True, check=False) for by in (warm, subprocess)]
    assert [result.returncode for result in results] == [status] * 2
    assert all(result.stderr.endswith(said) for result in results)


def test_it_can_be_killed_and_knows_nothing_of_those_before():
    """Modules of ours are imported anew, logging is as nobody has set it up."""
    code = "import logging, ea_tools; ea_tools.mark = logging.basicConfig(); print('ready', flush=True); input()"
    process = warm.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == -signal.SIGTERM
    process.stdin.close()
    code = "import logging, ea_tools; print(hasattr(ea_tools, 'mark'), logging.root.handlers, logging.root.level)"
    assert run(code).stdout == f"False [] {30}\n"


def test_where_python_would_begin_otherwise_it_is_cold():
    def is_warm(*command, **environment):
        return warm.Program.of(list(map(str, command)), {**warm.ENVIRONMENT, **environment}) is not None

    assert is_warm(sys.executable, "-P", "-m", "ea_tools.training.train")
    assert is_warm("bash", warm.REPO / "scripts" / "train.sh", "--help")
    assert not is_warm(sys.executable, "-P", "-m", "ea_tools.training.train", PYTHONPATH="/elsewhere")
    assert not is_warm(sys.executable, "-P", "-m", "ea_tools.training.train", OMP_NUM_THREADS="2")
    assert not is_warm("bash", warm.REPO / "data-prep" / "sample.sh")
    assert not is_warm("/usr/bin/python3", "-c", "")
    assert not is_warm(sys.executable, "-W", "error", "-c", "")
