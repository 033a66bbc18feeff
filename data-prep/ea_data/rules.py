"""The rules for a line: punctuation, tokens, case, lengths. Each takes a chunk of lines."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from ea_runtime.text import Normalizer, composed, words

from .corpus import Rules
from .parallel import Chunk

OTHER_SPACE = re.compile(r"[^\S ]")  # whatever str.split() takes for white space, but for the plain space


def in_turn(steps: Sequence[Callable[[Any], Any]], chunk: Chunk) -> Any:
    """What several functions make of a chunk, each of what the one before it gives."""
    return reduce(lambda lines, step: step(lines), steps, chunk)


def compose(chunk: Chunk) -> Chunk:
    """Chunk -> the same lines in Unicode's form NFC."""
    return tuple([composed(line.decode()).encode() for line in lines] for lines in chunk)


class Normalise:
    """Chunk -> the same lines with normalised punctuation and no non-printing characters, as WMT has them."""

    def __init__(self, languages: tuple[str, ...]) -> None:
        self._normalizers = [Normalizer(lang) for lang in languages]

    def __call__(self, chunk: Chunk) -> Chunk:
        return tuple(
            [normalizer.clean(line.decode()).encode() + b"\n" for line in lines]
            for normalizer, lines in zip(self._normalizers, chunk, strict=True)
        )


def plain_apostrophes(chunk: Chunk) -> Chunk:
    """Chunk -> the same lines with ' for ’."""
    return tuple([line.replace("’".encode(), b"'") for line in lines] for lines in chunk)


class Tokenise:
    """Chunk -> its tokenised lines; text that comes in tokens passes through, but for its case and its spaces.

    White space of any kind becomes a plain space there: BPE would keep another inside a word, and fairseq split at it.
    """

    def __init__(self, languages: Sequence[str], rules: Rules) -> None:
        self._words = [words(rules.tokenizer, lang, rules.split_dashes) for lang in languages]
        self._rules = rules

    def __call__(self, chunk: Chunk) -> Chunk:
        return tuple(
            [self._line(tokenize, line) for line in lines]
            for tokenize, lines in zip([side.tokenize for side in self._words], chunk, strict=True)
        )

    def _line(self, tokenize: Callable[[str], str], line: bytes) -> bytes:
        text = line.decode()
        given = self._rules.tokenizer == "given"
        text = OTHER_SPACE.sub(" ", text.removesuffix("\n")) if given else tokenize(text)
        return (text.lower() if self._rules.lowercase else text).encode() + b"\n"


def faults(rules: Rules, chunk: Chunk) -> list[str | None]:
    """The length rules' fault of each pair of a chunk of space-separated tokens, or None."""
    return [rules.fault(len(source.split()), len(target.split())) for source, target in zip(*chunk, strict=True)]


def no_faults(chunk: Chunk) -> list[None]:
    """No fault for each pair of a chunk: where no length rule holds."""
    return [None] * len(chunk[0])
