"""The rules for chunks of lines: tokens, lengths."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from ea_runtime.text import Normalizer, RawText, Tokens, words

from .corpora import Rules
from .parallel import Chunk

OTHER_SPACE = re.compile(r"[^\S ]")  # whatever str.split() takes for white space, but for the plain space


def in_turn(steps: Sequence[Callable[[Any], Any]], chunk: Chunk) -> Any:
    """Apply several functions to a chunk, each to the result of the one before."""
    return reduce(lambda lines, step: step(lines), steps, chunk)


class GivenTokens(RawText):
    """Text in tokens; other white space becomes plain spaces, since BPE would keep it and fairseq split at it."""

    def tokenize(self, line: str) -> str:
        """The line with a plain space for each other white space; white space at its ends stays."""
        return OTHER_SPACE.sub(" ", line.removesuffix("\n"))


class Tokenise:
    """Chunk of raw text -> its tokens, by a corpus's rules for training text or for other text.

    Args:
        languages: those by whose rules Moses splits the sides.
        training: whether it is training text, whose punctuation may be normalised; in other text ’ may become '.
    """

    def __init__(self, languages: Sequence[str], rules: Rules, training: bool = True) -> None:
        given = rules.tokenizer == "given"
        self._sides = [
            Tokens(
                GivenTokens() if given else words(rules.tokenizer, language, rules.split_dashes),
                compose=rules.nfc,
                normalizer=Normalizer(language) if training and rules.normalise else None,
                plain_apostrophes=rules.plain_apostrophes and not training,
                lowercase=rules.lowercase,
            )
            for language in languages
        ]

    def __call__(self, chunk: Chunk) -> Chunk:
        sides = zip(self._sides, chunk, strict=True)
        return tuple([tokens(line.decode()).encode() + b"\n" for line in lines] for tokens, lines in sides)


def faults(rules: Rules, chunk: Chunk) -> list[str | None]:
    """The length rules' fault of each pair of a chunk of space-separated tokens, or None."""
    return [rules.fault(len(source.split()), len(target.split())) for source, target in zip(*chunk, strict=True)]


def no_faults(chunk: Chunk) -> list[None]:
    """No fault for each pair of a chunk: where no length rule holds."""
    return [None] * len(chunk[0])
