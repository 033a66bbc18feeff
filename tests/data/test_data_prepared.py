"""A prepared data folder: what other scripts rely on finding in it."""

import gzip
import json

import pytest
from helpers.data_toy import parallel, read, script


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multi30k")
    for seed, (name, number) in enumerate(
        [("train", 90), ("val", 12), ("test_2016_flickr", 10), ("test_2017_flickr", 11)]
    ):
        parallel(folder / "raw", name, number, seed)
        for lang in ("de", "en"):
            path = folder / "raw" / f"{name}.{lang}"
            (folder / "raw" / f"{name}.{lang}.gz").write_bytes(gzip.compress(path.read_bytes().replace(b"\n", b"\r\n")))
            path.rename(folder / f"{name}.{lang}")
    return folder


def prepare(folder, out, *options):
    done = script(
        "multi30k", "en-de", "--raw", folder / "raw", "--out", out, "--merges", "80", "--workers", "1", *options
    )
    return done, json.loads((out / "PREP.json").read_text())


def test_a_data_folder_has_these_files_and_entries(multi30k, tmp_path):
    out = tmp_path / "out"
    done, prep = prepare(multi30k, out)
    splits = ("train", "valid", "test", "test1")
    binary = {f"{split}.en-de.{lang}.{kind}" for split in splits for lang in ("en", "de") for kind in ("bin", "idx")}
    others = {"dict.en.txt", "dict.de.txt", "code", "raw", "PREP.json", ".stamp.json"}
    assert {path.name for path in out.iterdir()} == binary | others
    for split, name in (("valid", "val"), ("test", "test_2016_flickr"), ("test1", "test_2017_flickr")):
        for lang in ("en", "de"):  # not tokenised, case as it was; only the line ends are others
            assert (out / f"raw/{split}.{lang}").read_bytes() == (multi30k / f"{name}.{lang}").read_bytes()
    expected = {
        "name": "multi30k-en-de", "source_lang": "en", "target_lang": "de", "tokenizer": "moses", "lowercase": True,
        "bpe": "subword_nmt", "bpe_merges": 80, "dropped": {},
    }  # fmt: skip
    assert {key: prep[key] for key in expected} == expected
    assert {split: found["pairs"] for split, found in prep["splits"].items()} == dict(
        zip(splits, (90, 12, 10, 11), strict=True)
    )
    assert [prep["splits"][split]["name"] for split in splits[2:]] == ["test_2016_flickr", "test_2017_flickr"]
    assert prep["command"].startswith("data-prep/multi30k.sh en-de --raw ")
    assert {"python", "sacremoses", "subword-nmt", "sentencepiece", "regex", "numpy"} <= set(prep["versions"])
    assert f"{out}: ready" in done.stdout


def test_sentencepiece_replaces_the_codes(multi30k, tmp_path):
    for out in ("out", "again"):
        _, prep = prepare(multi30k, tmp_path / out, "--bpe", "sentencepiece", "--merges", "400")
    model = "sentencepiece.bpe.model"
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "again" / model).read_bytes()
    assert (prep["bpe"], prep["bpe_merges"]) == ("sentencepiece", 400)
    assert not (tmp_path / "out/code").exists()
    assert "▁" in (tmp_path / "out/dict.en.txt").read_text()


def test_own_text_is_joined_and_validation_taken_from_it(tmp_path):
    """Two training texts one after the other, validation taken from them, from a folder that is not the repository."""
    parallel(tmp_path, "one", 50, 1)
    parallel(tmp_path, "two", 30, 2)
    parallel(tmp_path, "news", 9, 3)
    script(
        "custom", "--source-lang", "en", "--target-lang", "de", "--train", "one", "two", "--valid-every", "10",
        "--test", "news", "--out", "mine", "--name", "mine", "--merges", "50", "--vocabulary-threshold", "2",
        "--normalise", "--split-dashes",
        cwd=tmp_path,
    )  # fmt: skip
    prep = json.loads((tmp_path / "mine/PREP.json").read_text())
    assert (prep["name"], prep["lowercase"]) == ("mine", False)
    assert [found["pairs"] for found in prep["splits"].values()] == [72, 8, 9]
    assert (tmp_path / "mine/vocabulary.en").exists()
    every = read(tmp_path / "one.en") + read(tmp_path / "two.en")
    assert read(tmp_path / "mine/raw/valid.en") == every[9::10]
    assert read(tmp_path / "mine/raw/test.de") == read(tmp_path / "news.de")
