"""Words are tokenised, normalised and split as by the libraries, byte for byte."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.data_toy import Rules, sentences, write
from sacremoses import MosesPunctNormalizer

from ea_data import subwords
from ea_runtime.text import Normalizer

CLI = Path(sys.executable).with_name("subword-nmt")
LINES = sentences(400, seed=5)
AWKWARD = """(a) . b|( a ) ; c|5 % 6\u00a0%|x : y ;|nº\u00a05|25\u00a0ºC 3\u00a0cm|ja, "nein" , "doch".|a ," b
er sagte "ja." Dann .|«\u00a0oui\u00a0» « non »|\u00a0«\u00a0a\u00a0»\u00a0b|1\u00a0000\u00a0000|``a'' ´´b´´
d’accord l’été ‘x‘y‚|a\u00a0? b\u00a0! c\u00a0;d,\u00a0e|(( ))|…|“a”, „b“.  c   d \r|– — a—b|a\tb|Sie sagte "Ja."|"""
AWKWARD = AWKWARD.replace("\n", "|").split("|")


@pytest.mark.parametrize("lang", ["de", "en", "fr"])
def test_punctuation_is_normalised_as_moses_does(lang):
    """Moses' punctuation rules, then every non-printing character a space, also as in Moses.

    Moses sees the line's end, where its rule for German finds a character behind a quotation mark.
    """
    plain, ours = MosesPunctNormalizer(lang, perl_parity=True), Normalizer(lang)
    for line in LINES + AWKWARD:
        assert ours.clean(line) == plain.normalize(line + "\n").replace("\t", " ")
    assert ours.clean("a\u200bb\u00adc\u0007d\0e") == "a b c d e"


def chunk(lines):
    return [line.encode() + b"\n" for line in lines]


def test_a_text_of_fewer_pairs_than_merges_says_so_in_words_of_its_flag(tmp_path, capsys):
    subwords.learn(Counter({b"abc": 5}), 50, tmp_path)
    said = capsys.readouterr().err
    assert "--merges" in said and said.count("\n") == 1


def test_rare_subwords_are_split_as_subword_nmt_splits_them(tmp_path):
    """White space in the line stays. The codes themselves are compared by test_data_recipes.py."""

    def apply(*options):
        given = write(tmp_path / "in", lines).open("rb")
        command = [CLI, "apply-bpe", "-c", tmp_path / "code", *options]
        return subprocess.run(command, stdin=given, capture_output=True, check=True).stdout

    lines = [" ".join(line.split()) for line in sentences(400, seed=1)]
    lines += [" vorn", "hinten ", "  beides  ", "zwei  in  der Mitte", "   "]
    words = subwords.count_words((chunk(lines),))
    subwords.learn(words[0], 150, tmp_path)
    split = apply()
    counts = Counter(split.decode().split())
    write(tmp_path / "counts", [f"{word} {count}" for word, count in counts.items()])
    theirs = apply("--vocabulary", tmp_path / "counts", "--vocabulary-threshold", "40")
    (ours,) = subwords.Apply(tmp_path, "subword_nmt", ["de"])((chunk(lines),))
    assert b"".join(ours) == split
    subwords.write_vocabularies(tmp_path, ["de"], words, 40)
    (ours,) = subwords.Apply(tmp_path, "subword_nmt", ["de"])((chunk(lines),))
    assert b"".join(ours) == theirs != split


@pytest.mark.parametrize(
    ("source", "target", "fault"),
    [
        (0, 3, "empty"),
        (3, 0, "empty"),
        (175, 175, None),
        (176, 175, "too long"),
        (30, 20, None),
        (31, 20, "length ratio"),
        (20, 31, "length ratio"),
    ],
)
def test_bounds_of_lengths_are_inclusive(source, target, fault):
    """As in Moses' clean-corpus-n."""
    assert Rules(max_ratio=1.5, max_length=175).fault(source, target) == fault
