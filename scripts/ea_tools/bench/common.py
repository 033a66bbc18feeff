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
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
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
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask

from ea_artifacts.command import UserError, reporting
from ea_artifacts.files import write_json
from ea_tools.training.memory import keep_freed_memory
from ea_tools.training.products import require_bf16_units, use_bf16_products
from ea_tools.training.provenance import provenance

Batch = dict[str, Any]  # as fairseq collates it
Candidate = Callable[[Any], int]  # does something with a batch, and gives the number of tokens that it did
Times = dict[str, dict[str, list[list[float]]]]  # "seconds", "tokens" -> candidate -> repetition -> batch

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
SEED = 1


def prepare(args: argparse.Namespace) -> str:
    """Set device and threads as asked; gives the device's name, "cpu" or "cuda"."""
    device = "cuda" if args.device != "cpu" and torch.cuda.is_available() else "cpu"
    if args.device == "cuda" != device:
        raise UserError("--device cuda: PyTorch sees no GPU here")
    if "fp16" in args.precision and device == "cpu":
        raise UserError("--precision fp16 needs a GPU")
    if device == "cpu":
        keep_freed_memory()  # as scripts/train.sh does
        if "size" in args and "bf16" in args.precision:  # of products; of an attention alone, of all numbers
            require_bf16_units()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(SEED)
    torch.backends.cudnn.allow_tf32 = False  # float32 is float32, in the plain composition's convolutions as elsewhere
    return device


def type_of_numbers(precision: str, device: str) -> str:
    """The precision of a model's numbers. On a CPU bf16 is that of matrix products alone, switched on or off."""
    if device != "cpu":
        return precision
    use_bf16_products(precision == "bf16")
    return "fp32"


def generate_lengths(count: int) -> numpy.ndarray:
    """count x 2 integers: lengths of source and target as in IWSLT'14 De-En, in subwords, without end of sentence."""
    chance = numpy.random.default_rng(SEED)
    covariance = numpy.outer(LOG_DEVIATION, LOG_DEVIATION) * ((1, CORRELATION), (CORRELATION, 1))
    lengths = numpy.empty((0, 2), dtype=int)
    while len(lengths) < count:
        drawn = numpy.exp(chance.multivariate_normal(LOG_MEAN, covariance, size=count)).round().astype(int)
        shorter, longer = drawn.min(axis=1), drawn.max(axis=1)
        fitting = (shorter >= 1) & (longer <= LONGEST) & (longer <= RATIO * shorter)
        lengths = numpy.concatenate([lengths, drawn[fitting]])
    return lengths[:count]


def configuration(
    model: str, *flags: Any, longest: int = POSITIONS, device: str = "cpu", precision: str = "fp32"
) -> DictConfig:
    """The configuration of translation that fairseq-train makes of these flags.

    Args:
        model: words after --arch, as in options.PAIRS.
        longest: tokens of a sentence.
    """
    task = ["--task", "translation", "--max-source-positions", longest, "--max-target-positions", longest]
    words = ["data", "--arch", *model.split(), "--distributed-world-size", "1", "--share-all-embeddings"]
    words += map(str, [*task, *flags])
    words += ["--cpu"] if device == "cpu" else []
    words += [] if precision == "fp32" else [f"--{precision}"]
    return copy.deepcopy(_configuration(*words))


@functools.cache
def _configuration(*words: str) -> DictConfig:
    """It takes a second to make."""
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    args.tpu = False  # fairseq takes --bf16 for a TPU
    return convert_namespace_to_omegaconf(args)


def make_task(config: DictConfig) -> TranslationTask:
    """A task whose dictionary has WORDS words and no file."""
    words = Dictionary()
    for number in range(WORDS - len(words)):
        words.add_symbol(str(number))
    return TranslationTask(config.task, words, words)


def random_sentences(task: FairseqTask, lengths: numpy.ndarray | None = None) -> FairseqDataset:
    """A data set of random words; lengths: count x 2 (default: a corpus of `generate_lengths`)."""
    words, chance = task.source_dictionary, torch.Generator().manual_seed(SEED)
    lengths, sides = generate_lengths(SENTENCES) if lengths is None else lengths, []
    for side in (lengths[:, 0], lengths[:, 1]):
        sizes = side + 1  # with end of sentence
        tokens = torch.randint(words.nspecial, len(words), (int(sizes.sum()),), generator=chance)
        tokens[torch.from_numpy(sizes.cumsum() - 1)] = words.eos()
        sides += [ListDataset(tokens.split(sizes.tolist()), sizes), sizes, words]
    return LanguagePairDataset(*sides)


def batches_of(dataset: FairseqDataset, **limits: int) -> list[Sequence[int]]:
    """The rows of an epoch's batches, made by fairseq's own rules; limits: max_tokens or max_sentences of a batch."""
    with numpy_seed(SEED):
        order = dataset.ordered_indices()  # by length
    longest = min(POSITIONS, limits.get("max_tokens", POSITIONS))  # or what fits into a batch
    order, _ = dataset.filter_indices_by_size(order, (longest, longest))
    if not len(order):
        raise UserError(f"no sentence has at most {longest} tokens; a larger --max-tokens may help")
    return dataset.batch_by_size(order, **limits)


def pick(dataset: FairseqDataset, batches: Sequence[Sequence[int]], count: int) -> list[Batch]:
    """`count` of these batches, which are sorted by length: spread evenly, in random order."""
    places = numpy.unique(((numpy.arange(count) + 0.5) * len(batches) / count).astype(int))
    numpy.random.default_rng(SEED).shuffle(places)
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
        {"seconds", "tokens"}, each {name: table[repetition][item]}.
    """
    names = list(candidates)
    times: Times = {kind: {name: [] for name in names} for kind in ("seconds", "tokens")}
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
                    seconds, tokens = timed(candidates[name], item, device)
                    times["seconds"][name][repetition].append(seconds)
                    times["tokens"][name][repetition].append(tokens)
                progress.update(1)
    return times


def timed(candidate: Candidate, item: Any, device: str) -> tuple[float, int]:
    """One call: its seconds and tokens."""
    synchronize(device)
    start = time.perf_counter()
    tokens = candidate(item)
    synchronize(device)
    return time.perf_counter() - start, tokens


def run(
    name: str,
    args: argparse.Namespace,
    cases: Callable[[str], Iterable[Sequence[Any]]],
    measure: Callable[..., dict[str, Any]],
    report: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Measure case after case; each is printed, and kept in --output, as soon as it is there.

    Args:
        cases: of a device: the arguments of `measure` behind the command line's and the device.
        report: prints a result (default: `report_speeds`).
    """
    results: list[dict[str, Any]] = []
    with reporting(f"benchmark_{name}"):
        device = prepare(args)
        for case in cases(device):
            results.append(measure(args, device, *case))
            (report or report_speeds)(results[-1])
            write_json(args.output, record(name, args, device, results))
    print(f"written: {args.output}")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median and quartiles."""
    low, middle, high = numpy.percentile(values, (25, 50, 75))
    return {"median": float(middle), "q1": float(low), "q3": float(high), "count": len(values)}


def speeds(times: Times) -> dict[str, Any]:
    """Tokens per second of each candidate, and its speed as a share of stock's, from what `interleave` gives.

    A pass is one repetition over all batches.
    """
    passes = {
        name: numpy.array(times["tokens"][name]).sum(axis=1) / numpy.array(table).sum(axis=1)
        for name, table in times["seconds"].items()
    }
    ratios = {name: spread(speed / passes["stock"]) for name, speed in passes.items() if name != "stock"}
    per_second = {name: spread(speed) for name, speed in passes.items()}
    return {"tokens_per_second": per_second, "ratio": ratios["ours"], "ratios": ratios}


def report_speeds(result: Mapping[str, Any]) -> None:
    """Print what `speeds` found, as people read it."""
    print(result["label"])
    for name, speed in result["tokens_per_second"].items():
        label = result["architectures"].get(name, name)
        of_stock = f", {show(result['ratios'][name])} of stock's" if name != "stock" else ""
        print(f"  {label:<30} {show(speed, 0):>30} target tokens/s{of_stock}")


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
