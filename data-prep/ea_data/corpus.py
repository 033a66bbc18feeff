"""A corpus: parts, rules and expected counts. The corpora themselves are in corpora.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ea_artifacts.preparation import Preparation

#: Rules for a line of text that PREP.json states under "rules" alone; the other rules there choose lines.
ABOUT_TEXT = ("split_dashes", "normalise", "plain_apostrophes", "vocabulary_threshold", "separate_dictionaries")


@dataclass(frozen=True)
class Rules:
    """The rules of one corpus."""

    tokenizer: str = "moses"  # "none": subwords of raw text; "given": the text comes in tokens, and stays as it is
    nfc: bool = False  # text is brought to Unicode's form NFC first; published corpora did not
    lowercase: bool = False  # text that comes in subwords must be lower-case already, and is refused where it is not
    split_dashes: bool = False  # Moses' -a: "foo-bar" -> "foo @-@ bar"
    normalise: bool = False  # punctuation and non-printing characters, in training text
    plain_apostrophes: bool = False  # ’ becomes ', in text that is no training text
    filter_on: str = "words"  # lengths are counted in "words", before the split and BPE, or in "subwords", after
    max_ratio: float | None = None  # a pair goes if one side is more than this many times as long as the other
    max_length: int | None = None
    drop_test_overlap: bool = False  # a training pair goes if a side of it is a sentence of validation or a test
    valid_every: int | None = None  # every n-th training line is validation
    bpe: str = "subword_nmt"  # or sentencepiece
    merges: int = 10_000
    vocabulary_threshold: int = 0  # subwords rarer than this on their side are split again
    separate_dictionaries: bool = False  # each side has a dictionary of its own subwords alone

    @classmethod
    def like(cls, preparation: Preparation) -> Rules:
        """The rules of prepared text for a line."""
        rules: dict[str, Any] = {name: preparation.rules[name] for name in ABOUT_TEXT if name in preparation.rules}
        rules |= {name: getattr(preparation, name) for name in ("tokenizer", "lowercase", "bpe", "merges")}
        return cls(**rules, nfc=preparation.unicode == "NFC")

    def fault(self, source_length: int, target_length: int) -> str | None:
        """Why a training pair is dropped, or None; as in Moses' clean-corpus-n."""
        if not source_length or not target_length:
            return "empty"
        if self.max_length and max(source_length, target_length) > self.max_length:
            return "too long"
        if self.max_ratio and max(source_length, target_length) > self.max_ratio * min(source_length, target_length):
            return "length ratio"
        return None


@dataclass(frozen=True)
class Part:
    """A piece of parallel text: two files. {lang} in `member` is the side's language, {role} its "src" or "ref"."""

    member: str  # path inside the archive, or below --raw
    url: str = ""  # of the archive, or of the file itself, which may hold {lang} too
    form: str = "plain"  # plain, ted, segments: see sources.py
    size: int = 0  # of the file at `url`, in bytes; 0: not known
    sha256: str = ""


@dataclass(frozen=True)
class Corpus:
    """Parallel text and what to do with it."""

    name: str
    source_lang: str
    target_lang: str
    train: tuple[Part, ...]
    rules: Rules
    valid: tuple[Part, ...] = ()  # none: every rules.valid_every-th training line
    tests: dict[str, tuple[Part, ...]] = field(default_factory=dict)  # name -> parts; for fairseq: test, test1, ...
    expected: dict[str, int] = field(default_factory=dict)  # split -> pairs
    downloads: str = ""  # folder below data/downloads
    codes: Path | None = None  # subword-nmt's codes, where the text comes in subwords
    like: Preparation | None = None  # whose rules, subwords and dictionary this text gets

    def splits(self) -> dict[str, tuple[Part, ...]]:
        """fairseq's name of each split that comes as such -> its parts."""
        splits = {"train": self.train} | ({"valid": self.valid} if self.valid else {})
        return splits | dict(zip(self.test_names(), self.tests.values(), strict=True))

    def test_names(self) -> dict[str, str]:
        """fairseq's name of each test -> the name people know it by."""
        return {f"test{number or ''}": name for number, name in enumerate(self.tests)}

    def files(self) -> dict[str, Part]:
        """URL -> its part, of all downloads."""
        languages = (self.source_lang, self.target_lang)
        every = [part for parts in self.splits().values() for part in parts if part.url]
        return {part.url.format(lang=lang): part for part in every for lang in languages}
