"""scripts/setup.sh: it completes a broken installation, and names the reason where it fails."""

import os
import shutil
import subprocess
import sys

import pytest
from helpers import REPO
from helpers.mistakes import fake_command


@pytest.fixture
def checkout(tmp_path):
    """A repository with nothing but what set-up reads."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPO / "scripts" / "setup.sh", tmp_path / "scripts")
    shutil.copy(REPO / "requirements.txt", tmp_path)
    return tmp_path


def setup(repo, *args, **environment):
    command = ["bash", str(repo / "scripts" / "setup.sh"), *args]
    return subprocess.run(command, cwd="/", env=os.environ | environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(("version", "start"), [("3.10.13", "/"), ("3.14.0", ""), (None, "/")])
def test_other_versions_of_python_are_refused(checkout, monkeypatch, version, start):
    """Also one whose path begins at the folder that one is in, which is / here; and one that is not there."""
    path = str(checkout / "bin/python")
    if version:
        program = f"[ $1 = --version ] && echo 'Python {version}' && exit 0\nexit 1\n"
        fake_command(checkout, "python", program, monkeypatch)
    result = setup(checkout, PYTHON=start + path.removeprefix("/"))
    assert result.returncode == 1
    named = f"Python {version}" if version else path
    assert "Python 3.11, 3.12 or 3.13 is needed" in result.stderr and named in result.stderr
    assert not (checkout / ".venv").exists()


def test_packages_of_the_examples_come_with_a_set_up_that_has_nothing_else_to_do(checkout, monkeypatch):
    (checkout / ".venv").mkdir()
    shutil.copy(checkout / "requirements.txt", checkout / ".venv" / ".requirements")
    quiet = 'case " $* " in *" -q "*|*" --quiet "*) exit 1;; esac\n[ "$PIP_USE_PEP517" = 1 ] || exit 1\n'
    fake_command(checkout / ".venv", "python", f'{quiet}for word; do last=$word; done\necho "$last"\n', monkeypatch)
    files = [f"{checkout}/examples/requirements.txt", f"{checkout}/examples/time_series/requirements.txt"]
    assert setup(checkout, "--examples").stdout.splitlines() == files
    assert setup(checkout).stdout == ""


def test_an_environment_that_a_kill_left_without_pip_is_made_whole(checkout):
    """python -m venv puts the interpreter there first, and pip last."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True)
    (checkout / "requirements.txt").write_text("nothing-is-installed-here==0\n")
    result = setup(checkout, PIP_NO_INDEX="1")
    assert result.returncode != 0 and "No module named pip" not in result.stderr
    subprocess.run([checkout / ".venv/bin/python", "-m", "pip", "--version"], check=True, capture_output=True)


def test_what_set_up_says_is_not_the_commands_output(checkout):
    shutil.copy(REPO / "scripts" / "lib.sh", checkout / "scripts")
    (checkout / "scripts" / "setup.sh").write_text("echo set-up done\n")
    command = ["bash", "-c", 'source scripts/lib.sh; require_setup; echo "$repo"']
    environment = os.environ | {"CDPATH": str(checkout)}
    result = subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True)
    assert (result.stdout, result.stderr) == (f"{checkout}\n", "set-up done\n")


@pytest.mark.parametrize(
    ("given", "expected"), [({}, "1000"), ({"OMP_WAIT_POLICY": "active"}, ""), ({"GOMP_SPINCOUNT": "7"}, "7")]
)
def test_threads_of_commands_soon_sleep_while_they_wait_unless_the_user_decides(given, expected):
    environment = {
        name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
    }
    command = ["bash", "-c", f"source {REPO}/scripts/lib.sh; printenv GOMP_SPINCOUNT || true"]
    result = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == expected
