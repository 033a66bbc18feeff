"""The recipes against an independent statement of their rules, on small archives shaped exactly like the real ones."""

import dataclasses
import gzip
import io
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import regex
from helpers.data_toy import corpora, pairs, read, text_only, write
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from ea_artifacts.command import UserError

SUBWORD_NMT = Path(sys.executable).with_name("subword-nmt")


def archive(path, members):
    """Writes a .tgz or .tar of name -> text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz" if path.suffix == ".tgz" else "w") as file:
        for name, data in members.items():
            data = data.encode() if isinstance(data, str) else data
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))


def text(lines):
    return "".join(line + "\n" for line in lines)


def segments(lines, language):
    """A test set as IWSLT's .xml and WMT's .sgm have it."""
    rows = ['<?xml version="1.0" encoding="UTF-8"?>', f'<refset setid="x" srclang="any" trglang="{language}">', "<doc>"]
    rows += ["<url>http://x</url>", "<title>not a sentence</title>"]
    rows += [f'<seg id="{number}"> {line} </seg>' for number, line in enumerate(lines, 1)]
    return text([*rows, "</doc>", "</refset>"])


def escaped(lines, seed):
    """Lines with XML entities and typographic apostrophes here and there, as in the real test sets."""
    rng = random.Random(seed)
    return [
        line.replace("<b>", "&lt;b&gt;") + rng.choice(["", " R&amp;D", " &quot;x&quot;", " don’t", " d’or"])
        for line in lines
    ]


def a_test(number, seed):
    source, target = pairs(number, seed)
    return escaped(source, seed), escaped(target, seed + 1)


def subword_nmt(folder, merges, train, *others):
    """The library's own commands: codes learnt on both sides one after the other, and everything split with them."""
    both = write(folder / "both", [line for side in train for line in side])
    codes = folder / "codes"
    learn = [SUBWORD_NMT, "learn-bpe", "-s", str(merges)]
    subprocess.run(learn, stdin=both.open(), stdout=codes.open("w"), stderr=subprocess.PIPE, check=True)
    result = []
    for lines in [*train, *others]:
        apply = [SUBWORD_NMT, "apply-bpe", "-c", codes]
        given = write(folder / "in", lines).open("rb")
        done = subprocess.run(apply, stdin=given, capture_output=True, check=True)
        result.append(done.stdout.decode().split("\n")[:-1])
    return result


def moses(lines, lang, dashes=False):
    """Moses' tokens: sacremoses', and the full stop of a last word is always split off."""
    tokenizer = MosesTokenizer(lang)
    tokens = [tokenizer.tokenize(line, aggressive_dash_splits=dashes, return_str=True) for line in lines]
    return [re.sub(r"([^. ])\.$", r"\1 .", line) for line in tokens]


def in_bounds(source, target, longest):
    a, b = len(source.split()), len(target.split())
    return 1 <= a <= longest and 1 <= b <= longest and a / b <= 1.5 and b / a <= 1.5


def assert_text(pipeline, stage, split, expected, raw=False):
    for path, lines in zip(pipeline.text(stage, split, raw), expected, strict=True):
        assert read(path) == lines


def only(kept, *sides):
    """The lines of each side that are kept."""
    return [[line for line, ok in zip(side, kept, strict=True) if ok] for side in sides]


TALK = ["<url>http://x</url>", "<keywords>talks, a</keywords>", "<speaker>A. B.</speaker>", "<talkid>535</talkid>"]
TALK += ["<title>A B: talk</title>", "<description>TED Talk Subtitles: what</description>"]
IWSLT_TESTS = ["TED.dev2010", "TEDX.dev2012", "TED.tst2010", "TED.tst2011", "TED.tst2012"]


@pytest.fixture(scope="module")
def iwslt(tmp_path_factory):
    """Raw sides and the archive made of them."""
    folder = tmp_path_factory.mktemp("iwslt")
    sides = [list(side) for side in pairs(600, seed=3)]
    sides[0][5], sides[1][6], sides[0][7] = "", " ", "zu lang " * 88  # 176 words
    sides[1][7] = "too long " * 88
    for side in sides:
        for at in (500, 100, 0):
            side[at:at] = TALK
    tests = {name: a_test(12, seed) for seed, name in enumerate(IWSLT_TESTS)}
    members = {}
    for lang, side, which in (("de", sides[0], 0), ("en", sides[1], 1)):
        members[f"de-en/train.tags.de-en.{lang}"] = text(side)
        for name, parts in sorted(tests.items(), reverse=True):
            members[f"de-en/IWSLT14.{name}.de-en.{lang}.xml"] = segments(parts[which], lang)
    archive(folder / "de-en.tgz", {"de-en/README": "read me\n"} | members)
    return folder, sides, tests


@pytest.mark.slow
def test_iwslt14(iwslt, tmp_path):
    folder, sides, tests = iwslt
    train = []
    for lang, side in zip(("de", "en"), sides, strict=True):
        kept = [line for line in side if not re.search("<url>|<talkid>|<keywords>", line)]
        kept = [re.sub("</?title>|</?description>", "", line) for line in kept]
        train.append(list(zip(kept, moses(kept, lang), strict=True)))
    kept = [(a, b) for a, b in zip(*train, strict=True) if in_bounds(a[1], b[1], 175)]
    assert 400 < len(kept) < 618  # all the rules had something to do
    valid = kept[22::23]
    train = [pair for number, pair in enumerate(kept, 1) if number % 23]
    test_sides = [[line for name in IWSLT_TESTS for line in tests[name][which]] for which in (0, 1)]
    parts = {"train": train, "valid": valid}
    expected = {split: [[pair[i][1].lower() for pair in part] for i in (0, 1)] for split, part in parts.items()}
    expected["test"] = [
        [line.lower() for line in moses([line.replace("’", "'") for line in side], lang)]
        for lang, side in zip(("de", "en"), test_sides, strict=True)
    ]
    # Entities are not undone: so in the real test set.
    assert any("&amp; amp ;" in line for line in expected["test"][0])

    pipeline = text_only(corpora.iwslt14_de_en(), folder, tmp_path / "out", workers=2)
    for split, lines in expected.items():
        assert_text(pipeline, "tokens", split, lines)
    every = subword_nmt(tmp_path, 10_000, expected["train"], *expected["valid"], *expected["test"])
    for number, split in enumerate(expected):
        assert_text(pipeline, "subwords", split, every[2 * number : 2 * number + 2])
    assert_text(pipeline, "subwords", "valid", [[pair[i][0] for pair in valid] for i in (0, 1)], raw=True)
    assert_text(pipeline, "subwords", "test", test_sides, raw=True)


def test_extracted_files_are_as_good_as_the_archive(iwslt, tmp_path):
    folder, *_ = iwslt
    shutil.unpack_archive(folder / "de-en.tgz", tmp_path / "raw")  # also on Python 3.11.2, where tarfile has no filters
    sources = {"archive": folder, "files": tmp_path / "raw"}
    ours, theirs = (text_only(corpora.iwslt14_de_en(), raw, tmp_path / name) for name, raw in sources.items())
    for split in ours.splits():
        assert_text(ours, "subwords", split, map(read, theirs.text("subwords", split)))


def wmt(folder, recipe, sizes, test_set):
    """Archives as at statmt.org, with `sizes` training lines in each part; returns the raw sides."""
    languages = (recipe.source_lang, recipe.target_lang)
    archives, training = {}, ([], [])
    for seed, (part, size) in enumerate(zip(recipe.train, sizes, strict=True), 10):
        sides = [list(side) for side in pairs(size, seed)]
        sides[0][2], sides[1][3], sides[0][4], sides[1][5] = "", "", "a\u200bb c\u00add\0", "one " * 9
        for lang, side, whole in zip(languages, sides, training, strict=True):
            member, data = part.member.format(lang=lang), text(side).encode()
            if part.url.endswith(".tar"):  # Giga: packed one by one, inside a plain tar
                member, data = member + ".gz", gzip.compress(data)
            archives.setdefault(part.url, {})[member] = data
            whole += side
    test = a_test(30, 99)
    members = {}
    for lang, role, side in zip(languages, ("src", "ref"), test, strict=True):
        members[f"test-full/{test_set}-{role}.{lang}.sgm"] = segments(side, lang)
        members[f"test-full/{test_set}-{role}.cs.sgm"] = "another language\n"
    archives["test-full.tgz"] = members
    for url, members in archives.items():
        archive(folder / Path(url).name, {"training/unrelated.txt": "x\n"} | members)
    return training, test


@pytest.mark.parametrize(
    ("recipe", "sizes", "test_set", "every"),
    [
        (corpora.wmt14_en_de(), (250, 120, 60), "newstest2014-deen", 100),
        (corpora.wmt14_en_fr(), (900, 300, 300, 200, 1100), "newstest2014-fren", 1333),
    ],
    ids=["en-de", "en-fr"],
)
@pytest.mark.slow
def test_wmt14(recipe, sizes, test_set, every, tmp_path):
    parts = tuple(dataclasses.replace(part, sha256="") for part in recipe.train)  # without checksums
    recipe = dataclasses.replace(recipe, train=parts)
    languages = (recipe.source_lang, recipe.target_lang)
    training, test = wmt(tmp_path / "raw", recipe, sizes, test_set)

    def clean(lines, lang):
        normalise = MosesPunctNormalizer(lang, perl_parity=True).normalize
        return [regex.sub(r"\p{C}", " ", normalise(line)) for line in lines]

    train, valid = [], []
    for lang, side in zip(languages, training, strict=True):
        lines = moses(clean(side, lang), lang, dashes=True)
        valid.append(lines[every - 1 :: every])
        train.append([line for number, line in enumerate(lines, 1) if number % every])
    tested = [
        moses([line.replace("’", "'") for line in side], lang, dashes=True)
        for lang, side in zip(languages, test, strict=True)
    ]
    split = subword_nmt(tmp_path, 40_000, train, *valid, *tested)
    raw_valid = [side[every - 1 :: every] for side in training]

    pipeline = text_only(recipe, tmp_path / "raw", tmp_path / "out", workers=2)
    for name, sides, raw in (("train", split[:2], None), ("valid", split[2:4], raw_valid)):
        kept = [in_bounds(a, b, 250) for a, b in zip(*sides, strict=True)]
        assert name == "valid" or 0 < sum(kept) < len(kept)
        assert_text(pipeline, "subwords", name, only(kept, *sides))
        if raw:
            assert_text(pipeline, "subwords", name, only(kept, *raw), raw=True)
    assert_text(pipeline, "subwords", "test", split[4:])
    assert_text(pipeline, "subwords", "test", test, raw=True)


def test_an_archive_that_is_not_the_published_one_is_named(iwslt, tmp_path):
    raw, other = tmp_path / "raw", {"de-en/train.tags.de-en.de": "a\n", "de-en/other": "b\n"}
    raw.mkdir()

    def refused(recipe, message):
        with pytest.raises(UserError, match=message):
            text_only(recipe, raw, tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["raw"]

    refused(corpora.wmt14_en_de(), r"raw: has no .*europarl.*https://.*europarl-v7.tgz")
    archive(raw / "de-en.tgz", other)
    refused(corpora.iwslt14_de_en(), "no member .*dev2010")
    os.truncate(shutil.copy(iwslt[0] / "de-en.tgz", raw), 9000)
    refused(corpora.iwslt14_de_en(), r"raw/de-en\.tgz: truncated or damaged")
    wmt(raw, corpora.wmt14_en_de(), (10, 10, 10), "newstest2014-deen")
    refused(corpora.wmt14_en_de(), "europarl-v7.tgz: its SHA-256 is .*0224c7c710")
