"""What is done to a line: punctuation, tokens, case, lengths. Each function takes and gives one line or one pair."""

from __future__ import annotations

import re

import regex
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from .parallel import Chunk
from .recipe import Rules

METACHARACTERS = re.compile(r"[][(){}.*+?|^$\\]")
NON_PRINTING = regex.compile(r"\p{C}")


class Tokenizer(MosesTokenizer):
    """sacremoses' tokenizer with one rule that Moses has and it has not, and with sets where it searches strings.

    Moses splits the full stop off the last word whatever that is: "in the U.S." ends in "U.S" and ".". The text that
    the standard recipes made is like that.
    """

    def __init__(self, lang: str):
        super().__init__(lang)
        self._lower, self._alpha = frozenset(self.IsLower), frozenset(self.IsAlpha)
        self.NONBREAKING_PREFIXES = frozenset(self.NONBREAKING_PREFIXES)
        self.NUMERIC_ONLY_PREFIXES = frozenset(self.NUMERIC_ONLY_PREFIXES)

    def handles_nonbreaking_prefixes(self, text: str) -> str:
        text = super().handles_nonbreaking_prefixes(text)
        if text[-1:] == "." and text[-2:-1] not in ("", " "):
            return text[:-1] + " ."
        return text

    def islower(self, text: str) -> bool:
        return self._lower.issuperset(text)

    def isanyalpha(self, text: str) -> bool:
        return not self._alpha.isdisjoint(text)


class Normalizer(MosesPunctNormalizer):
    """sacremoses' normaliser as Moses' own script has it, which published data went by: the same output, faster.

    A substitution is tried only on text that holds what it cannot match without.
    """

    def __init__(self, lang: str):
        super().__init__(lang, perl_parity=True)
        self._steps = [(_needed(pattern), re.compile(pattern).sub, text) for pattern, text in self.substitutions]

    def normalize(self, text: str) -> str:
        for needed, substitute, replacement in self._steps:
            if needed in text:
                text = substitute(replacement, text)
        return text.strip()


def _needed(pattern: str) -> str:
    """A string that any text must hold for `pattern`, of the few forms that Moses uses, to change it; "" if unsure."""
    if pattern == " +":  # becomes one space, so that one space is no change
        return "  "
    for character in pattern:
        if not character.isascii():
            return character
    if METACHARACTERS.search(re.sub(r"\\\W", "", pattern)):
        return ""
    return re.sub(r"\\(\W)", r"\1", pattern)


class Normalise:
    """Chunk -> the same lines with normalised punctuation and without non-printing characters, as WMT recipes do."""

    def __init__(self, languages: tuple[str, ...]):
        self._normalizers = [Normalizer(lang) for lang in languages]

    def __call__(self, chunk: Chunk) -> Chunk:
        return tuple(
            [_printing(normalizer.normalize(line.decode())).encode() + b"\n" for line in lines]
            for normalizer, lines in zip(self._normalizers, chunk, strict=True)
        )


def _printing(text: str) -> str:
    return text if text.isprintable() else NON_PRINTING.sub(" ", text)


def plain_apostrophes(chunk: Chunk) -> Chunk:
    """Chunk -> the same lines with ' for ’."""
    return tuple([line.replace("’".encode(), b"'") for line in lines] for lines in chunk)


class Tokenise:
    """Chunk -> its tokenised lines; text that comes in tokens passes through, but for its case."""

    def __init__(self, languages: tuple[str, str], rules: Rules):
        self._tokenizers = [Tokenizer(lang) for lang in languages]
        self._rules = rules

    def __call__(self, chunk: Chunk) -> Chunk:
        return tuple(
            [self._line(tokenizer, line) for line in lines]
            for tokenizer, lines in zip(self._tokenizers, chunk, strict=True)
        )

    def _line(self, tokenizer: Tokenizer, line: bytes) -> bytes:
        if self._rules.tokenised:
            text = line.decode().removesuffix("\n")
        else:
            text = tokenizer.tokenize(line.decode(), self._rules.split_dashes, return_str=True)
        return (text.lower() if self._rules.lowercase else text).encode() + b"\n"


class Faults:
    """Chunk of space-separated tokens -> what the length rules say about each pair, None where they say nothing."""

    def __init__(self, rules: Rules):
        self._rules = rules

    def __call__(self, chunk: Chunk) -> list[str | None]:
        pairs = zip(*chunk, strict=True)
        return [self._rules.fault(len(source.split()), len(target.split())) for source, target in pairs]


class TokeniseChecked(Tokenise):
    """Chunk -> (its tokenised lines, what the length rules say about each pair)."""

    def __init__(self, languages: tuple[str, str], rules: Rules):
        super().__init__(languages, rules)
        self._faults = Faults(rules) if rules.filter_on == "words" else lambda sides: [None] * len(sides[0])

    def __call__(self, chunk: Chunk) -> tuple[Chunk, list[str | None]]:
        sides = super().__call__(chunk)
        return sides, self._faults(sides)
