"""What was made: PREP.json, a table for the screen, and a picture of the sentence lengths."""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from .binary import count_lengths
from .corpus import Corpus

POSITIONS = 1024  # fairseq's default --max-source-positions and --max-target-positions, end mark included
RED, PLAIN = "\033[31m", "\033[0m"


def summarise(
    corpus: Corpus,
    folder: Path,
    *,
    stages: Mapping[str, dict],
    merges: int,
    unknown: Mapping[str, list[int]],
    types: int,
    command: Sequence[str],
    versions: dict[str, str],
) -> dict:
    """The contents of PREP.json for the binary data in `folder`.

    Args:
        stages: what each stage had to report, by its name.
        merges: how many merges the subwords are made of, or how many pieces of sentencepiece.
        unknown: each split's unknown subwords, by side; its splits are those of the data, in their order.
        types: the size of the dictionary.
        command: what was called.
    """
    rules = corpus.rules
    filters = [
        {"on": rules.filter_on, "split": split} | counts
        for stage in ("tokenise", "filter")
        for split, counts in stages[stage].items()
    ]
    dropped: dict[str, int] = {}
    for counts in filters:
        for reason, number in counts["dropped"].items():
            dropped[reason] = dropped.get(reason, 0) + number
    return {
        "name": corpus.name,
        "source_lang": corpus.source_lang,
        "target_lang": corpus.target_lang,
        "tokenizer": "given" if rules.tokenised else "moses",
        "lowercase": rules.lowercase,
        "bpe": rules.bpe,
        "bpe_merges": merges,
        "rules": dataclasses.asdict(rules),
        "splits": {split: _split(corpus, folder, split, by_side) for split, by_side in unknown.items()},
        "dictionary": types,
        "train_words": stages["learn"],
        "filters": filters,
        "dropped": dropped,
        "command": shlex.join(command),
        "versions": versions,
    }


def _split(corpus: Corpus, folder: Path, split: str, unknown: list[int]) -> dict:
    """What there is to say about one split; `unknown` are its unknown subwords by side."""
    languages = (corpus.source_lang, corpus.target_lang)
    parts = corpus.splits().get(split, corpus.train)
    facts = {
        "pairs": 0,
        "expected": corpus.expected.get(split),
        "name": corpus.test_names().get(split, split),
        "source": [part.url or part.member for part in parts],
        "subwords": {},
        "longest": {},
        "unknown_percent": {},
    }
    for lang, number in zip(languages, unknown, strict=True):
        counts = count_lengths(folder / f"{split}.{'-'.join(languages)}.{lang}.idx")
        facts["pairs"] = int(counts.sum())
        facts["subwords"][lang] = int(counts @ np.arange(len(counts)))
        facts["longest"][lang] = len(counts) - 1
        facts["unknown_percent"][lang] = round(100 * number / max(1, facts["subwords"][lang]), 4)
    return facts


def table(summary: dict, colour: bool) -> str:
    """The summary as lines for the screen; a number of pairs other than the expected one is red and marked."""
    languages = (summary["source_lang"], summary["target_lang"])
    heads = ["split", "pairs", "expected", *(f"{what} {lang}" for what in ("subwords", "unk %") for lang in languages)]
    lines = [f"\n{heads[0]:<28}" + "".join(f"{head:>14}" for head in heads[1:])]
    for split, facts in summary["splits"].items():
        name = split if facts["name"] == split else f"{split} ({facts['name'][:20]})"
        cells = [f"{facts['pairs']:,}", f"{facts['expected']:,}" if facts["expected"] else "-"]
        cells += [f"{facts['subwords'][lang]:,}" for lang in languages]
        cells += [f"{facts['unknown_percent'][lang]:.2f}" for lang in languages]
        line = f"{name:<28}" + "".join(f"{cell:>14}" for cell in cells)
        if facts["expected"] and facts["pairs"] != facts["expected"]:
            line = f"{RED}{line}{PLAIN}" if colour else line
            line += "  <- not as expected"
        lines.append(line)
    for lang in languages:
        words = summary["train_words"][lang]
        lines.append(f"train {lang}: {words['words']:,} words, {words['types']:,} types")
    lines.append(f"dictionary, both languages: {summary['dictionary']:,} types")
    for counts in summary["filters"]:
        reasons = ", ".join(f"{number:,} {reason}" for reason, number in counts["dropped"].items()) or "nothing dropped"
        lines.append(
            f"length filter on {counts['on']}, {counts['split']}: "
            f"{counts['in']:,} pairs in, {counts['out']:,} out; {reasons}"
        )
    return "\n".join(lines) + "\n"


def warnings(summary: dict) -> list[str]:
    """What the user should know before training."""
    return [
        f"warning: {split}: its longest {lang} sentence has {longest:,} subwords, more than the {POSITIONS:,} that "
        f"fairseq's models take;\n  fairseq leaves it out of training, but stops at it elsewhere unless told "
        f"--skip-invalid-size-inputs-valid-test"
        for split, facts in summary["splits"].items()
        for lang, longest in facts["longest"].items()
        if longest + 1 > POSITIONS
    ]


def plot_lengths(summary: dict, folder: Path) -> None:
    """Writes folder/lengths.png: how many training sentences have how many subwords."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    pair = f"{summary['source_lang']}-{summary['target_lang']}"
    for lang in pair.split("-"):
        counts = count_lengths(folder / f"train.{pair}.{lang}.idx")
        axes.stairs(counts, label=f"{lang}, mean {np.average(np.arange(len(counts)), weights=counts):.1f}")
    axes.set(xlabel="subwords in a sentence", ylabel="sentences", yscale="log", title=f"{summary['name']}, training")
    axes.legend()
    figure.savefig(folder / "lengths.png", dpi=120)
    pyplot.close(figure)
