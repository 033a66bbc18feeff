"""scripts/glue.sh: metrics by their formulas, what is trained, what is picked, what is refused."""

import json
import math
import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
from helpers.models import dictionary
from helpers.other_models import ROBERTA, build, script_output

from ea_data import glue as prep
from ea_tools import glue
from ea_tools.common import UserError
from ea_tools.glue_report import markdown
from ea_tools.glue_scores import METRICS
from ea_tools.tables import table as tables

EXPECTED, PREDICTED = [1, 1, 1, 0, 0, 1, 0, 1], [1, 0, 1, 0, 1, 1, 0, 0]


def test_metrics_are_those_of_their_formulas():
    pairs = list(zip(EXPECTED, PREDICTED, strict=True))
    tp, tn, fp, fn = (pairs.count(pair) for pair in ((1, 1), (0, 0), (0, 1), (1, 0)))
    assert METRICS["accuracy"](EXPECTED, PREDICTED) == (tp + tn) / 8
    assert METRICS["f1"](EXPECTED, PREDICTED) == pytest.approx(2 * tp / (2 * tp + fp + fn))
    matthews = (tp * tn - fp * fn) / math.sqrt((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn))
    assert METRICS["matthews"](EXPECTED, PREDICTED) == pytest.approx(matthews)
    x, y = [0.1, 0.9, 0.4, 0.6], [0.2, 0.8, 0.6, 0.5]
    dx, dy = ([value - sum(side) / 4 for value in side] for side in (x, y))
    pearson = sum(a * b for a, b in zip(dx, dy, strict=True)) / math.sqrt(
        sum(a * a for a in dx) * sum(b * b for b in dy)
    )
    assert METRICS["pearson"](x, y) == pytest.approx(pearson)
    assert METRICS["spearman"](x, y) == pytest.approx(1 - 6 * (0 + 0 + 1 + 1) / (4 * 15))
    assert METRICS["pearson"](x, [0.5] * 4) == 0


def cola(folder, rows=40):
    """A prepared CoLA: a sentence is right if it begins with w1."""
    (folder / "raw").mkdir(parents=True)
    for split, size in (("train", rows), ("dev", 20)):
        lines = [f"x\t{i % 2}\t*\tw{i % 2} w{i % 7} w{i % 5}" for i in range(size)]
        (folder / f"raw/{split}.tsv").write_text("".join(f"{line}\n" for line in lines))
    prep.prepare("CoLA", folder / "raw", folder / "CoLA", 13, None)
    return folder / "CoLA"


def arguments(data, folder, *more):
    places = ["--data", data, "--runs", folder / "runs", "--results", folder / "results"]
    return [str(word) for word in ("CoLA", "ea_roberta", *places, *more)]


def commands(capsys, data, folder, *more):
    with pytest.raises(SystemExit) as stop:
        glue.main([*arguments(data, folder, *more), "--dry-run"])
    assert stop.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_the_papers_choice_and_the_papers_space(tmp_path, capsys):
    data = cola(tmp_path)
    (command,) = commands(capsys, data, tmp_path)
    for words in ("--batch-size 8", "--lr 2e-05", "--max-epoch 3", "--ea-alpha 0.2", "--ea-beta 0.1"):
        assert f" {words} " in f"{command} "
    assert " --total-num-update 15 --warmup-updates 1 " in command  # 40 rows, 8 a batch, 3 epochs; 6%
    (command,) = commands(capsys, data, tmp_path, "--update-freq", 4)  # 5 batches of an epoch are 2 updates
    assert " --total-num-update 6 --warmup-updates 1 " in command
    (command,) = commands(capsys, data, tmp_path, "--max-update", 4)
    assert " --total-num-update 4 " in command
    assert len(commands(capsys, data, tmp_path, "--search")) == 3 * 2 * 3 * 3 * 3
    assert len(commands(capsys, data, tmp_path, "--alpha", 0.1, 0.2, "--seeds", 1, 2)) == 4


def scores(value):
    return {"valid": {"f1": value, "accuracy": value - 2}}


def test_the_best_mean_over_seeds_is_picked():
    settings = [glue.Setting(3, 8, 2e-5, alpha, 0.1) for alpha in (0.1, 0.2)]
    picked = glue.pick({settings[0]: {1: scores(90), 2: scores(70)}, settings[1]: {1: scores(82), 2: scores(84)}},
                       ["f1", "accuracy"])  # fmt: skip
    assert picked["setting"]["alpha"] == 0.2
    assert picked["scores"]["valid/f1"] == {"mean": 83, "deviation": pytest.approx(math.sqrt(2)), "seeds": 2}
    assert len(picked["all"]) == 2


def test_the_table_has_the_papers_numbers_and_says_what_nobody_has_run():
    result = {"name": "mine", "task": "MRPC", "checkpoint": None, "device": "d", "date": "t"}
    result |= {"commit": "0123456789abcdef with local changes", "command": "glue.sh"}
    result |= {"scores": {"valid/f1": {"mean": 91.25, "deviation": 0.5, "seeds": 3}}}
    text = markdown(glue.read_table(), [result])
    assert (
        "| EA-RoBERTa-Large (journal) | 68.1 | 96.8 | 92.0/88.7 | 92.3/92.2 | 92.3/89.7 | 90.6/90.4 | 95.0 | 85.3 |"
        in text
    )
    assert "; d; commit 0123456789 with local changes; t; " in text
    text = markdown(glue.read_table(), [result | {"trained_at": ["a" * 40, None]}])
    assert "; d; commit aaaaaaaaaa and then not recorded; t; " in text
    assert "| mine | not run | not run | 91.2 ± 0.5 (3 seeds) | not run |" in text
    assert "| ea_roberta_large | not run | not run |" in text


def test_a_table_of_translations_it_is_not():
    with pytest.raises(UserError, match=r"glue\.toml: is a table of scripts/glue\.sh"):
        tables.read("glue")


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda data: (data / "PREP.json").unlink(), r"PREP.json: no such file; make .* with data-prep/glue.sh CoLA"),
        (lambda data: (data / "PREP.json").write_text('{"task": "RTE"}'), "holds RTE, and not CoLA"),
        (lambda data: (data / "PREP.json").write_text("{"), "PREP.json: not JSON"),
    ],
)
def test_data_that_do_not_fit_are_refused(change, message, tmp_path):
    data = cola(tmp_path)
    change(data)
    with pytest.raises(UserError, match=message):
        glue.read_prep(data, "CoLA")


def test_a_checkpoint_that_is_missing_or_of_another_dictionary_is_refused(tmp_path):
    data = cola(tmp_path)
    with pytest.raises(UserError, match=r"model\.pt: no such checkpoint file"):
        glue.check_checkpoint(tmp_path / "model.pt", data)
    torch.save({"model": build("roberta").state_dict()}, tmp_path / "model.pt")
    with pytest.raises(UserError, match=r"was trained with 25 subwords, and .*dict\.txt makes"):
        glue.check_checkpoint(tmp_path / "model.pt", data)
    dictionary().save(str(data / "input0/dict.txt"))
    glue.check_checkpoint(tmp_path / "model.pt", data)
    (tmp_path / "dict.txt").write_text("other 1\n" * 20)
    with pytest.raises(UserError, match="is not the dictionary beside the checkpoint"):
        glue.check_checkpoint(tmp_path / "model.pt", data)


@pytest.mark.parametrize(
    "words, message",
    [
        (["COLA", "ea_roberta"], "invalid choice: 'COLA'"),
        (["CoLA"], "TASK and ARCH are wanted"),
        (["CoLA", "ea_roberta", "--ea-alpha", "0.1"], "--ea-alpha is not to be given here"),
        (["CoLA", "roberta", "--alpha", "0.1"], "--alpha and --beta are for architectures that begin with ea_"),
        (["CoLA", "ea_roberta", "--data", "nowhere"], "nowhere/PREP.json: no such file"),
        (
            ["CoLA", "ea_roberto", "--data", "{data}"],
            "glue: ARCH ea_roberto: there is no such architecture; near it are",
        ),
        (
            ["CoLA", "ea_roberta", "--data", "{data}", "--droput", "0"],
            "glue: --droput: there is no such flag; is --dro",
        ),
    ],
)
def test_bad_command_lines_end_with_one_line(words, message, capsys, tmp_path):
    data = cola(tmp_path)
    with pytest.raises(SystemExit) as stop:
        glue.main([*(word.format(data=data) for word in words), "--runs", str(tmp_path / "runs")])
    assert not (tmp_path / "runs").exists()
    assert stop.value.code not in (0, None)
    assert message in (capsys.readouterr().err + str(stop.value.code))


def test_results_of_other_data_are_not_mixed_and_every_commit_is_told(tmp_path, monkeypatch):
    """Two seeds, the second one trained at another commit; then the data change, or a record knows nothing of them."""
    data, commits = cola(tmp_path), iter(["a" * 40, "b" * 40, "c" * 40, "d" * 40])
    monkeypatch.setattr(glue, "provenance", lambda on_cpu: {"commit": next(commits), "device": "d", "date": "t"})
    monkeypatch.setattr(glue, "predict", lambda *words: ([1, 0, 1], [1, 0, 0]))
    trainings = []
    monkeypatch.setattr(glue, "run_to_the_end", lambda words: trainings.append(words) or 0)
    words = arguments(data, tmp_path, "--seeds")
    glue.main([*words, "1"])
    glue.main([*words, "1", "2"])
    assert len(trainings) == 2, "the first seed is not trained again"
    assert f"; commit {'a' * 10} and then {'c' * 10}; t; " in (tmp_path / "results/glue.md").read_text()
    record = next((tmp_path / "runs").rglob("*seed1/glue.json"))
    kept = json.loads(record.read_text())
    (data / "label/valid.bin").write_bytes((data / "label/valid.bin").read_bytes()[::-1])
    with pytest.raises(
        SystemExit, match=r"seed1: was trained on other data .*CoLA holds now .*; move it away to train it"
    ):
        glue.main([*words, "1"])
    record.write_text(json.dumps({name: kept[name] for name in ("command", "scores")}))
    commits = iter("e")
    glue.main([*words, "1"])
    assert "; commit not recorded; t; " in (tmp_path / "results/glue.md").read_text()


def test_a_training_that_was_cut_off_goes_on_with_its_own_data_alone(tmp_path, monkeypatch):
    data = cola(tmp_path)
    monkeypatch.setattr(glue, "provenance", lambda on_cpu: {"commit": "a" * 40})
    monkeypatch.setattr(glue, "run_to_the_end", lambda words: 1)
    run = tmp_path / "run"
    for _ in range(2):  # the second time without a checkpoint: it stopped before the first was saved
        with pytest.raises(UserError, match="training failed"):
            glue.trained_and_scored(run, ["train"], data, {}, [], "model 1")
        (run / "log.jsonl").write_text("")
    with pytest.raises(
        UserError, match=r"began with another model than the checkpoint holds now .*model 1, now model 2"
    ):
        glue.trained_and_scored(run, ["train"], data, {}, [], "model 2")
    (data / "input0/train.bin").write_bytes(b"other")
    with pytest.raises(UserError, match="was trained on other data"):
        glue.trained_and_scored(tmp_path / "run", ["train"], data, {}, [])


def test_two_at_once(tmp_path, monkeypatch):
    """The second is refused before it trains; what it starts is not waited for."""
    lock = f"import fcntl, time; file = open({str(tmp_path / 'lock')!r}, 'w'); fcntl.lockf(file, fcntl.LOCK_EX)"
    command = [sys.executable, "-c", f"{lock}; print('held', flush=True); time.sleep(60)"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        monkeypatch.setattr(glue, "run_to_the_end", lambda words: pytest.fail("it trains"))
        with pytest.raises(UserError, match="another process trains in this folder"):
            glue.trained_and_scored(tmp_path, ["train"], tmp_path, {}, [])
        holder.kill()


def test_a_training_ends_with_the_command_that_started_it(tmp_path):
    child = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    parent = f"import sys; from ea_tools import glue; glue.run_to_the_end([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.slow
def test_trains_scores_and_goes_on(tmp_path):
    """The score is the one that fairseq reached in the best epoch; run again, nothing is trained."""
    data = cola(tmp_path)
    size = [*ROBERTA[:-2], "--num-workers", 0]
    words = arguments(data, tmp_path, "--epochs", 8, "--lr", 0.01, *size)
    first = script_output("glue.sh", *words)
    assert first.returncode == 0, first.stderr[-3000:]
    result = json.loads((tmp_path / "results/glue/CoLA-ea_roberta.json").read_text())
    best = max(float(word) for word in re.findall(r"best_mcc (\S+)", first.stdout))
    score = result["scores"]["valid/matthews"]["mean"]
    assert score > 0 and score == pytest.approx(best, abs=0.06)
    assert f"| ea_roberta | {score:.1f} (1 seed) |" in first.stdout and result["setting"]["alpha"] == 0.2
    again = script_output("glue.sh", *words)
    assert again.returncode == 0 and "fairseq_train" not in again.stderr
    other = script_output("glue.sh", *words, "--dropout", 0.3)
    assert other.returncode == 1 and "was made by another command" in other.stderr
