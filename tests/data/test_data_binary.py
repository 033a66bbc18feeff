"""The binary data are those of fairseq-preprocess, byte for byte."""

import sys
from pathlib import Path

import numpy as np
import pytest
from helpers import warm
from helpers.data_toy import corpus, read, recipe, text_only, write

from ea_data import binary


def fairseq_preprocess(pipeline, folder, *joined):
    text = pipeline.folder["filter"]
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
        train, valid, test = (pipeline.folder["filter"] / f"{split}.{lang}" for split in ("train", "valid", "test"))
        rare = [" ".join(f"{lang}{i}" for i in range(start, start + 20)) for start in range(0, types // 2, 20)]
        write(train, [*read(train), *rare, "", odd])
        write(valid, [*read(valid), "", "never seen before", odd])
        write(test, ["nothing known"] * 3)
    fairseq_preprocess(pipeline, tmp_path / "theirs", *joined)
    (tmp_path / "ours").mkdir()
    pipeline.binarise(tmp_path / "ours")
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()} - {"preprocess.log"}
    assert len(theirs) == 2 + 3 * 4
    for name in theirs:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_an_index_is_written_and_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(binary, "BLOCK", 3)
    sizes = np.array([3, 1, 4, 1, 5, 9, 2, 6], np.int32)
    (tmp_path / "lengths").write_bytes(sizes.tobytes())
    binary.write_index(tmp_path / "x.idx", tmp_path / "lengths", np.uint16)
    assert binary.count_lengths(tmp_path / "x.idx").tolist() == np.bincount(sizes - 1).tolist()
    assert np.fromfile(tmp_path / "x.idx", np.int32, 8, offset=binary.HEADER + 8).tolist() == sizes.tolist()
    begins = np.fromfile(tmp_path / "x.idx", np.int64, offset=binary.HEADER + 8 + sizes.nbytes)
    assert begins.tolist() == [0, 6, 8, 16, 18, 28, 46, 50]
