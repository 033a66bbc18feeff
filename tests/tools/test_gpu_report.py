"""scripts/gpu_report.sh: its commands exist and take its flags; steps that are done are left out; a failure is kept.

A GPU is not needed: the steps' commands are stand-ins here.
"""

import os
import shlex
import shutil
import subprocess

from helpers import REPO

from ea_tools.bench import options
from ea_tools.training import train


def gpu_report(repo, *flags):
    command = ["bash", str(repo / "scripts" / "gpu_report.sh"), *map(str, flags)]
    options = {"capture_output": True, "text": True, "timeout": 60, "start_new_session": True}
    return subprocess.run(command, check=False, **options)


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


def test_a_failed_step_stops_no_other_a_done_one_is_left_out_and_an_interrupt_ends_all(tmp_path):
    """In a repository of stand-ins."""
    for folder in ("scripts", "data-prep", ".venv/bin"):
        (tmp_path / folder).mkdir(parents=True)
    for name in ("gpu_report.sh", "lib.sh"):
        shutil.copy(REPO / "scripts" / name, tmp_path / "scripts")
    for name in ("scripts/setup.sh", "scripts/benchmark_training.sh", "data-prep/sample.sh", ".venv/bin/python"):
        (tmp_path / name).write_text("#!/bin/sh\n")
        (tmp_path / name).chmod(0o755)
    training, corpus = tmp_path / "scripts/benchmark_training.sh", tmp_path / "data-prep/sample.sh"
    training.write_text("#!/bin/sh\ntrap 'exit 130' INT\nkill -INT 0\n")  # Ctrl-C, to the whole group
    corpus.write_text('#!/bin/sh\necho made >> "$0.log"\n')
    flags = ("--output", tmp_path / "a folder", "--only", "training", "corpus")
    assert gpu_report(tmp_path, *flags).returncode == 130
    assert not corpus.with_suffix(".sh.log").exists()
    training.write_text("#!/bin/sh\nexit 1\n")
    first = gpu_report(tmp_path, *flags)
    assert (first.returncode, "failed: training" in first.stderr) == (1, True)
    training.write_text("#!/bin/sh\n")
    second = gpu_report(tmp_path, *flags)
    assert second.returncode == 0, second.stderr
    assert "corpus: done before" in second.stdout
    assert corpus.with_suffix(".sh.log").read_text() == "made\n"
