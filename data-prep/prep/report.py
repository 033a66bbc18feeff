"""What was made: PREP.json, a table for the screen, and a picture of the sentence lengths."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .pipeline import Pipeline

RED, PLAIN = "\033[31m", "\033[0m"


def lengths(index: Path) -> np.ndarray:
    """Subwords of each sentence of an .idx file of fairseq's, without the end mark: int array, one per sentence."""
    header = 9 + 8 + 1  # magic, version, type of the tokens; then the number of sentences and their sizes
    number = int(np.fromfile(index, np.int64, 1, offset=header)[0])
    return np.memmap(index, np.int32, "r", header + 8, (number,)) - 1


def summarise(pipeline: Pipeline, folder: Path, log: str, versions: dict[str, str]) -> dict:
    """The contents of PREP.json for the binarised data in `folder`; `log` is what fairseq-preprocess said."""
    recipe, rules = pipeline.recipe, pipeline.recipe.rules
    filters = [
        {"on": rules.filter_on, "split": split} | counts
        for stage in ("tokenise", "filter")
        for split, counts in pipeline.report(stage).items()
    ]
    dropped: dict[str, int] = {}
    for counts in filters:
        for reason, number in counts["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + number
    return {
        "name": recipe.name,
        "source_lang": recipe.source_lang,
        "target_lang": recipe.target_lang,
        "tokenizer": "moses",
        "lowercase": rules.lowercase,
        "bpe": rules.bpe,
        "bpe_merges": rules.merges,
        "rules": dataclasses.asdict(rules),
        "splits": {split: _split(pipeline, folder, split, log) for split in pipeline.splits()},
        "train_words": pipeline.report("learn"),
        "filters": filters,
        "dropped": dropped,
        "command": shlex.join(pipeline.command),
        "versions": versions,
    }


def _split(pipeline: Pipeline, folder: Path, split: str, log: str) -> dict:
    recipe = pipeline.recipe
    parts = recipe.splits().get(split, recipe.train)
    found = {
        "pairs": 0,
        "expected": recipe.expected.get(split),
        "name": recipe.test_names().get(split, split),
        "source": [part.url or part.member for part in parts],
        "subwords": {},
        "longest": {},
        "unknown_percent": {},
    }
    for lang in pipeline.languages:
        sizes = lengths(folder / f"{split}.{recipe.source_lang}-{recipe.target_lang}.{lang}.idx")
        found["pairs"] = len(sizes)
        found["subwords"][lang] = int(sizes.sum())
        found["longest"][lang] = int(sizes.max())
        said = re.search(rf"/{split}\.{lang}: \d+ sents, \d+ tokens, ([\d.e-]+)% replaced", log)
        found["unknown_percent"][lang] = float(said[1]) if said else None
    return found


def table(summary: dict, colour: bool) -> str:
    """The summary as lines for the screen; a number of pairs other than the expected one is red and marked."""
    languages = (summary["source_lang"], summary["target_lang"])
    heads = ["split", "pairs", "expected", *(f"{what} {lang}" for what in ("subwords", "unk %") for lang in languages)]
    lines = [f"\n{heads[0]:<28}" + "".join(f"{head:>14}" for head in heads[1:])]
    for split, found in summary["splits"].items():
        name = split if found["name"] == split else f"{split} ({found['name'][:20]})"
        cells = [f"{found['pairs']:,}", f"{found['expected']:,}" if found["expected"] else "-"]
        cells += [f"{found['subwords'][lang]:,}" for lang in languages]
        cells += [f"{found['unknown_percent'][lang]:.2f}" for lang in languages]
        line = f"{name:<28}" + "".join(f"{cell:>14}" for cell in cells)
        if found["expected"] and found["pairs"] != found["expected"]:
            line = f"{RED}{line}{PLAIN}" if colour else line
            line += "  <- not as expected"
        lines.append(line)
    for lang in languages:
        words = summary["train_words"][lang]
        lines.append(f"train {lang}: {words['words']:,} words, {words['types']:,} types")
    for counts in summary["filters"]:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts["dropped"].items()) or "nothing dropped"
        lines.append(
            f"length filter on {counts['on']}, {counts['split']}: "
            f"{counts['in']:,} pairs in, {counts['out']:,} out; {reasons}"
        )
    return "\n".join(lines) + "\n"


def plot_lengths(summary: dict, folder: Path) -> None:
    """Writes folder/lengths.png: how many training sentences have how many subwords."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    pair = f"{summary['source_lang']}-{summary['target_lang']}"
    for lang in pair.split("-"):
        counts = np.bincount(lengths(folder / f"train.{pair}.{lang}.idx"))
        axes.stairs(counts, label=f"{lang}, mean {np.average(np.arange(len(counts)), weights=counts):.1f}")
    axes.set(xlabel="subwords in a sentence", ylabel="sentences", yscale="log", title=f"{summary['name']}, training")
    axes.legend()
    figure.savefig(folder / "lengths.png", dpi=120)
    pyplot.close(figure)
