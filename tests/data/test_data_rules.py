"""Words are tokenised, normalised and split as by the libraries, byte for byte."""

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from helpers.data_toy import Rules, pairs, sentences, write
from sacremoses import MosesPunctNormalizer, MosesTokenizer

from ea_data import rules, subwords
from ea_runtime import text
from ea_runtime.text import Normalizer, Tokenizer

CLI = Path(sys.executable).with_name("subword-nmt")
LINES = sentences(400, seed=5)
AWKWARD = """(a) . b|( a ) ; c|5 % 6\u00a0%|x : y ;|nº\u00a05|25\u00a0ºC 3\u00a0cm|ja, "nein" , "doch".|a ," b
er sagte "ja." Dann .|«\u00a0oui\u00a0» « non »|\u00a0«\u00a0a\u00a0»\u00a0b|1\u00a0000\u00a0000|``a'' ´´b´´
d’accord l’été ‘x‘y‚|a\u00a0? b\u00a0! c\u00a0;d,\u00a0e|(( ))|…|“a”, „b“.  c   d \r|– — a—b|a\tb|"""
AWKWARD = AWKWARD.replace("\n", "|").split("|")


@pytest.mark.parametrize(("lang", "dashes"), [("de", False), ("en", True), ("fr", False)])
def test_tokens_are_sacremoses_s_with_the_last_full_stop_split_off(lang, dashes):
    plain, ours = MosesTokenizer(lang), Tokenizer(lang)
    for line in LINES:
        expected = plain.tokenize(line, dashes, return_str=True)
        expected = re.sub(r"([^. ])\.$", r"\1 .", expected)  # the one rule that sacremoses lacks
        assert ours.tokenize(line, dashes, return_str=True) == expected


@pytest.mark.parametrize("lang", ["de", "en", "fr"])
def test_punctuation_is_normalised_as_moses_does(lang):
    """Moses' punctuation rules, then every non-printing character a space, also as in Moses."""
    plain, ours = MosesPunctNormalizer(lang, perl_parity=True), rules.Normalise((lang, lang))
    for line in LINES + AWKWARD:
        assert ours(([line.encode()], []))[0] == [plain.normalize(line + "\n").replace("\t", " ").encode() + b"\n"]
    assert ours((["a\u200bb\u00adc\u0007d\0e".encode()], []))[0] == [b"a b c d e\n"]


def test_a_quotation_at_a_lines_end_is_normalised_as_moses_does():
    """Moses sees the line's end, where its rule for German finds a character behind the quotation mark."""
    clean = Normalizer("de").clean
    assert clean('Sie sagte "Ja."') == clean('Sie sagte "Ja."\n') == 'Sie sagte "Ja".'


def chunk(lines):
    return [line.encode() + b"\n" for line in lines]


def apply_bpe(folder, lines, *options):
    """subword-nmt's own command on these lines."""
    command = [CLI, "apply-bpe", "-c", folder / "code", *options]
    given = write(folder / "in", lines).open("rb")
    return subprocess.run(command, stdin=given, capture_output=True, check=True).stdout


@pytest.fixture(scope="module")
def learnt(tmp_path_factory):
    """Tokenised text, and codes that were learnt on it by subword-nmt's own command."""
    folder = tmp_path_factory.mktemp("bpe")
    tokenise = rules.Tokenise(("de", "en"), Rules(lowercase=True))
    source, target = (b"".join(side).decode().split("\n")[:-1] for side in tokenise(tuple(map(chunk, pairs(400)))))
    both = write(folder / "text", source + target)
    with (folder / "code").open("w") as file:
        subprocess.run(
            [CLI, "learn-bpe", "-s", "150"], stdin=both.open(), stdout=file, check=True, stderr=subprocess.PIPE
        )
    return folder, source, target


def test_codes_are_those_that_subword_nmt_learns(learnt, tmp_path):
    folder, source, target = learnt
    words = sum(subwords.count_words((chunk(source), chunk(target))), Counter())
    subwords.learn(words, 150, tmp_path)
    assert (tmp_path / "code").read_bytes() == (folder / "code").read_bytes()


def test_a_text_of_fewer_pairs_than_merges_says_so_in_words_of_its_flag(tmp_path, capsys):
    subwords.learn(Counter({b"abc": 5}), 50, tmp_path)
    said = capsys.readouterr().err
    assert "--merges" in said and said.count("\n") == 1


@pytest.mark.parametrize("remembered", [text.REMEMBERED, 7])
def test_words_are_split_as_subword_nmt_splits_them(learnt, monkeypatch, remembered):
    monkeypatch.setattr(text, "REMEMBERED", remembered)
    folder, source, target = learnt
    unseen = [" ".join(line.split()[::-1]) + " ungesehenes 東 x" for line in target]
    unseen[:5] = [" vorn", "hinten ", "  beides  ", "zwei  in  der Mitte", "   "]
    applied = subwords.Apply(folder, "subword_nmt", ("de", "en"))((chunk(source), chunk(unseen)))
    for lines, ours in zip((source, unseen), applied, strict=True):
        assert b"".join(ours) == apply_bpe(folder, lines)


def test_rare_subwords_are_split_as_subword_nmt_splits_them(learnt, tmp_path):
    folder, source, _ = learnt
    split = apply_bpe(folder, source)
    counts = Counter(split.decode().split())
    write(folder / "counts", [f"{word} {count}" for word, count in counts.items()])
    theirs = apply_bpe(folder, source, "--vocabulary", folder / "counts", "--vocabulary-threshold", "40")
    write(tmp_path / "code", [(folder / "code").read_bytes()[:-1]])
    subwords.write_vocabularies(tmp_path, ["de"], subwords.count_words((chunk(source),)), 40)
    allowed = (tmp_path / "vocabulary.de").read_text().splitlines()
    assert set(allowed) == {word for word, count in counts.items() if count >= 40}
    (ours,) = subwords.Apply(tmp_path, "subword_nmt", ["de"])((chunk(source),))
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
