"""A corpus: parts, rules and expected counts; and the corpora, each of which states these and nothing else."""

from __future__ import annotations

from collections.abc import Callable
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
    lowercase: bool = False
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
    separate_dictionaries: bool = False  # each side has a dictionary, of that side's subwords

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
    form: str = "plain"  # plain, ted, segments: see text.py
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
    downloads: str = ""  # folder below data/downloads; none: the text is given, or in this repository
    codes: Path | None = None  # subword-nmt's codes, where the text comes in subwords
    like: Preparation | None = None  # whose rules, subwords and dictionary this text gets

    def splits(self) -> dict[str, tuple[Part, ...]]:
        """fairseq's name of each split that comes as such -> its parts."""
        splits = {"train": self.train} | ({"valid": self.valid} if self.valid else {})
        return splits | dict(zip(self.test_names(), self.tests.values(), strict=True))

    def test_names(self) -> dict[str, str]:
        """fairseq's name of each test -> the name people know it by."""
        return {f"test{number or ''}": name for number, name in enumerate(self.tests)}

    def urls(self) -> set[str]:
        """The addresses of all downloads."""
        every = [part for parts in self.splits().values() for part in parts]
        return {part.url.format(lang=lang) for part in every for lang in (self.source_lang, self.target_lang)} - {""}


def sample() -> Corpus:
    """A small German-English corpus in this repository, made from a grammar.

    To learn: gender, number and case of articles and adjectives; the verb's second place, its place at the end of a
    subordinate clause, and separable prefixes; perfect, future and modal verbs; "nicht" and "kein"; place and direction
    after "in"; relative clauses. Held-out sentences never occur in training, and are made only of words that do.
    """
    return Corpus(
        name="sample",
        source_lang="de",
        target_lang="en",
        train=(Part("train.{lang}"),),
        valid=(Part("valid.{lang}"),),
        tests={"test": (Part("test.{lang}"),)},
        rules=Rules(lowercase=True, nfc=True, merges=1_000),
    )


def multi30k(source: str, target: str) -> Corpus:
    """Multi30k, task 1: image captions in German, English and French."""

    def part(split: str) -> tuple[Part, ...]:
        url = "https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw/"
        return (Part(split + ".{lang}", url=url + split + ".{lang}.gz"),)

    return Corpus(
        name=f"multi30k-{source}-{target}",
        source_lang=source,
        target_lang=target,
        train=part("train"),
        valid=part("val"),
        tests={name: part(name) for name in ("test_2016_flickr", "test_2017_flickr")},
        rules=Rules(lowercase=True, merges=8_000),
        expected={"train": 29_000, "valid": 1_014, "test": 1_000, "test1": 1_000},
        downloads="multi30k",
    )


def iwslt14_de_en() -> Corpus:
    """IWSLT'14 German-English, TED talks, as in the papers: lower-cased, 10k joint BPE merges, two dictionaries.

    Validation is every 23rd training pair. 72 of the test pairs are known to be misaligned; they stay, for
    comparability.
    """
    archive = "https://dl.fbaipublicfiles.com/fairseq/data/iwslt14/de-en.tgz"
    tests = ("TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012")
    return Corpus(
        name="iwslt14-de-en",
        source_lang="de",
        target_lang="en",
        train=(Part("de-en/train.tags.de-en.{lang}", url=archive, form="ted"),),
        tests={
            "dev2010+dev2012+tst2010+tst2011+tst2012": tuple(
                Part(f"de-en/IWSLT14.{test}.de-en.{{lang}}.xml", url=archive, form="segments") for test in tests
            )
        },
        rules=Rules(
            lowercase=True, plain_apostrophes=True, filter_on="words", max_ratio=1.5, max_length=175,
            valid_every=23, merges=10_000, separate_dictionaries=True,
        ),
        expected={"train": 160_239, "valid": 7_283, "test": 6_750},
        downloads="iwslt14",
    )  # fmt: skip


def _wmt14(name: str, source: str, target: str, train: tuple[Part, ...], test: str, valid_every: int) -> Corpus:
    archive = "https://www.statmt.org/wmt14/test-full.tgz"
    return Corpus(
        name=name,
        source_lang=source,
        target_lang=target,
        train=train,
        tests={"newstest2014": (Part(f"test-full/{test}-{{role}}.{{lang}}.sgm", url=archive, form="segments"),)},
        rules=Rules(
            split_dashes=True, normalise=True, plain_apostrophes=True, filter_on="subwords", max_ratio=1.5,
            max_length=250, valid_every=valid_every, merges=40_000,
        ),
        expected={"test": 3_003},
        downloads="wmt14",
    )  # fmt: skip


EUROPARL = {
    "url": "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    "sha256": "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
}
COMMON_CRAWL = {
    "url": "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    "sha256": "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
}
NEWS_COMMENTARY = {
    "url": "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    "sha256": "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
}
UN = {"url": "https://www.statmt.org/wmt13/training-parallel-un.tgz"}
GIGA = {"url": "https://www.statmt.org/wmt10/training-giga-fren.tar"}


def wmt14_en_de() -> Corpus:
    """WMT'14 English-German, about 4.5 million pairs: cased, 40k joint BPE merges.

    Europarl v7, Common Crawl, News Commentary v9. Validation is every 100th training line; test is newstest2014.
    """
    train = (
        Part("training/europarl-v7.de-en.{lang}", **EUROPARL),
        Part("commoncrawl.de-en.{lang}", **COMMON_CRAWL),
        Part("training/news-commentary-v9.de-en.{lang}", **NEWS_COMMENTARY),
    )
    return _wmt14("wmt14-en-de", "en", "de", train, "newstest2014-deen", 100)


def wmt14_en_fr() -> Corpus:
    """WMT'14 English-French, about 41 million pairs before filtering: cased, 40k joint BPE merges.

    Europarl v7, Common Crawl, UN, News Commentary v9, Giga. Validation is every 1333rd training line; test is
    newstest2014.
    """
    train = (
        Part("training/europarl-v7.fr-en.{lang}", **EUROPARL),
        Part("commoncrawl.fr-en.{lang}", **COMMON_CRAWL),
        Part("un/undoc.2000.fr-en.{lang}", **UN),
        Part("training/news-commentary-v9.fr-en.{lang}", **NEWS_COMMENTARY),
        Part("giga-fren.release2.fixed.{lang}", **GIGA),
    )
    return _wmt14("wmt14-en-fr", "en", "fr", train, "newstest2014-fren", 1333)


#: Command -> the function that makes its corpus, and the pairs of languages to choose from. custom.sh is none of them.
PUBLIC: dict[str, tuple[Callable[..., Corpus], tuple[str, ...]]] = {
    "sample": (sample, ()),
    "multi30k": (multi30k, ("de-en", "en-de", "en-fr")),
    "iwslt14-de-en": (iwslt14_de_en, ()),
    "wmt14-en-de": (wmt14_en_de, ()),
    "wmt14-en-fr": (wmt14_en_fr, ()),
}


def _test_names(prefixes: list[str]) -> list[str]:
    """The name of each test: the last part of its prefix, or the whole prefix where two tests share the last part."""
    names = [Path(prefix).name for prefix in prefixes]
    return names if len(set(names)) == len(names) else prefixes


def custom(
    name: str, source: str, target: str, train: list[str], valid: str | None, tests: list[str], rules: Rules
) -> Corpus:
    """Your own parallel text: PREFIX.SOURCE and PREFIX.TARGET, one sentence a line, plain or .gz.

    Text that was published in tokens is taken as it is with --tokenised; text in subwords with --tokenised and
    --bpe-given CODE. Moses tokenises raw text where it has rules for both languages. Elsewhere sentencepiece makes
    subwords of it. --like takes all of this from text that was prepared before.
    """

    def part(prefix: str) -> tuple[Part, ...]:
        return (Part(str(Path(prefix).absolute()).replace("{", "{{").replace("}", "}}") + ".{lang}"),)

    return Corpus(
        name=name,
        source_lang=source,
        target_lang=target,
        train=sum(map(part, train), ()),
        valid=() if valid is None else part(valid),
        tests=dict(zip(_test_names(tests), map(part, tests), strict=True)),
        rules=rules,
    )
