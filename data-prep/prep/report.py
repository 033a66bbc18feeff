"""What was made: PREP.json, a table for the screen, and a picture of the sentence lengths."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .pipeline import Pipeline


def lengths(index: Path) -> np.ndarray:
    """Subwords of each sentence of an .idx file of fairseq's, without the end mark: int array, one per sentence."""
    header = 9 + 8 + 1  # magic, version, type of the tokens; then the number of sentences and their sizes
    number = int(np.fromfile(index, np.int64, 1, offset=header)[0])
    return np.memmap(index, np.int32, "r", header + 8, (number,)) - 1


def summarise(pipeline: Pipeline, folder: Path, versions: dict[str, str]) -> dict:
    """The contents of PREP.json for the binarised data in `folder`."""
    recipe, rules = pipeline.recipe, pipeline.recipe.rules
    pair = f"{recipe.source_lang}-{recipe.target_lang}"
    names, parts = recipe.test_names(), recipe.splits()
    splits = {}
    for split in pipeline.splits():
        sizes = {lang: lengths(folder / f"{split}.{pair}.{lang}.idx") for lang in pipeline.languages}
        splits[split] = {
            "pairs": len(sizes[recipe.source_lang]),
            "name": names.get(split, split),
            "source": [part.url or part.member for part in parts.get(split, parts["train"])],
            "subwords": {lang: int(side.sum()) for lang, side in sizes.items()},
        }
    return {
        "name": recipe.name,
        "source_lang": recipe.source_lang,
        "target_lang": recipe.target_lang,
        "tokenizer": "moses",
        "lowercase": rules.lowercase,
        "bpe": rules.bpe,
        "bpe_merges": rules.merges,
        "rules": dataclasses.asdict(rules),
        "splits": splits,
        "dropped": pipeline.dropped(),
        "command": shlex.join(pipeline.command),
        "versions": versions,
    }


def plot_lengths(pipeline: Pipeline, folder: Path) -> None:
    pass
