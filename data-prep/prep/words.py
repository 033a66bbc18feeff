"""Text to words with spaces between them, and back: by Moses' rules, or the text as it is."""

from __future__ import annotations

import unicodedata

from sacremoses import MosesDetokenizer

from .corpus import base_language
from .moses import Tokenizer


def composed(text: str) -> str:
    """The text in Unicode's form NFC, in which é is one character; some systems write it as two."""
    return unicodedata.normalize("NFC", text)


class Moses:
    """Moses tokens of one language. `split_dashes`: "foo-bar" becomes "foo @-@ bar"."""

    def __init__(self, language: str, split_dashes: bool = False) -> None:
        language = base_language(language)
        self._tokenizer, self._detokenizer = Tokenizer(language), MosesDetokenizer(language)
        self._split_dashes = split_dashes

    def tokenize(self, line: str) -> str:
        """One line of raw text as tokens with spaces between them."""
        return self._tokenizer.tokenize(line, self._split_dashes, return_str=True)

    def detokenize(self, line: str) -> str:
        """The reverse."""
        return self._detokenizer.detokenize(line.split())


class RawText:
    """Text as it is, but for its spaces: fairseq knows only one kind, and one of them between words."""

    def tokenize(self, line: str) -> str:
        """One line of raw text with a plain space wherever it has white space of any kind."""
        return " ".join(line.split())

    detokenize = tokenize


def words(tokenizer: str, language: str, split_dashes: bool = False) -> Moses | RawText:
    """What splits and joins text of a corpus with this tokenizer; for text that was given in tokens that is Moses."""
    return RawText() if tokenizer == "none" else Moses(language, split_dashes)
