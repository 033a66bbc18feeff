"""scripts/gpu_report.sh: its commands exist and take its flags; steps that are done are left out; a failure is kept.

A GPU is not needed: the steps' commands are stand-ins here.
"""

import os
import shlex
import shutil
import subprocess

import pytest
import torch
from helpers import REPO

from ea_tools.bench import options
from ea_tools.training import train

STEPS = {
    "kernels": "tests/kernels/test_gpu.py",
    "training": "benchmark_training.sh",
    "decoding": "benchmark_decoding.sh",
    "attention": "benchmark_attention.sh",
    "compiled": "benchmark_attention.sh",
    "corpus": "sample.sh",
    "fp16": "train.sh",
    "bf16": "train.sh",
}


def gpu_report(repo, *flags):
    command = ["bash", str(repo / "scripts" / "gpu_report.sh"), *map(str, flags)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture
def checkout(tmp_path):
    """A repository whose commands print their flags; decoding fails."""
    scripts = tmp_path / "scripts"
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / "data-prep").mkdir()
    scripts.mkdir()
    for name in ("gpu_report.sh", "lib.sh"):
        shutil.copy(REPO / "scripts" / name, scripts)
    doors = [scripts / name for name in STEPS.values() if name.endswith(".sh") and name != "sample.sh"]
    doors += [scripts / "setup.sh", scripts / "evaluate.sh"]
    for path in (*doors, tmp_path / "data-prep" / "sample.sh", tmp_path / ".venv" / "bin" / "python"):
        path.write_text('#!/bin/sh\necho "$0 $*"\n')
        path.chmod(0o755)
    (scripts / "benchmark_decoding.sh").write_text("#!/bin/sh\necho no memory\nexit 1\n")
    return tmp_path


def test_commands_take_their_flags(tmp_path):
    """Each flag is one that its benchmark reads, and train.sh plans the trainings."""
    result = gpu_report(REPO, "--dry-run", "--output", tmp_path / "a folder")
    assert result.returncode == 0, result.stderr
    commands = [shlex.split(line) for line in result.stdout.splitlines()]
    assert [command[0] for command in commands if command[0].endswith("train.sh")] == ["scripts/train.sh"] * 2
    for door, *flags in commands:
        assert os.access(REPO / door, os.X_OK)
        if door.startswith("scripts/benchmark_"):
            name = door.removeprefix("scripts/benchmark_").removesuffix(".sh")
            args = getattr(options, name)(flags)
            assert (args.device, args.output.parent) == ("cuda", tmp_path / "a folder")
        elif door == "scripts/train.sh":
            args, _ = train.parse(flags)
            assert args.precision in ("fp16", "bf16")
    assert not list(tmp_path.iterdir())


def test_done_steps_are_left_out_and_a_failure_stops_no_other(checkout, tmp_path):
    output = tmp_path / "out put"
    first = gpu_report(checkout, "--output", output)
    assert first.returncode == 1
    assert "failed: decoding" in first.stderr
    logs = {path.stem: path.read_text().splitlines() for path in output.glob("*.log")}
    assert logs.keys() == STEPS.keys()
    assert [name for name, lines in logs.items() if lines[-1] != "done"] == ["decoding"]
    assert all(command in logs[name][0] for name, command in STEPS.items() if name != "decoding")
    assert any("evaluate.sh" in line for line in logs["fp16"])
    shutil.copy(checkout / "scripts" / "benchmark_training.sh", checkout / "scripts" / "benchmark_decoding.sh")
    second = gpu_report(checkout, "--output", output)
    assert second.returncode == 0, second.stderr
    assert second.stdout.count("done before") == len(STEPS) - 1
    (output / "kernels.log").unlink()
    third = gpu_report(checkout, "--output", output, "--only", "kernels", "corpus")
    assert third.stdout.count("done before") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "nothing"], "--only nothing"),
        (["--minutes", "5"], "--minutes"),
        pytest.param([], "no GPU", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_refused(tmp_path, flags, message):
    result = gpu_report(REPO, "--output", tmp_path / "out", *flags)
    assert result.returncode == 1
    assert message in result.stderr
    assert not list(tmp_path.iterdir())
