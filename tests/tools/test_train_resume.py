"""scripts/train.sh run again: it goes on where a kill, a torn file or a full disk left it, and nowhere else."""

import errno
import fcntl
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq.trainer import Trainer
from helpers import warm
from helpers.toy import ENVIRONMENT, TINY, Payload, done, made_checkpoint, script, tool

from ea_artifacts.checkpoints import load
from ea_artifacts.command import UserError
from ea_artifacts.run import Run
from ea_tools.training import fairseq_train, launch, recipes, run_folder, train

FLAGS = [*TINY, "--max-tokens", "256", "--update-freq", "1", "--log-interval", "2", "--no-tensorboard", "--gpus", "0"]
FLAGS += ["--eval-bleu-args", '{"beam": 1, "max_len_b": 5}']  # the recipe's validations translate, which takes long


def command(data, run, *flags):
    return ["sample", "ea_transformer_lite", "--data", data, "--run", run, *FLAGS, *flags]


def last_updates(run):
    return run_folder.updates(load(run / "checkpoint_last.pt"))


def test_the_newest_that_loads_is_taken_by_its_updates(tmp_path, capsys):
    """Torn ones are set aside, and halves of a kill removed."""
    for name, updates in (("checkpoint2.pt", 20), ("checkpoint_3_25.pt", 25)):
        made_checkpoint(tmp_path / name, updates)
    torn = {"checkpoint_last.pt": 30, "checkpoint_3_30.pt": 30, "checkpoint10.pt": 100}
    for name, updates in torn.items():
        os.truncate(made_checkpoint(tmp_path / name, updates), 100)
    halves = [tmp_path / "checkpoint4.pt.tmp", tmp_path / ".average10.pt.123.tmp"]
    for path in halves:
        path.write_text("half")
    assert run_folder.updates(run_folder.mend(tmp_path)) == last_updates(tmp_path) == 25
    assert not any(path.exists() for path in halves)
    said = capsys.readouterr().err
    for name in torn:
        assert f"{name}.damaged" in said
        assert (tmp_path / f"{name}.damaged").stat().st_size == 100


def test_a_best_checkpoint_that_was_not_copied_any_more_is(tmp_path):
    """A kill between writing checkpointN.pt and copying it to checkpoint_best.pt and checkpoint_last.pt."""
    for name in ("checkpoint1.pt", "checkpoint_best.pt", "checkpoint_last.pt"):
        made_checkpoint(tmp_path / name, 10, val_loss=2.0, best=2.0)
    made_checkpoint(tmp_path / "checkpoint2.pt", 20, val_loss=1.5, best=1.5)
    run_folder.mend(tmp_path)
    assert run_folder.updates(load(tmp_path / "checkpoint_best.pt")) == 20
    made_checkpoint(tmp_path / "checkpoint3.pt", 30, val_loss=1.8, best=1.5)
    run_folder.mend(tmp_path)
    assert run_folder.updates(load(tmp_path / "checkpoint_best.pt")) == 20
    assert last_updates(tmp_path) == 30
    for name in ("checkpoint1.pt", "checkpoint2.pt", "checkpoint3.pt", "checkpoint_last.pt"):
        (tmp_path / name).unlink()  # fairseq's --no-last-checkpoints, or a user who made room
    assert run_folder.updates(run_folder.mend(tmp_path)) == last_updates(tmp_path) == 20


@pytest.mark.parametrize("left", ["average3.pt", "eval/test.json"])
def test_an_average_or_a_score_binds_the_folder_of_a_run(tmp_path, data, left):
    """Without checkpoints nothing can go on; and another model must not take the place of the one that was scored."""
    run_folder.claim(tmp_path, {"arch": "a"}, "", data)
    (tmp_path / left).parent.mkdir(exist_ok=True)
    (tmp_path / left).touch()
    with pytest.raises(UserError, match=r"arch: .*a.*b"):
        run_folder.claim(tmp_path, {"arch": "b"}, "", data)
    with pytest.raises(UserError, match=str(tmp_path)):
        run_folder.mend(tmp_path)


@pytest.mark.parametrize(
    ("done", "before", "now", "goes_on_after"),
    [(10, 20, 40, 20), (20, 21, 3, 2), (10, None, 10, 0), (10, None, 20, 10)],
)
def test_the_share_of_an_epoch_that_was_seen_stays(done, before, now, goes_on_after):
    """Batches of another size, or another number of GPUs: fairseq alone would stop, or see text twice or never."""
    place = {"iterations_in_epoch": done, **({} if before is None else {"batches_in_epoch": before})}
    fairseq_train.fit_place(place, now)
    assert place["iterations_in_epoch"] == goes_on_after


@pytest.mark.slow
def test_going_on_in_the_middle_of_an_epoch_with_larger_batches(data, tmp_path):
    run = tmp_path / "run"
    for flags in (["--max-update", 6], ["--max-update", 9, "--max-tokens", 2048]):  # of 9 batches, then of 2
        done("train.sh", *command(data, run), *flags)
    said = [line for line in (run / "train.log").read_text().splitlines() if "when batches were of another" in line]
    assert len(said) == 1 and "goes on after batch 1 of 2" in said[0]
    assert last_updates(run) == 9
    assert Run(run).model() == run_folder.settle_model(run), "it was settled at the end of the training"
    assert Run(run).has_model_recorded


@pytest.mark.parametrize(
    "names, model, updates",
    [
        (["checkpoint1.pt", "checkpoint2.pt", "checkpoint_best.pt", "checkpoint_last.pt"], "average2.pt", 2),
        (["checkpoint2.pt", *(f"checkpoint_1_{n}0.pt" for n in range(1, 13))], "average10.pt", 13),
        (["checkpoint_best.pt", "checkpoint_last.pt"], "checkpoint_best.pt", 1),
        (["checkpoint_last.pt"], "checkpoint_last.pt", 1),
    ],
    ids=["epochs", "updates", "best", "last"],
)
def test_the_model_of_a_finished_training(tmp_path, names, model, updates):
    """The next command scores the average of the last checkpoints, else the best, else the last."""
    for number, name in enumerate(names, 1):
        made_checkpoint(tmp_path / name, number)
    assert run_folder.settle_model(tmp_path) == Run(tmp_path).model() == tmp_path / model
    assert run_folder.updates(load(tmp_path / model)) == updates


def test_a_finished_run_does_not_pretend_to_be_trained_with_other_flags(tmp_path):
    """A loop over --dropout without --run would score one model several times."""
    flags = {"dropout": "0.3", "lr": "0.0005", "share-all-embeddings": "", "max-update": "10", "update-freq": "2"}
    (tmp_path / "run.json").write_text(json.dumps({"identity": {}, "starts": [{"flags": flags}]}))
    same = {"lr": ["5e-4"], "share-all-embeddings": [], "max-update": ["20"], "keep-last-epochs": ["1"]}
    run_folder.refuse_other_flags(tmp_path, {**same, "update-freq": ["2"], "log-interval": ["5"]})
    for name, values, said in (
        ("dropout", ["0.4"], r"--dropout 0\.4 .*0\.3.*--run"),
        ("clip-norm", ["1"], "--clip-norm 1 "),
        ("bf16", [], "--bf16 "),
        ("update-freq", ["4"], "--update-freq 4 .*2"),
    ):
        with pytest.raises(UserError, match=said):
            run_folder.refuse_other_flags(tmp_path, {**same, name: values})
    with pytest.raises(UserError, match=r"--without dropout .*0\.3"):
        run_folder.refuse_other_flags(tmp_path, same, ["--dropout", "clip-norm"])


def test_the_best_of_a_run_is_chosen_by_one_metric(tmp_path):
    """A loss of 7 would be better than any BLEU of 6."""
    by_loss, by_bleu = {"lr": ["1"]}, {"lr": ["1"], "best-checkpoint-metric": ["bleu"]}
    (tmp_path / "run.json").write_text(json.dumps({"identity": {}, "starts": [{"flags": {"lr": "1"}}]}))
    run_folder.require_same_metric(tmp_path, by_bleu)  # nothing was saved yet
    made_checkpoint(tmp_path / "checkpoint1.pt", 10)
    run_folder.require_same_metric(tmp_path, by_loss)
    run_folder.require_same_metric(tmp_path, {**by_bleu, "reset-meters": []})
    with pytest.raises(UserError, match=r"loss.* bleu .*--reset-meters"):
        run_folder.require_same_metric(tmp_path, by_bleu)


def test_another_machine_does_not_stop_at_what_the_first_will_mend(tmp_path):
    assert run_folder.whole_last(tmp_path) is None
    path = made_checkpoint(tmp_path / "checkpoint_last.pt", 30)
    assert run_folder.updates(run_folder.whole_last(tmp_path)) == 30
    os.truncate(path, 100)
    assert run_folder.whole_last(tmp_path) is None


class Begun(Exception):
    """train.sh has become fairseq-train."""


def test_another_machine_starts_beside_a_torn_checkpoint(data, tmp_path, monkeypatch):
    """The first one mends it meanwhile."""
    monkeypatch.setattr(os, "execve", mock.Mock(side_effect=Begun))
    os.truncate(made_checkpoint(tmp_path / "checkpoint_last.pt", 30), 100)
    with pytest.raises(Begun):
        train.main([*map(str, command(data, tmp_path)), "--nodes", "2", "--node-rank", "1", "--master", "localhost"])
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint_last.pt"]


def test_weights_alone_are_not_gone_on_from(tmp_path, capsys):
    torch.save({"model": {"w": torch.ones(1)}}, tmp_path / "checkpoint5.pt")
    made_checkpoint(tmp_path / "checkpoint4.pt", 40)
    assert run_folder.updates(run_folder.mend(tmp_path)) == 40
    assert "checkpoint5.pt: has no optimizer state" in capsys.readouterr().err
    assert (tmp_path / "checkpoint5.pt").exists(), "it is whole, and may be scored"
    for name in ("checkpoint4.pt", "checkpoint_last.pt", "checkpoint_best.pt"):
        (tmp_path / name).unlink()
    with pytest.raises(UserError, match=f"{tmp_path}: .*none of its checkpoints; scripts/evaluate.sh can score"):
        run_folder.mend(tmp_path)


def test_a_checkpoint_that_is_not_allowed_is_no_damaged_one(tmp_path):
    """It may be a good one of another version: it is refused, runs nothing, and stays where it is."""
    trace = tmp_path / "trace"
    made_checkpoint(tmp_path / "checkpoint4.pt", 40)
    torch.save({"model": {}, "cfg": Payload(trace)}, tmp_path / "checkpoint_last.pt")
    content = (tmp_path / "checkpoint_last.pt").read_bytes()
    with pytest.raises(UserError, match=r"checkpoint_last\.pt: refused"):
        run_folder.mend(tmp_path)
    assert (tmp_path / "checkpoint_last.pt").read_bytes() == content
    assert not list(tmp_path.glob("*.damaged"))
    assert not trace.exists()


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EIO, "Input/output error"),
        MemoryError(),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"),
    ],
    ids=["disk", "memory", "PyTorch's memory"],
)
def test_a_checkpoint_that_the_machine_cannot_read_is_no_damaged_one(tmp_path, monkeypatch, error):
    """The next start may read it. A torn one beside it is set aside."""
    for number in (1, 2):
        made_checkpoint(tmp_path / f"checkpoint{number}.pt", 10 * number)
    os.truncate(made_checkpoint(tmp_path / "checkpoint3.pt", 30), 100)
    read = torch.load

    def unreadable(path, **options):
        if path.name == "checkpoint2.pt":
            raise error
        return read(path, **options)

    monkeypatch.setattr(torch, "load", unreadable)
    with pytest.raises(UserError, match=r"checkpoint2\.pt: could not be read \(.+\)"):
        run_folder.mend(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint1.pt", "checkpoint2.pt", "checkpoint3.pt.damaged"}


def test_a_folder_belongs_to_one_run(tmp_path, data):
    mine = {"recipe": "sample", "arch": "a", "data": "x", "seed": "1", "encoder-layers": "1"}
    run_folder.claim(tmp_path, {**mine, "arch": "mistyped"}, "", data)
    run_folder.claim(tmp_path, mine, "", data)  # nothing was saved yet
    made_checkpoint(tmp_path / "checkpoint1.pt", 10)
    run_folder.claim(tmp_path, {**mine, "encoder-layers": "01"}, "", data)  # the same number
    with pytest.raises(UserError, match=str(tmp_path)) as refusal:
        run_folder.claim(tmp_path, {**mine, "arch": "b", "ea-beta": "0.3"}, "", data)
    assert refusal.match(r"(?s)arch: .*a.*b\n.*ea-beta: .*0\.3")
    (tmp_path / "run.json").unlink()
    with pytest.raises(UserError, match=r"scripts/train\.sh"):
        run_folder.claim(tmp_path, mine, "", data)


def test_every_start_is_recorded_and_differences_are_printed(tmp_path, data, capsys):
    """The record says on which code and flags each part of a run was trained; starting afresh forgets the last try."""

    def start(lr, done, **more):
        command = f"train.sh a --lr {lr}"
        run_folder.claim(tmp_path, {"arch": "a"}, command, data)
        flags = {"user-dir": ["ea_fairseq"], "lr": [lr], "dropout": ["0"], "save-dir": ["x"], **more}
        run_folder.record_start(tmp_path, flags, launch.Launch(gpus=0), done, command)
        return json.loads((tmp_path / "run.json").read_text())

    start("0.1", 0)
    (first,) = start("0.2", 0)["starts"]  # the first saved nothing
    assert first["flags"] == {"lr": "0.2", "dropout": "0"}
    assert (first["processes"], first["updates"]) == (1, 0)
    assert len(first["commit"].split()[0]) == 40 and first["date"]
    assert first["device"].startswith("CPU, ")
    made_checkpoint(tmp_path / "checkpoint1.pt", 10)
    run_folder.settle_model(tmp_path)
    capsys.readouterr()
    record = start("0.3", 10, fp16=[], dropout=["0.0"])  # the same number
    assert not Run(tmp_path).has_model_recorded, "a kill before the end must not leave the first training's average"
    assert record["command"] == "train.sh a --lr 0.2", "the one that began the run"
    commands = {one["updates"]: one["command"] for one in record["starts"]}
    assert commands == {0: "train.sh a --lr 0.2", 10: "train.sh a --lr 0.3"}
    printed = capsys.readouterr().err
    assert "--lr is 0.3 from here on; it was 0.2 " in printed
    assert "--fp16 is given from here on; it was not given" in printed
    assert "dropout" not in printed


def test_a_run_whose_starts_were_not_recorded_goes_on(tmp_path, data):
    """Version 0.1.0 recorded none."""
    made_checkpoint(tmp_path / "checkpoint_last.pt", 10)
    (tmp_path / "run.json").write_text(json.dumps({"identity": {"arch": "a"}, "command": "c", "starts": []}))
    run_folder.claim(tmp_path, {"arch": "a"}, "now", data)
    run_folder.require_same_metric(tmp_path, {"best-checkpoint-metric": ["bleu"]})
    run_folder.refuse_other_flags(tmp_path, {"lr": ["1"]})
    run_folder.record_start(tmp_path, {"lr": ["1"]}, launch.Launch(gpus=0), 10, "now")
    (start,) = json.loads((tmp_path / "run.json").read_text())["starts"]
    assert (start["updates"], start["flags"]) == (10, {"lr": "1"})


def test_flags_of_the_model_are_part_of_a_runs_identity(data, tmp_path):
    words = ["sample", "ea_transformer_lite", "--data", data, "--run", tmp_path, "--gpus", 0]
    words += ["--ea-beta", 0.3, "--encoder-layers", 2, "--seed", 7, "--lr", 1, "--max-epoch", 9, "--no-scale-embedding"]
    args, flags = train.parse([*map(str, words)])
    identity = train.identity(train.plan(recipes.read("sample"), args, flags, launch.Launch(gpus=0)))
    model = {"recipe": "sample", "arch": "ea_transformer_lite", "ea-beta": "0.3", "encoder-layers": "2", "seed": "7"}
    model |= {"no-scale-embedding": "", "share-all-embeddings": "", "optimizer": "adam"}
    assert model.items() <= identity.items()
    assert identity["data"] == train.fingerprint(data)
    assert not {"lr", "max-epoch", "max-tokens", "save-dir", "cpu"} & identity.keys(), "these belong to the launch"


def test_two_at_once(tmp_path):
    """The lock outlives exec, which is how train.py becomes fairseq-train, and dies with the process."""
    holder = subprocess.Popen(
        [sys.executable, "-c", "import os, pathlib; from ea_tools.training import run_folder;"
         f"run_folder.take(pathlib.Path({str(tmp_path)!r}));"
         "os.execv('/bin/sh', ['sh', '-c', 'echo held; exec sleep 60'])"],
        stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match=f"{tmp_path}: .*--run"):
        run_folder.take(tmp_path)
    holder.kill()
    holder.wait()
    run_folder.take(tmp_path)


def contents(path):
    """Weights, optimizer and progress, which must be the same bit for bit."""
    state = load(path)
    history = state["optimizer_history"][-1]
    progress = [history["num_updates"], history["lr_scheduler_state"]["best"] or 0]
    return state["model"], state["last_optimizer_state"]["state"], progress


@pytest.mark.slow
def test_kills_change_nothing(data, tmp_path):
    # Wide enough that writing a checkpoint takes a moment in which one can be killed.
    size = ["--max-epoch", 5, "--save-interval-updates", 4, "--keep-interval-updates", 2, "--encoder-embed-dim", 256]
    size += ["--decoder-embed-dim", 256, "--num-workers", 0]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    done("training.train", *command(data, undisturbed, *size))

    rng, struck, went_on = random.Random(1), 0, 0
    for number in range(4):
        words = [*tool("training.train"), *map(str, command(data, killed, *size))]
        process = warm.Popen(words, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for line in process.stdout:
            went_on += b"goes on after" in line
            if b"Start iterating" in line:
                break
        # Every other one dies while a checkpoint is being written, the others after one.
        writing = number % 2
        awaited = "*.tmp" if writing else "checkpoint*.pt"
        while process.poll() is None and not list(killed.glob(awaited)):
            time.sleep(0.001)
        if not writing:
            time.sleep(rng.uniform(0, 1.2))
        process.send_signal(signal.SIGKILL)
        was_killed = process.wait() == -signal.SIGKILL
        with (killed / "lock").open("w") as lock:  # the training holds it until it is dead, a moment after its client
            fcntl.lockf(lock, fcntl.LOCK_EX)
        struck += was_killed and bool(list(killed.glob("*.tmp")))
        process.stdout.close()
    assert struck, "no kill came while a checkpoint was being written"
    assert went_on, "no kill came after a checkpoint"

    done("training.train", *command(data, killed, *size))
    for name in ("checkpoint_last.pt", "checkpoint_best.pt", "checkpoint5.pt"):
        torch.testing.assert_close(contents(killed / name), contents(undisturbed / name), rtol=0, atol=0, msg=name)
    assert not list(killed.glob("*.tmp"))
    assert sorted(p.name for p in killed.glob("*.pt")) == sorted(p.name for p in undisturbed.glob("*.pt"))

    again = script("training.train", *command(data, killed, *size))
    assert "this run is finished: --max-epoch is 5" in again.stderr
    assert again.returncode == 0


@pytest.mark.slow
def test_the_count_of_patience_survives_a_resume(data, tmp_path):
    """With a learning rate of 0 nothing ever improves: the second validation without is in epoch 3."""
    still = ["--lr", 0, "--patience", 2, "--num-workers", 0]
    done("training.train", *command(data, tmp_path, *still, "--max-epoch", 2))
    done("training.train", *command(data, tmp_path, *still, "--max-epoch", 9))
    state = load(tmp_path / "checkpoint_last.pt")
    assert state["extra_state"]["train_iterator"]["epoch"] == 4, "the next epoch would have been the fourth"
    assert state["extra_state"]["early_stopping"]["num_runs"] == 2
    again = script("training.train", *command(data, tmp_path, *still, "--max-epoch", 9))
    assert "2 validations without improvement, --patience is 2" in again.stderr

    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").open()]
    validated = [line["step"] for line in lines if line["tag"] == "valid"]
    assert validated == sorted(set(validated))
    assert {"train_inner", "train", "valid"} == {line["tag"] for line in lines}
    assert all("loss" in line for line in lines)
    assert "| valid | epoch 003 |" in (tmp_path / "train.log").read_text()


def test_own_data_get_a_run_like_any_other(data, tmp_path, monkeypatch):
    """Without a recipe the one that was made is kept; the run has its lock and its text's preparation."""
    monkeypatch.setattr(os, "execve", mock.Mock(side_effect=Begun))
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / "recipe.toml").write_text("of a training that ended before its first checkpoint")
    with pytest.raises(Begun):
        train.main([*map(str, ["--data", data, "ea_transformer_lite", "--run", tmp_path, *FLAGS])])
    kept = recipes.read(str(tmp_path / "recipe.toml"))
    assert (kept.data, kept.eval_bleu) == (data, True)  # small text is scored at validations
    assert {"lock", "prepared", "run.json"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.slow
def test_a_full_disk(data, tmp_path):
    """On a small tmpfs in a mount namespace: the run stops with a message, and earlier checkpoints are whole."""
    disk, saved = tmp_path / "disk", tmp_path / "saved"
    disk.mkdir()
    if subprocess.run(["unshare", "-rm", "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", disk]).returncode:
        pytest.skip("needs unshare and tmpfs")
    arguments = command(data, disk / "run", "--max-epoch", 5, "--num-workers", 0)
    inside = 'mount -t tmpfs -o size=1000k tmpfs "$1"; shift; "$@"; status=$?; cp -r "$DISK"/run "$SAVED"; exit $status'
    train_py = tool("training.train")
    result = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, "sh", disk, *train_py, *map(str, arguments)],
        env={**ENVIRONMENT, "DISK": str(disk), "SAVED": str(saved)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 1
    assert "could not write" in result.stdout
    assert "make room and run the same command again" in result.stdout
    whole = [path for path in saved.glob("*.pt") if run_folder.updates(load(path))]
    assert len(whole) >= 3, "each of them loads"
    assert not list(saved.glob("*.tmp"))
    # With room again, the same command goes on.
    shutil.move(saved, disk / "run")
    result = done("training.train", *arguments)
    assert "goes on after" in result.stderr


def test_batches_that_each_epoch_makes_anew_are_those_of_the_epoch(monkeypatch):
    """Only data that are loaded can tell, and the call that asks for batches loads them."""
    task = SimpleNamespace(datasets={}, has_sharded_data=lambda split: False, can_reuse_epoch_itr=lambda data: False)
    asked = []

    def batches(trainer, epoch, load_dataset):
        task.datasets["train"] = "loaded"
        asked.append((epoch, load_dataset))
        return [epoch]

    monkeypatch.setattr(Trainer, "get_train_iterator", batches)
    trainer = object.__new__(fairseq_train.LongRunTrainer)
    trainer.task, trainer._taken_up = task, None
    trainer.cfg = SimpleNamespace(dataset=SimpleNamespace(update_epoch_batch_itr=False, train_subset="train"))
    assert trainer.get_train_iterator(3, load_dataset=True) == [3]
    assert asked == [(1, True), (3, False)]
