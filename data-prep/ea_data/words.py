"""Text to words with spaces between them, and back: by Moses' rules, or the text as it is."""

from __future__ import annotations

import unicodedata

from sacremoses import MosesDetokenizer

from .moses import Tokenizer


def composed(text: str) -> str:
    """The text in Unicode's form NFC, in which é is one character; some systems write it as two."""
    return unicodedata.normalize("NFC", text)


class Moses:
    """Moses tokens of one language.

    Args:
        split_dashes: "foo-bar" becomes "foo @-@ bar".
        escape: tokens have "&apos;" for an apostrophe, as Moses has by default.
    """

    def __init__(self, language: str, split_dashes: bool = False, escape: bool = True) -> None:
        self._tokenizer, self._detokenizer = Tokenizer(language), MosesDetokenizer(language)
        self._split_dashes, self._escape = split_dashes, escape

    def tokenize(self, line: str) -> str:
        """One line of raw text as tokens with spaces between them."""
        return self._tokenizer.tokenize(line, self._split_dashes, return_str=True, escape=self._escape)

    def detokenize(self, line: str) -> str:
        """The reverse."""
        return self._detokenizer.detokenize(line.split())


class RawText:
    """Text as it is, but for its spaces: fairseq knows only one kind, and one of them between words."""

    def tokenize(self, line: str) -> str:
        """One line of raw text with a plain space wherever it has white space of any kind."""
        return " ".join(line.split())

    detokenize = tokenize


def words(tokenizer: str, language: str, split_dashes: bool = False, escape: bool = True) -> Moses | RawText:
    """The splitter and joiner of a corpus's text with this tokenizer; Moses for text that was given in tokens."""
    return RawText() if tokenizer == "none" else Moses(language, split_dashes, escape)
