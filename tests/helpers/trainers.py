"""Trainers of tiny models, and batches for them."""

import copy
import functools
import logging
from unittest import mock

import torch
from fairseq.data import LanguagePairDataset
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import metrics
from fairseq.tasks.translation import TranslationTask
from fairseq.trainer import Trainer

from ea_fairseq import optim
from ea_fairseq.trainer import FlatTrainer
from helpers.models import TINY, TRAINING, batch, dictionary, model_args

TASK = TRAINING[TRAINING.index("--optimizer") + 2 :]


@functools.cache
def configuration(arch, *flags):
    """fairseq's configuration of a command line, which takes a second to make."""
    args = model_args(arch, *TINY, *TASK, *flags)
    args.tpu = False  # fairseq takes --bf16 for a TPU
    return convert_namespace_to_omegaconf(args)


def build(kind, *flags, arch="ea_transformer_base", optimizer=optim.NAME, precision="fp32", dropout="0.1"):
    """A trainer of this class; a later flag replaces an earlier one."""
    words = ["--dropout", dropout, "--attention-dropout", dropout, "--optimizer", optimizer, *flags]
    cfg = copy.deepcopy(configuration(arch, *words, *([] if precision == "fp32" else [f"--{precision}"])))
    words = dictionary()
    task = TranslationTask(cfg.task, words, words)
    torch.manual_seed(1)
    trainer = kind(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    trainer.get_train_iterator = None  # there are no data
    return trainer


def stock(*flags, **options):
    """fairseq's own trainer and Adam."""
    with mock.patch.object(torch.cuda, "current_device", lambda: None):  # which it asks for in float16
        trainer = build(Trainer, *flags, **{"optimizer": "adam", **options})
        trainer.optimizer  # noqa: B018  (built when it is first asked for)
    return trainer


def flat(*flags, **options):
    """Ours."""
    return build(FlatTrainer, *flags, **options)


def batches(trainer, count, longest=9, seed=1):
    """Random pairs of sentences."""
    words, generator = dictionary(), torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(count):
        rows = int(torch.randint(2, 6, (), generator=generator))
        sides = []
        for side in (0, 1):
            lengths = torch.randint(2, longest + 1, (rows,), generator=generator).tolist()
            tokens = batch(lengths, seed=1000 * seed + 2 * number + side)
            sides += [[row[row.ne(words.pad())] for row in tokens], lengths, words]
        data = LanguagePairDataset(*sides, left_pad_source=trainer.task.cfg.left_pad_source, left_pad_target=False)
        drawn.append(data.collater([data[row] for row in range(rows)]))
    return drawn


def weights(trainer):
    """All weights, as one new tensor of float32."""
    return torch.cat([x.detach().float().reshape(-1) for x in trainer.get_model().parameters()]).clone()


def train(trainer, data, accumulated=1):
    """Updates by these batches: (loss, norm of the gradients) of each that was reported."""
    metrics.reset()
    rows, report = [], Trainer._reduce_and_log_stats

    def keep(self, logs, size, norm=None):
        rows.append((sum(float(log["loss"]) for log in logs) / float(size), float(norm)))
        return report(self, logs, size, norm)

    with mock.patch.object(Trainer, "_reduce_and_log_stats", keep):
        for first in range(0, len(data), accumulated):
            trainer.train_step(copy.deepcopy(data[first : first + accumulated]))
    return rows


def save(trainer, path):
    """A checkpoint in the middle of an epoch; returns its path."""
    trainer.consolidate_optimizer()
    trainer.save_checkpoint(str(path), {"train_iterator": {"epoch": 1, "iterations_in_epoch": 6, "version": 2}})
    return path


def lines(caplog, name="ea_fairseq.trainer"):
    """What a logger said."""
    return [record.getMessage() for record in caplog.records if record.name == name and record.levelno >= logging.INFO]
