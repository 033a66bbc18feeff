"""A prepared data folder: what other scripts rely on finding in it."""

import dataclasses
import gzip
import json

import pytest
from helpers.data_toy import corpus, parallel, prepared, read, recipe, script, sentences, write
from helpers.other_models import run

from ea_data import binary

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
    said = script("multi30k", "en-de", "--raw", folder / "raw", "--out", out, *options)
    assert said.count("<- not as expected") == 4
    return json.loads((out / "PREP.json").read_text())


def test_a_data_folder_has_these_files_and_entries(multi30k, tmp_path):
    out = tmp_path / "out"
    prep = prepare(multi30k, out, "--merges", "80")
    splits = dict(zip(("train", "valid", "test", "test1"), SIZES, strict=True))
    of_splits = {f"{split}.en-de.{lang}.{kind}" for split in splits for lang in ("en", "de") for kind in ("bin", "idx")}
    others = {"dict.en.txt", "dict.de.txt", "code", "raw", "PREP.json", ".stamp.json"}
    assert {path.name for path in out.iterdir()} == of_splits | others
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


def test_sentencepiece_learns_the_same_model_every_time(tmp_path):
    """It holds no name of a temporary file, and stands in the place of the codes."""
    raw, model = corpus(tmp_path / "raw"), "sentencepiece.bpe.model"
    for name in ("out", "again"):
        prep = prepared(recipe(tokenizer="none", bpe="sentencepiece", merges=400), raw, tmp_path / name)
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


# Words that mean something to fairseq.
ODD = {"de": "<unk> <s> </s> <pad>", "en": "<unk> a@@ b 東京"}


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
    given = recipe(tokenizer="given", separate_dictionaries=not joined)
    prep = prepared(dataclasses.replace(given, codes=codes), raw, out)
    subwords = tmp_path / "out.work/2-subwords"
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", subwords / split)]
    languages = ["--source-lang", "de", "--target-lang", "en"]
    run("preprocess", *joined, "--workers", 1, *languages, *prefixes, "--destdir", tmp_path / "theirs")
    theirs = {path.name for path in (tmp_path / "theirs").iterdir()} - {"preprocess.log"}
    assert len(theirs) == 2 + 3 * 4
    for name in theirs:
        assert (out / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name
    for lang in ODD:
        name = out / f"valid.de-en.{lang}"
        sentences_read = binary.read_sentences(name)
        lengths = [len(row) - 1 for row in sentences_read]
        unknown = sum(row.count(3) for row in sentences_read) - 1  # "<unk>" stands in the text
        assert unknown >= 3
        expected = {"subwords": sum(lengths), "longest": max(lengths), "empty": 1}
        expected["unknown_percent"] = round(100 * unknown / sum(lengths), 4)
        assert {name: prep["splits"]["valid"][name][lang] for name in expected} == expected
