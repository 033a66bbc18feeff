"""The common part of the benchmarks: sentences of realistic lengths, fairseq's batches, fair timing, one JSON file.

Other work on a machine changes times from second to second. So the candidates take turns on the same batches, and each
turn begins with another of them. The results are medians of ratios between neighbours in time, with quartiles.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from tqdm import tqdm

import ea_fairseq  # noqa: F401  (registers the architectures; first, for fairseq is less talkative then)

# isort: split
import numpy
import torch
from fairseq import options
from fairseq.data import Dictionary, FairseqDataset, LanguagePairDataset, ListDataset
from fairseq.data.data_utils import numpy_seed
from fairseq.data.indexed_dataset import make_builder
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.tasks import TASK_REGISTRY, FairseqTask
from fairseq.tasks.translation import TranslationTask

from ea_tools.common import UserError
from ea_tools.sides import BOTH, TASKS, Sides, sides_of
from ea_tools.training.products import use_bf16_products
from ea_tools.training.provenance import provenance

Batch = dict[str, Any]  # as fairseq collates it
Candidate = Callable[[Any], int]  # does something with a batch, and gives the number of tokens that it did
Times = dict[str, dict[str, list[list[float]]]]  # kind of measurement -> candidate -> repetition -> batch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

# IWSLT'14 De-En's 7,283 validation pairs, every 23rd of the training text, in subwords of its joint 10k code. Log
# lengths of German and English have these means, standard deviations and correlation. The fit's 5, 50, 95 and 99%
# quantiles are 6, 19, 58 and 92 German subwords; the text's are 6, 19, 59 and 87.
LOG_MEAN = (2.960, 2.945)
LOG_DEVIATION = (0.673, 0.660)
CORRELATION = 0.971
LONGEST, RATIO = 175, 1.5  # the recipe's filter, there in words
SENTENCES = 160_239  # IWSLT'14's training text
WORDS = 10_148  # of a joint dictionary of 10k merges, about
POSITIONS = 1024  # fairseq's own number for a model


def prepare(args: argparse.Namespace) -> str:
    """Set device and threads as asked; gives the device's name, "cpu" or "cuda"."""
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU here")
    if getattr(args, "data", None) and not (args.data / "PREP.json").is_file():
        raise UserError(f"--data {args.data}: no prepared data there (it has no PREP.json)")
    if "fp16" in args.precision and (args.device == "cpu" or not torch.cuda.is_available()):
        raise UserError("--precision fp16 needs a GPU")
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in the plain composition's convolutions as elsewhere
    return "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"


def type_of_numbers(precision: str, device: str) -> str:
    """The precision of a model's numbers. On a CPU bf16 is that of matrix products alone, switched on or off."""
    if device != "cpu":
        return precision
    use_bf16_products(precision == "bf16")
    return "fp32"


def generate_lengths(count: int, seed: int) -> numpy.ndarray:
    """count x 2 integers: lengths of source and target as in IWSLT'14 De-En, in subwords, without end of sentence."""
    chance = numpy.random.default_rng(seed)
    covariance = numpy.outer(LOG_DEVIATION, LOG_DEVIATION) * ((1, CORRELATION), (CORRELATION, 1))
    lengths = numpy.empty((0, 2), dtype=int)
    while len(lengths) < count:
        drawn = numpy.exp(chance.multivariate_normal(LOG_MEAN, covariance, size=count)).round().astype(int)
        shorter, longer = drawn.min(axis=1), drawn.max(axis=1)
        fitting = (shorter >= 1) & (longer <= LONGEST) & (longer <= RATIO * shorter)
        lengths = numpy.concatenate([lengths, drawn[fitting]])
    return lengths[:count]


def configuration(
    model: str, *flags: Any, data: Path | str = "data", device: str = "cpu", precision: str = "fp32"
) -> DictConfig:
    """The configuration that fairseq-train makes of these flags; `model`: words after --arch, as in options.PAIRS."""
    words = [str(data), "--arch", *model.split(), "--distributed-world-size", "1", *map(str, flags)]
    words += ["--cpu"] if device == "cpu" else []
    words += [] if precision == "fp32" else [f"--{precision}"]
    return copy.deepcopy(_configuration(*words))


@functools.cache
def _configuration(*words: str) -> DictConfig:
    """It takes a second to make."""
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    args.tpu = False  # fairseq takes --bf16 for a TPU
    return convert_namespace_to_omegaconf(args)


def sides_of_model(model: str) -> Sides:
    """The sides of a model, by words after --arch."""
    return sides_of(ARCH_MODEL_REGISTRY[model.split()[0]])


def task_flags(model: str, longest: int = POSITIONS) -> list[str]:
    """The flags of the task that trains such a model: translation, or that of a model with one side.

    Args:
        longest: sentence that the model has positions for, in tokens.
    """
    sides = sides_of_model(model)
    if sides == BOTH:
        positions = ["--max-source-positions", str(longest), "--max-target-positions", str(longest)]
    else:  # one sentence is one sample; masked_lm puts a token before it
        positions = ["--sample-break-mode", "eos", "--tokens-per-sample", str(longest + 1)]
    return ["--task", TASKS[sides], *positions]


def make_task(args: argparse.Namespace, config: DictConfig) -> FairseqTask:
    """The task of --data; without it, one whose dictionary has WORDS words and no file."""
    kind = TASK_REGISTRY[config.task._name]
    if args.data:
        return kind.setup_task(config.task)
    words = Dictionary()
    for number in range(WORDS - len(words)):
        words.add_symbol(str(number))
    return kind(config.task, words, words) if kind is TranslationTask else kind(config.task, words)


def corpus(args: argparse.Namespace, task: FairseqTask, split: str) -> FairseqDataset:
    """The data set of --data, or random words in sentences of generated lengths."""
    if args.data:
        task.load_dataset(split)
        return task.dataset(split)
    return random_sentences(task, generate_lengths(SENTENCES, args.seed), args.seed)


def random_sentences(task: FairseqTask, lengths: numpy.ndarray, seed: int) -> FairseqDataset:
    """A data set of random words; lengths, count x 2, as `generate_lengths` gives them. One side reads the first."""
    words, chance = task.source_dictionary, torch.Generator().manual_seed(seed)
    sides = []
    for side in (lengths[:, 0], lengths[:, 1]):
        sizes = side + 1  # with end of sentence
        tokens = torch.randint(words.nspecial, len(words), (int(sizes.sum()),), generator=chance)
        tokens[torch.from_numpy(sizes.cumsum() - 1)] = words.eos()
        sides += [ListDataset(tokens.split(sizes.tolist()), sizes), sizes, words]
    return LanguagePairDataset(*sides) if isinstance(task, TranslationTask) else _as_read_by(task, sides[0])


def _as_read_by(task: FairseqTask, sentences: ListDataset) -> FairseqDataset:
    """The data set that a task of one side makes of these sentences, which it reads from a file."""
    configured = task.cfg or task.args
    with tempfile.TemporaryDirectory() as folder:
        builder = make_builder(f"{folder}/train.bin", impl="mmap", vocab_size=len(task.source_dictionary))
        for sentence in sentences:
            builder.add_item(sentence)
        builder.finalize(f"{folder}/train.idx")
        configured.data, before = folder, configured.data
        task.load_dataset("train")  # maps the file, which may go when its folder does
        configured.data = before
    return task.dataset("train")


def batches_of(dataset: FairseqDataset, seed: int, **limits: int) -> list[Sequence[int]]:
    """The rows of an epoch's batches, made by fairseq's own rules; limits: max_tokens or max_sentences of a batch."""
    with numpy_seed(seed):
        order = dataset.ordered_indices()  # by length
    longest = min(POSITIONS, limits.get("max_tokens", POSITIONS))  # or what fits into a batch
    order, _ = dataset.filter_indices_by_size(order, (longest, longest))
    if not len(order):
        raise UserError(f"no sentence has at most {longest} tokens; a larger --max-tokens may help")
    return dataset.batch_by_size(order, **limits)


def pick(dataset: FairseqDataset, batches: Sequence[Sequence[int]], count: int, seed: int) -> list[Batch]:
    """`count` of these batches, which are sorted by length: spread evenly, in random order."""
    places = numpy.unique(((numpy.arange(count) + 0.5) * len(batches) / count).astype(int))
    numpy.random.default_rng(seed).shuffle(places)
    return [dataset.collater([dataset[index] for index in batches[place]]) for place in places]


def describe(batch: Batch) -> dict[str, int]:
    """Sentences, longest source and target, and target tokens of a batch."""
    sentences, source = batch["net_input"]["src_tokens"].shape
    return {"sentences": sentences, "source": source, "target": batch["target"].size(1), "tokens": batch["ntokens"]}


def synchronize(device: str) -> None:
    """Wait for a GPU to finish."""
    if device == "cuda":
        torch.cuda.synchronize()


def interleave(
    candidates: Mapping[str, Candidate], items: Sequence[Any], repetitions: int, device: str, label: str
) -> Times:
    """Time all candidates on all items, in turns; each begins as often as the others.

    Args:
        candidates: {name: function of an item that returns the number of its tokens}.
        items: batches, or other arguments of the candidates.
        label: of the progress bar.

    Returns:
        {"seconds", "cpu_seconds", "tokens"}, each {name: table[repetition][item]}; cpu_seconds: of this process.
    """
    names = list(candidates)
    times = {kind: {name: [] for name in names} for kind in ("seconds", "cpu_seconds", "tokens")}
    rounds = len(items) * (1 + repetitions)
    with tqdm(total=rounds, desc=label, unit=" rounds", mininterval=1, leave=False) as progress:
        for item in items:  # memory is taken, kernels are chosen and compiled for each shape
            for name in names:
                candidates[name](item)
            progress.update(1)
        for repetition in range(repetitions):
            for kind, name in itertools.product(times, names):
                times[kind][name].append([])
            for number, item in enumerate(items):
                first = (repetition + number) % len(names)
                for name in names[first:] + names[:first]:
                    for kind, value in timed(candidates[name], item, device).items():
                        times[kind][name][repetition].append(value)
                progress.update(1)
    return times


def timed(candidate: Candidate, item: Any, device: str) -> dict[str, float]:
    """One call: {"seconds", "cpu_seconds", "tokens"}."""
    synchronize(device)
    start, cpu_start = time.perf_counter(), time.process_time()
    tokens = candidate(item)
    synchronize(device)
    return {
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - cpu_start,
        "tokens": tokens,
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = numpy.percentile(values, (25, 50, 75))
    return {"median": float(middle), "q1": float(low), "q3": float(high), "count": len(values)}


def ratios(times: Times, clock: str = "seconds") -> dict[str, dict[str, float]]:
    """Speed of each candidate as a share of stock's. A pass is one repetition over all batches.

    Args:
        times: the result of `interleave`.
        clock: "seconds", or "cpu_seconds", which leave out other work on the machine, and count threads that wait.
    """
    speed = _speed_of_passes(times, clock)
    return {name: spread(speed[name] / speed["stock"]) for name in speed if name != "stock"}


def _speed_of_passes(times: Times, clock: str) -> dict[str, numpy.ndarray]:
    """Tokens a second of each candidate, pass by pass."""
    tokens, seconds = (
        {name: numpy.array(table).sum(axis=1) for name, table in times[kind].items()} for kind in ("tokens", clock)
    )
    return {name: tokens[name] / seconds[name] for name in seconds}


def speeds(times: Times) -> dict[str, Any]:
    """Tokens per second of each candidate, and of ours as a share of stock's, from what `interleave` gives."""
    return {
        "tokens_per_second": {name: spread(values) for name, values in _speed_of_passes(times, "seconds").items()},
        "ratio": ratios(times)["ours"],
        "ratio_by_cpu_time": ratios(times, "cpu_seconds")["ours"],
    }


def report_speeds(label: str, result: Mapping[str, Any], device: str) -> None:
    """Print what `speeds` found, as people read it."""
    by_cpu = f", by CPU time {show(result['ratio_by_cpu_time'])}" if device == "cpu" else ""
    print(f"{label}: ours / stock {show(result['ratio'])}{by_cpu}")
    for name, speed in result["tokens_per_second"].items():
        print(f"  {result['architectures'].get(name, name):<20} {show(speed, 0):>30} target tokens/s")


def show(quartiles: Mapping[str, float], digits: int = 2) -> str:
    """0.97 (0.95 .. 0.98)"""
    return "{median:,.{0}f} ({q1:,.{0}f} .. {q3:,.{0}f})".format(digits, **quartiles)


def record(name: str, args: argparse.Namespace, device: str, results: Sequence[Mapping]) -> dict[str, Any]:
    """The content of the JSON file: place, versions and settings of the results, then the results."""
    return {
        "benchmark": name,
        "command": shlex.join(sys.argv),
        "options": vars(args),
        **provenance(device == "cpu"),
        "threads": torch.get_num_threads(),
        "load_average": os.getloadavg(),  # above the number of cores: others were at work
        "results": results,
    }
