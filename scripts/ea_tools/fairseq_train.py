"""fairseq-train with what long runs need; it takes fairseq-train's flags, and scripts/train.sh calls it.

- the count of --patience survives a resume
- checkpoint_last.pt and checkpoint_best.pt are replaced in one step, so that no kill can leave half of one
- a full disk ends the run with a message, the earlier checkpoints untouched
- SAVE_DIR/train.log holds what is on the screen, SAVE_DIR/log.jsonl the same numbers for programs
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Deprecations inside fairseq and hydra, which nobody who trains can do anything about.
warnings.filterwarnings("ignore", category=UserWarning, module=r"hydra|fairseq")
warnings.filterwarnings("ignore", category=FutureWarning, module="fairseq")
warnings.filterwarnings("ignore", message=r"\n'config' is validated|'pin_memory' argument")

logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # of a package that nobody needs here

import fairseq_cli.train as fairseq_train  # noqa: E402
from fairseq.data.iterators import EpochBatchIterating  # noqa: E402
from fairseq.file_io import PathManager  # noqa: E402
from fairseq.logging import progress_bar  # noqa: E402
from fairseq.trainer import Trainer  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

logger = logging.getLogger("train")


class LongRunTrainer(Trainer):
    """fairseq's trainer, whose checkpoints also hold the state of early stopping."""

    def __init__(self, cfg: DictConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(cfg, *args, **kwargs)
        if self.is_data_parallel_master:
            _log_to(Path(cfg.checkpoint.save_dir))

    def get_train_iterator(self, epoch: int, *args: Any, **kwargs: Any) -> EpochBatchIterating:
        """An epoch's batches, the same ones whichever process makes them."""
        # fairseq groups sentences into batches once, by a seed that depends on the epoch in which it does: the first,
        # or the one in which a run is taken up again. Always as in the first, a resumed run sees the same batches.
        return super().get_train_iterator(epoch if self.task.has_sharded_data("train") else 1, *args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """What goes into a checkpoint."""
        state = super().state_dict()
        # Validation starts its metrics afresh; --eval-bleu's are NumPy arrays, which no safe torch.load takes.
        state["extra_state"]["metrics"].pop("valid", None)
        return state

    def save_checkpoint(self, filename: str, extra_state: dict[str, Any]) -> Any:
        """Save with the state of early stopping; a full disk ends the run with a message."""
        # Plain numbers: torch.load(weights_only=True) takes no others.
        stopping = {name: float(value) for name, value in vars(fairseq_train.should_stop_early).items()}
        with _room_on_disk(Path(filename)):
            return super().save_checkpoint(filename, {**extra_state, "early_stopping": stopping})

    def load_checkpoint(self, *args: Any, reset_meters: bool = False, **kwargs: Any) -> dict[str, Any] | None:
        """Load, and take early stopping up where it was."""
        extra_state = super().load_checkpoint(*args, reset_meters=reset_meters, **kwargs)
        stopping = (extra_state or {}).get("early_stopping", {})
        if not reset_meters:
            vars(fairseq_train.should_stop_early).update(stopping)
        return extra_state


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
    """A progress bar that also writes what it shows as lines of JSON."""

    file = None  # SAVE_DIR/log.jsonl, in the one process that writes it

    def __init__(self, bar: progress_bar.BaseProgressBar) -> None:
        self.bar = bar

    def __iter__(self) -> Iterator[Any]:
        return iter(self.bar)

    def log(self, stats: Mapping[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """What fairseq logs in the middle of an epoch."""
        self._write(stats, tag, step)
        self.bar.log(stats, tag=tag, step=step)

    def print(self, stats: Mapping[str, Any], tag: str | None = None, step: int | None = None) -> None:
        """What fairseq prints at the end of an epoch and of a validation."""
        self._write(stats, tag, step)
        self.bar.print(stats, tag=tag, step=step)

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


def _log_to(folder: Path) -> None:
    """Both logs go on where an earlier process of the same run stopped."""
    handler = logging.FileHandler(folder / "train.log", encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s | %(levelname)s | %(name)s | %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger().addHandler(handler)
    Journal.file = (folder / "log.jsonl").open("a", buffering=1, encoding="utf-8")


# At import and not in main(): with several GPUs fairseq starts processes that import this file and no more.
fairseq_train.Trainer = LongRunTrainer
PathManager.copy = staticmethod(copy_in_one_step)
_progress_bar = progress_bar.progress_bar
progress_bar.progress_bar = lambda *args, **kwargs: Journal(_progress_bar(*args, **kwargs))

if __name__ == "__main__":
    fairseq_train.cli_main()
