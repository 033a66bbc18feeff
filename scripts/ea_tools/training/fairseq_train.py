"""fairseq-train with what long runs need; it takes fairseq-train's flags and one more, and scripts/train.sh calls it.

- the count of --patience survives a resume
- checkpoint_last.pt and checkpoint_best.pt are replaced in one step, so that no kill can leave half of one
- a full disk ends the run with a message, and leaves the earlier checkpoints as they are
- SAVE_DIR/train.log holds the screen, the command, the configuration, the model and the traceback of an error
- SAVE_DIR/log.jsonl holds the numbers for programs
- on a CPU, memory that a step frees is kept for the next one
- --bf16-products, before the data: the CPU's units for bfloat16 make float32 products
- one optimizer call for all parameters (ea_fairseq/optim.py), unless --use-old-adam asks for fairseq's own
- a line for each validation; on a terminal a bar besides, and nothing else; elsewhere progress lines come by the clock
- divergence, Ctrl-C and errors end in one sentence, success in a command
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shlex
import shutil
import sys
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from ea_artifacts.command import REPO, UserError, ignore_warnings

ignore_warnings()
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # of a package that is not needed here

import fairseq_cli.train as fairseq_train  # noqa: E402
import torch  # noqa: E402
from fairseq import checkpoint_utils, utils  # noqa: E402
from fairseq.data.iterators import EpochBatchIterating, EpochBatchIterator  # noqa: E402
from fairseq.file_io import PathManager  # noqa: E402
from fairseq.logging import metrics, progress_bar  # noqa: E402
from fairseq.trainer import Trainer  # noqa: E402
from omegaconf import DictConfig  # noqa: E402
from tqdm import tqdm  # noqa: E402

utils.import_user_module(Namespace(user_dir=str(REPO / "ea_fairseq")))  # here for the trainer; later calls do nothing
from ea_fairseq import optim  # noqa: E402
from ea_fairseq.trainer import FlatTrainer  # noqa: E402
from ea_tools.training import products  # noqa: E402
from ea_tools.training.memory import keep_freed_memory  # noqa: E402
from ea_tools.training.run_folder import next_command, settle_model, started  # noqa: E402

logger = logging.getLogger("train")
LOG_ALONE = {"log_alone": True}  # for train.log, and not for the screen
TERMINAL = {"terminal": True}  # for a terminal, too, which shows warnings and these alone


class LongRunTrainer(FlatTrainer):
    """fairseq's trainer, whose checkpoints also hold the state of early stopping."""

    OPTIMIZERS = ("adam", optim.NAME)

    def __init__(self, cfg: DictConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        self._batches_in_epoch = 0
        self._tried: set[str] = set()  # the validation sets of which one sentence was validated
        self._taken_up: dict[str, Any] | None = None  # place in the epoch of the checkpoint that is resumed
        if self.is_data_parallel_master:
            _log_to(Path(cfg.checkpoint.save_dir))
            Journal.progress = None
            if cfg.common.log_format == "simple":
                Journal.progress = Progress(self, _has_terminal(sys.argv))
                parameters = sum(parameter.numel() for parameter in self._model.parameters())
                what = f"{cfg.model._name}, {parameters:,} parameters"
                logger.info(f"training {what}; {cfg.checkpoint.save_dir}/train.log has the details", extra=TERMINAL)

    def get_train_iterator(self, epoch: int, *args: Any, **kwargs: Any) -> EpochBatchIterating:
        """An epoch's batches, the same ones whichever process makes them."""
        # fairseq groups sentences into batches once, by a seed made of the present epoch's number. A resumed run sees
        # the same batches only where it is always the first epoch's. --update-epoch-batch-itr, and some data, make
        # batches anew in each epoch.
        first_serve = self._first_may_serve()
        batches = super().get_train_iterator(1 if first_serve else epoch, *args, **kwargs)
        if epoch != 1 and first_serve and not self._first_may_serve():  # the data were loaded only now
            batches = super().get_train_iterator(epoch, *args, **{**kwargs, "load_dataset": False})
        self._batches_in_epoch = len(batches)
        if self._taken_up:
            fit_place(self._taken_up, self._batches_in_epoch)
            self._taken_up = None  # later epochs begin at their beginning
        return batches

    def get_valid_iterator(self, subset: str, *args: Any, **kwargs: Any) -> EpochBatchIterating:
        """A validation set's batches. fairseq asks for them before it trains: then one sentence is validated."""
        batches = super().get_valid_iterator(subset, *args, **kwargs)
        if subset not in self._tried:
            self._tried.add(subset)
            self._try_validation(subset, batches)
        return batches

    def _try_validation(self, subset: str, batches: EpochBatchIterating) -> None:
        """Validate one sentence: what fails here would fail after an epoch, and lose it.

        Raises:
            ValueError: there is no sentence, the model cannot validate it, or the metric that chooses the best
                checkpoint is not computed.
        """
        if type(batches) is not EpochBatchIterator:  # some tasks make other batches
            return
        if not batches.frozen_batches:
            raise ValueError(f"--valid-subset {subset}: has no sentence that the model can read")
        sentence = batches.dataset.collater([batches.dataset[batches.frozen_batches[0][0]]])
        before = logging.root.manager.disable
        logging.disable(logging.INFO)  # --eval-bleu shows the sentence
        try:
            with metrics.aggregate(new_root=True) as measured:
                self.valid_step(sentence)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise ValueError(f"nothing was trained, since the first validation step fails: {reason}") from error
        finally:
            logging.disable(before)
        metric, computed = self.cfg.checkpoint.best_checkpoint_metric, measured.get_smoothed_values()
        if subset == self.cfg.dataset.valid_subset.split(",")[0] and metric not in computed:
            raise ValueError(
                f"--best-checkpoint-metric {metric}: validation does not compute it; available: "
                f"{', '.join(computed)}; --eval-bleu adds bleu, and --report-accuracy accuracy"
            )

    def _first_may_serve(self) -> bool:
        """Whether the first epoch's batches serve all epochs; certain once the data are loaded."""
        if self.task.has_sharded_data("train") or self.cfg.dataset.update_epoch_batch_itr:
            return False
        data = self.task.datasets.get(self.cfg.dataset.train_subset)
        return data is None or self.task.can_reuse_epoch_itr(data)

    def state_dict(self) -> dict[str, Any]:
        """The content of a checkpoint."""
        state = super().state_dict()
        # Validation starts its metrics afresh; --eval-bleu's are NumPy arrays, which no safe torch.load takes.
        state["extra_state"]["metrics"].pop("valid", None)
        return state

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> Any:
        """Save with the state of early stopping; a full disk ends the run with a message, and so does divergence."""
        if Path(filename).name == "crash.pt":  # of a step that failed, by this error
            error = sys.exc_info()[1]
            if isinstance(error, FloatingPointError):  # gradients are no numbers, which no later update can mend
                done, lr = self.get_num_updates(), self.get_lr()
                logger.critical(
                    f"training has diverged after {done:,} updates, with a learning rate of {lr:g}: {error}\nThe "
                    "checkpoints that there are stay as they are. Start a new run with a lower --lr, more "
                    "--warmup-updates or a --clip-norm."
                )
                sys.exit(1)
            return None  # fairseq raises the error next
        # Plain numbers: torch.load(weights_only=True) takes no others.
        stopping = {name: float(value) for name, value in vars(fairseq_train.should_stop_early).items()}
        place = {**extra_state["train_iterator"], "batches_in_epoch": self._batches_in_epoch}
        with _room_on_disk(Path(filename)):
            extra_state = {**extra_state, "early_stopping": stopping, "train_iterator": place}
            return super().save_checkpoint(filename, extra_state)

    def load_checkpoint(self, *args: Any, reset_meters: bool = False, **kwargs: Any) -> dict[str, Any] | None:
        """Load, and take early stopping up where it was."""
        extra_state = super().load_checkpoint(*args, reset_meters=reset_meters, **kwargs)
        stopping = (extra_state or {}).get("early_stopping", {})
        if not reset_meters:
            vars(fairseq_train.should_stop_early).update(stopping)
        asked_for = self.cfg.checkpoint
        anew = asked_for.reset_dataloader or (reset_meters and not asked_for.reset_meters)  # for --finetune-from-model
        self._taken_up = None if anew else (extra_state or {}).get("train_iterator")
        return extra_state


def fit_place(place: dict[str, Any], batches: int) -> None:
    """Let a place in an epoch be the same share of it where batches are of another size than when it was written.

    Args:
        place: what fairseq keeps of an epoch's iterator, with ``batches_in_epoch`` besides; it is changed.
        batches: how many there are in an epoch now, for each process.
    """
    done, before = place.get("iterations_in_epoch", 0), place.get("batches_in_epoch")
    if not done or before == batches or (before is None and done < batches):
        return
    place["iterations_in_epoch"] = min(done * batches // before, batches - 1) if before else 0
    logger.info(
        f"the epoch goes on after batch {place['iterations_in_epoch']:,} of {batches:,}: the checkpoint was made after "
        f"batch {done:,}{f' of {before:,}' if before else ''}, when batches were of another size"
    )


class Progress:
    """Reports on a training: a line for each validation, and between them a bar or, by the clock, lines.

    Lines come every ten seconds in the first two minutes, then ever more rarely.
    """

    def __init__(self, trainer: Trainer, has_bar: bool) -> None:
        self._trainer, self._limits = trainer, trainer.cfg.optimization
        self._began = self._logged = time.monotonic()
        self._at_start: int | None = None  # updates
        self._left: float = math.inf  # updates
        self._epoch = ""
        form = "{desc}: {percentage:3.0f}%|{bar}| {n:,} of {total:,} updates [{elapsed}<{remaining}{postfix}]"
        self._bar = tqdm(bar_format=form, leave=False, dynamic_ncols=True, disable=not has_bar, delay=1e-9)

    def reached(self, epoch: int, batch: int, batches: int) -> None:
        """`batch` of `batches` in this epoch are done: move the bar; log a line where it is time for one."""
        done, most, now = self._trainer.get_num_updates(), self._limits.max_epoch, time.monotonic()
        if self._at_start is None:
            self._at_start = self._bar.initial = self._bar.n = done
            self._began = now
        self._epoch = f"epoch {epoch}" + (f" of at most {most}" if most else "")
        of_epochs = batches - batch + (most - epoch) * batches if most else math.inf
        of_updates = self._limits.max_update - done if self._limits.max_update else math.inf
        self._left = min(of_epochs, of_updates)
        # With --patience alone the end is unknown: the bar shows the epoch.
        self._bar.total = done + int(self._left if self._left < math.inf else batches - batch)
        self._bar.set_description_str(self._epoch, refresh=False)
        self._bar.update(done - self._bar.n)
        if not batch or now - self._logged < min(600, max(10, (now - self._began) / 12)):
            return
        self._logged = now
        line = f"epoch {epoch}, batch {batch:,} of {batches:,}, update {done:,}"
        if self._limits.max_update:
            line += f" of {self._limits.max_update:,}"
        if measured := self._measured("loss"):
            line += f": {measured}"
            self._bar.set_postfix_str(measured, refresh=False)
        logger.info(line)

    def _measured(self, loss: str) -> str:
        values = metrics.get_smoothed_values("train")
        if not {"loss", "wps"} <= values.keys():
            return ""
        return f"{loss} {float(values['loss']):.3f}, {float(values['wps']):,.0f} tokens a second"

    def validating(self, batch: int, batches: int) -> None:
        """Show on the bar how many batches are validated."""
        self._bar.set_postfix_str(f"validation {batch:,} of {batches:,}")

    def after_a_validation(self, subset: str, stats: Mapping[str, Any]) -> None:
        """Log the line of a validation."""
        values = {name: _number(progress_bar.format_stat(value)) for name, value in stats.items()}
        now = self._trainer.get_num_updates()
        said = [f"{self._epoch}, {now:,} updates: {subset} loss {values['loss']:.3f}"]
        said += [f"BLEU {values['bleu']:.2f}"] if "bleu" in values else []
        said += [self._measured("training loss")]
        if 0 < self._left < math.inf and now > self._at_start:
            pace = (time.monotonic() - self._began) / (now - self._at_start)
            said.append(f"{'at most ' * bool(self._limits.max_epoch)}{tqdm.format_interval(pace * self._left)} left")
        self._bar.set_postfix_str("", refresh=False)
        logger.info(", ".join(filter(None, said)), extra=TERMINAL)

    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


def copy_in_one_step(source: str, target: str, overwrite: bool = False) -> bool:
    """Copy a checkpoint so that `target` is at any moment its old self or its new one."""
    temporary = Path(f"{target}.tmp")
    with _room_on_disk(Path(target)):
        shutil.copyfile(source, temporary)
        temporary.replace(target)
    return True


@contextlib.contextmanager
def _room_on_disk(path: Path) -> Iterator[None]:
    """Turn a failed write into a message and a clean exit; the half-written temporary file goes away."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        Path(f"{path}.tmp").unlink(missing_ok=True)
        free = shutil.disk_usage(path.parent).free / 2**20
        logger.critical(
            f"could not write {path}: {error}. {free:,.0f} MiB are free there. The earlier checkpoints are as they "
            "were: make room and run the same command again, it goes on from the last of them."
        )
        sys.exit(1)


class Journal(progress_bar.BaseProgressBar):
    """A progress bar that also writes its numbers as lines of JSON."""

    file: IO[str] | None = None  # SAVE_DIR/log.jsonl, in the one process that writes it
    progress: Progress | None = None  # in the same process

    def __init__(self, bar: progress_bar.BaseProgressBar, batches: Any, epoch: int | None, training: bool) -> None:
        self.bar, self.batches, self.epoch, self.training = bar, batches, epoch or 0, training

    def __iter__(self) -> Iterator[Any]:
        first, batches = getattr(self.batches, "n", 0), len(self.batches)
        self._reached(first, batches)
        for done, batch in enumerate(self.bar, first + 1):
            yield batch
            self._reached(done, batches)

    def _reached(self, done: int, batches: int) -> None:
        if self.progress and self.training:
            self.progress.reached(self.epoch, done, batches)
        elif self.progress:
            self.progress.validating(done, batches)

    def log(self, stats: Mapping[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """Log in the middle of an epoch."""
        self._write(stats, tag, step)
        self.bar.log(stats, tag=tag, step=step)

    def print(self, stats: Mapping[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """Print at the end of an epoch, and of a validation."""
        self._write(stats, tag, step)
        self.bar.print(stats, tag=tag, step=step)
        if self.progress and not self.training:
            self.progress.after_a_validation(tag or "", stats)

    def update_config(self, config: Mapping[str, Any]) -> None:
        """For loggers that show the configuration."""
        self.bar.update_config(config)

    def _write(self, stats: Mapping[str, Any], tag: str | None, step: int | None) -> None:
        if self.file:
            numbers = {name: _number(progress_bar.format_stat(value)) for name, value in stats.items()}
            print(json.dumps({"time": round(time.time(), 3), "tag": tag, "step": step, **numbers}), file=self.file)


def _number(text: Any) -> Any:
    with contextlib.suppress(TypeError, ValueError):
        return float(text)
    return text


def _warning_to_log(message: Warning | str, category: type[Warning], *place: Any) -> None:
    logger.info(f"{category.__name__}: {message}", extra=LOG_ALONE)


def _log_to(folder: Path) -> None:
    """Both logs go on where an earlier process of the same run stopped."""
    if Journal.file:
        return
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)
    warnings.showwarning = _warning_to_log  # type: ignore[assignment]  # its last arguments are not needed
    Journal.file = (folder / "log.jsonl").open("a", buffering=1, encoding="utf-8")


_configuration = fairseq_train.convert_namespace_to_omegaconf
_progress_bar = progress_bar.progress_bar


def _configuration_without_tpu(args: Namespace) -> DictConfig:
    """fairseq takes --bf16 for a TPU and ends where there is none, whatever the model; GPUs compute in bf16, too."""
    if args.bf16 and find_spec("torch_xla") is None:
        args.tpu = False
    return _configuration(args)


def _journal(batches: Any, *, epoch: int | None = None, prefix: str | None = None, **kwargs: Any) -> Journal:
    """fairseq's progress bar, of which those for validation have a prefix, with a journal."""
    return Journal(_progress_bar(batches, epoch=epoch, prefix=prefix, **kwargs), batches, epoch, prefix is None)


def _for_the_screen(record: logging.LogRecord) -> bool:
    """Whether a message is short enough for the screen: fairseq logs its configuration and the model as objects."""
    return isinstance(record.msg, str) and not hasattr(record, "log_alone")


def _has_terminal(words: list[str]) -> bool:
    """Whether people watch, who have not asked for another form of the log."""
    return sys.stdout.isatty() and sys.stderr.isatty() and _value(words, "--log-format", "") == "simple"


class Terminal(logging.StreamHandler):
    """The screen where people watch: messages stand above the bar. train.log has all of them."""

    #: beginnings of fairseq's messages about the end of a training
    ENDS = ("early stop", "stopping training", "Stopping training")

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a message is a warning, of ours, about evolving attention or about the training's end."""
        ours = hasattr(record, "terminal") or record.name.startswith("ea_fairseq")
        return record.levelno >= logging.WARNING or ours or str(record.msg).startswith(self.ENDS)

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message alone."""
        tqdm.write(record.getMessage(), file=self.stream)


#: This file's parts, and their places in fairseq: owner, name, part.
CHANGES: tuple[tuple[Any, str, Any], ...] = (
    (fairseq_train, "Trainer", LongRunTrainer),
    (fairseq_train, "convert_namespace_to_omegaconf", _configuration_without_tpu),
    (PathManager, "copy", staticmethod(copy_in_one_step)),
    (progress_bar, "progress_bar", _journal),
    # fairseq tries a failed write twice more, in the same open file: behind the first half of the checkpoint.
    (checkpoint_utils, "_torch_persistent_save", torch.save),
)


def _change_fairseq() -> None:
    """Put this file's parts in the place of fairseq's, in this process."""
    for change in CHANGES:
        setattr(*change)
    if _has_terminal(sys.argv):
        logging.getLogger().handlers[:] = [Terminal(sys.stdout)]
    for screen in logging.getLogger().handlers:
        screen.addFilter(_for_the_screen)


def _value(words: list[str], flag: str, default: str) -> str:
    return words[words.index(flag) + 1] if flag in words[:-1] else default


def main(words: list[str]) -> None:
    """fairseq-train; it ends in a sentence on the screen, and at length in train.log."""
    if words[:1] == [f"--{products.FLAG}"]:
        products.use_bf16_products()
        words = sys.argv[1:] = words[1:]  # fairseq reads them there
    if "--cpu" in words:
        keep_freed_memory()
    folder = Path(_value(words, "--save-dir", "checkpoints"))
    if _value(words, "--distributed-rank", os.environ.get("RANK", "0")) == "0" and folder.is_dir():
        _log_to(folder)
        logger.info("+ " + shlex.join(sys.orig_argv), extra=LOG_ALONE)
    journal = folder / "log.jsonl"
    written = journal.stat().st_size if Journal.file else 0
    try:
        try:
            fairseq_train.cli_main()
        finally:
            if Journal.progress:
                Journal.progress.close()
    except KeyboardInterrupt:
        print("\ntrain: interrupted; run the same command again, it goes on from the last checkpoint", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        logger.error("this ended the training:", exc_info=True, extra=LOG_ALONE)
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # torch.multiprocessing gives the whole traceback of another process; the error is its last line.
        of_another = type(error).__name__ == "ProcessRaisedException"
        said = next(reversed(lines) if of_another else iter(lines), "")
        print(f"train: {type(error).__name__}: {said}; the whole of it is in {folder / 'train.log'}", file=sys.stderr)
        sys.exit(1)
    if Journal.file and journal.stat().st_size == written:
        print(f"train: nothing was trained; {folder / 'train.log'} says why", file=sys.stderr)
        sys.exit(1)
    if Journal.file and (folder / "run.json").exists() and started(folder):  # scripts/train.sh's, without --no-save
        try:
            logger.info(f"the model of {folder} is {settle_model(folder).name}", extra=TERMINAL)
        except (UserError, OSError) as error:
            logger.warning(f"{folder} has no average of its last checkpoints: {error}")
        logger.info(f"next: {next_command(Path(words[0]), folder)}", extra=TERMINAL)


if __name__ in ("__main__", "__mp_main__"):  # the latter in the processes that fairseq starts for several GPUs
    _change_fairseq()
if __name__ == "__main__":
    main(sys.argv[1:])
