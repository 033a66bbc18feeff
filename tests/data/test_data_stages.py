"""Stages: killed anywhere and run again gives the same data; nothing half-made ever has a final name."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest
from helpers import warm
from helpers.data_toy import PREP, Pipeline, corpus, prepared, recipe, stages, text_only, write

from ea_artifacts.command import UserError
from ea_data import binary, parallel

# Kills its own process with SIGKILL in the middle of a stage, or at its end, just before the folder gets its name.
KILLED = """
import os, signal
from pathlib import Path
from helpers.data_toy import *
from ea_data import pipeline as module
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
original = Pipeline.make_{stage}
def dying(self, folder):
    if {middle}:
        (folder / "train.de").write_text("half\\n")
        module.zip_longest = module.subwords.learn = module.binary.write = die
    original(self, folder)
    die()
Pipeline.make_{stage} = dying
prepared(recipe(), Path({raw!r}), Path({out!r}), workers=2)
"""


def contents(folder):
    """Relative path -> bytes, of the data itself: PREP.json is not meant to be the same twice."""
    files = (path for path in folder.rglob("*") if path.is_file())
    data = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: value for name, value in data.items() if not name.endswith(".json")}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    raw = corpus(folder / "raw", train=1000)
    prepared(recipe(), raw, folder / "out")
    return raw, folder / "out"


@pytest.mark.parametrize("middle", [True, False])
@pytest.mark.slow
def test_killed_in_every_stage_and_run_again_gives_the_same_data(undisturbed, tmp_path, middle):
    raw, expected = undisturbed
    out, work = tmp_path / "out", tmp_path / "out.work"
    for number, stage in enumerate(stages.NAMES, 1):
        code = KILLED.format(stage=stage, middle=middle, raw=str(raw), out=str(out))
        done = warm.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 128 + signal.SIGKILL, done.stderr  # as warm.run says it
        finished = {f"{n}-{name}" for n, name in enumerate(stages.NAMES, 1) if n < number}
        assert {path.name for path in work.iterdir() if path.is_dir() and path.suffix != ".tmp"} == finished
        assert list(work.glob("*.tmp"))
        assert not out.exists()
    prepared(recipe(), raw, out, workers=2)
    assert contents(out) == contents(expected)
    assert not list(work.glob("*.tmp"))
    assert {path.name for path in tmp_path.iterdir()} == {"out", "out.work"}


def started(tmp_path, **options):
    """custom.sh in a new session, in the middle of the first stage, by two workers."""
    raw = corpus(tmp_path / "raw", train=20_000)
    arguments = ["--source-lang", "de", "--target-lang", "en", "--workers", "2", "--out", tmp_path / "out"]
    arguments += ["--train", raw / "train", "--valid", raw / "valid"]
    command = ["bash", PREP / "custom.sh", *arguments]
    process = subprocess.Popen(command, start_new_session=True, **options)
    deadline = time.monotonic() + 60
    while not list((tmp_path / "out.work").glob("tokens.*.tmp/new/train.de")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    time.sleep(0.3)
    return process


def test_ctrl_c_is_one_line_and_status_130(tmp_path):
    """The terminal sends it to every process: none says more than that, and the status is that of an interruption."""
    process = started(tmp_path, stderr=subprocess.PIPE, text=True)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in said
    assert said.splitlines()[-1] == "custom.sh: interrupted; run it again to go on"


def test_a_killed_run_leaves_no_process(tmp_path):
    """Killed from outside, while its workers are busy."""
    process = started(tmp_path, stderr=subprocess.DEVNULL)
    process.kill()
    process.wait()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGKILL)
    pytest.fail("workers outlived their parent")


@pytest.fixture
def made(tmp_path, capsys):
    """A function that prepares tmp_path/raw by these rules: the stages that it makes, on the text alone."""
    corpus(tmp_path / "raw")

    def make(**rules):
        text_only(recipe(**rules), tmp_path / "raw", tmp_path / "out")
        return [line for line in capsys.readouterr().err.splitlines() if line in stages.NAMES]

    return make


def test_a_change_makes_the_stages_again_that_depend_on_it(tmp_path, made):
    every = list(stages.NAMES[:-1])
    in_subwords = {"merges": 70, "filter_on": "subwords"}
    for rules, first in (
        ({}, 0),
        ({}, 2),
        ({"merges": 70}, 1),
        ({**in_subwords, "max_length": 30}, 0),
        ({**in_subwords, "max_length": 20}, 1),
        ({**in_subwords, "max_length": 20, "separate_dictionaries": True}, 1),
    ):
        assert made(**rules) == every[first:]
    write(tmp_path / "raw/test.de", [f"zeile {i}" for i in range(20)])
    assert made(**rules) == every


def test_every_rule_makes_other_data(tmp_path):
    """Else the old data would be called finished."""
    raw = corpus(tmp_path / "raw")
    changes = [{}, {"tokenizer": "none"}, {"vocabulary_threshold": 2}, {"valid_every": 5}]
    changes += [{name: True} for name in ("nfc", "drop_test_overlap", "separate_dictionaries")]
    keys = {Pipeline(recipe(**rules), raw, tmp_path / "out").chain[-1].key for rules in changes}
    assert len(keys) == len(changes)


def test_validation_that_comes_from_the_training_text_is_filtered_like_it(tmp_path):
    rules = recipe(valid_every=5, filter_on="subwords", max_length=30)
    pipeline = text_only(dataclasses.replace(rules, valid=()), corpus(tmp_path / "raw"), tmp_path / "out")
    for path in pipeline.text("subwords", "valid"):
        assert max(len(line.split()) for line in path.read_text().splitlines()) <= 30
    assert pipeline.chain[1].report()["filters"]["valid"]["dropped"]


def test_a_finished_folder_is_replaced_only_by_a_finished_one(undisturbed, tmp_path, monkeypatch):
    raw, _ = undisturbed
    out = tmp_path / "out"
    prepared(recipe(), raw, out)
    before = contents(out)
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(binary, "write", None)
        prepared(recipe(merges=50), raw, out)
    assert contents(out) == before
    assert prepared(recipe(merges=50), raw, out)["bpe_merges"] == 50
    assert contents(out) != before


@pytest.mark.parametrize("folder", ["out", "out.work"])
def test_a_folder_of_other_files_is_left_alone(tmp_path, folder):
    """Before a run that would be refused for its data, too."""
    raw = corpus(tmp_path / "raw")
    write(raw / "valid.en", ["one line"])
    write(tmp_path / folder / "thesis.tex", ["years of work"])
    with pytest.raises(UserError, match=f"{folder}: exists and was not made here"):
        prepared(recipe(), raw, tmp_path / "out")
    assert [path.name for path in (tmp_path / folder).iterdir()] == ["thesis.tex"]


def test_own_files_in_a_prepared_folder_are_not_lost(tmp_path):
    raw, out = corpus(tmp_path / "raw", train=20), tmp_path / "out"
    prepared(recipe(), raw, out)
    notes = write(out / "raw/notes.txt", ["my notes"])
    prepared(recipe(), raw, out)  # nothing to do, and nothing to refuse
    with pytest.raises(UserError, match=f"{notes}: was not made here, and would be lost"):
        prepared(recipe(lowercase=True), raw, out)
    assert notes.exists()


def test_a_stage_that_is_damaged_or_half_removed_is_made_again(tmp_path, made, monkeypatch):
    made()
    (tmp_path / "out.work/2-subwords" / stages.STAMP).write_text("{}")
    assert made() == ["subwords"]

    def interrupted(*_, **options):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):  # before the stage's files are removed
        patch.setattr(stages.shutil, "rmtree", interrupted)
        prepared(recipe(merges=70), tmp_path / "raw", tmp_path / "out")
    for name in ("subwords.x.tmp/new/train.de", "notes.tmp"):
        write(tmp_path / "out.work" / name, [""])
    assert made() == ["subwords"]
    assert {path.name for path in (tmp_path / "out.work").glob("*.tmp")} == {"notes.tmp"}, "a user's file"


def test_a_second_run_in_one_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.time, "sleep", lambda seconds: None)
    raw = corpus(tmp_path / "raw")
    with stages.alone(tmp_path / "out"), pytest.raises(UserError, match="another run is at work here"):
        prepared(recipe(), raw, tmp_path / "out")


@pytest.mark.slow
def test_neither_workers_nor_chunks_change_the_data(undisturbed, tmp_path, monkeypatch):
    """Order is preserved and both sides stay in step; fairseq's binary data included."""
    raw, expected = undisturbed
    monkeypatch.setattr(parallel, "CHUNK_LINES", 7)
    prepared(recipe(), raw, tmp_path / "out", workers=3)
    assert contents(tmp_path / "out") == contents(expected)


UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]


def namespaces():
    command = [*UNSHARE, "true"]
    return shutil.which("unshare") and not subprocess.run(command, capture_output=True, check=False).returncode


@pytest.mark.skipif(not namespaces(), reason="needs unshare(1) and user namespaces, to mount a small disk")
def test_a_full_disk_is_one_line_and_leaves_nothing_half_made(tmp_path):
    """Here in the second stage."""
    raw, disk = corpus(tmp_path / "raw", train=6000), tmp_path / "disk"
    disk.mkdir()
    code = f"""
    mount -t tmpfs -o size=700k tmpfs {disk}
    bash {PREP / "custom.sh"} --source-lang de --target-lang en --train {raw}/train --valid {raw}/valid --workers 2 \\
        --out {disk}/out
    code=$?
    ls -A {disk}/out.work 2>/dev/null
    ls -d {disk}/out 2>/dev/null
    exit $code
    """
    done = subprocess.run([*UNSHARE, "bash", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "No space left on device; make room and run it again" in done.stderr
    assert done.stdout.split() == ["1-tokens", stages.LOCK]
