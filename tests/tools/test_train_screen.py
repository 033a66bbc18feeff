"""A training's screen: a line by time, one sentence at a bad end; train.log has the rest. And its memory, on a CPU."""

import logging
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.data import IdDataset
from fairseq.data.iterators import EpochBatchIterator
from helpers.models import model_args
from helpers.toy import ENVIRONMENT, TINY, script

from ea_artifacts.command import REPO
from ea_tools.training import fairseq_train, products, run_folder


@pytest.fixture
def watched(monkeypatch, caplog):
    """A training of at most 3 epochs of 100 updates, or 201 updates: its clock, and what is shown of it."""
    clock, trainer = SimpleNamespace(now=100.0), SimpleNamespace(updates=0)
    clock.monotonic, trainer.get_num_updates = lambda: clock.now, lambda: trainer.updates
    trainer.cfg = SimpleNamespace(optimization=SimpleNamespace(max_update=201, max_epoch=3))
    monkeypatch.setattr(fairseq_train, "time", clock)
    values = {"loss": torch.tensor(5.25), "wps": 1234.5}
    monkeypatch.setattr(fairseq_train.metrics, "get_smoothed_values", lambda name: values)
    caplog.set_level(logging.INFO, "train")
    shown = fairseq_train.Progress(trainer, has_bar=True)

    def steps(number, seconds):
        for _ in range(number):
            epoch, batch = trainer.updates // 100 + 1, trainer.updates % 100 + 1
            shown.reached(epoch, batch - 1, 100)
            clock.now += seconds
            trainer.updates += 1
            shown.reached(epoch, batch, 100)

    yield SimpleNamespace(clock=clock, trainer=trainer, shown=shown, steps=steps)
    shown.close()


def test_a_line_comes_by_time_at_first_often_then_rarely(watched, caplog):
    watched.steps(60, 1)
    assert len(caplog.records) == 6, "one in ten seconds, however short or long the steps are"
    first = caplog.records[0].getMessage()
    assert first == "epoch 1, batch 10 of 100, update 10 of 201: loss 5.250, 1,234 tokens a second"
    caplog.clear()
    watched.clock.now += 3600
    watched.steps(60, 10)
    assert 1 <= len(caplog.records) <= 4, "after an hour one in five minutes"
    assert not any(map(fairseq_train.Terminal().filter, caplog.records)), "a terminal has the bar"


def test_a_validation_is_one_line_with_the_time_left(watched, caplog):
    def line(subset="valid", **stats):
        caplog.clear()
        watched.shown.after_a_validation(subset, {"loss": torch.tensor(4.0), **stats})
        (record,) = caplog.records
        assert fairseq_train.Terminal().filter(record)
        return record.getMessage()

    watched.steps(120, 2)
    speed = "training loss 5.250, 1,234 tokens a second"
    assert line() == f"epoch 2 of at most 3, 120 updates: valid loss 4.000, {speed}, at most 02:42 left"
    assert line("law", bleu=23.456).startswith("epoch 2 of at most 3, 120 updates: law loss 4.000, BLEU 23.46, ")
    limits = watched.trainer.cfg.optimization
    limits.max_update = 0
    watched.steps(1, 2)
    assert line().endswith("at most 05:58 left"), "by epochs"
    limits.max_epoch, limits.max_update = 0, 201
    watched.steps(1, 2)
    assert line() == f"epoch 2, 122 updates: valid loss 4.000, {speed}, 02:38 left"
    limits.max_update = 0
    watched.steps(1, 2)
    assert line() == f"epoch 2, 123 updates: valid loss 4.000, {speed}", "--patience may end it at any time"


def test_the_bar_is_that_of_the_whole_training(watched, capsys):
    watched.trainer.updates = 50  # of a run that goes on
    watched.steps(10, 1)
    bar = watched.shown._bar
    assert (bar.initial, bar.n, bar.total) == (50, 60, 201)
    assert "epoch 1 of at most 3:  30%|" in str(bar) and "| 60 of 201 updates [" in str(bar)
    watched.shown.validating(2, 7)
    assert "validation 2 of 7" in str(bar)


@pytest.mark.parametrize(
    ("logger", "level", "message", "extra", "shown"),
    [
        ("fairseq.trainer", "INFO", "begin training epoch 1", {}, False),
        ("fairseq_cli.train", "INFO", "early stop since valid performance ...", {}, True),
        ("fairseq.trainer", "WARNING", "overflow", {}, True),
        ("ea_fairseq.from_plain", "INFO", "These parameters start fresh", {}, True),
        ("train", "INFO", "next: scripts/evaluate.sh", fairseq_train.TERMINAL, True),
        ("train", "INFO", "the command", fairseq_train.LOG_ALONE, False),
    ],
)
def test_a_terminal_shows_warnings_and_what_is_meant_for_it(logger, level, message, extra, shown, capsys):
    number = getattr(logging, level)
    record = logging.getLogger(logger).makeRecord(logger, number, "", 0, message, (), None, extra=extra)
    fairseq_train.Terminal(sys.stdout).handle(record)
    assert capsys.readouterr().out == f"{message}\n" * shown


def test_people_watch_a_terminal_and_may_ask_for_another_log(monkeypatch):
    has_terminal, words = fairseq_train._has_terminal, ["x.py", "--log-format", "simple"]
    assert not has_terminal(words)
    for stream in (sys.stdout, sys.stderr):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert has_terminal(words)
    assert not has_terminal([*words[:2], "json"])
    assert not has_terminal(words[:1])


def test_another_error_in_a_step_is_no_divergence(tmp_path, caplog):
    """fairseq saves crash.pt then, too, and raises the error, which the user must see."""
    try:
        raise PermissionError("a kernel cannot be compiled")
    except PermissionError:
        fairseq_train.LongRunTrainer.save_checkpoint(None, str(tmp_path / "crash.pt"), {})
    assert not caplog.records
    assert not list(tmp_path.iterdir())


def test_bf16_needs_no_tpu():
    args = model_args("transformer", "--bf16", "--save-dir", "none")
    assert fairseq_train._configuration(args).common.tpu
    assert not fairseq_train._configuration_without_tpu(args).common.tpu


def test_a_checkpoint_is_copied_in_one_step(tmp_path, monkeypatch, caplog):
    """A link's target is another checkpoint, and stays; a copy that fails half-way leaves the one before."""
    for number in (1, 2):
        (tmp_path / f"checkpoint{number}.pt").write_text(f"contents {number}")
    best, source = tmp_path / "checkpoint_best.pt", str(tmp_path / "checkpoint2.pt")
    best.symlink_to("checkpoint1.pt")
    assert fairseq_train.copy_in_one_step(source, str(best), overwrite=True)
    assert (best.read_text(), best.is_symlink()) == ("contents 2", False)
    assert (tmp_path / "checkpoint1.pt").read_text() == "contents 1"

    def full_disk(source, target):
        Path(target).write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(fairseq_train.shutil, "copyfile", full_disk)
    with pytest.raises(SystemExit):
        fairseq_train.copy_in_one_step(source, str(best), overwrite=True)
    assert best.read_text() == "contents 2"
    assert len(list(tmp_path.iterdir())) == 3
    assert "could not write" in caplog.text


def test_a_write_that_fails_once_leaves_no_torn_checkpoint(tmp_path, monkeypatch):
    """fairseq would write again behind the first half, and say that it had saved."""
    for change in fairseq_train.CHANGES:
        monkeypatch.setattr(*change)
    failed = []
    with (tmp_path / "checkpoint1.pt.tmp").open("wb") as file:

        def write(block):
            if not failed and file.tell() > 100:
                failed.append(True)
                raise OSError(28, "No space left on device")
            return file.write(block)

        stream = SimpleNamespace(write=write, flush=file.flush)
        with pytest.raises((OSError, RuntimeError)):
            checkpoint_utils._torch_persistent_save({"model": torch.zeros(100)}, stream)
    assert failed


@pytest.fixture
def trainer(monkeypatch):
    """A trainer whose base, fairseq's, saves and loads `trainer.state`."""
    found = object.__new__(fairseq_train.LongRunTrainer)
    found.cfg = SimpleNamespace(checkpoint=SimpleNamespace(reset_dataloader=False, reset_meters=False))
    found.state = {"extra_state": {"metrics": {"train": [1], "valid": [2]}}}
    monkeypatch.setattr(fairseq_train.Trainer, "state_dict", lambda self: self.state)
    monkeypatch.setattr(fairseq_train.Trainer, "load_checkpoint", lambda self, *_, **__: self.state["extra_state"])
    return found


@pytest.mark.parametrize(
    ("reset", "asked_for", "stopping", "place"),
    [(False, False, True, True), (True, False, False, False), (True, True, False, True)],
    ids=["resumed", "--finetune-from-model", "--reset-meters"],
)
def test_a_run_from_anothers_checkpoint_begins_afresh(trainer, monkeypatch, reset, asked_for, stopping, place):
    """fairseq resets everything for --finetune-from-model, and says so by reset_meters alone.

    It is not stopped by the other run's losses, and begins with a whole epoch.
    """
    state = {"early_stopping": {"best": 5.0, "num_runs": 3.0}, "train_iterator": {"iterations_in_epoch": 2}}
    monkeypatch.setattr(fairseq_train.fairseq_train, "should_stop_early", lambda: None)
    trainer._taken_up, trainer.cfg.checkpoint.reset_meters = None, asked_for
    trainer.state["extra_state"] |= state
    trainer.load_checkpoint("checkpoint_last.pt", reset_meters=reset)
    assert vars(fairseq_train.fairseq_train.should_stop_early) == (state["early_stopping"] if stopping else {})
    assert trainer._taken_up == (state["train_iterator"] if place else None)


def test_what_a_validation_measured_is_in_no_checkpoint(trainer):
    """With --eval-bleu these are arrays, which nothing can read that takes weights and settings alone."""
    assert trainer.state_dict()["extra_state"]["metrics"] == {"train": [1]}


@pytest.fixture
def validating(trainer, monkeypatch):
    """That trainer, and what it validates of the batches [3, 1], [2] of sentences; it measures a loss."""
    trainer.cfg.dataset = SimpleNamespace(valid_subset="valid,law")
    trainer.cfg.checkpoint.best_checkpoint_metric = "loss"
    trainer.batches, trainer.validated, trainer._tried = [[3, 1], [2]], [], set()
    base = fairseq_train.Trainer
    made = lambda self, _: EpochBatchIterator(IdDataset(), lambda samples: samples, self.batches)  # noqa: E731
    monkeypatch.setattr(base, "get_valid_iterator", made)

    def valid_step(self, sample):
        self.validated += sample.tolist()
        fairseq_train.metrics.log_scalar("loss", 1.0)

    monkeypatch.setattr(base, "valid_step", valid_step)
    return trainer


def test_one_sentence_of_each_validation_set_is_tried_before_training(validating):
    for _ in range(2):
        for subset in ("valid", "law"):
            assert len(validating.get_valid_iterator(subset)) == 2
    assert validating.validated == [3, 3]


def test_what_would_fail_after_an_epoch_fails_before_it(validating, monkeypatch):
    validating.cfg.checkpoint.best_checkpoint_metric = "bleu"
    with pytest.raises(ValueError, match=r"--best-checkpoint-metric bleu: .* loss; --eval-bleu"):
        validating.get_valid_iterator("valid")
    validating.get_valid_iterator("law")  # which chooses no checkpoint
    validating.batches, validating._tried = [], set()
    with pytest.raises(ValueError, match="--valid-subset valid: "):
        validating.get_valid_iterator("valid")

    def no_translation(self, sample):
        raise TypeError("forward() takes one argument")

    validating.batches, validating._tried = [[0]], set()
    monkeypatch.setattr(fairseq_train.Trainer, "valid_step", no_translation)
    with pytest.raises(ValueError, match=r"TypeError: forward\(\) takes one argument"):
        validating.get_valid_iterator("valid")


@pytest.fixture
def logged(tmp_path, caplog, monkeypatch):
    """A run's folder; its logs are closed again. fairseq-train logs from INFO on, pytest from WARNING."""
    monkeypatch.setattr(fairseq_train.Journal, "file", None)  # as in a new process
    caplog.set_level(logging.INFO)
    handlers, show = list(logging.getLogger().handlers), fairseq_train.warnings.showwarning
    yield tmp_path
    fairseq_train.warnings.showwarning = show
    for handler in set(logging.getLogger().handlers) - set(handlers):
        logging.getLogger().removeHandler(handler)
        handler.close()
    if fairseq_train.Journal.file:
        fairseq_train.Journal.file.close()


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (KeyboardInterrupt(), 130, "train: interrupted; run the same command again"),
        (RuntimeError("no such thing\nmore of it"), 1, "train: RuntimeError: no such thing; the whole of it is in {}"),
        (None, 1, "train: nothing was trained; {} says why\n"),
    ],
    ids=["Ctrl-C", "an error", "nothing trained"],
)
def test_a_bad_end_is_one_line_and_the_log_has_the_rest(logged, monkeypatch, capsys, error, status, said):
    """fairseq ends with status 0, for example where --write-checkpoints-asynchronously lacks its package."""
    train = lambda: fairseq_train.Journal([], [], 1, True)._write({"loss": 1}, "train", 1)  # noqa: E731
    monkeypatch.setattr(fairseq_train.fairseq_train, "cli_main", train)
    fairseq_train.main(["data/x", "--save-dir", str(logged)])
    monkeypatch.setattr(fairseq_train.fairseq_train, "cli_main", mock.Mock(side_effect=error))
    with pytest.raises(SystemExit) as end:
        fairseq_train.main(["data/x", "--save-dir", str(logged)])
    assert end.value.code == status
    assert capsys.readouterr().err.lstrip().startswith(said.format(logged / "train.log"))
    log = (logged / "train.log").read_text()
    assert "+ " in log, "the command"
    assert ("Traceback" in log) == ("more of it" in log) == isinstance(error, RuntimeError)


def test_products_of_bfloat16_and_memory_are_set_before_fairseq_starts(logged, monkeypatch):
    """And fairseq, which does not know the flag, does not see it."""
    matmul, words = torch.backends.mkldnn.matmul, ["data/x", "--cpu", "--save-dir", str(logged / "none")]
    found, kept = [], []
    cli_main = lambda: found.append((sys.argv[1:], matmul.fp32_precision))  # noqa: E731
    products.use_bf16_products(False)
    monkeypatch.setattr(fairseq_train, "keep_freed_memory", lambda: kept.append(len(found)))
    monkeypatch.setattr(fairseq_train.fairseq_train, "cli_main", cli_main)
    try:
        for before in ([], ["--bf16-products"]):
            monkeypatch.setattr(sys, "argv", ["fairseq_train.py", *before, *words])
            fairseq_train.main(sys.argv[1:])
    finally:
        products.use_bf16_products(False)
    assert found == [(words, "ieee"), (words, "bf16")]
    assert kept == [0, 1]


def test_what_to_type_next(tmp_path, monkeypatch):
    """The command runs where it is typed, and on what there is."""
    monkeypatch.chdir(REPO)
    command = f"scripts/evaluate.sh --data data/x --run {tmp_path} --subset valid"
    assert run_folder.next_command(REPO / "data/x", tmp_path) == command
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "test.de").touch()
    monkeypatch.chdir(tmp_path.parent)
    here, elsewhere = Path(tmp_path.name), f"{REPO}/scripts/evaluate.sh --data {tmp_path} --run {tmp_path}"
    assert run_folder.next_command(here, here) == elsewhere


@pytest.mark.slow
def test_a_run_that_diverges(data, tmp_path):
    size = [*TINY, "--max-tokens", 250, "--update-freq", 1, "--no-tensorboard", "--gpus", 0, "--num-workers", 0]
    flags = ["--data", data, "--run", tmp_path / "run", *size, "--lr", "1e6", "--warmup-updates", 1]
    result = script("training.train", "sample", "ea_transformer_lite", *flags)
    assert result.returncode == 1
    assert re.search(r"diverged after \d updates, with a learning rate of ", result.stdout)
    assert "with a lower --lr" in result.stdout
    assert "Traceback" not in result.stdout + result.stderr
    assert "'_name'" not in result.stdout, "fairseq's configuration"
    assert "'_name'" in (tmp_path / "run" / "train.log").read_text()
    assert not (tmp_path / "run" / "crash.pt").exists()


BLOCKS = """
import resource
from ea_tools.training.memory import keep_freed_memory
assert keep_freed_memory()
for _ in range(2):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * (2100 << 20)
    del block
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif("glibc" not in platform.libc_ver(), reason="other C libraries have no mallopt")
def test_a_freed_block_is_used_again():
    """Also one that is larger than mallopt's largest number; else the system has to give its pages anew."""
    given = {name: value for name, value in ENVIRONMENT.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", BLOCKS], env=given, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100
