"""Ways that have to give the same numbers: captured and eager steps, kernels and plain composition, graphs and none."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from fairseq.logging import metrics
from fairseq.trainer import Trainer

from ea_fairseq import decoding as graphs
from ea_fairseq import optim, step
from ea_fairseq.trainer import FlatTrainer
from ea_tools.bench import attention, common, decoding, options, training

Row = dict[str, Any]  # {"label", a name for each number}; "ok" of a comparison: whether it holds
#: No warm-up, so that a difference of gradients becomes one of weights and of later losses.
FIXED = "--lr-scheduler fixed --lr 2e-4 --warmup-updates 0".split()
NO_DROPOUT = "--dropout 0 --attention-dropout 0 --activation-dropout 0".split()
#: the largest relative difference of losses, scores and attention, where sums are in another order
LIMIT = {"fp32": 1e-4, "bf16": 0.05}


class Setting:
    """Where steps run, and how large their models and batches are."""

    def __init__(self, dry_run: bool) -> None:
        self.dry_run, self.device = dry_run, "cpu" if dry_run else "cuda"

    def settings(self, size: str, precision: str, tokens: int) -> argparse.Namespace:
        """Settings of the training benchmark."""
        flags = f"--device {self.device} --size {size} --precision {self.precision(precision)}"
        tokens, repetitions, batches = (64, 1, 2) if self.dry_run else (tokens, 5, 6)
        numbers = f"--memory-batches 0 --max-tokens {tokens} --repetitions {repetitions} --batches {batches}"
        return options.training([*flags.split(), *numbers.split()])

    def decoding_settings(self) -> argparse.Namespace:
        """Settings of the decoding benchmark."""
        repetitions = "1" if self.dry_run else "3"
        return options.decoding(["--device", self.device, "--batches", "3", "--repetitions", repetitions])

    def precision(self, name: str) -> str:
        """A CPU computes in float32."""
        return "fp32" if self.dry_run else name

    def trainer(self, precision: str, *flags: str, **others: Any) -> FlatTrainer:
        """Our `base`, with 4,096 tokens a batch; see `training.trainer`."""
        args, model = self.settings("base", precision, 4096), options.PAIRS["base"]["ours"]
        return training.trainer(args, model, self.device, self.precision(precision), *flags, **others)

    def epoch(self, trainer: FlatTrainer, count: int) -> tuple[list[common.Batch], list[step.Shape]]:
        """`count` batches, and the shapes of captured steps for all batches of an epoch."""
        args = self.settings("base", "fp32", 4096)
        data, rows = training.epoch(args, trainer.task, None)
        sizes = step.sizes_of(data, rows)
        assert sizes is not None  # they are pairs of sentences
        return common.pick(data, rows, count), step.table_of(sizes, 4 if self.dry_run else step.SHAPES)


def rows(report: Setting) -> Iterator[Row]:
    """Ways that have to give the same numbers."""
    for precision in dict.fromkeys(map(report.precision, ("fp32", "bf16"))):
        for others, flags, kind in (
            ("eager steps, padded alike", (optim.NAME, *FIXED), Padded),
            ("fairseq's trainer, not padded, no dropout", ("adam", *FIXED, *NO_DROPOUT), FlatTrainer),
        ):
            ours = report.trainer(precision, optim.NAME, *flags[1:])
            expected = report.trainer(precision, *flags, kind=kind)
            batches, ours.table = report.epoch(ours, 4)
            expected.table = ours.table
            batches *= 1 if report.dry_run else 3
            yield compare(f"captured, {others}, {precision}", ours, expected, batches, LIMIT[precision])
            del ours, expected
        for place in attention.KINDS:
            heads, length = (4, 12) if report.dry_run else (8, 32)
            batch, dtype = (3 if report.dry_run else 128), common.DTYPES[precision]
            problem = attention.make_problem(report.device, dtype, place, heads, length, batch)
            pair = [attention.results_of(attention.PATHS[name](problem), problem) for name in ("ours", "plain")]
            worst = attention.largest_difference(*pair)
            yield {"label": f"attention, {place}, {precision}", "difference": worst, "ok": worst <= LIMIT[precision]}
        yield hypotheses(report, precision)


class Padded(FlatTrainer):
    """Trains by eager steps on the batches that captured steps replay."""

    def _build_optimizer(self) -> None:
        super()._build_optimizer()
        self.graphed._captured_for = self._pad  # type: ignore[method-assign]  # it captures nothing

    def _pad(self, sample: step.Sample) -> None:
        size = (*sample["net_input"]["src_tokens"].shape, sample["target"].size(1))
        shape = next(x for x in self.table or () if all(a <= b for a, b in zip(size, x, strict=True)))
        static = step.Static(shape, self.task.source_dictionary, self.device)
        static.fill(sample)
        sample.update(static.sample(sample["ntokens"]))


def compare(label: str, ours: FlatTrainer, expected: FlatTrainer, batches: list[common.Batch], limit: float) -> Row:
    """A row about two trainers on the same batches; a captured one reports its last update later, which is left out."""
    rows, start = [], weights(ours)
    for trainer in (ours, expected):
        rows.append(losses(trainer, batches))
    (ends, others), captured = map(weights, (ours, expected)), ours.graphed
    pairs = torch.tensor(list(zip(*rows, strict=False)), dtype=torch.float64)  # updates x trainers x loss and norm
    worst = ((pairs[:, 0] - pairs[:, 1]).abs() / pairs[:, 1].abs()).amax(0).tolist()
    moved = float((ends - others).norm() / (others - start).norm())
    return {
        **{"label": label, "updates": len(pairs), "shapes": len(captured.captured), "refused": captured.refused},
        **{"loss": worst[0], "norm": worst[1], "weights": moved, "same_bits": torch.equal(ends, others)},
        "ok": captured.refused is None and bool(captured.captured) and worst[0] <= limit,
    }


def losses(trainer: FlatTrainer, batches: list[common.Batch]) -> list[tuple[float, float]]:
    """An update by each batch: loss and norm of the gradients of those that were reported."""
    rows, original = [], Trainer._reduce_and_log_stats

    def keep(self: Trainer, logs: Any, size: float, norm: Any = None) -> dict[str, Any]:
        rows.append((sum(float(log["loss"]) for log in logs) / float(size), float(norm)))
        return original(self, logs, size, norm)

    metrics.reset()
    with mock.patch.object(Trainer, "_reduce_and_log_stats", keep):
        training.training_step(trainer)(copy.deepcopy(batches))
    return rows


def weights(trainer: FlatTrainer) -> torch.Tensor:
    """All of them, as one new tensor of float32."""
    return torch.cat([x.detach().float().reshape(-1) for x in trainer.model.parameters()])


def hypotheses(report: Setting, precision: str) -> Row:
    """Decoding by graphs beside decoding without; `same`: the share of sentences with the same best hypothesis."""
    args = report.decoding_settings()
    config, task = decoding.configured("base", 5, report.device)
    model = decoding.random_model(task, options.PAIRS["base"]["ours"])
    model = decoding.ready(model, config, precision, report.device)
    search = decoding.searcher(task, model, config, report.device)
    batches = decoding.choose(args, task, "12")  # a graph has at most 64 hypotheses
    ways = [[best[0] for batch in batches for best in search(batch)]]
    replayed = model.decoder.graphs and bool(graphs._IDLE.get(model.decoder))  # an error switches graphs off
    model.decoder.graphs = False
    ways.append([best[0] for batch in batches for best in search(batch)])
    same = [torch.equal(a["tokens"], b["tokens"]) for a, b in zip(*ways, strict=True)]
    scores = torch.tensor([[float(best["score"]) for best in way] for way in ways])
    worst, share = float((scores[0] - scores[1]).abs().max() / scores[1].abs().max()), sum(same) / len(same)
    is_right = replayed and worst <= LIMIT[precision] and (share == 1 or precision != "fp32")
    return {"label": f"decoding, graphs, {precision}", "same": share, "score": worst, "ok": is_right}
