"""Time training, ours and fairseq's Transformer in turns on the same batches; options.training says how."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from tqdm import tqdm

from ea_fairseq import optim
from ea_fairseq.trainer import FlatTrainer
from ea_tools.bench import common, options
from ea_tools.common import UserError, reporting, write_json
from ea_tools.maps.sides import BOTH, DECODER, ENCODER
from ea_tools.training.memory import keep_freed_memory
from ea_tools.training.products import require_bf16_units
from ea_tools.training.recipes import read, spell_flags

#: flags of recipes that only translation has, and what trains a model with one side
OF_TRANSLATION = {"criterion", "label-smoothing", "share-all-embeddings", "share-decoder-input-output-embed"}
#: a third candidate: our model and one optimizer call for all parameters
FLAT = f"ours, {optim.NAME}"
CRITERIA = {ENCODER: "masked_lm", DECODER: "cross_entropy"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: time, measure memory, print, and keep everything in --output."""
    arguments = sys.argv[1:] if arguments is None else [str(word) for word in arguments]
    args = options.training(arguments)
    with reporting("benchmark_training"):
        device = common.prepare(args)
        if device == "cpu":
            keep_freed_memory()  # as scripts/train.sh does
            if "bf16" in args.precision:
                require_bf16_units()
        if args.memory_of:
            print(json.dumps(memory(args, device, **json.loads(args.memory_of))))
            return
        results = []
        for size in args.size:
            for precision in args.precision:
                for length in options.LENGTHS[: options.LENGTHS.index(args.longest) + 1] if args.growth else [None]:
                    results.append(measure(args, arguments, device, size, precision, length))
                    write_json(
                        args.output, common.record("growth" if args.growth else "training", args, device, results)
                    )
    print(f"written: {args.output}")


def measure(
    args: argparse.Namespace,
    arguments: Sequence[str],
    device: str,
    size: str,
    precision: str,
    length: int | None = None,
) -> dict[str, Any]:
    """Speed and memory of one pair of models; `length`: on sentences of so many tokens."""
    trainers = {name: trainer(args, arch, device, precision) for name, arch in options.PAIRS[size].items()}
    trainers[FLAT] = trainer(args, options.PAIRS[size]["ours"], device, precision, optim.NAME)
    batches = choose(args, trainers["ours"].task, length, args.batches)
    label = f"{size} {precision}" + (f", {length} tokens" if length else "")
    steps = {name: training_step(of_model) for name, of_model in trainers.items()}
    times = common.interleave(steps, batches, args.repetitions, device, label)
    result = {
        "size": size,
        "precision": precision,
        "length": length,
        "architectures": options.PAIRS[size],
        "batches": [common.describe(batch) for batch in batches],
        **common.speeds(times),
        "ratio_flat_adam": common.ratios(times)[FLAT],
        "times": times,
    }
    if args.memory_batches:
        result["memory"] = {
            name: memory_alone(arguments, arch=arch, precision=precision, length=length)
            for name, arch in tqdm(options.PAIRS[size].items(), desc=f"{label}, memory", unit=" models")
        }
    common.report_speeds(label, result, device)
    print(f"  {FLAT} / stock {common.show(result['ratio_flat_adam'])}")
    for name, used in result.get("memory", {}).items():
        print(
            f"  {options.PAIRS[size][name]:<20} {used['peak'] / 2**20:>8,.0f} MiB at most, "
            f"{used['before'] / 2**20:,.0f} before"
        )
    return result


def trainer(args: argparse.Namespace, model: str, device: str, precision: str, optimizer: str = "adam") -> Trainer:
    """A trainer with everything else as the recipe has it; `model`: words after --arch, as in options.PAIRS."""
    recipe = read(args.recipe)
    precision = common.type_of_numbers(precision, device)
    flags = {name: value for name, value in recipe.flags_for(model.split()[0]).items() if name != "task"}
    sides = common.sides_of_model(model)
    if sides != BOTH:
        flags = {name: value for name, value in flags.items() if name not in OF_TRANSLATION}
        flags["criterion"] = CRITERIA[sides]
    elif not args.data:  # the benchmark's words are one dictionary
        flags = {**flags, "share-all-embeddings": True, "share-decoder-input-output-embed": False}
    flags["optimizer"] = optimizer
    longest = max(common.POSITIONS, args.longest) if args.growth else common.POSITIONS
    flags = [
        *common.task_flags(model, longest),
        *spell_flags(flags),
        "--max-tokens",
        args.max_tokens or recipe.batch.tokens,
    ]
    config = common.configuration(model, *flags, data=args.data or "data", device=device, precision=precision)
    torch.manual_seed(args.seed)
    task = common.make_task(args, config)
    trainer = FlatTrainer(config, task, task.build_model(config.model), task.build_criterion(config.criterion))
    trainer.save_checkpoint = lambda *_: None  # a step that fails would leave a checkpoint before it says why
    return trainer


def training_step(trainer: Trainer) -> common.Candidate:
    """A function that trains on a batch and gives its number of tokens."""

    def step(batch: common.Batch) -> int:
        trainer.train_step([batch], raise_oom=True)  # else fairseq leaves the batch out, and it would count as done
        return batch["ntokens"]

    return step


def choose(args: argparse.Namespace, task: FairseqTask, length: int | None, count: int) -> list[common.Batch]:
    """The batches to time: `count` of the corpus, or one of sentences of `length` tokens, end of sentence included."""
    max_tokens = args.max_tokens or read(args.recipe).batch.tokens
    if length:
        sentences = max(1, max_tokens // length)
        dataset = common.random_sentences(task, numpy.full((sentences, 2), length - 1), args.seed)
        return [dataset.collater([dataset[index] for index in range(sentences)])]
    return common.pick(common.corpus(args, task, "train"), count, args.seed, max_tokens=max_tokens)


def memory_alone(arguments: Sequence[str], **what: Any) -> dict[str, int]:
    """`memory` in a fresh process: memory that one model has had is no measure for the next."""
    command = [sys.executable, "-P", "-m", "ea_tools.bench", "training", *arguments, "--memory-of", json.dumps(what)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise UserError(f"the process that measures the memory of {what} ended: {said[-1]}")
    return json.loads(result.stdout.splitlines()[-1])


def memory(args: argparse.Namespace, device: str, arch: str, precision: str, length: int | None) -> dict[str, int]:
    """{"peak", "before"}: bytes at most while training, and before the first step. On the CPU: of the whole process."""
    of_model = trainer(args, arch, device, precision)
    # A GPU's allocator is asked for its own count; three steps of one shape are enough for the optimizer to exist.
    batches = choose(args, of_model.task, length, args.memory_batches) * (3 if length else 1)
    before = torch.cuda.memory_allocated() if device == "cuda" else resident("VmRSS")
    step, peak = training_step(of_model), 0
    for batch in batches:
        if device == "cuda":
            with fairseq_keeps_peak():
                step(batch)
            peak = max(peak, torch.cuda.max_memory_allocated())
        else:
            step(batch)
    return {"peak": peak or resident("VmHWM"), "before": before, "steps": len(batches)}


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
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {field}; --memory-batches 0 leaves memory out")
