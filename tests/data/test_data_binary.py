"""The binary data are those of fairseq-preprocess, byte for byte."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from fairseq.data import indexed_dataset
from helpers import warm
from helpers.data_toy import corpus, read, recipe, text_only, write

from ea_data import binary


def fairseq_preprocess(pipeline, folder, *joined):
    text = pipeline.folder["subwords"]
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
    raw = corpus(tmp_path / "raw", train=300)
    pipeline = text_only(recipe(separate_dictionaries=not joined), raw, tmp_path / "out")
    for lang, odd in (
        ("de", "<unk> <s> </s> <pad>"),
        ("en", "<unk> a@@ b 東京"),
    ):  # words that mean something to fairseq
        train, valid, test = (pipeline.folder["subwords"] / f"{split}.{lang}" for split in ("train", "valid", "test"))
        rare = [" ".join(f"{lang}{i}" for i in range(start, start + 20)) for start in range(0, types // 2, 20)]
        write(train, [*read(train), *rare, "", odd])
        write(valid, [*read(valid), "", "never seen before", odd])
        write(test, ["nothing known"] * 3)
    fairseq_preprocess(pipeline, tmp_path / "theirs", *joined)
    (tmp_path / "ours").mkdir()
    pipeline.make_binary(tmp_path / "ours")
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()} - {"preprocess.log"}
    assert len(theirs) == 2 + 3 * 4
    for name in theirs:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    prep = json.loads((tmp_path / "ours/PREP.json").read_text())
    for lang in ("de", "en"):
        name = tmp_path / f"ours/valid.de-en.{lang}"
        sentences = [row.tolist() for row in indexed_dataset.make_dataset(str(name), "mmap")]
        assert binary.read_sentences(name) == sentences
        lengths = Counter(len(row) - 1 for row in sentences)
        assert dict(enumerate(binary.count_lengths(name.with_name(f"{name.name}.idx")))) == {
            length: lengths[length] for length in range(max(lengths) + 1)
        }
        unknown = sum(row.count(3) for row in sentences) - 1  # "<unk>" stands in the text
        assert unknown >= 3
        subwords = sum(length * number for length, number in lengths.items())
        assert prep["splits"]["valid"]["unknown_percent"][lang] == round(100 * unknown / subwords, 4)
