"""The sample corpus: the same for the same seed, held-out text unseen but made of known words."""

import re

import pytest
from helpers.data_toy import prepare, read, sample


@pytest.fixture(scope="module")
def splits():
    return sample.corpus(12_000, 500, 500, seed=1)


@pytest.fixture(scope="module")
def everything(splits):
    return [pair for pairs in splits.values() for pair in pairs]


def words(text):
    return re.findall(r"\w+", text.lower())


def test_held_out_sentences_are_new_and_made_of_known_words(splits, everything):
    assert {split: len(pairs) for split, pairs in splits.items()} == {"train": 12_000, "valid": 500, "test": 500}
    german = [pair[0] for pair in everything]
    assert len(set(german)) == len(german), "no held-out sentence occurs in training, and none twice"
    for side in (0, 1):
        known = {word for pair in splits["train"] for word in words(pair[side])}
        assert {word for split in ("valid", "test") for pair in splits[split] for word in words(pair[side])} <= known
        assert 150 <= len(known) <= 350
        lengths = [len(words(pair[side])) for pair in splits["train"]]
        assert 6 <= sum(lengths) / len(lengths) <= 9


def test_the_seed_decides_the_text_and_the_german_decides_the_english(everything):
    again = sample.corpus(6_000, 100, 100, seed=2)
    assert again == sample.corpus(6_000, 100, 100, seed=2) != sample.corpus(6_000, 100, 100, seed=3)
    translation = dict(everything)
    both = [pair for pairs in again.values() for pair in pairs if pair[0] in translation]
    assert len(both) > 20
    assert all(translation[german] == english for german, english in both)


def test_the_command_takes_number_and_seed(tmp_path):
    args, corpus = prepare.parse("sample", ["--train", "90", "--seed", "3"])
    raw = prepare.raw_folder(args, corpus, tmp_path / "out")
    for split, pairs in sample.corpus(90, 500, 500, 3).items():
        assert read(raw / f"{split}.de") == [german for german, _ in pairs]
