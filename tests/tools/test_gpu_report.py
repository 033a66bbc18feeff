"""scripts/gpu_report.sh: its dry run, on a CPU, takes every step; what fails or does not fit is recorded.

A dry run's times say nothing about speed. Its comparisons have to hold.
"""

import json
import shutil
import subprocess

import pytest
from helpers import REPO
from helpers.mistakes import fake_command

from ea_fairseq import decoding, step
from ea_tools.bench import attention, gpu_report, options, training


def report(path, *flags):
    """The steps of a dry run by name, and the exit status's message."""
    said = None
    try:
        gpu_report.main(["--dry-run", "--output", str(path), *flags])
    except SystemExit as ended:
        said = str(ended.code)
    return {result["step"]: result for result in json.loads(path.read_text())["results"]}, said


def test_every_step_runs(tmp_path):
    steps, said = report(tmp_path / "r.json")
    assert said is None, {name: result.get("error") for name, result in steps.items()}
    assert list(steps) == list(options.GPU_STEPS) == list(gpu_report.STEPS)
    rows = {name: {row["label"]: row for row in result["rows"]} for name, result in steps.items()}
    assert all(rows.values())
    checked = list(rows["equality"].values())
    assert len(checked) == 6 and all(row["ok"] for row in checked)
    assert checked[0]["same_bits"] and checked[0]["shapes"] > 1
    assert 0 < checked[1]["weights"] < 1e-3, "fairseq's own step is another, and gives the same"
    assert rows["capture"]["captured"]["shapes"] > 1
    for name in ("base", "lite", "base-16384", "base-fp16"):
        kinds = [label.partition(": ")[2] for label in rows[name]]
        assert kinds == ["ours", "stock", training.FLAT, training.STOCK_FLAT, training.CAPTURED]
        assert list(rows[name].values())[-1]["refused"] is None
    assert len(rows["decoding"]) == 3
    whole, *kernels = rows["kernels"].values()
    assert whole["ms"] >= kernels[0]["ms"] >= kernels[-1]["ms"] > 0


def test_a_fault_fails_the_comparison_and_the_run(tmp_path, monkeypatch):
    """Steps that are not captured, another attention, and decoding without graphs."""
    monkeypatch.setattr(step.GraphedStep, "_unsuited", lambda self: "a reason")
    monkeypatch.setattr(decoding, "TOLERANCE", dict.fromkeys(decoding.TOLERANCE, -1.0))
    plain = attention.composition
    monkeypatch.setitem(attention.PATHS, "ours", lambda problem: lambda: [2 * x for x in plain(problem)])
    steps, said = report(tmp_path / "r.json", "--only", "equality")
    assert "equality" in said
    assert [row["ok"] for row in steps["equality"]["rows"]] == [False] * 6


def test_other_numbers_fail_the_comparison(tmp_path, monkeypatch):
    """A replay that forgets its batch."""
    monkeypatch.setattr(step.Static, "fill", lambda static, sample: None)
    steps, _ = report(tmp_path / "r.json", "--only", "equality")
    assert not steps["equality"]["rows"][1]["ok"]


def test_a_failed_step_is_recorded_and_the_next_goes_on(tmp_path, monkeypatch):
    def broken(of_report):
        yield {"label": "a row", "ms": 1.0}
        assert json.loads((tmp_path / "r.json").read_text())["results"][-1]["rows"] == [{"label": "a row", "ms": 1.0}]
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu_report.STEPS, "capture", broken)
    steps, said = report(tmp_path / "r.json", "--only", "capture", "attention")
    assert "capture" in said and "attention" not in said
    assert "no such kernel" in steps["capture"]["error"] and "in broken" in steps["capture"]["error"]
    assert len(steps["capture"]["rows"]) == 1 and len(steps["attention"]["rows"]) == 5


def test_what_no_longer_fits_is_left_out(tmp_path, capsys):
    steps, said = report(tmp_path / "r.json", "--minutes", "0.4", "--only", "equality", "kernels")
    assert "120 s" in steps["equality"]["skipped"] and "skipped" not in steps["kernels"]
    assert "equality: skipped" in capsys.readouterr().out
    assert said is None


def test_a_cpu_alone_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_report.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="--dry-run"):
        gpu_report.main(["--output", str(tmp_path / "r.json")])
    assert not list(tmp_path.iterdir())


def test_without_an_environment_the_machines_own_python_is_taken(tmp_path, monkeypatch):
    """If it has torch and fairseq."""
    for name in ("scripts", "site"):
        (tmp_path / name).mkdir()
    for name in ("gpu_report.sh", "lib.sh"):
        shutil.copy(REPO / "scripts" / name, tmp_path / "scripts")
    (tmp_path / "scripts" / "setup.sh").write_text("echo set up\nexit 3\n")
    own = f'[ "$1" = -c ] && exec "{shutil.which("python3")}" -S "$@"\necho "python3 $*"\n'
    fake_command(tmp_path, "python3", own, monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    command = ["bash", str(tmp_path / "scripts" / "gpu_report.sh"), "--minutes", "3"]
    run = {"capture_output": True, "text": True, "check": False}
    assert subprocess.run(command, **run).returncode == 3
    for name in ("torch", "fairseq"):
        (tmp_path / "site" / f"{name}.py").write_text("raise SystemExit('imported')")
    assert subprocess.run(command, **run).stdout == "python3 -P -m ea_tools bench.start gpu_report --minutes 3\n"
