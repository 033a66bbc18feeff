"""Attention maps as numbers, for each kind of attention and each layer.

Over the first sentences of a prepared split, under teacher forcing: entropy, similarity to the layer before, and the
shares of skip connection and convolution in the logits. With --gold also the alignment error rate, with --compare the
paired differences. Intervals are 95% over sentences. docs/attention.md has the formulas.

The model may be one for translation, a BART, a RoBERTa or a language model. It reads the samples that its task makes of
the split, with masks for masked_lm and denoising.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from ea_artifacts.checkpoints import told_apart
from ea_artifacts.command import Parser, UserError, at_least, ignore_warnings, portable, reporting
from ea_artifacts.files import json_text, replacing
from ea_tools.figures import style
from ea_tools.maps import KINDS
from ea_tools.maps.alignments import Gold, alignment_errors, check_range, hard_alignment, read_gold
from ea_tools.maps.measures import PARTS, Estimate, Place, Sums, estimate, statistics_of
from ea_tools.sides import BOTH, NAMES
from ea_tools.training.provenance import provenance

if TYPE_CHECKING:  # imported where a model is loaded or a figure is made
    from fairseq.data import FairseqDataset
    from matplotlib.axes import Axes

    from ea_tools.maps.collect import LayerMaps
    from ea_tools.maps.models import Loaded

SUFFIXES = (".md", ".png", ".svg", ".json")
#: Tokens of the longer side in a batch, padding included; the maps of all layers are in memory.
BATCH_TOKENS = 1000
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
LOOKS = {kind: (style.COLOURS[number], style.MARKERS[number]) for number, kind in enumerate(KINDS)}
#: of the models: line, inside of the markers
STYLES: dict[str, tuple[Any, str | None]] = {"run": ("-", None), "compare": ("--", "white")}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load, go through the sentences, write; a file appears under its name only when all are complete."""
    args = parse(arguments)
    ignore_warnings()
    with reporting("map_statistics"):
        report = examine(args)
        with contextlib.ExitStack() as stack:
            for path in dict.fromkeys(args.out):
                stack.enter_context(replacing(path)).write_bytes(render(report, path.suffix.lower()))
    print(f"written: {', '.join(map(str, args.out))}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(prog="map_statistics.sh", description=__doc__)
    add = parser.add_argument
    add("--run", required=True, type=Path, metavar="RUN", help="a run (its model.json names the checkpoint) or a file")
    add("--compare", type=Path, metavar="RUN", help="a baseline's folder or checkpoint, same data")
    add("--data", type=Path, metavar="DIR", help="prepared data (default: the run's training data)")
    add("--subset", default="test", metavar="SPLIT", help="valid, test, test1, ... (default: test)")
    add("--sentences", type=at_least(2), default=200, metavar="N", help="the first N of the subset (default: 200)")
    pharaoh = 'alignments in Pharaoh\'s format, a sentence a line: "0-0 1-2 1?3"'
    add("--gold", type=Path, metavar="FILE", help=pharaoh)
    add("--gold-from", type=int, choices=(0, 1), help="the first word's number (default: 0)")
    files, default = ", ".join(SUFFIXES) + " (default: map-statistics.md)", [Path("map-statistics.md")]
    add("--out", nargs="+", type=style.output(SUFFIXES), default=default, metavar="FILE", help=files)
    args = parser.parse_args(arguments)
    if args.gold_from is not None and not args.gold:
        parser.error("--gold-from goes with --gold FILE")
    args.command = ["scripts/map_statistics.sh", *arguments]
    return args


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

    def __init__(self, loaded: Loaded, subset: str, most: int, gold: Sequence[Gold] | None = None) -> None:
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
                return Pair(number, None, None)  # an unknown subword hides the end of its word
            words.append(loaded.words([dictionary[word] for word in ids], side).numbers)
        check_range(gold, [word[-1] + 1 if len(word) else 0 for word in words], f"--gold, sentence {number + 1}")
        return Pair(number, (words[0], words[1]), gold)

    def check(self, loaded: Loaded) -> None:
        """Refuse sentences that this model cannot read."""
        sides = ("source", "target") if loaded.sides == BOTH else ("source",)
        for pair in self.pairs:
            # Tasks of one text state the number of tokens alone.
            item = self._dataset[pair.number] if loaded.sides == BOTH else {}
            for side in sides:
                length = len(item[side]) if side in item else self._length(pair.number)
                if length > (most := loaded.longest(side)):
                    raise UserError(
                        f"sentence {pair.number + 1}: its {loaded.called(side) or 'text '}has {length:,} tokens, "
                        f"{loaded.checkpoint} takes {most:,}; give fewer --sentences"
                    )

    def _length(self, number: int) -> int:
        return int(self._dataset.num_tokens(number))

    def batches(self, tokens: int = BATCH_TOKENS) -> Iterator[tuple[list[Pair], dict[str, Any]]]:
        """(pairs, fairseq's batch) with sentences of about the same length, the rows in the order of the pairs."""
        batch: list[Pair] = []
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
        raise UserError(f"--subset {subset}: {path} does not exist; available: {', '.join(there) or 'none'}")
    loaded.task.load_dataset(subset)
    dataset = loaded.task.dataset(subset)
    if len(dataset) < 2:
        raise UserError(f"--subset {subset}: {path} holds one sentence; the intervals need several")
    return dataset


def _read_alignments(args: argparse.Namespace, loaded: Loaded) -> list[Gold] | None:
    """The alignments of --gold, one for each sentence of the subset; None where there are none to be read."""
    if not args.gold:
        return None
    if loaded.task_name != "translation":
        raise UserError(
            f"--gold: {loaded.checkpoint} was trained for {loaded.task_name}; alignments are of sentences and their "
            "translations, read off encoder-decoder attention"
        )
    for side in ("source", "target"):
        if not loaded.has_words(side):
            raise UserError(
                f"--gold: subwords of {loaded.language(side)} do not show where a word begins; prepare the data "
                "from text in tokens (custom.sh --tokenised)"
            )
    sentences = len(_load(loaded, args.subset))
    gold = read_gold(args.gold, args.gold_from)
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
    before: dict[str, LayerMaps] = {}  # kind -> its map in the layer before
    for maps in layers:
        for name, sums, counts in statistics_of(maps, before.get(maps.kind)):
            yield (name, maps.kind, maps.layer), sums, counts
        if maps.kind == "cross" and any(pair.gold for pair in pairs):
            errors = [_sentence_errors(maps, number, pair) for number, pair in enumerate(pairs)]
            yield ("aer", "cross", maps.layer), *np.array(errors).T
        before[maps.kind] = maps


def _sentence_errors(maps: LayerMaps, number: int, pair: Pair) -> tuple[int, int]:
    """(errors, links) of a sentence of the batch: the row that predicts a token is the row of that token."""
    if pair.gold is None or pair.words is None:
        return 0, 0
    visible = ~maps.masked[number, 0]  # T x S
    weights = maps.weights[number].mean(dim=0)[visible.any(dim=1)][:, visible.any(dim=0)]
    source, target = pair.words
    # The last row predicts the end of the sentence, the last column is it.
    links = hard_alignment(weights[:-1, :-1].double().numpy(), source, target)
    return alignment_errors(links, *pair.gold)


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
            f"{args.gold}: each of the {len(sample.pairs)} sentences has a word that is not in the dictionaries; give "
            "more --sentences"
        )
    tallies = [tally(loaded, sample) for loaded in models]
    counted = [{place: sums for place, sums in of_model.items() if sums[1].any()} for of_model in tallies]
    estimates = {
        who: {place: estimate(sums) for place, sums in of_model.items()}
        for who, of_model in zip(STYLES, counted, strict=False)
    }
    if args.compare:
        model, baseline = counted
        both = {place: (sums, baseline[place]) for place, sums in model.items() if place in baseline}
        estimates["difference"] = {place: estimate(*pair) for place, pair in both.items()}
    rows: dict[tuple[str, str, str], dict[int, Estimate]] = {}
    for kind in KINDS:
        for who, of_model in estimates.items():
            for (statistic, its, layer), one in sorted(of_model.items()):
                if its == kind:
                    rows.setdefault((statistic, kind, who), {})[layer] = one
    facts = {
        "data": models[0].preparation.name,
        "subset": args.subset,
        "sentences": len(sample.pairs),
        "checkpoints": [str(loaded.checkpoint) for loaded in models],
        "gold": str(args.gold) if args.gold else None,
        "aligned_sentences": sample.aligned,
        "command": portable(args.command),
        **provenance(on_cpu=True),
    }
    names = dict(zip(STYLES, told_apart([loaded.checkpoint for loaded in models]), strict=False))
    mixes = {who: learnt_mixes(loaded.model) for who, loaded in zip(names, models, strict=True)}
    return Report(facts, names, rows, mixes)


# ---- the report


@dataclass(frozen=True)
class Report:
    """Everything that is written down."""

    facts: dict[str, Any]  # the source of the numbers
    names: dict[str, str]  # of the models: "run" and, where there is a baseline, "compare"
    rows: dict[tuple[str, str, str], dict[int, Estimate]]  # statistic, kind, and a model or "difference"; by layer
    mixes: dict[str, dict[str, float]]  # of each model: {"alpha_encoder_2": 0.1, ...}, its learnt alpha and beta; or {}


def render(report: Report, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".json":
        return json_text(as_json(report)).encode()
    return table(report).encode() if suffix == ".md" else picture(report, suffix.removeprefix("."))


def as_json(report: Report) -> dict[str, Any]:
    """{..., "statistics": {statistic: {kind: {layer: {"run": ..., "compare": ..., "difference": ...}}}}}"""
    statistics: dict[str, dict[str, dict[str, dict]]] = {}
    for (statistic, kind, who), by_layer in report.rows.items():
        layers = statistics.setdefault(statistic, {}).setdefault(kind, {})
        for layer, one in by_layer.items():
            layers.setdefault(str(layer), {})[who] = vars(one)
    mixes = list(report.mixes.values())
    return {**report.facts, "names": list(report.names.values()), "statistics": statistics, "learnt_mixes": mixes}


def table(report: Report) -> str:
    """Markdown: a table for each statistic, a column for each layer."""
    facts, names = report.facts, report.names
    aligned = f", {facts['aligned_sentences']:,} of them with gold alignments" if facts["gold"] else ""
    in_means = ", alignments in the mean of a layer's heads" if facts["gold"] else ""
    head = (
        f"{facts['data']}, {facts['subset']}: {facts['sentences']:,} sentences{aligned}. Means over heads and "
        f"rows{in_means}, ± half of the 95% interval by bootstrap over sentences."
    )
    if "compare" in names:
        head += " Differences: {run} - {compare}, paired by sentence; bold: zero is not in the interval.".format(
            **names
        )
    lines = [head]
    for statistic, title in STATISTICS.items():
        rows = {
            f"{kind}: {names[who]}" if who in names else f"{kind}: {who}": {
                layer: _cell(one, "" if who in names else "+") for layer, one in by_layer.items()
            }
            for (its, kind, who), by_layer in report.rows.items()
            if its == statistic
        }
        lines += _markdown(title, rows)
    for who, mixes in report.mixes.items():
        rows = {}
        for place, value in mixes.items():
            share, kind, layer = place.split("_")
            rows.setdefault(f"{kind}: {share}", {})[int(layer)] = f"{value:.4f}"
        lines += _markdown(f"learnt by {names[who]}", rows)
    lines += ["", *(f"- {name}: `{path}`" for name, path in zip(names.values(), facts["checkpoints"], strict=True))]
    lines += [f"- `{facts['command']}`", f"- commit {facts['commit']}, {facts['device']}, {facts['date']}"]
    return "\n".join(lines) + "\n"


def _markdown(title: str, rows: Mapping[str, Mapping[int, str]]) -> list[str]:
    """Lines of Markdown: a row for each name, a column for each layer; none without any row."""
    layers = sorted({layer for cells in rows.values() for layer in cells})
    if not layers:
        return []
    body = [[name, *(cells.get(layer, "-") for layer in layers)] for name, cells in rows.items()]
    head = ["", f"| {title} | layer {' | '.join(map(str, layers))} |", f"|---|{'---|' * len(layers)}"]
    return head + [f"| {' | '.join(row)} |" for row in body]


def _cell(one: Estimate, sign: str) -> str:
    mean = f"{one.mean:{sign}.3f}"
    return f"{f'**{mean}**' if sign and one.clear else mean} ± {one.half:.3f}"


def picture(report: Report, form: str) -> bytes:
    """PNG or SVG: a panel for each statistic, layers across."""
    from matplotlib.lines import Line2D

    measured = {statistic for statistic, _, _ in report.rows}
    shown = [name for name in STATISTICS if name != "own" and name in measured]
    columns = 3 if len(shown) < 7 else 4
    rows = -(-len(shown) // columns)
    figure, panels = style.panels(rows, columns, (3.6 * columns, 0.9 + 2.9 * rows), sharex=True)
    for panel, statistic in zip(panels.flat, [*shown, *[None] * (rows * columns - len(shown))], strict=True):
        _panel(panel, report, statistic) if statistic else panel.remove()
    kinds = [Line2D([], [], color=colour, marker=marker, label=KINDS[kind]) for kind, (colour, marker) in LOOKS.items()]
    models = [
        Line2D([], [], color="0.2", linestyle=dashes, marker="o", markerfacecolor=fill, label=textwrap.fill(name, 40))
        for name, (dashes, fill) in zip(report.names.values(), STYLES.values(), strict=False)
    ]
    models += [Line2D([], [], linestyle="", label=" ") for _ in range(len(kinds) - len(models))]
    handles = [handle for column in zip(kinds, models, strict=True) for handle in column]  # matplotlib fills columns
    figure.legend(handles=handles, loc="outside lower center", ncols=len(LOOKS), fontsize=9, frameon=False)
    file = io.BytesIO()
    style.save(figure, file, form)
    return file.getvalue()


def _panel(panel: Axes, report: Report, statistic: str) -> None:
    """Lines over layers: a colour for each kind of attention, a style for each model; the interval is shaded."""
    from matplotlib.ticker import MaxNLocator

    for (its, kind, who), by_layer in report.rows.items():
        if its == statistic and who in STYLES:
            (dashes, fill), (colour, marker) = STYLES[who], LOOKS[kind]
            means, low, high = ([getattr(one, name) for one in by_layer.values()] for name in ("mean", "low", "high"))
            face: dict[str, Any] = {"markerfacecolor": fill or colour, "markersize": 5}
            panel.plot(list(by_layer), means, dashes, color=colour, marker=marker, **face)
            panel.fill_between(list(by_layer), low, high, color=colour, alpha=0.2, linewidth=0)
    panel.set_title(STATISTICS[statistic].replace(": ", ":\n"), fontsize=10)
    panel.set_xlabel("layer", fontsize=9)
    panel.tick_params(labelsize=9, labelbottom=True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if statistic in PARTS.values():
        panel.set_ylim(0, 1.08 * panel.dataLim.y1 or 1)
    panel.grid(alpha=0.3)


if __name__ == "__main__":
    main()
