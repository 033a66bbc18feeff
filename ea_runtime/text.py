"""Raw text to a model's subwords and back: for data preparation, for training's scores, and for translation.

PREP.json, which data preparation writes and a run keeps, says by which rules.
"""

from __future__ import annotations

import contextlib
import io
import unicodedata
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

import regex
from sacremoses import MosesDetokenizer, MosesPunctNormalizer, MosesTokenizer
from subword_nmt.apply_bpe import BPE

from ea_artifacts.command import UserError
from ea_artifacts.preparation import CODES, FILE, Preparation

NON_PRINTING = regex.compile(r"\p{C}")
#: The most words whose subwords are remembered, and the most letters of one: tens of megabytes at most.
REMEMBERED, SHORT = 50_000, 32
#: A file of codes begins with this, and a number.
VERSION = "#version:"


class Tokenizer(MosesTokenizer):
    """sacremoses' tokenizer with a rule of Moses that it lacks, and sets for fast look-ups.

    Moses splits the full stop off the last word whatever that is: "in the U.S." ends in "U.S" and ".". The text that
    the standard recipes made is like that.
    """

    def __init__(self, lang: str) -> None:
        super().__init__(lang)
        self._lower, self._alpha = frozenset(self.IsLower), frozenset(self.IsAlpha)
        self.NONBREAKING_PREFIXES: frozenset[str] = frozenset(self.NONBREAKING_PREFIXES)
        self.NUMERIC_ONLY_PREFIXES: frozenset[str] = frozenset(self.NUMERIC_ONLY_PREFIXES)

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
    """sacremoses' normaliser as Moses' own script has it, which published data went by.

    One rule differs: Moses moves a comma or full stop out of quotation marks in every language but English and Czech,
    sacremoses in German, Spanish and French.
    """

    def __init__(self, lang: str) -> None:
        super().__init__(lang, perl_parity=True)

    def clean(self, text: str) -> str:
        """The text normalised, with spaces for characters that do not print, such as soft hyphens."""
        # Moses reads lines with their ends; its rule for ." in German, Spanish and French wants a character behind.
        text = self.normalize(text.removesuffix("\n") + "\n")
        return text if text.isprintable() else NON_PRINTING.sub(" ", text)


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
        self._language, self._split_dashes, self._escape = language, split_dashes, escape

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._language)

    @cached_property
    def _detokenizer(self) -> MosesDetokenizer:
        return MosesDetokenizer(self._language)

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


def words_of(prepared: Preparation, language: str) -> Moses | RawText:
    """The splitter and joiner of words for text of this language, by the rules of the prepared data."""
    dashes = prepared.rules.get("split_dashes", False)
    return words(prepared.tokenizer, prepared.moses_language(language), dashes, prepared.escape)


class ShortWords(dict[str, tuple[str, ...]]):
    """The subwords of words that subword-nmt has split; long words, which are rare, would fill the memory."""

    def __setitem__(self, word: str, subwords: tuple[str, ...]) -> None:
        if len(word) <= SHORT:
            super().__setitem__(word, subwords)


def segmenter(path: Path, vocabulary: Iterable[str] | None = None) -> BPE:
    """The splitter of words by a file of codes in subword-nmt, with the allowed subwords if not all are.

    Raises:
        UserError: it is no file of codes.
    """
    codes = path.read_text(encoding="utf-8")
    # A file of this first line alone has no merges; subword-nmt takes it for a damaged one.
    no_merges = codes.startswith(VERSION) and "\n" not in codes.strip()
    try:
        with contextlib.redirect_stderr(io.StringIO()) as said:
            bpe = BPE(io.StringIO(codes), merges=0 if no_merges else -1, vocab=vocabulary and set(vocabulary))
    except SystemExit:  # it says why, and ends the program
        raise UserError(f"{path}: {said.getvalue().partition(chr(10))[0]}") from None
    bpe.cache = ShortWords()
    return bpe


def join_pieces(line: str) -> str:
    """A line of sentencepiece's pieces with spaces between them as text, as fairseq's --post-process joins it."""
    return "".join(line.split()).replace("\u2581", " ").strip()


class Tokens:
    """Raw text to tokens. This is the one place that says in which order the rules for a line apply.

    Args:
        words: the splitter of words.
        compose: whether text is brought to Unicode's form NFC.
        normalizer: of punctuation, where the text is normalised.
        plain_apostrophes: whether ’ becomes '.
        lowercase: whether tokens are in lower case.
    """

    def __init__(
        self,
        words: Moses | RawText,
        *,
        compose: bool = False,
        normalizer: Normalizer | None = None,
        plain_apostrophes: bool = False,
        lowercase: bool = False,
    ) -> None:
        self._words, self._compose, self._normalizer = words, compose, normalizer
        self._plain_apostrophes, self._lowercase = plain_apostrophes, lowercase

    def __call__(self, line: str) -> str:
        """One line of raw text as tokens with spaces between them."""
        if self._compose:
            line = composed(line)
        if self._normalizer:
            line = self._normalizer.clean(line)
        if self._plain_apostrophes:
            line = line.replace("’", "'")
        line = self._words.tokenize(line)
        return line.lower() if self._lowercase else line


class Text:
    """Source text to subwords, and the model's subwords to target text.

    Args:
        folder: what holds PREP.json and the code that splits words, such as RUN/prepared.
        source: the language of the text to split, by default the source language.
    """

    def __init__(self, folder: Path, source: str | None = None) -> None:
        names = (FILE, *CODES.values(), "vocabulary.*")
        #: all files that are read
        self.files = sorted(path for name in names for path in folder.glob(name))
        self.preparation = prepared = Preparation.at(folder)
        source = source or prepared.source_lang
        self._target = words_of(prepared, prepared.target_lang)
        # Text to translate gets all rules: those for training text, and those for other text.
        self._tokens = Tokens(
            words_of(prepared, source),
            compose=prepared.unicode == "NFC",
            normalizer=Normalizer(prepared.moses_language(source)) if prepared.rules.get("normalise") else None,
            plain_apostrophes=prepared.rules.get("plain_apostrophes", False),
            lowercase=prepared.lowercase,
        )
        self._split = splitter(folder, prepared.bpe, source)

    def subwords(self, line: str) -> str:
        """One line of raw source text as subwords with spaces between them; "" where there is nothing to translate."""
        return self._split(self._tokens(line))

    def join(self, subwords: str) -> str:
        """Subwords, with spaces between them, as words."""
        if self.preparation.bpe == "sentencepiece":
            return join_pieces(subwords)
        return (subwords + " ").replace("@@ ", "").rstrip()

    def detokenize(self, words: str) -> str:
        """Words of the target language, their subwords joined, as people write them."""
        return self._target.detokenize(words)


def splitter(folder: Path, kind: str, language: str) -> Callable[[str], str]:
    """The function from words to subwords that the folder's code, or its model of sentencepiece, defines.

    Raises:
        UserError: the file is damaged.
    """
    codes = folder / CODES[kind]
    if kind == "sentencepiece":
        from sentencepiece import SentencePieceProcessor

        try:
            model = SentencePieceProcessor(model_file=str(codes))
        except RuntimeError as error:
            raise UserError(f"{codes}: {error}; prepare that text again") from None
        return lambda line: " ".join(model.encode(line, out_type=str))
    path = folder / f"vocabulary.{language}"  # where rare subwords are split again
    allowed = set(path.read_text(encoding="utf-8").split("\n")) - {""} if path.is_file() else None
    bpe = segmenter(codes, allowed)

    def split(line: str) -> str:
        # It remembers all words, which a server cannot afford. Another thread may still use the old dictionary.
        if len(bpe.cache) > REMEMBERED:
            bpe.cache = ShortWords()
        return bpe.process_line(line)

    return split
