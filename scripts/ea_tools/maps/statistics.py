"""Attention maps as numbers, for each kind of attention and each layer; scripts/map_statistics.sh is how it is called.

Over the first sentences of a prepared split, under teacher forcing: entropy, similarity to the layer before, the shares
of skip connection and convolution in the logits and, where gold alignments are given, alignment error rate. With 95%
intervals over sentences; with --compare also the paired differences. docs/map-statistics.md has the formulas.

The model may be one for translation, a BART, a RoBERTa or a language model, over the samples that its task makes of the
split: with masks for masked_lm and denoising, pairs of sentences for some tasks of GLUE.
"""

# Axes: B batch, K heads, T target (query) length, S source (key) length. Masks: True = masked.

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ea_tools.common import UserError, portable, replacing, reporting
from ea_tools.figures import style
from ea_tools.maps import KINDS
from ea_tools.maps.alignments import Gold, alignment_errors, check_range, hard_alignment, read_gold
from ea_tools.provenance import provenance
from ea_tools.sides import BOTH, NAMES

if TYPE_CHECKING:  # imported where a model is loaded or a figure is made
    from fairseq.data import FairseqDataset
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from torch import Tensor

    from ea_tools.maps.collect import LayerMaps
    from ea_tools.maps.models import Loaded

Place = tuple[str, str, int]  # statistic, kind of attention, layer
Sums = np.ndarray  # 2 x sentences: for each sentence the sum over heads and rows, and how many were summed

STATISTICS = {
    "entropy": "entropy (nats)",
    "normalised": "normalised entropy",
    "same_head": "similarity to the layer before: same head",
    "head_mean": "similarity to the layer before: mean over heads",
    "own": "share of the logits: own query-key logits",
    "skip": "share of the logits: skip connection",
    "convolution": "share of the logits: convolution",
    "aer": "alignment error rate",
}
#: the summands of the logits, by the names of LayerMaps: what the statistics call them
PARTS = {"logits": "own", "previous": "skip", "convolution": "convolution"}
DIFFERENCE = ": difference"
SUFFIXES = (".md", ".png", ".svg", ".json")
RESAMPLES = 1000
BATCH_TOKENS = 1000  # of the longer side, padding included: the maps of all layers are in memory at once

LOOKS = {kind: (style.COLOURS[number], style.MARKERS[number]) for number, kind in enumerate(KINDS)}
STYLES = (("-", None), ("--", "white"))  # of the model, of the baseline: line, inside of the markers


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load, go through the sentences, write; a file appears under its name only when all are complete."""
    args = parse(arguments)
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")  # fairseq's own attention
    with reporting("map_statistics"):
        report = examine(args)
        with contextlib.ExitStack() as stack:
            for path in args.out:
                stack.enter_context(replacing(path)).write_bytes(render(report, path.suffix.lower()))
    print(f"written: {', '.join(map(str, args.out))}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
        prog="map_statistics.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", required=True, type=Path, metavar="RUN", help="a run's folder (its averaged checkpoint, or its best)"
        " or a checkpoint"
    )  # fmt: skip
    parser.add_argument("--compare", type=Path, metavar="RUN", help="a baseline's folder or checkpoint, same data")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data (default: what the run was trained on)")
    parser.add_argument("--subset", default="test", metavar="SPLIT", help="valid, test, test1, ... (default: test)")
    parser.add_argument(
        "--sentences", type=int, default=200, metavar="N", help="the first N of the subset (default: 200)"
    )
    parser.add_argument(
        "--gold",
        type=Path,
        metavar="FILE",
        help='alignments of the subset: Pharaoh\'s format, a sentence a line ("0-0 1-2 1?3"), or NAACL\'s ("1 2 3 S")',
    )
    parser.add_argument(
        "--gold-from", type=int, choices=(0, 1), help="the first word's number (default: 0; in NAACL's format 1)"
    )
    parser.add_argument("--gold-target-first", action="store_true", help="its links have the target word first")
    parser.add_argument(
        "--out",
        nargs="+",
        type=style.output(SUFFIXES),
        default=[Path("map-statistics.md")],
        metavar="FILE",
        help=f"{', '.join(SUFFIXES)} (default: map-statistics.md)",
    )
    args = parser.parse_args(arguments)
    if args.sentences < 2:
        parser.error("--sentences must be at least 2: the intervals are over sentences")
    if not args.gold and (args.gold_from is not None or args.gold_target_first):
        parser.error("--gold-from and --gold-target-first say how to read --gold FILE, which is missing")
    args.command = ["scripts/map_statistics.sh", *arguments]
    return args


# ---- the statistics of maps: numpy arrays, B x K x T x S, in float64; visible, B x 1 x T x S, is the mask's opposite


def entropy(weights: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """-sum_j A_ij ln A_ij over the visible keys, in nats: B x K x T."""
    return -_times_log(np.where(visible, weights, 0.0)).sum(axis=3)


def similarity(one: np.ndarray, other: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """1 - the Jensen-Shannon divergence in bits of two maps' rows, from 0 (nothing shared) to 1 (equal): B x K x T."""
    one, other = np.where(visible, one, 0.0), np.where(visible, other, 0.0)
    divergence = (_times_log(one) + _times_log(other)).sum(axis=3) / 2 - _times_log((one + other) / 2).sum(axis=3)
    return 1 - divergence / np.log(2)


def _times_log(p: np.ndarray) -> np.ndarray:
    """p ln p, 0 for p = 0."""
    return p * np.log(np.where(p > 0, p, 1.0))


def shares(parts: Mapping[str, np.ndarray], visible: np.ndarray) -> dict[str, np.ndarray]:
    """Each part's share of the logits' variation along a row, part -> B x K x T; NaN in a row where nothing varies.

    The softmax does not see what is the same for all keys of a row. So a part's size is its standard deviation over the
    row's visible keys, and its share that size over the sum of the sizes.
    """
    sizes = {name: spread(part, visible) for name, part in parts.items()}
    total = sum(sizes.values())
    return {name: np.divide(size, total, out=np.full_like(total, np.nan), where=total > 0)
            for name, size in sizes.items()}  # fmt: skip


def spread(part: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Standard deviation over the visible keys of each row: B x K x T; 0 where there are none."""
    keys = np.maximum(visible.sum(axis=3), 1)
    mean = np.where(visible, part, 0.0).sum(axis=3) / keys
    return np.sqrt((np.where(visible, part - mean[..., None], 0.0) ** 2).sum(axis=3) / keys)


def statistics_of(maps: LayerMaps, before: LayerMaps | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(statistic, sums, counts) of one layer, two arrays over the sentences of the batch; their quotient is the mean.

    Over heads and rows. A row that sees fewer than two keys has nothing to divide its attention between, and is left
    out of everything: padding, and the decoder's first.

    Args:
        before: the same kind's map in the layer before; None in the first.
    """
    weights, visible = _numpy(maps.weights), ~maps.masked.numpy()
    keys = visible.sum(axis=3)  # B x 1 x T
    rows = keys > 1
    own_entropy = entropy(weights, visible)
    statistics = {"entropy": own_entropy, "normalised": own_entropy / np.log(np.maximum(keys, 2))}
    if before is not None:
        earlier = _numpy(before.weights)
        statistics["same_head"] = similarity(weights, earlier, visible)
        statistics["head_mean"] = similarity(*(w.mean(axis=1, keepdims=True) for w in (weights, earlier)), visible)
    if len(maps.parts) > 1:
        parts = {PARTS[name]: part.share * _numpy(part.map) for name, part in maps.parts.items()}
        statistics |= shares(parts, visible)
    for name, values in statistics.items():
        counted = rows & ~np.isnan(values)
        yield name, np.where(counted, values, 0.0).sum(axis=(1, 2)), counted.sum(axis=(1, 2))


def _numpy(x: Tensor) -> np.ndarray:
    return x.double().numpy()


# ---- a test set


@dataclass(frozen=True)
class Pair:
    """A sentence pair of the test set."""

    number: int  # its line, from 0
    # The word that each subword of source and target belongs to, without the ends of sentences; None without gold.
    words: tuple[np.ndarray, np.ndarray] | None
    gold: Gold | None


class Sample:
    """The first sentences of a prepared split, as fairseq's data set holds them, and their gold alignments."""

    def __init__(self, loaded: Loaded, subset: str, most: int, gold: Sequence[Gold | None] | None = None) -> None:
        self._dataset = _load(loaded, subset)
        self.pairs = [
            self._pair(loaded, number, gold[number] if gold else None)
            for number in range(min(most, len(self._dataset)))
        ]
        self.aligned = sum(pair.gold is not None for pair in self.pairs)

    def _pair(self, loaded: Loaded, number: int, gold: Gold | None) -> Pair:
        if gold is None:
            return Pair(number, None, None)
        pair, words = self._dataset[number], []
        for side in ("source", "target"):
            dictionary, ids = getattr(loaded.task, f"{side}_dictionary"), pair[side][:-1].tolist()
            if dictionary.unk() in ids:
                return Pair(number, None, None)  # where the word of an unknown subword ends, nobody knows any more
            words.append(loaded.words([dictionary[word] for word in ids], side).numbers)
        check_range(gold, [word[-1] + 1 if len(word) else 0 for word in words], f"--gold, sentence {number + 1}")
        return Pair(number, tuple(words), gold)

    def check(self, loaded: Loaded) -> None:
        """Refuse sentences that this model cannot read."""
        for pair in self.pairs:
            for side in ("source", "target") if loaded.sides == BOTH else ("source",):
                # Tasks of one text say no more of a sample than how many tokens there are.
                length = len(self._dataset[pair.number][side]) if loaded.sides == BOTH else self._length(pair.number)
                if length > (most := loaded.longest(side)):
                    name = loaded.called(side) or "text "
                    raise UserError(
                        f"sentence {pair.number + 1}: its {name}has {length:,} tokens, {loaded.checkpoint} takes "
                        f"{most:,}; give fewer --sentences"
                    )

    def _length(self, number: int) -> int:
        return int(self._dataset.num_tokens(number))

    def batches(self, tokens: int = BATCH_TOKENS) -> Iterator[tuple[list[Pair], dict[str, Any]]]:
        """(pairs, fairseq's batch) with sentences of about the same length, the rows in the order of the pairs."""
        batch = []
        for pair in sorted(self.pairs, key=lambda pair: self._length(pair.number)):
            if batch and self._length(pair.number) * (len(batch) + 1) > tokens:
                yield self._collate(batch)
                batch = []
            batch.append(pair)
        yield self._collate(batch)

    def _collate(self, pairs: Sequence[Pair]) -> tuple[list[Pair], dict[str, Any]]:
        sample = self._dataset.collater([self._dataset[pair.number] for pair in pairs])
        by_number = {pair.number: pair for pair in pairs}  # fairseq puts the longest first
        return [by_number[int(number)] for number in sample["id"]], sample


def _load(loaded: Loaded, subset: str) -> FairseqDataset:
    """A split as fairseq reads it."""
    stem = loaded.stem
    path = loaded.data / stem.format(subset)
    if not path.is_file():
        ending = path.name.removeprefix(subset)
        there = sorted(file.name.removesuffix(ending) for file in path.parent.glob(f"*{ending}"))
        raise UserError(f"--subset {subset}: {path} does not exist; there are: {', '.join(there) or 'none'}")
    if not path.stat().st_size:
        raise UserError(f"--subset {subset}: {path} is empty")
    loaded.task.load_dataset(subset)
    dataset = loaded.task.dataset(subset)
    if len(dataset) < 2:
        raise UserError(f"--subset {subset}: {path} holds one sentence; the intervals need several")
    return dataset


def _read_alignments(args: argparse.Namespace, loaded: Loaded) -> list[Gold | None] | None:
    """The alignments of --gold, one for each sentence of the subset; None where there are none to be read."""
    if not args.gold:
        return None
    if loaded.task_name != "translation":
        raise UserError(
            f"--gold: {loaded.checkpoint} was trained for {loaded.task_name}; alignments are of sentences and their "
            "translations, read off encoder-decoder attention"
        )
    sentences = len(_load(loaded, args.subset))
    gold = read_gold(args.gold, sentences, args.gold_from, args.gold_target_first)
    if len(gold) != sentences:
        raise UserError(
            f"{args.gold}: has {len(gold):,} lines, and {args.subset} {sentences:,} sentences; the alignments of the "
            "whole subset are needed, a sentence a line"
        )
    return gold


def tally(loaded: Loaded, sample: Sample, tokens: int = BATCH_TOKENS) -> dict[Place, Sums]:
    """The statistics of every layer, sentence by sentence."""
    import torch

    from ea_tools.maps.collect import collect

    sums = {}
    with tqdm(total=len(sample.pairs), unit=" sentences", mininterval=0.1 if sys.stderr.isatty() else 10) as progress:
        for pairs, batch in sample.batches(tokens):
            with torch.no_grad(), collect(loaded.model) as collected:
                loaded.model(**batch["net_input"], features_only=True)
            places = [pair.number for pair in pairs]
            for place, *sums_and_counts in _of_batch(collected.layers, pairs):
                if place not in sums:
                    sums[place] = np.zeros((2, len(sample.pairs)))
                sums[place][:, places] = sums_and_counts
            progress.update(len(pairs))
    return sums


def _of_batch(layers: Iterable[LayerMaps], pairs: Sequence[Pair]) -> Iterator[tuple[Place, np.ndarray, np.ndarray]]:
    """(place, sums, counts) of every layer, over the sentences of a batch."""
    before = {}  # kind -> its map in the layer before
    for maps in layers:
        for name, sums, counts in statistics_of(maps, before.get(maps.kind)):
            yield (name, maps.kind, maps.layer), sums, counts
        if maps.kind == "cross" and any(pair.gold for pair in pairs):
            errors = [_sentence_errors(maps, number, pair) for number, pair in enumerate(pairs)]
            yield ("aer", "cross", maps.layer), *np.array(errors).T
        before[maps.kind] = maps


def _sentence_errors(maps: LayerMaps, number: int, pair: Pair) -> tuple[int, int]:
    """(errors, links) of a sentence of the batch: the row that predicts a token is the row of that token."""
    if pair.gold is None:
        return 0, 0
    visible = ~maps.masked[number, 0]  # T x S
    weights = maps.weights[number].mean(dim=0)[visible.any(dim=1)][:, visible.any(dim=0)]
    source, target = pair.words
    # The last row predicts the end of the sentence, the last column is it.
    links = hard_alignment(weights[:-1, :-1].double().numpy(), source, target)
    return alignment_errors(links, *pair.gold)


# ---- means and intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over the rows of all sentences, and its 95% interval by bootstrap over sentences."""

    mean: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half the width of the interval."""
        return (self.high - self.low) / 2

    @property
    def clear(self) -> bool:
        """As a difference: zero is not in the interval."""
        return self.low > 0 or self.high < 0


@functools.cache
def resamples(sentences: int) -> np.ndarray:
    """How often a sentence is in each of RESAMPLES samples with replacement, RESAMPLES x sentences; always the same."""
    return np.random.default_rng(1).multinomial(sentences, np.full(sentences, 1 / sentences), size=RESAMPLES)


def estimate(one: Sums, other: Sums | None = None) -> Estimate:
    """The mean of one statistic, or its difference from another's on the same samples of sentences."""
    times = np.vstack([np.ones(len(one[0])), resamples(len(one[0]))])
    with np.errstate(invalid="ignore"):  # a sample may hold no sentence that counts
        mean, *values = _quotient(times, one) - (0 if other is None else _quotient(times, other))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Estimate(float(mean), float(low), float(high))


def _quotient(times: np.ndarray, statistic: Sums) -> np.ndarray:
    sums, counts = statistic
    return (times @ sums) / (times @ counts)


@dataclass(frozen=True)
class Report:
    """Everything that is written down."""

    facts: dict[str, Any]  # what the numbers are of
    names: list[str]  # of the model and, if there is one, of the baseline
    estimates: list[dict[Place, Estimate]]  # of each model
    differences: dict[Place, Estimate]  # model - baseline; {} without one
    mixes: list[dict[str, float]]  # of each model: {"alpha_encoder_2": 0.1, ...}, its learnt alpha and beta; or {}


def examine(args: argparse.Namespace) -> Report:
    """Load the models, go through the sentences."""
    from ea_fairseq.mixes import learnt_mixes
    from ea_tools.maps.models import load_model

    models = [load_model(args.run, args.data, with_text=True)]
    if args.compare:
        models.append(load_model(args.compare, models[0].data))
        if models[1].sides != models[0].sides:
            raise UserError(
                f"--compare {models[1].checkpoint}: has {NAMES[models[1].sides]}, and {models[0].checkpoint} "
                f"{NAMES[models[0].sides]}"
            )
    sample = Sample(models[0], args.subset, args.sentences, _read_alignments(args, models[0]))
    for loaded in models:
        sample.check(loaded)
    if args.gold and not sample.aligned:
        raise UserError(
            f"{args.gold}: of no sentence that was asked for is there an alignment, or all of them have words that the "
            "dictionaries do not know"
        )
    tallies = [tally(loaded, sample) for loaded in models]
    counted = [{place: sums for place, sums in of_model.items() if sums[1].any()} for of_model in tallies]
    differences = {}
    if args.compare:
        model, baseline = counted
        differences = {place: estimate(sums, baseline[place]) for place, sums in model.items() if place in baseline}
    facts = {
        "data": models[0].prep.get("name", models[0].data.name),
        "subset": args.subset,
        "sentences": len(sample.pairs),
        "checkpoints": [str(loaded.checkpoint) for loaded in models],
        "gold": str(args.gold) if args.gold else None,
        "aligned_sentences": sample.aligned,
        "command": portable(args.command),
        **provenance(on_cpu=True),
    }
    return Report(
        facts=facts,
        names=_names([loaded.checkpoint for loaded in models]),
        estimates=[{place: estimate(sums) for place, sums in of_model.items()} for of_model in counted],
        differences=differences,
        mixes=[learnt_mixes(loaded.model) for loaded in models],
    )


def _names(checkpoints: Sequence[Path]) -> list[str]:
    """The runs' names without their common beginning, or with the checkpoints' where they are of one run."""
    names = [path.absolute().parent.name for path in checkpoints]
    if len(set(names)) < len(names):
        return ["/".join(path.absolute().parts[-2:]) for path in checkpoints]
    if len(names) == 1:
        return names
    one, other = (name.split("-") for name in names)
    while one[0] == other[0] and min(len(one), len(other)) > 1:  # "multi30k-de-en-" says nothing here
        del one[0], other[0]
    return ["-".join(one), "-".join(other)]


# ---- writing


def render(report: Report, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".json":
        return (json.dumps(as_json(report), indent=1, ensure_ascii=False) + "\n").encode()
    return table(report).encode() if suffix == ".md" else picture(report, suffix.removeprefix("."))


def as_json(report: Report) -> dict[str, Any]:
    """{..., "statistics": {statistic: {kind: {layer: {"run": ..., "compare": ..., "difference": ...}}}}}"""
    statistics = {}
    for who, estimates in zip(("run", "compare"), report.estimates, strict=False):
        _insert(statistics, who, estimates)
    _insert(statistics, "difference", report.differences)
    return {**report.facts, "names": report.names, "statistics": statistics, "learnt_mixes": report.mixes}


def _insert(statistics: dict[str, dict], who: str, estimates: Mapping[Place, Estimate]) -> None:
    for (statistic, kind, layer), one in estimates.items():
        layers = statistics.setdefault(statistic, {}).setdefault(kind, {})
        layers.setdefault(str(layer), {})[who] = vars(one)


def table(report: Report) -> str:
    """Markdown: a table for each statistic, a column for each layer."""
    facts = report.facts
    aligned = f", {facts['aligned_sentences']:,} of them with gold alignments" if facts["gold"] else ""
    lines = [
        f"{facts['data']}, {facts['subset']}: {facts['sentences']:,} sentences{aligned}. Means over heads and rows, "
        "± half of the 95% interval by bootstrap over sentences."
    ]
    if report.differences:
        lines[0] += " Differences: {} - {}, paired by sentence; bold: zero is not in the interval.".format(
            *report.names
        )
    for statistic, title in STATISTICS.items():
        if rows := _rows(report, statistic):
            layers = sorted({layer for _, by_layer in rows for layer in by_layer})
            lines += ["", f"| {title} | layer {' | '.join(map(str, layers))} |", f"|---|{'---|' * len(layers)}"]
            for name, by_layer in rows:
                sign = "+" if name.endswith(DIFFERENCE) else ""
                lines.append(f"| {name} | {' | '.join(_cell(by_layer.get(layer), sign) for layer in layers)} |")
    for name, mixes in zip(report.names, report.mixes, strict=True):
        lines += _table_of_mixes(name, mixes)
    lines += ["", *(f"- {name}: `{path}`" for name, path in zip(report.names, facts["checkpoints"], strict=True))]
    lines += [f"- `{facts['command']}`", f"- commit {facts['commit']}, {facts['device']}, {facts['date']}"]
    return "\n".join(lines) + "\n"


def _table_of_mixes(name: str, mixes: Mapping[str, float]) -> list[str]:
    """Lines of Markdown: a row for each kind's learnt alpha and beta, a column for each layer; none without any."""
    rows = {}
    for place, value in mixes.items():
        share, kind, layer = place.split("_")
        rows.setdefault(f"{kind}: {share}", {})[int(layer)] = value
    if not rows:
        return []
    layers = sorted(set().union(*rows.values()))
    lines = ["", f"| learnt by {name} | layer {' | '.join(map(str, layers))} |", f"|---|{'---|' * len(layers)}"]
    for title, values in rows.items():
        cells = (f"{values[layer]:.4f}" if layer in values else "-" for layer in layers)
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return lines


def _rows(report: Report, statistic: str) -> list[tuple[str, dict[int, Estimate]]]:
    """[(name, {layer: Estimate}), ...]: for each kind the models, then their difference."""
    rows = []
    for kind in KINDS:
        for name, estimates in zip(report.names, report.estimates, strict=True):
            rows.append((f"{kind}: {name}", of_layers(estimates, statistic, kind)))
        rows.append((f"{kind}{DIFFERENCE}", of_layers(report.differences, statistic, kind)))
    return [(name, by_layer) for name, by_layer in rows if by_layer]


def of_layers(estimates: Mapping[Place, Estimate], statistic: str, kind: str) -> dict[int, Estimate]:
    """{layer: Estimate}, the lowest layer first."""
    return {place[2]: one for place, one in sorted(estimates.items()) if place[:2] == (statistic, kind)}


def _cell(one: Estimate | None, sign: str) -> str:
    if one is None:
        return "-"
    mean = f"{one.mean:{sign}.3f}"
    return f"{f'**{mean}**' if sign and one.clear else mean} ± {one.half:.3f}"


def picture(report: Report, form: str) -> bytes:
    """PNG or SVG: a panel for each statistic, layers across."""
    shown = [name for name in STATISTICS if name != "own" and _rows(report, name)]
    columns = 3 if len(shown) < 7 else 4
    rows = -(-len(shown) // columns)
    figure, panels = style.panels(rows, columns, (3.6 * columns, 0.9 + 2.9 * rows), sharex=True)
    for panel, statistic in zip(panels.flat, [*shown, *[None] * (rows * columns - len(shown))], strict=True):
        _panel(panel, report, statistic) if statistic else panel.remove()
    figure.legend(handles=_legend(report), loc="outside lower center", ncols=len(LOOKS), fontsize=9, frameon=False)
    file = io.BytesIO()
    style.save(figure, file, form)
    return file.getvalue()


def _legend(report: Report) -> list[Artist]:
    """Kinds of attention above, models below: matplotlib fills column after column."""
    from matplotlib.lines import Line2D

    kinds = [Line2D([], [], color=colour, marker=marker, label=KINDS[kind]) for kind, (colour, marker) in LOOKS.items()]
    models = [
        Line2D([], [], color="0.2", linestyle=dashes, marker="o", markerfacecolor=fill, label=name)
        for name, (dashes, fill) in zip(report.names, STYLES, strict=False)
    ]
    models += [Line2D([], [], linestyle="", label=" ") for _ in range(len(kinds) - len(models))]
    return [handle for column in zip(kinds, models, strict=True) for handle in column]


def _panel(panel: Axes, report: Report, statistic: str) -> None:
    """Lines over layers: a colour for each kind of attention, a style for each model; the interval is shaded."""
    from matplotlib.ticker import MaxNLocator

    for estimates, (dashes, fill) in zip(report.estimates, STYLES, strict=False):
        for kind, (colour, marker) in LOOKS.items():
            by_layer = of_layers(estimates, statistic, kind)
            means, low, high = ([getattr(one, name) for one in by_layer.values()] for name in ("mean", "low", "high"))
            face = {"markerfacecolor": fill or colour, "markersize": 5}
            panel.plot(list(by_layer), means, dashes, color=colour, marker=marker, **face)
            panel.fill_between(list(by_layer), low, high, color=colour, alpha=0.2, linewidth=0)
    panel.set_title(STATISTICS[statistic].replace(": ", ":\n"), fontsize=10)
    panel.set_xlabel("layer", fontsize=9)
    panel.tick_params(labelsize=9, labelbottom=True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if statistic in PARTS.values():
        panel.set_ylim(0, 1.08 * panel.dataLim.y1)
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
