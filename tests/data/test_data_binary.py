"""The binary data are those of fairseq-preprocess, byte for byte."""

import dataclasses
import sys
from pathlib import Path

import pytest
from fairseq.data import indexed_dataset
from helpers import warm
from helpers.data_toy import prepared, recipe, sentences, write

from ea_data import binary

# Words that mean something to fairseq.
ODD = {"de": "<unk> <s> </s> <pad>", "en": "<unk> a@@ b 東京"}


def fairseq_preprocess(text, folder, *joined):
    command = [
        Path(sys.executable).with_name("fairseq-preprocess"), *joined, "--workers", "2",
        "--source-lang", "de", "--target-lang", "en", "--destdir", folder,
        "--trainpref", text / "train", "--validpref", text / "valid", "--testpref", text / "test",
    ]  # fmt: skip
    warm.run(command, capture_output=True, check=True)


@pytest.mark.parametrize(
    ("types", "joined"),
    [(50, ["--joined-dictionary"]), (65_600, ["--joined-dictionary"]), (50, [])],
    ids=["uint16", "uint32", "separate"],
)
def test_the_data_are_those_of_fairseq_preprocess(tmp_path, types, joined):
    """The text is in subwords already, and stays as it is."""
    codes, raw, out = write(tmp_path / "code", ["a b</w>"]), tmp_path / "raw", tmp_path / "out"
    letters = [" ".join("".join(line.split())) for line in sentences(20)]  # which no codes split
    for lang, odd in ODD.items():
        rare = [" ".join(f"{lang}{i}" for i in range(start, start + 20)) for start in range(0, types // 2, 20)]
        write(raw / f"train.{lang}", [*sentences(300), *letters, *rare, odd])
        write(raw / f"valid.{lang}", [*letters, "", "never seen before", odd])
        write(raw / f"test.{lang}", ["nothing known"] * 3)
    corpus = recipe(tokenizer="given", separate_dictionaries=not joined)
    prep = prepared(dataclasses.replace(corpus, codes=codes), raw, out)
    fairseq_preprocess(tmp_path / "out.work/2-subwords", tmp_path / "theirs", *joined)
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()} - {"preprocess.log"}
    assert len(theirs) == 2 + 3 * 4
    for name in theirs:
        assert (out / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    for lang in ODD:
        name = out / f"valid.de-en.{lang}"
        sentences_read = [row.tolist() for row in indexed_dataset.make_dataset(str(name), "mmap")]
        assert binary.read_sentences(name) == sentences_read
        lengths = [len(row) - 1 for row in sentences_read]
        unknown = sum(row.count(3) for row in sentences_read) - 1  # "<unk>" stands in the text
        assert unknown >= 3
        expected = {"subwords": sum(lengths), "longest": max(lengths), "empty": 1}
        expected["unknown_percent"] = round(100 * unknown / sum(lengths), 4)
        assert {name: prep["splits"]["valid"][name][lang] for name in expected} == expected
