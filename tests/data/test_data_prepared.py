"""A prepared data folder: what other scripts rely on finding in it."""

import gzip
import json

import pytest
from helpers.data_toy import parallel, read, script

SIZES = {"train": 90, "val": 12, "test_2016_flickr": 10, "test_2017_flickr": 11}


@pytest.fixture(scope="module")
def multi30k(tmp_path_factory):
    folder = tmp_path_factory.mktemp("multi30k")
    (folder / "raw").mkdir()
    for seed, (name, number) in enumerate(SIZES.items()):
        parallel(folder, name, number, seed)
        for lang in ("de", "en"):
            content = (folder / f"{name}.{lang}").read_bytes().replace(b"\n", b"\r\n")
            (folder / "raw" / f"{name}.{lang}.gz").write_bytes(gzip.compress(content))
    return folder


def prepare(folder, out, *options):
    script("multi30k", "en-de", "--raw", folder / "raw", "--out", out, *options)
    return json.loads((out / "PREP.json").read_text())


def test_a_data_folder_has_these_files_and_entries(multi30k, tmp_path):
    out = tmp_path / "out"
    prep = prepare(multi30k, out, "--merges", "80")
    splits = dict(zip(("train", "valid", "test", "test1"), SIZES, strict=True))
    binary = {f"{split}.en-de.{lang}.{kind}" for split in splits for lang in ("en", "de") for kind in ("bin", "idx")}
    others = {"dict.en.txt", "dict.de.txt", "code", "raw", "PREP.json", ".stamp.json"}
    assert {path.name for path in out.iterdir()} == binary | others
    for split in ("valid", "test", "test1"):
        for lang in ("en", "de"):  # not tokenised, case as it was; only the line ends are others
            assert (out / f"raw/{split}.{lang}").read_bytes() == (multi30k / f"{splits[split]}.{lang}").read_bytes()
    expected = {
        "name": "multi30k-en-de", "source_lang": "en", "target_lang": "de", "tokenizer": "moses", "lowercase": True,
        "bpe": "subword_nmt", "bpe_merges": 80, "dropped": {},
    }  # fmt: skip
    assert {key: prep[key] for key in expected} == expected
    assert {splits[split]: facts["pairs"] for split, facts in prep["splits"].items()} == SIZES
    assert [prep["splits"][split]["name"] for split in ("test", "test1")] == ["test_2016_flickr", "test_2017_flickr"]
    assert prep["command"].startswith("data-prep/multi30k.sh --workers 1 en-de --raw ")
    assert {"python", "sacremoses", "subword-nmt", "sentencepiece", "regex", "numpy"} <= set(prep["versions"])


def test_sentencepiece_replaces_the_codes(multi30k, tmp_path):
    """Its model is the same every time: it holds no name of a temporary file."""
    model = "sentencepiece.bpe.model"
    for name in ("out", "again"):
        prep = prepare(multi30k, tmp_path / name, "--bpe", "sentencepiece", "--merges", "400")
    assert (prep["bpe"], prep["bpe_merges"]) == ("sentencepiece", 400)
    assert (tmp_path / "out" / model).read_bytes() == (tmp_path / "again" / model).read_bytes()
    assert not (tmp_path / "out/code").exists()
    assert "▁" in (tmp_path / "out/dict.en.txt").read_text()


def test_own_text_is_joined_and_validation_taken_from_it(tmp_path, monkeypatch):
    """Two training texts one after the other, validation taken from them, from a folder that is not the repository."""
    monkeypatch.chdir(tmp_path)
    for seed, (name, number) in enumerate({"one": 50, "two": 30, "news": 9}.items(), 1):
        parallel(tmp_path, name, number, seed)
    script(
        "custom", "--source-lang", "en", "--target-lang", "de", "--train", "one", "two", "--valid-every", "10",
        "--test", "news", "--out", "mine", "--name", "mine", "--merges", "50", "--vocabulary-threshold", "2",
        "--normalise", "--split-dashes",
    )  # fmt: skip
    prep = json.loads((tmp_path / "mine/PREP.json").read_text())
    assert (prep["name"], prep["lowercase"]) == ("mine", False)
    assert [facts["pairs"] for facts in prep["splits"].values()] == [72, 8, 9]
    assert (tmp_path / "mine/vocabulary.en").exists()
    assert read(tmp_path / "mine/raw/valid.en") == (read(tmp_path / "one.en") + read(tmp_path / "two.en"))[9::10]
    assert read(tmp_path / "mine/raw/test.de") == read(tmp_path / "news.de")
