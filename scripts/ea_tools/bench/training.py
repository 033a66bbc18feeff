"""Time training, ours and fairseq's Transformer in turns on the same batches; options.training says how."""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from tqdm import tqdm

from ea_artifacts.command import UserError, quiet
from ea_fairseq import optim, step
from ea_fairseq.trainer import FlatTrainer
from ea_tools.bench import common, options
from ea_tools.training.recipes import read, spell_flags

#: further candidates: one optimizer call for all parameters, and with it captured steps
FLAT, STOCK_FLAT, CAPTURED = f"ours, {optim.NAME}", f"stock, {optim.NAME}", "ours, captured"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: time, measure memory, print, and keep everything in --output."""
    args = options.training(arguments)
    lengths = options.LENGTHS[: options.LENGTHS.index(args.longest) + 1] if args.growth else [None]

    def cases(device: str) -> Iterator[tuple[str, str, int | None]]:
        return itertools.product(args.size, args.precision, lengths)

    common.run("growth" if args.growth else "training", args, cases, measure, report)


def measure(
    args: argparse.Namespace, device: str, size: str, precision: str, length: int | None = None
) -> dict[str, Any]:
    """Speed and memory of one pair of models; `length`: on sentences of so many tokens."""
    pair = options.PAIRS[size]
    trainers = {name: trainer(args, arch, device, precision) for name, arch in pair.items()}
    trainers[FLAT] = trainer(args, pair["ours"], device, precision, optim.NAME)
    data, rows = epoch(args, trainers["ours"].task, length)
    batches = common.pick(data, rows, args.batches)
    sizes = step.sizes_of(data, rows)
    if has_graphs(device) and sizes is not None:
        trainers[STOCK_FLAT] = trainer(args, pair["stock"], device, precision, optim.NAME)
        trainers[CAPTURED] = trainer(args, pair["ours"], device, precision, optim.NAME)
        trainers[CAPTURED].table = step.table_of(sizes)  # FLAT has none, so its steps are eager
    label = f"{size} {precision}" + (f", {length} tokens" if length else "")
    steps = {name: training_step(of_model) for name, of_model in trainers.items()}
    # On a GPU an update does not wait for the one before, so a turn is a row of updates, as in an epoch.
    turns = [batches] if device == "cuda" else [[batch] for batch in batches]
    times = common.interleave(steps, turns, args.repetitions, device, label)
    result = {
        "label": label,
        "size": size,
        "precision": precision,
        "length": length,
        "architectures": pair,
        "batches": [common.describe(batch) for batch in batches],
        **common.speeds(times),
        "times": times,
    }
    if args.memory_batches:
        result["memory"] = {
            name: memory_alone(args, arch, precision, length)
            for name, arch in tqdm(pair.items(), desc=f"{label}, memory", unit=" models")
        }
    if captured := getattr(trainers.get(CAPTURED), "_step", None):
        result["shapes_captured"], result["refused"] = len(captured.captured), captured.refused
    return result


def report(result: Mapping[str, Any]) -> None:
    """Print what `measure` found."""
    common.report_speeds(result)
    for name, used in result.get("memory", {}).items():
        label = result["architectures"][name]
        print(f"  {label:<20} {used['peak'] / 2**20:>8,.0f} MiB at most, {used['before'] / 2**20:,.0f} before")


def has_graphs(device: str) -> bool:
    """Whether training steps can be captured there."""
    return device == "cuda" or FlatTrainer.graph is not None


def trainer(
    args: argparse.Namespace,
    model: str,
    device: str,
    precision: str,
    optimizer: str = "adam",
    *others: str,
    kind: type[FlatTrainer] = FlatTrainer,
) -> FlatTrainer:
    """A trainer with everything else as the recipe has it.

    Args:
        model: words after --arch, as in options.PAIRS.
        others: flags that replace the recipe's.
    """
    recipe = read(args.recipe)
    # The benchmark's task has one dictionary.
    flags = recipe.flags_for(model.split()[0]) | {"task": False, "share-decoder-input-output-embed": False}
    flags |= {"optimizer": optimizer, "max-tokens": args.max_tokens or recipe.batch.tokens}
    config = common.configuration(
        model,
        *spell_flags(flags),
        *others,
        longest=max(common.POSITIONS, args.longest) if args.growth else common.POSITIONS,
        device=device,
        precision=common.type_of_numbers(precision, device),
    )
    torch.manual_seed(common.SEED)
    task = common.make_task(config)
    trainer = kind(config, task, task.build_model(config.model), task.build_criterion(config.criterion))
    trainer.save_checkpoint = lambda *_: None  # a step that fails would leave a checkpoint before it says why
    return trainer


def training_step(trainer: Trainer) -> common.Candidate:
    """A function that trains on batches, an update each, and gives their number of tokens."""

    def update(batches: list[common.Batch]) -> int:
        for batch in batches:
            trainer.train_step([batch], raise_oom=True)  # else fairseq leaves the batch out, and it would count as done
        return sum(batch["ntokens"] for batch in batches)

    return update


def choose(args: argparse.Namespace, task: FairseqTask, length: int | None, count: int) -> list[common.Batch]:
    """The batches to train on: `count` of an epoch."""
    return common.pick(*epoch(args, task, length), count)


def epoch(
    args: argparse.Namespace, task: FairseqTask, length: int | None
) -> tuple[FairseqDataset, list[Sequence[int]]]:
    """The data, and the rows of each batch: all, or one of sentences of `length` tokens, end of sentence included."""
    max_tokens = args.max_tokens or read(args.recipe).batch.tokens
    if length:
        sentences = max(1, max_tokens // length)
        dataset = common.random_sentences(task, numpy.full((sentences, 2), length - 1))
        return dataset, [range(sentences)]
    dataset = common.random_sentences(task)
    return dataset, common.batches_of(dataset, max_tokens=max_tokens)


def memory_alone(*what: Any) -> dict[str, int]:
    """`memory` in a fresh process: memory that one model has had is no measure for the next."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        try:
            return pool.submit(memory, *what).result()
        except BrokenProcessPool:
            raise UserError(f"the process that measures the memory of {what[1]} was killed; is there enough?") from None


def memory(args: argparse.Namespace, arch: str, precision: str, length: int | None) -> dict[str, int]:
    """{"peak", "before"}: bytes at most while training, and before the first step. On the CPU: of the whole process."""
    quiet()
    device = common.prepare(args)
    of_model = trainer(args, arch, device, precision)
    # A GPU's allocator is asked for its own count; three steps of one shape are enough for the optimizer to exist.
    batches = choose(args, of_model.task, length, args.memory_batches) * (3 if length else 1)
    before = torch.cuda.memory_allocated() if device == "cuda" else resident("VmRSS")
    with fairseq_keeps_peak():
        training_step(of_model)(batches)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else resident("VmHWM")
    return {"peak": peak, "before": before, "steps": len(batches)}


@contextmanager
def fairseq_keeps_peak() -> Iterator[None]:
    """fairseq's trainer starts the count of the peak afresh when it logs; not here."""
    reset, torch.cuda.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats, lambda *_: None
    try:
        yield
    finally:
        torch.cuda.reset_peak_memory_stats = reset


def resident(field: str) -> int:
    """Bytes of this process in memory: now (VmRSS) or at most so far (VmHWM)."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    if field not in fields:
        raise UserError(f"/proc/self/status has no {field}; --memory-batches 0 leaves memory out")
    return int(fields[field].split()[0]) * 1024
