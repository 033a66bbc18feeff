"""Commands that tests start warm (helpers/warm.py) are processes of their own, and end where they are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers import warm

ABOUT = """
import json, os, sys
about = [os.getcwd(), sys.argv, os.environ.get("THERE"), sys.stdin.read(), "torch" in sys.modules]
print(json.dumps([os.getpid(), *about]))
print("error", file=sys.stderr)
"""


def test_it_has_a_folder_streams_and_an_environment(tmp_path):
    command = [sys.executable, "-c", ABOUT, "one", "two words"]
    environment = {**warm.ENVIRONMENT, "THERE": "yes"}
    result = warm.run(command, cwd=tmp_path, env=environment, input="read", capture_output=True, text=True)
    number, *others = json.loads(result.stdout)
    assert number != os.getpid()
    assert others == [str(tmp_path), ["-c", "one", "two words"], "yes", "read", True]
    assert (result.returncode, result.stderr) == (0, "error\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_kill_ends_it_too(number):
    code = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    process = warm.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    pid = int(process.stdout.readline())
    process.send_signal(number)
    assert process.wait(timeout=60) != 0
    deadline = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
