"""Faults in a user's data and options: the message names them, and nothing is left behind."""

import dataclasses
import gzip
import json
import os
import signal

import pytest
from helpers.data_toy import corpora, corpus, parallel, prepare_command, read, recipe, script, text_only, write

from ea_artifacts.command import UserError
from ea_data import parallel as in_parallel


def short_side(raw):
    write(raw / "valid.en", read(raw / "valid.en")[:-3])


def empty_side(raw):
    write(raw / "train.de", [])


def blank_side(raw):
    write(raw / "train.en", [" "] * 200)


def no_file(raw):
    (raw / "valid.de").unlink()


def bad_test_and_train(raw):
    bad_byte(raw)
    empty_side(raw)


def bad_byte(raw):
    write(raw / "test.en", [*read(raw / "test.en")[:7], b"caf\xe9", *read(raw / "test.en")[8:]])


def nul(raw):
    write(raw / "train.de", ["a\0b", *read(raw / "train.de")[1:]])


def damaged_gz(raw):
    packed = gzip.compress((raw / "train.de").read_bytes())
    (raw / "train.de").unlink()
    (raw / "train.de.gz").write_bytes(packed[:-20])


@pytest.mark.parametrize(
    ("fault", "rules", "message"),
    [
        (short_side, {}, r"(?s)valid: .*same number.*20 lines in .*/valid\.de\n.*17 lines in .*/valid\.en"),
        (empty_side, {}, r"(?s)train: .*\b0 lines in .*/train\.de"),
        (blank_side, {}, r"train: no pair is left: 200 empty; give other text$"),
        (lambda raw: None, {"filter_on": "subwords", "max_ratio": 0.1}, "200 length ratio; .*, or raise --max-ratio$"),
        (no_file, {}, r"raw: has no valid\.de and no valid\.de\.gz"),
        (bad_byte, {}, r"/test\.en, line 8: byte 4 \(hex e9\) is not UTF-8"),
        (bad_test_and_train, {}, r"/test\.en, line 8: "),  # the quick one first
        (nul, {}, r"/train\.de, line 1: a NUL byte"),
        (damaged_gz, {}, r"train\.de\.gz: truncated or damaged"),
        (lambda raw: None, {"valid_every": 201, "filter_on": "subwords"}, "--valid-every 201 of 200 training pairs"),
    ],
)
def test_faulty_text_is_refused_by_file_and_line(tmp_path, fault, rules, message):
    raw, rules = corpus(tmp_path / "raw"), recipe(**rules)
    fault(raw)
    if rules.rules.valid_every:
        rules = dataclasses.replace(rules, valid=())
    with pytest.raises(UserError, match=message):
        text_only(rules, raw, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_nul_bytes_are_removed_where_non_printing_characters_are(tmp_path):
    raw = corpus(tmp_path / "raw")
    nul(raw)
    pipeline = text_only(recipe(normalise=True), raw, tmp_path / "out")
    assert read(pipeline.text("tokens", "train")[0])[0] == "a b"


def test_tests_of_one_name_are_told_apart_by_their_folders(tmp_path):
    prefixes = [tmp_path / "a/test", tmp_path / "b/test", tmp_path / "b/news"]
    made = prepare_command("--source-lang", "de", "--target-lang", "en", "--test", *prefixes)
    assert made.test_names() == {"test": "a/test", "test1": "b/test", "test2": "news"}
    members = [part.member for parts in made.tests.values() for part in parts]
    assert members == [f"{prefix}.{{lang}}" for prefix in prefixes]


def test_a_killed_worker_is_reported():
    def killed(chunk):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"^one of the worker processes was killed, .* fewer --workers$"):
        list(in_parallel.ordered_map(killed, iter([([b"a\n"], [b"b\n"])]), 2))


@pytest.mark.parametrize("filter_on", ["words", "subwords"])
def test_empty_lines_are_dropped_in_training_and_kept_in_tests(tmp_path, filter_on):
    raw = corpus(tmp_path / "raw")
    for split in ("train", "valid", "test"):
        for lang, at in (("de", 2), ("en", 5)):
            lines = read(raw / f"{split}.{lang}")
            lines[at] = " \u00a0"
            write(raw / f"{split}.{lang}", lines)
    pipeline = text_only(recipe(filter_on=filter_on), raw, tmp_path / "out")
    sizes = {split: [len(read(path)) for path in pipeline.text("subwords", split)] for split in pipeline.splits()}
    assert sizes == {"train": [198, 198], "valid": [20, 20], "test": [20, 20]}
    tokens, in_subwords = (stage.report() for stage in pipeline.chain[:2])
    assert (tokens if filter_on == "words" else in_subwords["filters"])["train"] == {
        "in": 200,
        "out": 198,
        "dropped": {"empty": 2},
    }
    assert read(pipeline.text("subwords", "test")[1])[5] == ""


@pytest.mark.slow
def test_a_line_of_100_000_tokens_is_dropped_in_training_and_kept_in_a_test(tmp_path):
    raw = tmp_path / "raw"
    for split, number in (("train", 60), ("valid", 10), ("test", 10)):
        parallel(raw, split, number)
    for path in (raw / "train.de", raw / "test.de"):
        write(path, [*read(path)[:-1], "wort1 " * 100_000])
    done = script(
        "custom", "--source-lang", "de", "--target-lang", "en", "--train", raw / "train", "--valid", raw / "valid",
        "--test", raw / "test", "--out", tmp_path / "out", "--workers", "2", "--merges", "60",
    )  # fmt: skip
    assert "60 pairs in, 59 out; 1 too long" in done.stderr
    assert "warning: test: its longest de sentence has 100,000 subwords" in done.stderr
    assert len(read(tmp_path / "out/raw/test.de")) == 10


def test_names_of_files_need_not_be_utf8(tmp_path):
    raw = corpus(tmp_path / os.fsdecode(b"caf\xe9"))
    script(
        "custom", "--source-lang", "de", "--target-lang", "en", "--train", raw / "train", "--valid", raw / "valid",
        "--merges", "60", "--workers", "1", "--out", tmp_path / "out",
    )  # fmt: skip
    assert "caf" in json.loads((tmp_path / "out" / "PREP.json").read_text(encoding="utf-8"))["command"]


CUSTOM = ["custom", "--source-lang", "de", "--target-lang", "en", "--train", "x", "--valid", "y"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["multi30k", "fr-de"], "argument pair: invalid choice: 'fr-de'"),
        (["multi30k", "de-en", "--merges", "0"], "argument --merges: must be at least 1, not 0"),
        (["multi30k", "de-en", "--raw", "/nowhere"], "/nowhere: has no train.de"),
        ([*CUSTOM[:5], "--train", "/nowhere/c", "--valid", "y"], "there is no /nowhere/c.de and no /nowhere/c."),
        ([*CUSTOM[:5], "--train", "/usr", "--valid", "y"], "/usr is a folder: give what its two files' names"),
        ([*CUSTOM, "--source-lang", "en"], "--source-lang and --target-lang must differ"),
        (CUSTOM[:-2], "--valid --valid-every is required"),
        ([*CUSTOM, "--source-lang", "de-AT"], "language code like de or de_AT, not 'de-AT'; did you mean de_AT?"),
        ([*CUSTOM[:-2], "--valid-every", "1"], "argument --valid-every: must be at least 2"),
        ([*CUSTOM, "--name", "../../evil"], "argument --name: must be the name of a folder in data/"),
        ([*CUSTOM, "--tokenizer", "none", "--tokenised"], "--tokenizer conflicts with --tokenised"),
        ([*CUSTOM, "--bpe-given", "code"], "--bpe-given goes with --tokenised"),
        ([*CUSTOM, "--tokenised", "--bpe-given", "no-code"], "custom.sh: no-code: No such file or directory"),
        ([*CUSTOM, "--test", "a/test", "a/../a/test"], "--test a/test: is named twice"),
        ([*CUSTOM, "--like", "runs/x"], "--like needs a --name or --out"),
        (["sample", "--train", "3"], "--train 3: cannot make"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_in_options_are_named(tmp_path, arguments, message):
    out = [] if "--like" in arguments else ["--out", tmp_path / "out"]
    done = script(*arguments, *out, check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_strict_refuses_unexpected_numbers_of_pairs(tmp_path):
    raw = tmp_path / "raw"
    for name in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
        parallel(raw, name, 30)
    common = ["multi30k", "en-de", "--raw", raw, "--out", tmp_path / "out", "--merges", "60", "--workers", "1"]
    done = script(*common, "--strict", check=False)
    assert done.returncode == 1
    assert "multi30k.sh: --strict: train 30 pairs (not 29,000), valid 30 pairs (not 1,014)" in done.stderr
    assert not (tmp_path / "out").exists()
    done = script(*common)
    assert done.stderr.count("<- not as expected") == 4
    assert script(*common, "--strict", check=False).returncode == 1


def test_expected_counts_are_the_published_ones():
    assert corpora.multi30k("de", "en").expected == {"train": 29_000, "valid": 1_014, "test": 1_000, "test1": 1_000}
    assert corpora.iwslt14_de_en().expected == {"train": 160_239, "valid": 7_283, "test": 6_750}
    assert corpora.wmt14_en_de().expected == corpora.wmt14_en_fr().expected == {"test": 3_003}
