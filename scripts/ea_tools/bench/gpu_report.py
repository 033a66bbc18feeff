"""Everything that needs a GPU, the most important first; options.gpu_report lists the steps."""

from __future__ import annotations

import argparse
import contextlib
import gc
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from ea_artifacts.command import UserError, reporting
from ea_artifacts.files import write_json
from ea_fairseq import graphs, optim, step
from ea_fairseq.trainer import FlatTrainer
from ea_tools.bench import attention, common, decoding, equality, options, training
from ea_tools.bench.equality import Row, Setting
from ea_tools.bench.tape import Tape
from evolving_attention.kernels import refusals

TINY = " ".join(
    f"--{side}-embed-dim 32 --{side}-ffn-embed-dim 32 --{side}-attention-heads 4 --{side}-layers 2"
    for side in ("encoder", "decoder")
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    args, start = options.gpu_report(arguments), time.monotonic()
    with reporting("gpu_report"), stand_ins() if args.dry_run else contextlib.nullcontext():
        if not args.dry_run and not torch.cuda.is_available():
            raise UserError("PyTorch sees no GPU here; --dry-run tries the steps on a CPU")
        report = Report(args, start + 60 * args.minutes)
        failed = [name for name in args.only if not report.run(name)]
        print(f"written: {args.output}")
        if failed:
            raise UserError(f"failed: {', '.join(failed)}; {args.output} says why")


@contextlib.contextmanager
def stand_ins() -> Iterator[None]:
    """While this holds, models and sentences are tiny, and ``Tape`` takes the place of CUDA graphs."""
    pairs = {size: {name: f"{words} {TINY}" for name, words in pair.items()} for size, pair in options.PAIRS.items()}
    with (
        mock.patch.dict(options.PAIRS, pairs),
        mock.patch.multiple(common, WORDS=90, SENTENCES=300, LOG_MEAN=(1.5, 1.5)),
        mock.patch.object(FlatTrainer, "graph", Tape),
        mock.patch.object(graphs, "for_device", lambda device: Tape),
    ):
        yield


class Report(Setting):
    """Runs steps and keeps their rows."""

    def __init__(self, args: argparse.Namespace, deadline: float) -> None:
        super().__init__(args.dry_run)
        self.path, self.deadline = args.output, deadline
        common.prepare(self.settings("base", "bf16", 4096))
        self.results: list[dict[str, Any]] = []
        self.record = common.record("gpu_report", args, self.device, self.results)

    def run(self, name: str) -> bool:
        """One step; False where it failed."""
        result: dict[str, Any] = {"step": name, "rows": []}
        self.results.append(result)
        start, error = time.monotonic(), None
        left = self.deadline - start
        if left < options.GPU_STEPS[name]:
            result["skipped"] = f"it needs about {options.GPU_STEPS[name]} s, and {max(0, left):.0f} s are left"
            print(f"{name}: skipped, {result['skipped']}")
        else:
            print(f"{name}:", flush=True)
            try:
                for row in STEPS[name](self):
                    result["rows"].append(row)
                    show(row)
                    write_json(self.path, self.record)
                    if time.monotonic() > self.deadline:
                        result["cut"] = "no time was left for the rest of this step"
                        print(f"  {result['cut']}")
                        break
            except Exception as caught:
                error = result["error"] = "".join(traceback.format_exception(caught))
                print(f"  failed: {type(caught).__name__}: {refusals.summary(caught)}", flush=True)
            result["seconds"] = time.monotonic() - start
            gc.collect()
            if self.device == "cuda" and error is None:  # after some errors the GPU answers nothing
                torch.cuda.empty_cache()
        write_json(self.path, self.record)
        return error is None and all(row.get("ok", True) for row in result["rows"])


def show(row: Row) -> None:
    """A row of the table on the screen."""
    cells = (f"{name} {value:,.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in row.items())
    next(cells)  # the label has no name
    print(f"  {row['label']:<44} {'  '.join(cells)}", flush=True)


def capture(report: Setting) -> Iterator[Row]:
    """Seconds for the shapes of a recipe's epoch, and peak memory, beside eager steps on the same batches."""
    for label in ("eager", "captured"):
        gc.collect()
        trainer = report.trainer("bf16", optim.NAME)
        batches, shapes = report.epoch(trainer, 12)
        row: Row = {"label": label}
        if report.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        if label == "captured":
            trainer.table = shapes
            trainer.optimizer  # noqa: B018  (built when it is first asked for)
            trainer.model.train()
            graphed = trainer.graphed
            seconds = common.timed(partial(capture_all, graphed, batches[0]), shapes, report.device)[0]
            row |= {"shapes": len(shapes), "seconds": seconds}
        with training.fairseq_keeps_peak():
            training.training_step(trainer)(batches)
        if label == "captured":
            row |= {"refused": graphed.refused, "ok": graphed.refused is None and None not in graphed.captured.values()}
        if report.device == "cuda":
            bytes_used = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
            row |= {f"{name}_MiB": number / 2**20 for name, number in bytes_used.items()}
        yield row
        del trainer


def capture_all(graphed: step.GraphedStep, batch: common.Batch, shapes: list[step.Shape]) -> int:
    """Capture the steps of all shapes, the largest first; `batch` is any."""
    graphed._captured_for(batch)
    for shape in reversed(shapes):
        if not graphed.refused and shape not in graphed.captured:
            graphed.captured[shape] = graphed._capture(shape)
    return len(shapes)


def speed(size: str, precision: str, tokens: int) -> Callable[[Setting], Iterator[Row]]:
    """A step that times training: stock, stock with our optimizer, ours eager, ours captured."""

    def rows(report: Setting) -> Iterator[Row]:
        args = report.settings(size, precision, tokens)
        result = training.measure(args, report.device, size, report.precision(precision))
        updates = len(result["batches"])
        for name, table in result["times"]["seconds"].items():
            yield {
                "label": f"{size}, {tokens} tokens, {args.precision[0]}: {name}",
                "ms": 1e3 * common.spread([sum(turns) / updates for turns in table])["median"],
                "of_stock": result["ratios"].get(name, {"median": 1.0})["median"],
                **({"refused": result["refused"]} if name == training.CAPTURED else {}),
            }

    return rows


def kernels(report: Setting) -> Iterator[Row]:
    """The kernels of a replay, those first that take longest."""
    trainer = report.trainer("bf16", optim.NAME)
    (batch,), trainer.table = report.epoch(trainer, 1)
    training.training_step(trainer)([batch] * 2)
    captured, count = trainer.graphed._captured_for(batch), 5
    if captured is None:
        raise RuntimeError(f"no step was captured: {trainer.graphed.refused}")
    captured.graph.replay()
    activity = ProfilerActivity.CPU if report.dry_run else ProfilerActivity.CUDA
    with profile(activities=[activity]) as profiled:
        for _ in range(count):
            captured.graph.replay()
        common.synchronize(report.device)
    took = "self_cpu_time_total" if report.dry_run else "self_device_time_total"
    events = sorted(profiled.key_averages(), key=lambda event: -getattr(event, took))
    for label, group in [("all", events), *((event.key[:44], [event]) for event in events[:30])]:
        microseconds = sum(getattr(event, took) for event in group)
        calls = sum(event.count for event in group) // count
        yield {"label": label, "ms": microseconds / 1e3 / count, "calls": calls}


def attention_alone(report: Setting) -> Iterator[Row]:
    """Forward and backward of the operation, repeated by a graph, in microseconds."""
    sizes = [("encoder", 130, 30), ("decoder", 130, 30), ("cross", 130, 30), ("encoder", 65, 60), ("encoder", 32, 120)]
    heads, dtype, count = 8, common.DTYPES[report.precision("bf16")], 1 if report.dry_run else 50
    for kind, batch, length in sizes:
        if report.dry_run:
            heads, batch, length = 4, 2, length // 10
        replays = {}
        for name in ("ours", "plain", "sdpa"):
            problem = attention.make_problem(report.device, dtype, kind, heads, length, batch)
            graph = Tape() if report.dry_run else graphs.CudaGraph()
            replays[name] = attention.recorded(attention.PATHS[name](problem), problem, graph)
        times = common.interleave(replays, [count], 3, report.device, kind)["seconds"]
        median = {name: 1e6 * common.spread([row[0] for row in table])["median"] for name, table in times.items()}
        yield {"label": f"{kind}, B {batch}, N {length}", **{name: x / count for name, x in median.items()}}


def decode(report: Setting) -> Iterator[Row]:
    """One sentence at a time, beam 5: stock, ours with graphs, and without."""
    args = report.decoding_settings()
    result = decoding.measure(args, report.device, "base", report.precision("bf16"), 5, "1")
    for name, per_second in result["tokens_per_second"].items():
        ratio = result["ratios"].get(name, {"median": 1.0})["median"]
        yield {"label": f"base: {name}", "tokens_per_second": per_second["median"], "of_stock": ratio}


STEPS: dict[str, Callable[[Setting], Iterator[Row]]] = {
    "equality": equality.rows,
    "capture": capture,
    "base": speed("base", "bf16", 4096),
    "lite": speed("lite", "bf16", 4096),
    "kernels": kernels,
    "attention": attention_alone,
    "base-16384": speed("base", "bf16", 16384),
    "base-fp16": speed("base", "fp16", 4096),
    "decoding": decode,
}
