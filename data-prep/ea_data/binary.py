"""fairseq's dictionaries and binary data, byte for byte as fairseq-preprocess writes them, by fairseq's own classes.

The command itself needs six times the processor time, and hangs where a worker process is killed.

    dict.XX.txt        a line "subword count" for each, the most frequent first; no special symbols
    SPLIT.S-T.XX.bin   the subwords' numbers, one sentence after the other, each with its end mark
    SPLIT.S-T.XX.idx   header; number of sentences; their lengths (int32); where each begins in .bin, in bytes (int64)
"""

from __future__ import annotations

import logging
import struct
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from .parallel import Chunk

# fairseq is imported where data are written: its import takes seconds, and exported models are used without it.
if TYPE_CHECKING:
    from fairseq.data import Dictionary

Encoded = tuple[np.ndarray, list[int], int]  # numbers, lengths, unknown subwords of one side of a chunk
TYPES = {4: np.int32, 5: np.int64, 8: np.uint16, 9: np.uint32}  # of the numbers in .bin, by fairseq's codes
TYPE_AT = 17  # where an index names the type
SIZES_AT = TYPE_AT + 9  # where its lengths begin

logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)  # of a package that is not needed here


def count_subwords(chunk: Chunk) -> list[Counter[str]]:
    """The subwords of each side of a chunk."""
    return [Counter(b"".join(lines).decode().split()) for lines in chunk]


def dictionary(counts: Counter[str]) -> Dictionary:
    """fairseq's dictionary of these subwords."""
    from fairseq.data import Dictionary

    result = Dictionary()
    for word, count in counts.items():
        result.add_symbol(word, count)
    result.finalize()
    return result


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


def write(names: Sequence[Path], dictionaries: Sequence[Dictionary], chunks: Iterable[list[Encoded]]) -> list[int]:
    """Writes NAME.bin and NAME.idx of each side of what `Encode` makes; returns how many subwords are unknown."""
    import torch
    from fairseq.data import indexed_dataset

    sizes = map(len, dictionaries)
    builders = [
        indexed_dataset.make_builder(f"{name}.bin", "mmap", size) for name, size in zip(names, sizes, strict=True)
    ]
    unknown = [0] * len(builders)
    for chunk in chunks:
        for side, (numbers, lengths, more) in enumerate(chunk):
            for sentence in torch.from_numpy(numbers).split(lengths):
                builders[side].add_item(sentence)
            unknown[side] += more
    for name, builder in zip(names, builders, strict=True):
        builder.finalize(f"{name}.idx")
    return unknown


def _index(path: Path) -> tuple[type, np.ndarray]:
    """The type of the numbers that an .idx file is of, and the sentences' lengths, end marks included."""
    with path.open("rb") as file:
        file.seek(TYPE_AT)
        code, number = struct.unpack("<BQ", file.read(SIZES_AT - TYPE_AT))
    return TYPES[code], np.fromfile(path, np.int32, number, offset=SIZES_AT)


def read_sentences(path: Path) -> list[list[int]]:
    """The sentences of PATH.bin and PATH.idx as numbers, each with its end mark."""
    number_type, sizes = _index(path.with_name(path.name + ".idx"))
    numbers: np.ndarray = np.fromfile(path.with_name(path.name + ".bin"), number_type)
    return [part.tolist() for part in np.split(numbers, np.cumsum(sizes)[:-1])]


def count_lengths(index: Path) -> np.ndarray:
    """How many sentences of an .idx file have 0, 1, 2, ... subwords, end marks not included: int array."""
    return np.bincount(_index(index)[1] - 1)
