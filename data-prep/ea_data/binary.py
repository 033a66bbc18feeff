"""fairseq's dictionaries and binary data, byte for byte as fairseq-preprocess writes them.

fairseq-preprocess keeps every sentence's length and address in Python lists, so its memory grows with the corpus. This
module streams: chunks in, numbers out.

    dict.XX.txt        a line "subword count" for each, the most frequent first; no special symbols
    SPLIT.S-T.XX.bin   the subwords' numbers, one sentence after the other, each with its end mark
    SPLIT.S-T.XX.idx   header; number of sentences; their lengths (int32); where each begins in .bin, in bytes (int64)
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from .parallel import Chunk

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # fairseq's numbers 0 to 3
END, UNKNOWN = SPECIAL.index("</s>"), SPECIAL.index("<unk>")
MAGIC, VERSION = b"MMIDIDX\x00\x00", 1
TYPE_CODES = {np.uint16: 8, np.uint32: 9}
HEADER = len(MAGIC) + 8 + 1  # magic, version, type of the numbers
BLOCK = 1 << 16  # sentences


def count_subwords(chunk: Chunk) -> list[Counter]:
    """The subwords of each side of a chunk."""
    return [Counter(b"".join(lines).decode().split()) for lines in chunk]


def dictionary(counts: Counter) -> list[tuple[str, int]]:
    """Subwords and their counts in the order of their numbers, filled up to a multiple of eight as fairseq does."""
    ordered = sorted(
        ((word, n) for word, n in counts.items() if word not in SPECIAL), key=lambda item: (-item[1], item[0])
    )
    missing = -(len(SPECIAL) + len(ordered)) % 8
    return ordered + [(f"madeupword{number:04d}", 0) for number in range(missing)]


class Encode:
    """Chunk -> for each side: its numbers and its sentences' lengths, as bytes, and how many subwords are unknown."""

    def __init__(self, words: Iterable[Iterable[str]]) -> None:
        """`words`: the subwords of each side's dictionary, in the order of their numbers."""
        self._sides = [{word: number for number, word in enumerate([*SPECIAL, *side])} for side in words]
        self.types = [np.uint16 if len(numbers) < 65_500 else np.uint32 for numbers in self._sides]

    def __call__(self, chunk: Chunk) -> list[tuple[bytes, bytes, int]]:
        sides = zip(chunk, self._sides, self.types, strict=True)
        return [self._encode(lines, number_of, kind) for lines, number_of, kind in sides]

    @staticmethod
    def _encode(lines: list[bytes], number_of: dict[str, int], kind: type) -> tuple[bytes, bytes, int]:
        numbers, lengths, unknown = [], [], 0
        for line in lines:
            of_line = [number_of.get(word) for word in line.decode().split()]
            if None in of_line:
                unknown += of_line.count(None)
                of_line = [UNKNOWN if number is None else number for number in of_line]
            numbers += of_line
            numbers.append(END)
            lengths.append(len(of_line) + 1)
        return np.array(numbers, kind).tobytes(), np.array(lengths, np.int32).tobytes(), unknown


def write_index(path: Path, lengths: Path, number_type: type) -> None:
    """Writes .idx from a file of int32 lengths, in blocks."""
    number, begin = lengths.stat().st_size // 4, 0
    with path.open("wb") as file:
        file.write(MAGIC + struct.pack("<QBQ", VERSION, TYPE_CODES[number_type], number))
        for sizes in _blocks(lengths, 0, number):
            file.write(sizes.tobytes())
        for sizes in _blocks(lengths, 0, number):
            ends = begin + np.cumsum(sizes, dtype=np.int64) * np.dtype(number_type).itemsize
            file.write(np.concatenate(([begin], ends[:-1])).astype(np.int64).tobytes())
            begin = int(ends[-1])


def read_sentences(path: Path) -> list[list[int]]:
    """The sentences of PATH.bin and PATH.idx as numbers, each with its end mark."""
    index = path.with_name(path.name + ".idx")
    header = index.read_bytes()[: HEADER + 8]
    code, number = struct.unpack("<BQ", header[HEADER - 1 :])
    number_type = {code: kind for kind, code in TYPE_CODES.items()} | {4: np.int32, 5: np.int64}
    sizes = np.fromfile(index, np.int32, number, offset=HEADER + 8)
    numbers = np.fromfile(path.with_name(path.name + ".bin"), number_type[code])
    return [part.tolist() for part in np.split(numbers, np.cumsum(sizes)[:-1])]


def count_lengths(index: Path) -> np.ndarray:
    """How many sentences of an .idx file have 0, 1, 2, ... subwords, end marks not included: int array."""
    number = int(np.fromfile(index, np.int64, 1, offset=HEADER)[0])
    counts = np.zeros(1, int)
    for sizes in _blocks(index, HEADER + 8, number):
        longer = np.bincount(sizes - 1, minlength=len(counts))
        longer[: len(counts)] += counts
        counts = longer
    return counts


def _blocks(path: Path, offset: int, number: int) -> Iterator[np.ndarray]:
    """`number` int32 from a file, a block at a time."""
    for start in range(0, number, BLOCK):
        yield np.fromfile(path, np.int32, min(BLOCK, number - start), offset=offset + 4 * start)
