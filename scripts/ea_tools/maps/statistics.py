"""Attention maps as numbers, for each kind of attention and each layer; scripts/map_statistics.sh is how it is called.

Over the first sentences of a prepared split, under teacher forcing: entropy, similarity to the layer before, the shares
of skip connection and convolution in the logits and, where gold alignments are given, alignment error rate. With 95%
intervals over sentences; with --compare also the paired differences. docs/map-statistics.md has the formulas.
"""

# Axes: B batch, K heads, T target (query) length, S source (key) length. Masks: True = masked.

import argparse
import contextlib
import functools
import io
import json
import logging
import re
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import matplotlib.font_manager  # here, before fairseq's start turns every library's debugging on
import numpy as np
import torch
from fairseq.data import Dictionary
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from tqdm import tqdm

from ea_fairseq.mixes import learnt_mixes
from ea_tools.checkpoints import load, section
from ea_tools.common import UserError, replacing, reporting
from ea_tools.evaluate import portable
from ea_tools.maps.collect import KINDS, LayerMaps, Loaded, collect, load_model
from ea_tools.provenance import provenance
from ea_tools.text import read_lines

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
OPTIONS = {"png": {"pil_kwargs": {"optimize": True}}, "svg": {"metadata": {"Date": None}}}
SUFFIXES = (".md", ".png", ".svg", ".json")
RESAMPLES = 1000
BATCH_TOKENS = 1000  # of the longer side, padding included: the maps of all layers are in memory at once

# Okabe and Ito's colours, which colour-blind people can tell apart; markers tell them apart in print.
LOOKS = {"encoder": ("#0072B2", "o"), "decoder": ("#D55E00", "s"), "cross": ("#009E73", "^")}
STYLES = (("-", None), ("--", "white"))  # of the model, of the baseline: line, inside of the markers


def main(arguments=None):
    """Command line: load, go through the sentences, write; a file appears under its name only when all are complete."""
    args = parse(arguments)
    logging.getLogger("matplotlib").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message="Support for mismatched key_padding_mask")  # fairseq's own attention
    with reporting("map_statistics"):
        report = examine(args)
        with contextlib.ExitStack() as stack:
            for path in args.out:
                stack.enter_context(replacing(path)).write_bytes(render(report, path.suffix.lower()))
    print(f"written: {', '.join(map(str, args.out))}")


def parse(arguments):
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
        "--gold", type=Path, metavar="FILE", help='alignments of the whole subset, a sentence a line: "0-0 1-2 1?3"'
    )
    parser.add_argument(
        "--out",
        nargs="+",
        type=_output,
        default=[Path("map-statistics.md")],
        metavar="FILE",
        help=f"{', '.join(SUFFIXES)} (default: map-statistics.md)",
    )
    args = parser.parse_args(arguments)
    if args.sentences < 2:
        parser.error("--sentences must be at least 2: the intervals are over sentences")
    args.command = ["scripts/map_statistics.sh", *arguments]
    return args


def _output(text):
    if Path(text).suffix.lower() not in SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text}: the name must end in {', '.join(SUFFIXES)}")
    return Path(text)


# ---- the statistics of maps: numpy arrays, B x K x T x S, in float64; visible, B x 1 x T x S, is the mask's opposite


def entropy(weights, visible):
    """-sum_j A_ij ln A_ij over the visible keys, in nats: B x K x T."""
    return -_times_log(np.where(visible, weights, 0.0)).sum(axis=3)


def similarity(one, other, visible):
    """1 - the Jensen-Shannon divergence in bits of two maps' rows, from 0 (nothing shared) to 1 (equal): B x K x T."""
    one, other = np.where(visible, one, 0.0), np.where(visible, other, 0.0)
    divergence = (_times_log(one) + _times_log(other)).sum(axis=3) / 2 - _times_log((one + other) / 2).sum(axis=3)
    return 1 - divergence / np.log(2)


def _times_log(p):
    """p ln p, 0 for p = 0."""
    return p * np.log(np.where(p > 0, p, 1.0))


def shares(parts, visible):
    """Each part's share of the logits' variation along a row, part -> B x K x T; NaN in a row where nothing varies.

    The softmax does not see what is the same for all keys of a row. So a part's size is its standard deviation over the
    row's visible keys, and its share that size over the sum of the sizes.
    """
    sizes = {name: spread(part, visible) for name, part in parts.items()}
    total = sum(sizes.values())
    return {name: np.divide(size, total, out=np.full_like(total, np.nan), where=total > 0)
            for name, size in sizes.items()}  # fmt: skip


def spread(part, visible):
    """Standard deviation over the visible keys of each row: B x K x T; 0 where there are none."""
    keys = np.maximum(visible.sum(axis=3), 1)
    mean = np.where(visible, part, 0.0).sum(axis=3) / keys
    return np.sqrt((np.where(visible, part - mean[..., None], 0.0) ** 2).sum(axis=3) / keys)


def statistics_of(maps: LayerMaps, before: LayerMaps | None):
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
    found = {"entropy": own_entropy, "normalised": own_entropy / np.log(np.maximum(keys, 2))}
    if before is not None:
        earlier = _numpy(before.weights)
        found["same_head"] = similarity(weights, earlier, visible)
        found["head_mean"] = similarity(*(w.mean(axis=1, keepdims=True) for w in (weights, earlier)), visible)
    if len(maps.parts) > 1:
        found |= shares({PARTS[name]: part.share * _numpy(part.map) for name, part in maps.parts.items()}, visible)
    for name, values in found.items():
        counted = rows & ~np.isnan(values)
        yield name, np.where(counted, values, 0.0).sum(axis=(1, 2)), counted.sum(axis=(1, 2))


def _numpy(x):
    return x.double().numpy()


# ---- alignments


def read_gold(path):
    """[(sure, possible), ...] of a file in Pharaoh format: sets of (source word, target word); possible holds sure too.

    Words count from 0; 1-2 is a sure link, 1?2 and 1p2 are possible ones.
    """
    return [_links(line, f"{path}:{number}") for number, line in enumerate(read_lines(path), 1)]


def _links(line, place):
    sure, possible = set(), set()
    for word in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", word)
        if not match:
            raise UserError(f"{place}: {word!r} is no link; a sure one is written 1-2, a possible one 1?2 or 1p2")
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return sure, possible


def check_range(gold, words, place):
    """Refuse links to words that the sentence does not have; words: how many source and target words it has."""
    for link in sorted(gold[1]):
        for word, there, side in zip(link, words, ("source", "target"), strict=True):
            if word >= there:
                raise UserError(
                    f"{place}: the link between words {link[0]} and {link[1]} is out of range: the {side} sentence has "
                    f"{there} words, and they count from 0"
                )


def word_numbers(symbols, bpe):
    """The number of the word, from 0, that each subword belongs to."""
    if bpe == "sentencepiece":
        starts = [number == 0 or symbol.startswith("▁") for number, symbol in enumerate(symbols)]
    else:
        starts = [number == 0 or not symbols[number - 1].endswith("@@") for number in range(len(symbols))]
    return np.cumsum(starts, dtype=int) - 1


def hard_alignment(weights, source_words, target_words):
    """{(source word, target word)}: for each target word the source word that gets most of its subwords' attention.

    Args:
        weights: subwords of the target x subwords of the source, without the ends of sentences.
        source_words, target_words: the word that each subword belongs to.
    """
    if not weights.size:
        return set()
    mass = np.zeros((target_words[-1] + 1, source_words[-1] + 1))
    np.add.at(mass, (target_words[:, None], source_words[None, :]), weights)
    return {(int(source), target) for target, source in enumerate(mass.argmax(axis=1))}


def alignment_errors(found, sure, possible):
    """(errors, links) of a sentence; over a corpus, AER = the sum of errors / the sum of links."""
    links = len(found) + len(sure)
    return links - len(found & sure) - len(found & possible), links


# ---- a test set


@dataclass(frozen=True)
class Pair:
    """A sentence pair of the test set."""

    number: int  # its line, from 0
    words: tuple | None  # the word that each subword belongs to: source, target, without the ends of sentences
    gold: tuple | None  # (sure, possible)


class Sample:
    """The first sentences of a prepared split, as fairseq's data set holds them, and their gold alignments."""

    def __init__(self, loaded: Loaded, subset: str, most: int, gold: Path | None):
        self._dataset = _load(loaded, subset)
        alignments = read_gold(gold) if gold else None
        if gold and len(alignments) != len(self._dataset):
            raise UserError(
                f"{gold}: has {len(alignments):,} lines, and {subset} {len(self._dataset):,} sentences; the alignments "
                "of the whole subset are needed, a sentence a line"
            )
        self._dictionaries = loaded.task.source_dictionary, loaded.task.target_dictionary
        self._bpe = loaded.prep["bpe"]
        self.pairs = [
            self._pair(number, alignments[number] if gold else None, gold)
            for number in range(min(most, len(self._dataset)))
        ]
        self.aligned = sum(pair.gold is not None for pair in self.pairs)

    def _pair(self, number, gold, path):
        pair, words = self._dataset[number], []
        for side, dictionary in zip(("source", "target"), self._dictionaries, strict=True):
            ids = pair[side][:-1].tolist()
            if gold and dictionary.unk() in ids:
                return Pair(number, None, None)  # where the word of an unknown subword ends, nobody knows any more
            words.append(word_numbers([dictionary[word] for word in ids], self._bpe))
        if gold:
            check_range(gold, [word[-1] + 1 if len(word) else 0 for word in words], f"{path}:{number + 1}")
        return Pair(number, tuple(words), gold)

    def check(self, loaded: Loaded):
        """Refuse sentences that this model cannot read."""
        for pair in self.pairs:
            for side, most in zip(("source", "target"), loaded.model.max_positions(), strict=True):
                length = len(self._dataset[pair.number][side])
                if length > most:
                    raise UserError(
                        f"sentence {pair.number + 1}: its {side} has {length:,} tokens, {loaded.checkpoint} takes "
                        f"{most:,}; give fewer --sentences"
                    )

    def batches(self, tokens=BATCH_TOKENS):
        """(pairs, fairseq's batch) with sentences of about the same length, the rows in the order of the pairs."""
        length = self._dataset.num_tokens
        batch = []
        for pair in sorted(self.pairs, key=lambda pair: length(pair.number)):
            if batch and length(pair.number) * (len(batch) + 1) > tokens:
                yield self._collate(batch)
                batch = []
            batch.append(pair)
        yield self._collate(batch)

    def _collate(self, pairs):
        sample = self._dataset.collater([self._dataset[pair.number] for pair in pairs])
        by_number = {pair.number: pair for pair in pairs}  # fairseq puts the longest first
        return [by_number[int(number)] for number in sample["id"]], sample


def _load(loaded: Loaded, subset: str):
    """A split as fairseq reads it."""
    source, target = loaded.prep["source_lang"], loaded.prep["target_lang"]
    stem = f"{source}-{target}.{source}.bin"
    path = loaded.data / f"{subset}.{stem}"
    if not path.is_file():
        there = sorted(found.name.removesuffix(f".{stem}") for found in loaded.data.glob(f"*.{stem}"))
        raise UserError(f"--subset {subset}: {path} does not exist; there are: {', '.join(there) or 'none'}")
    if not path.stat().st_size:
        raise UserError(f"--subset {subset}: {path} is empty")
    loaded.task.load_dataset(subset)
    dataset = loaded.task.dataset(subset)
    if len(dataset) < 2:
        raise UserError(f"--subset {subset}: {path} holds one sentence; the intervals need several")
    return dataset


def warn_of_other_words(loaded: Loaded):
    """Say so if the dictionaries are as large as those that the model was trained with, but others.

    No more than a warning: the path in the checkpoint may be relative to a folder that is not this one.
    """
    trained = Path(section(load(loaded.checkpoint), "task").get("data") or "")
    for language, used in (
        (loaded.prep["source_lang"], loaded.task.source_dictionary),
        (loaded.prep["target_lang"], loaded.task.target_dictionary),
    ):
        path = trained / f"dict.{language}.txt"
        if path.is_file() and Dictionary.load(str(path)).symbols != used.symbols:
            print(
                f"map_statistics: warning: {loaded.checkpoint} says that it was trained on {trained}, and {path} holds "
                f"other words than that of {loaded.data}: if they are not the ones it was trained on, the numbers mean "
                "nothing",
                file=sys.stderr,
            )
            return


@torch.no_grad()
def tally(loaded: Loaded, sample: Sample, tokens=BATCH_TOKENS):
    """{(statistic, kind, layer): (sums, counts)}, two arrays over the sentences."""
    sums = {}
    with tqdm(total=len(sample.pairs), unit=" sentences", mininterval=0.1 if sys.stderr.isatty() else 10) as progress:
        for pairs, batch in sample.batches(tokens):
            with collect(loaded.model) as collected:
                loaded.model(**batch["net_input"])
            places = [pair.number for pair in pairs]
            for place, *found in _of_batch(collected.layers, pairs, batch):
                if place not in sums:
                    sums[place] = np.zeros((2, len(sample.pairs)))
                sums[place][:, places] = found
            progress.update(len(pairs))
    return sums


def _of_batch(layers, pairs, batch):
    """((statistic, kind, layer), sums, counts) of every layer."""
    before = {}  # kind -> its map in the layer before
    for maps in layers:
        for name, sums, counts in statistics_of(maps, before.get(maps.kind)):
            yield (name, maps.kind, maps.layer), sums, counts
        if maps.kind == "cross" and any(pair.gold for pair in pairs):
            errors = [_sentence_errors(maps, number, pair) for number, pair in enumerate(pairs)]
            yield ("aer", "cross", maps.layer), *np.array(errors).T
        before[maps.kind] = maps


def _sentence_errors(maps, number, pair):
    """(errors, links) of a sentence of the batch: the row that predicts a token is the row of that token."""
    if pair.gold is None:
        return 0, 0
    visible = ~maps.masked[number, 0]  # T x S
    weights = maps.weights[number].mean(dim=0)[visible.any(dim=1)][:, visible.any(dim=0)]
    source, target = pair.words
    # The last row predicts the end of the sentence, the last column is it.
    found = hard_alignment(weights[:-1, :-1].double().numpy(), source, target)
    return alignment_errors(found, *pair.gold)


# ---- means and intervals


@dataclass(frozen=True)
class Estimate:
    """A mean over the rows of all sentences, and its 95% interval by bootstrap over sentences."""

    mean: float
    low: float
    high: float

    @property
    def half(self):
        return (self.high - self.low) / 2

    @property
    def clear(self):
        """As a difference: zero is not in the interval."""
        return self.low > 0 or self.high < 0


@functools.cache
def resamples(sentences):
    """How often a sentence is in each of RESAMPLES samples with replacement, RESAMPLES x sentences; always the same."""
    return np.random.default_rng(1).multinomial(sentences, np.full(sentences, 1 / sentences), size=RESAMPLES)


def estimate(one, other=None):
    """The Estimate of one (sums, counts), or of the difference to another's, both on the same samples of sentences."""
    times = np.vstack([np.ones(len(one[0])), resamples(len(one[0]))])
    with np.errstate(invalid="ignore"):  # a sample may hold no sentence that counts
        mean, *values = _quotient(times, one) - (0 if other is None else _quotient(times, other))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return Estimate(float(mean), float(low), float(high))


def _quotient(times, found):
    sums, counts = found
    return (times @ sums) / (times @ counts)


@dataclass(frozen=True)
class Report:
    """Everything that is written down."""

    facts: dict  # what the numbers are of
    names: list  # of the model and, if there is one, of the baseline
    estimates: list  # of each model: {(statistic, kind, layer): Estimate}
    differences: dict  # model - baseline; {} without one
    mixes: list  # of each model: {"alpha_encoder_2": 0.1, ...}, its learnt alpha and beta; {} where none are learnt


def examine(args) -> Report:
    """Load the models, go through the sentences."""
    models = [load_model(args.run, args.data)]
    if args.compare:
        models.append(load_model(args.compare, models[0].data))
    sample = Sample(models[0], args.subset, args.sentences, args.gold)
    for loaded in models:
        warn_of_other_words(loaded)
        sample.check(loaded)
    if args.gold and not sample.aligned:
        raise UserError(f"{args.gold}: every sentence has words that the dictionaries do not know")
    found = [tally(loaded, sample) for loaded in models]
    keep = [{place: both for place, both in one.items() if both[1].any()} for one in found]
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
        estimates=[{place: estimate(both) for place, both in one.items()} for one in keep],
        differences={place: estimate(both, keep[1][place]) for place, both in keep[0].items() if place in keep[1]}
        if len(keep) > 1
        else {},
        mixes=[learnt_mixes(loaded.model) for loaded in models],
    )


def _names(checkpoints):
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


def as_json(report: Report):
    """{..., "statistics": {statistic: {kind: {layer: {"run": ..., "compare": ..., "difference": ...}}}}}"""
    found = {}
    for who, estimates in zip(("run", "compare", "difference"), [*report.estimates, report.differences], strict=False):
        _insert(found, who, estimates)
    if report.differences:
        _insert(found, "difference", report.differences)
    return {**report.facts, "names": report.names, "statistics": found, "learnt_mixes": report.mixes}


def _insert(found, who, estimates):
    for (statistic, kind, layer), one in estimates.items():
        layers = found.setdefault(statistic, {}).setdefault(kind, {})
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
            layers = sorted({layer for _, found in rows for layer in found})
            lines += ["", f"| {title} | layer {' | '.join(map(str, layers))} |", f"|---|{'---|' * len(layers)}"]
            for name, found in rows:
                sign = "+" if name.endswith(DIFFERENCE) else ""
                lines.append(f"| {name} | {' | '.join(_cell(found.get(layer), sign) for layer in layers)} |")
    for name, mixes in zip(report.names, report.mixes, strict=True):
        lines += _table_of_mixes(name, mixes)
    lines += ["", *(f"- {name}: `{path}`" for name, path in zip(report.names, facts["checkpoints"], strict=True))]
    lines += [f"- `{facts['command']}`", f"- commit {facts['commit']}, {facts['device']}, {facts['date']}"]
    return "\n".join(lines) + "\n"


def _table_of_mixes(name, mixes):
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


def _rows(report, statistic):
    """[(name, {layer: Estimate}), ...]: for each kind the models, then their difference."""
    rows = []
    for kind in KINDS:
        for name, estimates in zip(report.names, report.estimates, strict=True):
            rows.append((f"{kind}: {name}", of_layers(estimates, statistic, kind)))
        rows.append((f"{kind}{DIFFERENCE}", of_layers(report.differences, statistic, kind)))
    return [(name, found) for name, found in rows if found]


def of_layers(estimates, statistic, kind):
    """{layer: Estimate}"""
    return {place[2]: one for place, one in sorted(estimates.items()) if place[:2] == (statistic, kind)}


def _cell(found, sign):
    if found is None:
        return "-"
    mean = f"{found.mean:{sign}.3f}"
    return f"{f'**{mean}**' if sign and found.clear else mean} ± {found.half:.3f}"


def picture(report: Report, form: str) -> bytes:
    """PNG or SVG: a panel for each statistic, layers across."""
    shown = [name for name in STATISTICS if name != "own" and _rows(report, name)]
    columns = 3 if len(shown) < 7 else 4
    rows = -(-len(shown) // columns)
    figure = Figure(figsize=(3.6 * columns, 0.9 + 2.9 * rows), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False, sharex=True).flat
    for panel, statistic in zip(panels, [*shown, *[None] * (rows * columns - len(shown))], strict=True):
        _panel(panel, report, statistic) if statistic else panel.remove()
    figure.legend(handles=_legend(report), loc="outside lower center", ncols=len(LOOKS), fontsize=9, frameon=False)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "statistics"}):
        figure.savefig(file, format=form, dpi=90, **OPTIONS[form])
    return file.getvalue()


def _legend(report):
    """Kinds of attention above, models below: matplotlib fills column after column."""
    kinds = [Line2D([], [], color=colour, marker=marker, label=KINDS[kind]) for kind, (colour, marker) in LOOKS.items()]
    models = [
        Line2D([], [], color="0.2", linestyle=style, marker="o", markerfacecolor=fill, label=name)
        for name, (style, fill) in zip(report.names, STYLES, strict=False)
    ]
    models += [Line2D([], [], linestyle="", label=" ") for _ in range(len(kinds) - len(models))]
    return [handle for column in zip(kinds, models, strict=True) for handle in column]


def _panel(panel, report, statistic):
    """Lines over layers: a colour for each kind of attention, a style for each model; the interval is shaded."""
    for estimates, (style, fill) in zip(report.estimates, STYLES, strict=False):
        for kind, (colour, marker) in LOOKS.items():
            found = of_layers(estimates, statistic, kind)
            means, low, high = ([getattr(one, name) for one in found.values()] for name in ("mean", "low", "high"))
            face = {"markerfacecolor": fill or colour, "markersize": 5}
            panel.plot(list(found), means, style, color=colour, marker=marker, **face)
            panel.fill_between(list(found), low, high, color=colour, alpha=0.2, linewidth=0)
    panel.set_title(STATISTICS[statistic].replace(": ", ":\n"), fontsize=10)
    panel.set_xlabel("layer", fontsize=9)
    panel.tick_params(labelsize=9, labelbottom=True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if statistic in PARTS.values():
        panel.set_ylim(0, 1.08 * panel.dataLim.y1)
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
