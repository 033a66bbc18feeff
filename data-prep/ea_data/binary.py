"""fairseq's dictionaries and binary data, byte for byte as fairseq-preprocess writes them, by fairseq's own classes.

The command itself needs six times the processor time, and hangs where a worker process is killed.

    dict.XX.txt        a line "subword count" for each, the most frequent first; no special symbols
    SPLIT.S-T.XX.bin   the subwords' numbers, one sentence after the other, each with its end mark
    SPLIT.S-T.XX.idx   header; number of sentences; their lengths (int32); where each begins in .bin, in bytes (int64)
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .parallel import Chunk

# fairseq is imported where data are read or written: its import takes seconds.
if TYPE_CHECKING:
    from fairseq.data import Dictionary

Encoded = tuple[np.ndarray, list[int], int]  # numbers, lengths, unknown subwords of one side of a chunk

logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # of a package that is not needed here


def save_dictionaries(counts: Sequence[Counter[str]], paths: Sequence[Path], separate: bool) -> None:
    """Writes fairseq's dictionary of each side's subwords, or the joint one twice."""
    from fairseq.data import Dictionary

    for side, path in zip(counts, paths, strict=True):
        dictionary = Dictionary()
        for word, count in (side if separate else counts[0] + counts[1]).items():
            dictionary.add_symbol(word, count)
        dictionary.finalize()
        dictionary.save(str(path))


def load_dictionary(path: Path) -> Dictionary:
    """The dictionary in a file."""
    from fairseq.data import Dictionary

    return Dictionary.load(str(path))


class Encode:
    """Chunk -> for each side: the numbers of its sentences, each with its end mark; their lengths; unknown subwords."""

    def __init__(self, dictionaries: Sequence[Dictionary]) -> None:
        self._dictionaries = dictionaries

    def __call__(self, chunk: Chunk) -> list[Encoded]:
        return [self._encode(lines, of_side) for lines, of_side in zip(chunk, self._dictionaries, strict=True)]

    @staticmethod
    def _encode(lines: list[bytes], dictionary: Dictionary) -> Encoded:
        numbers, lengths, unknown = [], [], 0
        for line in lines:
            words = line.decode().split()
            sentence = list(map(dictionary.index, words))
            unknown += sentence.count(dictionary.unk()) - words.count(dictionary.unk_word)
            numbers += sentence
            numbers.append(dictionary.eos())
            lengths.append(len(sentence) + 1)
        return np.array(numbers, np.int32), lengths, unknown


def write(
    names: Sequence[Path], dictionaries: Sequence[Dictionary], chunks: Iterable[list[Encoded]]
) -> list[dict[str, Any]]:
    """Writes NAME.bin and NAME.idx of each side of what `Encode` makes; returns each side's numbers for PREP.json."""
    import torch
    from fairseq.data import indexed_dataset

    sizes = map(len, dictionaries)
    builders = [
        indexed_dataset.make_builder(f"{name}.bin", "mmap", size) for name, size in zip(names, sizes, strict=True)
    ]
    lengths, unknown = [Counter[int]() for _ in names], [0 for _ in names]
    for chunk in chunks:
        for side, (numbers, of_chunk, more) in enumerate(chunk):
            for sentence in torch.from_numpy(numbers).split(of_chunk):
                builders[side].add_item(sentence)
            lengths[side].update(of_chunk)
            unknown[side] += more
    for name, builder in zip(names, builders, strict=True):
        builder.finalize(f"{name}.idx")
    return list(map(_facts, lengths, unknown))


def _facts(lengths: Counter[int], unknown: int) -> dict[str, Any]:
    """The numbers of a side whose sentences have these lengths, end marks included."""
    subwords = sum((length - 1) * number for length, number in lengths.items())
    percent = round(100 * unknown / max(1, subwords), 4)
    facts = {"subwords": subwords, "longest": max(lengths) - 1, "empty": lengths[1], "unknown_percent": percent}
    return {"pairs": lengths.total()} | facts


def read_sentences(path: Path) -> list[list[int]]:
    """The sentences of PATH.bin and PATH.idx as numbers, each with its end mark."""
    from fairseq.data import indexed_dataset

    return [sentence.tolist() for sentence in indexed_dataset.make_dataset(str(path), "mmap")]
