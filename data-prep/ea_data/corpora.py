"""The corpora: each states where its text comes from, its rules and its expected counts, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from .corpus import Corpus, Part, Rules


def sample() -> Corpus:
    """The corpus that sample.py makes."""
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


EUROPARL: dict[str, Any] = {
    "url": "https://www.statmt.org/wmt13/training-parallel-europarl-v7.tgz",
    "size": 657_632_379,
    "sha256": "0224c7c710c8a063dfd893b0cc0830202d61f4c75c17eb8e31836103d27d96e7",
}
COMMON_CRAWL: dict[str, Any] = {
    "url": "https://www.statmt.org/wmt13/training-parallel-commoncrawl.tgz",
    "size": 918_311_367,
    "sha256": "c7a74e2ea01ac6c920123108627e35278d4ccb5701e15428ffa34de86fa3a9e5",
}
NEWS_COMMENTARY: dict[str, Any] = {
    "url": "https://www.statmt.org/wmt14/training-parallel-nc-v9.tgz",
    "size": 80_418_416,
    "sha256": "cb8953f292298e6877ae433c98912b927cb0766b303f4540512ddd286c748485",
}
UN: dict[str, Any] = {"url": "https://www.statmt.org/wmt13/training-parallel-un.tgz"}
GIGA: dict[str, Any] = {"url": "https://www.statmt.org/wmt10/training-giga-fren.tar"}


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


#: The public ones: the name of the command, what makes the corpus, and the pairs of languages to choose from, if any.
PUBLIC: dict[str, tuple[Callable[..., Corpus], tuple[str, ...]]] = {
    "multi30k": (multi30k, ("de-en", "en-de", "en-fr")),
    "iwslt14-de-en": (iwslt14_de_en, ()),
    "wmt14-en-de": (wmt14_en_de, ()),
    "wmt14-en-fr": (wmt14_en_fr, ()),
}


def _test_names(prefixes: list[str]) -> list[str]:
    """The name of each test: the last part of its prefix, with the folders before it that tell it from others."""
    every = [Path(prefix).absolute().parts for prefix in prefixes]

    def name(parts: tuple[str, ...]) -> str:
        ends = (parts[-length:] for length in range(1, len(parts) + 1))
        return "/".join(next(end for end in ends if sum(other[-len(end) :] == end for other in every) == 1))

    return [name(parts) for parts in every]


def custom(name: str, source: str, target: str, train: list[str], valid: str, tests: list[str], rules: Rules) -> Corpus:
    """Your own parallel text: PREFIX.SOURCE and PREFIX.TARGET, one sentence a line, plain or .gz.

    Text that was published in tokens is taken as it is with --tokenised; text in subwords with --tokenised and
    --bpe-given CODE. Moses tokenises raw text where it has rules for both languages; else sentencepiece makes subwords
    of raw text. --like takes all of this from text that was prepared before.
    """

    def part(prefix: str) -> tuple[Part, ...]:
        return (Part(str(Path(prefix).absolute()).replace("{", "{{").replace("}", "}}") + ".{lang}"),)

    return Corpus(
        name=name,
        source_lang=source,
        target_lang=target,
        train=sum(map(part, train), ()),
        valid=part(valid) if valid else (),
        tests=dict(zip(_test_names(tests), map(part, tests), strict=True)),
        rules=rules,
    )
