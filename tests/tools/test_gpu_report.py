"""scripts/gpu_report.sh goes through all that it measures on the CPU too, goes on where it stopped, fails by cell.

There may be no GPU here. So what it would measure on one is called with the benchmarks' own functions replaced, which
shows that their names, flags and results fit together.
"""

import json
import time

import pytest
import torch
from helpers import warm
from helpers.interpreter import import_kernels
from helpers.toy import data  # noqa: F401  (a fixture)

from ea_tools.bench import attention, common, decoding, gpu_report, gpu_sections, training
from ea_tools.bench.gpu_sections import SECTIONS, Plan, Section, kernels_row
from ea_tools.common import UserError
from evolving_attention.kernels import gpu

GPU = Plan(rehearsal=False)
ORIGIN = {"device": "none", "versions": {"torch": "2"}, "cuda": None, "commit": "abc"}


@pytest.fixture
def small_section(monkeypatch):
    """A section of three cells whose functions are in a dictionary, to be replaced."""
    functions = {name: lambda seconds, name=name: {"value": name} for name in "abc"}
    section = Section("Letters", 1.0, lambda plan: functions.items(), ("what", "value"), lambda cell: [cell["value"]])
    monkeypatch.setattr(gpu_report, "SECTIONS", {"letters": section})
    monkeypatch.setattr(gpu_report, "origin", lambda plan: ORIGIN)
    return functions


def work(folder, seconds=60.0):
    status = gpu_report.work("letters", Plan(rehearsal=True), folder, time.monotonic() + seconds)
    return status, json.loads((folder / "letters.json").read_text())


def test_what_is_measured_is_not_measured_again(tmp_path, small_section):
    calls = []
    small_section["b"] = lambda seconds: calls.append(seconds) or {"value": "b"}
    for _ in range(2):
        status, content = work(tmp_path)
        assert status == 0
        assert list(content["cells"]) == ["a", "b", "c"]
    assert len(calls) == 1
    assert 0 < calls[0] <= 60
    assert content["cells"]["c"]["origin"]["device"] == "none"
    assert "- none, PyTorch 2, CUDA None, commit abc" in gpu_report.markdown(tmp_path, Plan(rehearsal=True))


def test_what_is_not_finished_goes_on(tmp_path, small_section):
    small_section["b"] = lambda seconds: {"finished": False}
    work(tmp_path)
    small_section["b"] = lambda seconds: {"finished": True, "value": "b"}
    _, content = work(tmp_path)
    assert content["cells"]["b"]["value"] == "b"


def test_a_cell_that_fails_says_why_and_others_are_measured(tmp_path, small_section):
    def fail(seconds):
        raise RuntimeError("no such instruction | of course\nat some place\nand more")

    small_section["a"] = fail
    _, content = work(tmp_path)
    assert content["cells"]["a"]["failed"] == "RuntimeError: no such instruction | of course ... and more"
    assert content["cells"]["c"]["value"] == "c"
    report = gpu_report.markdown(tmp_path, Plan(rehearsal=True))
    assert "| a | failed: RuntimeError: no such instruction / of course ... and more |" in report
    assert "| c | c |" in report


def test_another_process_takes_over_where_the_gpu_is_lost(tmp_path, small_section):
    def lose(seconds):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    small_section["b"] = lose
    status, content = work(tmp_path)
    assert status == gpu_report.GPU_IS_LOST
    assert list(content["cells"]) == ["a", "b"]
    status, content = work(tmp_path)
    assert status == 0
    assert list(content["cells"]) == ["a", "b", "c"]


def test_no_cell_begins_when_the_time_is_over(tmp_path, small_section):
    def slow(seconds):
        time.sleep(0.2)
        return {"value": "a"}

    small_section["a"] = slow
    _, content = work(tmp_path, seconds=0.1)
    assert list(content["cells"]) == ["a"]
    assert "| b | not run |" in gpu_report.markdown(tmp_path, Plan(rehearsal=True))


class Process:
    """In the place of a section's process: does something to its file, and ends or does not."""

    started = ()

    def __init__(self, command, **_):
        self.returncode, self.do = None, Process.started.pop(0)

    def wait(self, timeout=None):
        status = self.do()
        if status is None and timeout is not None:
            self.do = lambda: 0
            raise gpu_report.subprocess.TimeoutExpired("it", timeout)
        return status

    def kill(self):
        pass


def run_section(folder, monkeypatch, *started):
    """The section's file after these processes, one after the other."""
    path = folder / "letters.json"
    monkeypatch.setattr(gpu_report.subprocess, "Popen", Process)
    monkeypatch.setattr(Process, "started", [lambda do=do: do(path) for do in started])
    monkeypatch.setattr(gpu_report.sys, "argv", ["gpu_report"])
    args = gpu_report.parse(["--output", str(folder), "--rehearse"])
    gpu_report.run_section("letters", args, time.monotonic() + 5)
    assert not Process.started
    return json.loads(path.read_text())


def started(path, name, status, *done):
    """A process that measured some cells, began another one, and ended."""
    content = gpu_report.read(path, Plan(rehearsal=True))
    content["cells"] |= {cell: {"value": cell} for cell in done}
    gpu_report.write_json(path, {**content, "running": name})
    return status


def test_a_cell_that_ends_its_process_is_not_tried_again(tmp_path, small_section, monkeypatch):
    content = run_section(
        tmp_path,
        monkeypatch,
        lambda path: started(path, "b", -11, "a"),
        lambda path: started(path, None, 0, "c"),
    )
    assert content["cells"]["b"]["failed"].startswith("the process ended with status -11")
    assert content["cells"].keys() == set("abc")


def test_a_cell_whose_time_was_over_is_tried_next_time(tmp_path, small_section, monkeypatch):
    content = run_section(tmp_path, monkeypatch, lambda path: started(path, "b", None, "a"))
    assert content == {"rehearsal": True, "cells": {"a": {"value": "a"}}, "running": None}


def test_a_cell_that_was_running_when_the_program_was_stopped_is_not_to_blame(tmp_path, small_section, monkeypatch):
    started(tmp_path / "letters.json", "b", 0, "a")
    with pytest.raises(UserError, match="it cannot start"):  # the next process ends before it begins with a cell
        run_section(tmp_path, monkeypatch, lambda path: 1)
    assert gpu_report.read(tmp_path / "letters.json", Plan(rehearsal=True))["cells"] == {"a": {"value": "a"}}


def test_what_failed_is_measured_again_where_that_is_asked_for(tmp_path, small_section):
    small_section["b"] = lambda seconds: 1 / 0
    work(tmp_path)
    plan = Plan(rehearsal=True)
    assert "by `--again`" in gpu_report.markdown(tmp_path, plan)
    small_section["b"] = lambda seconds: {"value": "mended"}
    assert "ZeroDivisionError" in work(tmp_path)[1]["cells"]["b"]["failed"]
    gpu_report.forget_failures(["letters"], tmp_path, plan)
    _, content = work(tmp_path)
    assert content["cells"]["b"]["value"] == "mended"
    assert "--again" not in gpu_report.markdown(tmp_path, plan)


def test_rows_say_where_and_how_they_were_measured(tmp_path, small_section, monkeypatch):
    small_section["b"] = lambda seconds: {"value": "b", "without_kernels": ["encoder, bfloat16"]}
    del small_section["c"]
    work(tmp_path)
    assert "| a | a |\n| b, **without kernels** | b |" in gpu_report.markdown(tmp_path, Plan(rehearsal=True))
    monkeypatch.setattr(gpu_report, "origin", lambda plan: {**ORIGIN, "commit": "def"})
    small_section["c"] = lambda seconds: {"value": "c"}
    work(tmp_path)
    report = gpu_report.markdown(tmp_path, Plan(rehearsal=True))
    assert "- [1] none, PyTorch 2, CUDA None, commit abc\n- [2] none, PyTorch 2, CUDA None, commit def\n" in report
    assert "| a [1] | a |" in report
    assert "| c [2] | c |" in report


def test_another_gpu_has_another_output(tmp_path, small_section, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "B")
    monkeypatch.setattr(gpu_report, "origin", lambda plan: {**ORIGIN, "gpu": {"name": "B"}})
    work(tmp_path)
    gpu_report.check_gpu(tmp_path, Plan(rehearsal=True))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "C")
    with pytest.raises(UserError, match=r"letters\.json was measured on B, and this is C: choose another --output"):
        gpu_report.check_gpu(tmp_path, Plan(rehearsal=True))


def test_what_the_kernels_refused_is_noted(monkeypatch):
    _, gpu_trial = import_kernels()
    monkeypatch.setattr(gpu, "_kernels", lambda: "there are some")
    monkeypatch.setattr(gpu_trial, "passed", lambda call, may_try: call == "good")
    monkeypatch.setattr(gpu_trial.Variant, "of", lambda call: f"variant of {call}")
    before = gpu_trial.passed
    with gpu_sections.noting_refusals(GPU) as refused:
        assert gpu_trial.passed("good", may_try=True)
        assert not refused
        assert not gpu_trial.passed("bad", may_try=True)
    assert refused == {"variant of bad"}
    assert gpu_trial.passed is before
    monkeypatch.setattr(gpu, "_kernels", lambda: None)
    with gpu_sections.noting_refusals(GPU) as refused:
        assert refused == {"all: there are no kernels here"}


def test_a_section_that_cannot_start_stops_no_other(tmp_path, monkeypatch, capsys):
    begun = []

    def section(name, args, end):
        begun.append(name)
        if name == "kernels":
            raise UserError("kernels: it cannot start")

    monkeypatch.setattr(gpu_report, "run_section", section)
    with pytest.raises(SystemExit, match="gpu_report: kernels: it cannot start"):
        gpu_report.main(["--rehearse", "--output", str(tmp_path)])
    assert begun == list(gpu_report.SECTIONS)
    assert (tmp_path / "report.md").is_file()


@pytest.mark.parametrize("names", [("context", "A_logit"), ("A_logit", "context")])
def test_nothing_is_more_wrong_than_no_number(names):
    errors = {name: {"context": 1e-6, "A_logit": float("nan")}[name] for name in names}
    assert kernels_row({"errors": errors, "passed": False, "tolerance": 1e-4}) == ["nan **wrong**", "1e-04", "A_logit"]


def test_a_section_that_cannot_start_says_where_to_look(tmp_path, small_section, monkeypatch):
    with pytest.raises(UserError, match=r"letters: it cannot start: the end of .*letters.log"):
        run_section(tmp_path, monkeypatch, lambda path: started(path, None, 1))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--minutes", "0"], "--minutes 0: more than 0"),
        (["--only", "nothing"], "invalid choice: 'nothing'"),
        pytest.param([], "PyTorch sees no GPU here", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="GPU")),
    ],
)
def test_refused(tmp_path, flags, said, capsys):
    with pytest.raises(SystemExit) as caught:
        gpu_report.main([*flags, "--output", str(tmp_path / "out")])
    assert caught.value.code not in (0, None)
    assert said in f"{caught.value.code} {capsys.readouterr().err}"
    assert not list(tmp_path.iterdir())


def test_a_torn_file_is_named(tmp_path, small_section):
    (tmp_path / "letters.json").write_text("{")
    with pytest.raises(UserError, match=r"letters.json: .*; delete the file"):
        gpu_report.markdown(tmp_path, Plan(rehearsal=True))


def test_a_rehearsal_is_kept_apart(tmp_path, small_section):
    work(tmp_path)
    with pytest.raises(UserError, match=r"letters.json is of a rehearsal; choose another --output"):
        gpu_report.markdown(tmp_path, Plan(rehearsal=False))
    assert gpu_report.parse([]).output.name == "gpu"
    assert gpu_report.parse(["--rehearse"]).output.name == "gpu-rehearsal"


# ---- what is called on a GPU


def run_all(section):
    """Every cell of a section as on a GPU."""
    cells = dict(SECTIONS[section].cells(GPU))
    return {name: measure(60.0) for name, measure in cells.items()}


@pytest.fixture
def no_gpu_needed(monkeypatch):
    """What asks for a GPU is told that there is one; the benchmarks are to be replaced."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(common, "prepare", lambda args: args.device)


def speeds_of(*_):
    spread = {"median": 1.0, "q1": 0.9, "q3": 1.1, "count": 3}
    return {"ratio": spread, "tokens_per_second": {"ours": spread, "stock": spread}}


def test_training_on_a_gpu(monkeypatch, no_gpu_needed):
    called = []
    monkeypatch.setattr(training, "measure", lambda *arguments: called.append(arguments) or speeds_of())
    found = run_all("training")
    assert [arguments[2:] for arguments in called] == [
        ("cuda", size, precision) for size in ("base", "lite") for precision in ("bf16", "fp16", "fp32")
    ]
    assert {(args.batches, args.repetitions, args.memory_batches) for args, *_ in called} == {(6, 3, 0)}
    assert SECTIONS["training"].row(found["base, bf16"]) == ["1.00", "0.90 .. 1.10", "1", "1"]


def test_decoding_on_a_gpu(monkeypatch, no_gpu_needed):
    called = []
    monkeypatch.setattr(decoding, "measure", lambda *arguments: called.append(arguments[1:]) or speeds_of())
    run_all("decoding")
    assert ("cuda", "base", "bf16", 5, "full") in called
    assert len(called) == len(set(called)) == 2 * 3 * 2


@pytest.mark.slow
def test_memory_on_a_gpu(monkeypatch, no_gpu_needed):
    done = []
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: done.append("cleared"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("emptied"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: done.append("counted anew"))

    def memory(args, device, arch, precision, length):
        done.append((device, arch, precision, length))
        return {"peak": 3 * 2**20 if arch.startswith("ea_") else 2 * 2**20, "before": 0, "steps": 20}

    monkeypatch.setattr(training, "memory", memory)
    found = run_all("memory")
    assert done[:8] == [
        *("cleared", "emptied", "counted anew", ("cuda", "ea_transformer_base", "bf16", None)),
        *("cleared", "emptied", "counted anew", ("cuda", "transformer", "bf16", None)),
    ]
    assert SECTIONS["memory"].row(found["lite, fp32"]) == ["3", "2", "1.50"]


def test_attention_on_a_gpu(monkeypatch, no_gpu_needed):
    called = []
    monkeypatch.setattr(attention, "machine", lambda device, dtype: {"bytes": 1.0, "flops": 1.0})

    def measure(args, device, precision, kind, heads, length, peaks):
        called.append((device, precision, kind, heads, length))
        floor = {"milliseconds": 0.5}
        passes = {name: {"milliseconds": {"median": 2.0}, "floor": floor} for name in ("forward", "forward + backward")}
        return {"paths": {name: passes for name in args.paths if name != "compiled"}, "cannot_run": {"compiled": "no"}}

    monkeypatch.setattr(attention, "measure", measure)
    found = run_all("attention")
    lengths = {length for _, _, _, _, length in called}
    assert lengths == {16, 32, 64, 128, 256, 512, 1024}
    assert {(kind, heads) for _, _, kind, heads, _ in called} == {(k, h) for k in attention.KINDS for h in (4, 8)}
    assert len(found) == 3 * (2 * 3 * 7 + 3)
    row = SECTIONS["attention"].row(found["encoder, K = 8, bf16, N = 1024"])
    assert row == ["2.000", "1.00", "failed", "1.00", "25%"]


def test_kernels_on_a_gpu(monkeypatch):
    """Each cell asks for another variant, of the type and shape that it names."""
    gpu_kernels, gpu_trial = import_kernels()
    monkeypatch.setattr(gpu, "_kernels", lambda: gpu_kernels)
    monkeypatch.setattr(Plan, "device", "cpu")
    tried = []
    monkeypatch.setattr(
        gpu_trial, "errors", lambda variant: tried.append(variant) or {"the context": 0.5, "A_logit": 0}
    )
    found = run_all("kernels")
    assert len(set(tried)) == len(found) == 3 * (6 + 4 + 8)
    assert {variant.dtype for variant in tried} == {torch.float32, torch.float16, torch.bfloat16}
    assert {variant.geometry for variant in tried} == set(gpu_trial.Geometry)
    assert {variant.heads for variant in tried} == {1, 4, 8, 16}
    assert {variant.kernel_size for variant in tried} == {1, 3, 5}
    assert all(variant.gradients for variant in tried)
    assert sum(not variant.dropped for variant in tried) == 3 * 4
    assert {variant.settings[2] for variant in tried if not variant.dropped} == {True, False}, "the map is kept, or not"
    assert {(variant.rows, variant.columns) for variant in tried} > {(1000, 1000)}
    assert SECTIONS["kernels"].row(found["predictive, fp16"]) == ["5.0e-01 **wrong**", "5e-03", "the context"]


def test_a_training_that_is_cut_off(monkeypatch, tmp_path):
    log = [
        {"tag": "train", "step": 90, "loss": 5.3, "wps": 1.0, "wpb": 100.0, "train_wall": 5.0, "num_updates": 90.0},
        {"tag": "valid", "step": 190, "loss": 4.5, "wps": 99.0, "num_updates": 190.0},
        {"tag": "train", "step": 190, "loss": 5.3, "wps": 1.0, "wpb": 120.0, "train_wall": 2.0, "num_updates": 190.0},
        {
            "tag": "train_inner",
            "step": 200,
            "loss": 5.2,
            "wps": 1.0,
            "wpb": 1.0,
            "train_wall": 1.0,
            "num_updates": 200.0,
        },
    ]
    asked = []

    def command(words, seconds):  # a second call says nothing new: the run has its end, or no time was left
        if not asked:
            run = words[words.index("--run") + 1]
            run.mkdir(parents=True)
            (run / "log.jsonl").write_text("".join(f"{json.dumps(entry)}\n" for entry in log))
            (run / "train.log").write_text("x\nevolving attention takes its slower way for y\nz\n")
        asked.append(words)
        return None, ""

    monkeypatch.setattr(gpu_sections, "command", command)
    plan = Plan(False, tmp_path, tmp_path / "output")
    (tmp_path / "PREP.json").write_text("{}")
    found = gpu_sections.train_recipe(plan, "ea_transformer_base", 10.0)
    assert (found["finished"], found["updates"], found["validation_loss"]) == (False, 200, 4.5)
    assert found["words_per_second"] == (90 * 100 + 100 * 120) / 7, "of the training, without validating and saving"
    assert found["without_kernels"] == ["evolving attention takes its slower way for y"]
    assert found["run"].is_relative_to(tmp_path / "output"), "another --output is another training"
    again = gpu_sections.train_recipe(plan, "ea_transformer_base", 10.0)
    assert again == found
    assert asked[0][:5] == ["train", "multi30k-tiny-en-de", "ea_transformer_base", "--data", tmp_path]
    assert SECTIONS["multi30k"].row(found)[:3] == ["200", "3,000", "4.5"]
    nothing = gpu_sections.train_recipe(Plan(False, tmp_path / "nowhere"), "transformer", 10.0)
    assert nothing["finished"] is False
    assert "docs/data.md" in nothing["why"]


# ---- the whole program


@pytest.mark.slow
def test_rehearsal(tmp_path, data, capsys):  # noqa: F811
    """Everything once, in processes as on a GPU; then nothing is left to do."""
    flags = ["--rehearse", "--output", tmp_path / "out", "--data", data, "--minutes", 60]
    with warm.use():
        gpu_report.main([*map(str, flags)])
    report = (tmp_path / "out" / "report.md").read_text()
    assert report.startswith("# A rehearsal on the CPU: these numbers mean nothing")
    for section in SECTIONS:
        content = json.loads((tmp_path / "out" / f"{section}.json").read_text())
        assert content["rehearsal"] is True
        assert content["cells"].keys() == dict(SECTIONS[section].cells(Plan(True, data))).keys()
        for name, cell in content["cells"].items():
            assert "failed" not in cell, f"{section}, {name}: {cell['failed']}"
            assert cell["origin"]["commit"]
            assert f"| {name} " in report
    assert "failed" not in report
    capsys.readouterr()
    started = time.monotonic()
    gpu_report.main([*map(str, flags)])
    assert time.monotonic() - started < 5
    assert "to measure" not in capsys.readouterr().out
