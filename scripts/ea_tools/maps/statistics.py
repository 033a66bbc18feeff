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
from collections.abc import Iterator, Sequence
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
from ea_tools.tables.page import markdown_table
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
#: By statistic, kind of attention, layer, and "run", "compare" or "difference".
Statistics = dict[str, dict[str, dict[int, dict[str, Estimate]]]]


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
class Sample:
    """The first sentences of a prepared split."""

    dataset: FairseqDataset
    size: int
    # Sentence -> the words that subwords of source and target belong to, without the ends of sentences, and the links.
    gold: dict[int, tuple[np.ndarray, np.ndarray, Gold]]

    def batches(self, tokens: int = BATCH_TOKENS) -> Iterator[dict[str, Any]]:
        """fairseq's batches, of sentences of about the same length."""
        batch: list[Any] = []
        for number in sorted(range(self.size), key=self.dataset.num_tokens):
            if batch and int(self.dataset.num_tokens(number)) * (len(batch) + 1) > tokens:
                yield self.dataset.collater(batch)
                batch = []
            batch.append(self.dataset[number])
        yield self.dataset.collater(batch)


def read_sample(
    loaded: Loaded, subset: str, most: int, gold: Path | None = None, gold_from: int | None = None
) -> Sample:
    """The first sentences of a split, at most `most`, with the alignments of those whose words are all known."""
    if gold:
        _check_gold(loaded)
    dataset = _load(loaded, subset)
    sample = Sample(dataset, min(most, len(dataset)), {})
    if not gold:
        return sample
    alignments = read_gold(gold, gold_from)
    if len(alignments) != len(dataset):
        raise UserError(
            f"{gold}: has {len(alignments):,} lines, and {subset} {len(dataset):,} sentences; the alignments of the "
            "whole subset are needed, a sentence a line"
        )
    for number in range(sample.size):
        source, target = (_words(loaded, side, dataset[number][side][:-1].tolist()) for side in ("source", "target"))
        if source is not None and target is not None:
            sizes = [side[-1] + 1 if len(side) else 0 for side in (source, target)]
            check_range(alignments[number], sizes, f"--gold, sentence {number + 1}")
            sample.gold[number] = source, target, alignments[number]
    if not sample.gold:
        raise UserError(
            f"{gold}: each of the {sample.size} sentences has a word that is not in the dictionaries; give more "
            "--sentences"
        )
    return sample


def _check_gold(loaded: Loaded) -> None:
    """Refuse alignments where there is no encoder-decoder attention between words."""
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


def _words(loaded: Loaded, side: str, ids: list[int]) -> np.ndarray | None:
    """The word that each subword belongs to; None with an unknown one, which hides the end of its word."""
    dictionary = loaded.dictionary(side)
    return None if dictionary.unk() in ids else loaded.words([dictionary[word] for word in ids], side).numbers


def _load(loaded: Loaded, subset: str) -> FairseqDataset:
    """A split as fairseq reads it."""
    path = loaded.data / loaded.stem.format(subset)
    if not path.is_file():
        ending = path.name.removeprefix(subset)
        available = sorted(file.name.removesuffix(ending) for file in path.parent.glob(f"*{ending}"))
        raise UserError(f"--subset {subset}: {path} does not exist; available: {', '.join(available) or 'none'}")
    loaded.task.load_dataset(subset)
    dataset = loaded.task.dataset(subset)
    if len(dataset) < 2:
        raise UserError(f"--subset {subset}: {path} holds one sentence; the intervals need several")
    return dataset


def check_lengths(loaded: Loaded, sample: Sample) -> None:
    """Refuse a sample with a sentence that is too long for the model."""
    most = loaded.model.max_positions()
    _, too_long = sample.dataset.filter_indices_by_size(np.arange(sample.size), most)
    if len(too_long):
        raise UserError(
            f"sentence {min(too_long) + 1}: {loaded.checkpoint} takes at most {most} tokens; give fewer --sentences"
        )


def tally(loaded: Loaded, sample: Sample, tokens: int = BATCH_TOKENS) -> dict[Place, Sums]:
    """The statistics of every layer, sentence by sentence."""
    import torch

    from ea_tools.maps.collect import collect

    sums: dict[Place, Sums] = {}
    with tqdm(total=sample.size, unit=" sentences", mininterval=0.1 if sys.stderr.isatty() else 10) as progress:
        for batch in sample.batches(tokens):
            with torch.no_grad(), collect(loaded.model) as collected:
                loaded.model(**batch["net_input"], features_only=True)
            numbers = batch["id"].tolist()
            before: dict[str, LayerMaps] = {}  # kind -> its map in the layer before
            for maps in collected.layers:
                measured = [*statistics_of(maps, before.get(maps.kind))]
                if maps.kind == "cross" and sample.gold:
                    errors = [_errors(maps, row, sample.gold.get(number)) for row, number in enumerate(numbers)]
                    measured.append(("aer", *np.array(errors).T))
                for name, *of_sentences in measured:
                    place = (name, maps.kind, maps.layer)
                    sums.setdefault(place, np.zeros((2, sample.size)))[:, numbers] = of_sentences
                before[maps.kind] = maps
            progress.update(len(numbers))
    return sums


def _errors(maps: LayerMaps, row: int, gold: tuple[np.ndarray, np.ndarray, Gold] | None) -> tuple[int, int]:
    """(errors, links) of a sentence of the batch: the row of a map that predicts a token is the row of that token."""
    if gold is None:
        return 0, 0
    source, target, links = gold
    visible = ~maps.masked[row, 0]  # T x S
    weights = maps.weights[row].mean(dim=0)[visible.any(dim=1)][:, visible.any(dim=0)]
    # The last row predicts the end of the sentence, the last column is it.
    return alignment_errors(hard_alignment(weights[:-1, :-1].double().numpy(), source, target), *links)


def examine(args: argparse.Namespace) -> Report:
    """Load the models, go through the sentences."""
    from ea_tools.maps.models import load_models

    models = [loaded for loaded in load_models(args.run, args.compare, args.data, with_text=True) if loaded]
    sample = read_sample(models[0], args.subset, args.sentences, args.gold, args.gold_from)
    for loaded in models:
        check_lengths(loaded, sample)
    tallies = dict(zip(STYLES, (tally(loaded, sample) for loaded in models), strict=False))
    statistics: Statistics = {}
    places = dict.fromkeys(place for sums in tallies.values() for place in sums)
    for place in sorted(places, key=lambda place: [*KINDS].index(place[1])):
        counted = {who: sums[place] for who, sums in tallies.items() if place in sums and sums[place][1].any()}
        estimates = {who: estimate(sums) for who, sums in counted.items()}
        if len(counted) == 2:
            estimates["difference"] = estimate(*counted.values())
        if estimates:
            statistic, kind, layer = place
            statistics.setdefault(statistic, {}).setdefault(kind, {})[layer] = estimates
    facts = {
        "data": models[0].preparation.name,
        "subset": args.subset,
        "sentences": sample.size,
        "checkpoints": [str(loaded.checkpoint) for loaded in models],
        "gold": str(args.gold) if args.gold else None,
        "aligned_sentences": len(sample.gold),
        "command": portable(args.command),
        **provenance(on_cpu=True),
    }
    names = dict(zip(STYLES, told_apart([loaded.checkpoint for loaded in models]), strict=False))
    return Report(facts, names, statistics)


# ---- the report


@dataclass(frozen=True)
class Report:
    """Everything that is written down."""

    facts: dict[str, Any]  # the source of the numbers
    names: dict[str, str]  # of the models: "run" and, where there is a baseline, "compare"
    statistics: Statistics


def render(report: Report, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".json":
        content = {**report.facts, "names": list(report.names.values()), "statistics": report.statistics}
        return json_text(content).encode()
    return table(report).encode() if suffix == ".md" else picture(report, suffix.removeprefix("."))


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
        head += f" Differences: {' - '.join(names.values())}, paired by sentence; bold: zero is not in the interval."
    lines = [head]
    for statistic, title in STATISTICS.items():
        kinds = report.statistics.get(statistic, {})
        layers = sorted({layer for places in kinds.values() for layer in places})
        rows = [
            [f"{kind}: {names.get(who, who)}", *(_cell(places.get(layer, {}).get(who), who) for layer in layers)]
            for kind, places in kinds.items()
            for who in (*names, "difference")
            if any(who in ones for ones in places.values())
        ]
        if rows:
            lines += ["", *markdown_table([title, *(f"layer {layer}" for layer in layers)], rows)]
    lines += ["", *(f"- {name}: `{path}`" for name, path in zip(names.values(), facts["checkpoints"], strict=True))]
    lines += [f"- `{facts['command']}`", f"- commit {facts['commit']}, {facts['device']}, {facts['date']}"]
    return "\n".join(lines) + "\n"


def _cell(one: Estimate | None, who: str) -> str:
    if one is None:
        return "-"
    is_difference = who == "difference"
    mean = f"{one['mean']:{'+' if is_difference else ''}.3f}"
    clear = is_difference and (one["low"] > 0 or one["high"] < 0)
    return f"{f'**{mean}**' if clear else mean} ± {(one['high'] - one['low']) / 2:.3f}"


def picture(report: Report, form: str) -> bytes:
    """PNG or SVG: a panel for each statistic, layers across."""
    shown = [name for name in STATISTICS if name != "own" and name in report.statistics]
    columns = 3 if len(shown) < 7 else 4
    rows = -(-len(shown) // columns)
    figure, panels = style.panels(rows, columns, (3.6 * columns, 0.9 + 2.9 * rows), sharex=True)
    for panel, statistic in zip(panels.flat, [*shown, *[None] * (rows * columns - len(shown))], strict=True):
        _panel(panel, report, statistic) if statistic else panel.remove()
    lines = {line.get_label(): line for panel in figure.axes for line in panel.lines}
    columns = len(KINDS) if len(report.names) == 1 else len(report.names)
    figure.legend(handles=list(lines.values()), loc="outside lower center", ncols=columns, fontsize=9, frameon=False)
    file = io.BytesIO()
    style.save(figure, file, form)
    return file.getvalue()


def _panel(panel: Axes, report: Report, statistic: str) -> None:
    """Lines over layers: a colour for each kind of attention, a style for each model; the interval is shaded."""
    from matplotlib.ticker import MaxNLocator

    for who, name in report.names.items():
        for kind, layers in report.statistics[statistic].items():
            (dashes, fill), (colour, marker) = STYLES[who], LOOKS[kind]
            ones = {layer: of_models[who] for layer, of_models in layers.items() if who in of_models}
            means, low, high = np.array([[*one.values()] for one in ones.values()]).reshape(-1, 3).T
            look: dict[str, Any] = {"color": colour, "marker": marker, "markerfacecolor": fill or colour}
            label = textwrap.fill(f"{KINDS[kind]}: {name}" if len(report.names) > 1 else KINDS[kind], 60)
            panel.plot(list(ones), means, dashes, markersize=5, label=label, **look)
            panel.fill_between(list(ones), low, high, color=colour, alpha=0.2, linewidth=0)
    panel.set_title(STATISTICS[statistic].replace(": ", ":\n"), fontsize=10)
    panel.set_xlabel("layer", fontsize=9)
    panel.tick_params(labelsize=9, labelbottom=True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if statistic in PARTS.values():
        panel.set_ylim(0, 1.08 * panel.dataLim.y1 or 1)
    panel.grid(alpha=0.3)
