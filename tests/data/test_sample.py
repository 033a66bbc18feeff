"""The sample corpus: the same for the same seed, held-out text unseen but made of known words, grammar in order."""

import json
import re

import pytest
from helpers.data_toy import read, sample, script

SPLITS = sample.corpus(12_000, 500, 500, seed=1)
EVERYTHING = [pair for pairs in SPLITS.values() for pair in pairs]


def words(text):
    return re.findall(r"\w+", text.lower())


def test_sizes_and_held_out_text():
    assert {split: len(pairs) for split, pairs in SPLITS.items()} == {"train": 12_000, "valid": 500, "test": 500}
    german = [pair[0] for pair in EVERYTHING]
    assert len(set(german)) == len(german)  # so no held-out sentence occurs in training, and none twice
    for side in (0, 1):
        known = {word for pair in SPLITS["train"] for word in words(pair[side])}
        assert {word for split in ("valid", "test") for pair in SPLITS[split] for word in words(pair[side])} <= known
        assert 150 <= len(known) <= 350
        lengths = [len(words(pair[side])) for pair in SPLITS["train"]]
        assert 6 <= sum(lengths) / len(lengths) <= 9


def test_seeds():
    assert sample.corpus(300, 30, 30, seed=5) == sample.corpus(300, 30, 30, seed=5)
    assert sample.corpus(300, 30, 30, seed=5) != sample.corpus(300, 30, 30, seed=6)


def test_german_decides_the_english():
    """Also between seeds: a sentence made twice is translated the same way twice."""
    translation = dict(EVERYTHING)
    again = [pair for pairs in sample.corpus(12_000, 500, 500, seed=2).values() for pair in pairs]
    both = [pair for pair in again if pair[0] in translation]
    assert len(both) > 100
    for german, english in both:
        assert translation[german] == english


def test_punctuation_and_case():
    for german, english in EVERYTHING:
        for text in (german, english):
            assert re.fullmatch(r"[A-ZÄÖÜ][A-Za-zÄÖÜäöüß, ]+[.?]", text), text
            assert "  " not in text
        assert german[-1] == english[-1]


@pytest.mark.parametrize(
    ("german", "english"),
    [
        (r"^(.*) (.*) in den Garten\.$", "into the garden"), (r" im Garten\.$", "in the garden"),
        (r"^Sie hat\b", r"^She\b"), (r"^Sie haben\b", r"^They\b"), (r"\bholt\b.* ab\.$", r"\bpicks? up\b"),
        (r"\bnicht\b", r"\bnot\b"), (r"\bkeine?n?\b", r"\bno\b"), (r"^Will\b.*\?$", r"^Do(es)? .* want to\b"),
    ],
)  # fmt: skip
def test_what_german_forms_mean(german, english):
    found = [pair for pair in EVERYTHING if re.search(german, pair[0])]
    assert found
    for pair in found:
        if pair[0].count(",") == 0:
            assert re.search(english, pair[1]), pair


@pytest.mark.slow
def test_script(tmp_path):
    """Prepared data, the same twice; a second run finds nothing to do."""
    arguments = ["--train", "900", "--seed", "3", "--workers", "2"]
    for name in ("a", "b"):
        script("sample", *arguments, "--out", name, cwd=tmp_path)
    prep = json.loads((tmp_path / "a/PREP.json").read_text())
    assert {split: found["pairs"] for split, found in prep["splits"].items()} == {
        "train": 900,
        "valid": 500,
        "test": 500,
    }
    for path in (tmp_path / "a").glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()
    assert read(tmp_path / "a/raw/test.de") == [pair[0] for pair in sample.corpus(900, 500, 500, 3)["test"]]
    assert "nothing to do" in script("sample", *arguments, "--out", "a", cwd=tmp_path).stderr
