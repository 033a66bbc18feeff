"""Faults in a user's data: what is said, what happens, and that nothing is left behind."""

import dataclasses
import os
import signal
import sys

import pytest
from helpers.data_toy import corpora, corpus, parallel, prepare_command, read, recipe, script, text_only, write

from ea_data import parallel as in_parallel
from ea_data import prepare
from ea_data.command_line import UserError


def refused(raw, out, pattern, rules=None):
    with pytest.raises(UserError, match=pattern):
        text_only(rules or recipe(), raw, out)
    assert not out.exists()
    assert not out.with_name(out.name + ".work").exists()


def test_different_numbers_of_lines(tmp_path):
    raw = corpus(tmp_path / "raw")
    write(raw / "valid.en", read(raw / "valid.en")[:-3])
    refused(
        raw, tmp_path / "out", r"(?s)valid: .*not.* same number.*20 lines in .*/valid\.de\n.*17 lines in .*/valid\.en"
    )


def test_an_empty_side(tmp_path):
    raw = corpus(tmp_path / "raw")
    write(raw / "train.de", [])
    refused(raw, tmp_path / "out", r"(?s)train: .*\b0 lines in .*/train\.de")


def test_a_side_of_blank_lines(tmp_path):
    raw = corpus(tmp_path / "raw")
    write(raw / "train.en", [" "] * 200)
    with pytest.raises(UserError, match=r"no training pair is left; dropped: {'empty': 200}"):
        text_only(recipe(), raw, tmp_path / "out")
    with pytest.raises(UserError, match=r"train: no pair is left; dropped: {'empty': 200}"):
        text_only(recipe(filter_on="subwords"), raw, tmp_path / "out")


def test_too_few_pairs_for_valid_every(tmp_path):
    rules = dataclasses.replace(recipe(valid_every=201, filter_on="subwords"), valid=())
    message = "^valid: no pair is left: --valid-every 201 of 200 training pairs; choose a smaller number$"
    with pytest.raises(UserError, match=message):
        text_only(rules, corpus(tmp_path / "raw"), tmp_path / "out")


def test_tests_of_one_name_in_two_folders(tmp_path, capsys):
    """Both are prepared, in their order, by names that tell them apart; one that is named twice is refused."""
    languages = ("--source-lang", "de", "--target-lang", "en", "--test")
    prefixes = [tmp_path / "a/test", tmp_path / "b/test", tmp_path / "b/news"]
    made = prepare_command(*languages, *prefixes)
    assert made.test_names() == {"test": "a/test", "test1": "b/test", "test2": "news"}
    members = [part.member for parts in made.tests.values() for part in parts]
    assert members == [f"{prefix}.{{lang}}" for prefix in prefixes]
    with pytest.raises(SystemExit):
        prepare_command(*languages, *prefixes, tmp_path / "b/../a/test")
    assert f"--test {tmp_path}/a/test: is named twice" in capsys.readouterr().err


def test_a_worker_that_is_killed_from_outside():
    def killed(chunk):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match=r"^one of the worker processes was killed, .* fewer --workers$"):
        list(in_parallel.ordered_map(killed, iter([([b"a\n"], [b"b\n"])]), 2))


@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("/", "--out /: is the root of the file system; name a folder"),
        (b"caf\xe9", r"caf\udce9': the bytes of this name are not UTF-8; rename the file or folder"),
    ],
)
def test_an_unusable_out_is_refused_before_anything_is_made(tmp_path, monkeypatch, out, message):
    write(tmp_path / "thesis/chapter.tex", ["years of work"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["prepare.py", "sample", "--out", os.fsdecode(out)])
    with pytest.raises(SystemExit) as error:
        prepare.main()
    assert message in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis"]


def test_a_missing_file(tmp_path):
    raw = corpus(tmp_path / "raw")
    (raw / "valid.de").unlink()
    with pytest.raises(UserError, match=r"raw: has no valid\.de and no valid\.de\.gz"):
        text_only(recipe(), raw, tmp_path / "out")


def test_not_utf8(tmp_path):
    raw = corpus(tmp_path / "raw")
    write(raw / "test.en", [*read(raw / "test.en")[:7], b"caf\xe9", *read(raw / "test.en")[8:]])
    refused(raw, tmp_path / "out", r"/test\.en, line 8: byte 4 \(hex e9\) is not UTF-8")


def test_nul(tmp_path):
    """Refused, unless the recipe removes non-printing characters from training text anyway."""
    raw = corpus(tmp_path / "raw")
    write(raw / "train.de", ["a\0b", *read(raw / "train.de")[1:]])
    refused(raw, tmp_path / "out", r"/train\.de, line 1: a NUL byte")
    pipeline = text_only(recipe(normalise=True), raw, tmp_path / "out")
    assert read(pipeline.text("tokenise", "train")[0])[0] == "a b"


def test_a_damaged_gz(tmp_path):
    import gzip

    raw = corpus(tmp_path / "raw")
    packed = gzip.compress((raw / "train.de").read_bytes())
    (raw / "train.de").unlink()
    (raw / "train.de.gz").write_bytes(packed[:-20])
    refused(raw, tmp_path / "out", r"train\.de\.gz: truncated or damaged")


@pytest.mark.parametrize("filter_on", ["words", "subwords"])
def test_empty_lines(tmp_path, filter_on):
    """Dropped in training with a count; kept in validation and test, so that those stay aligned."""
    raw = corpus(tmp_path / "raw")
    for split in ("train", "valid", "test"):
        for lang, at in (("de", 2), ("en", 5)):
            lines = read(raw / f"{split}.{lang}")
            lines[at] = " \u00a0"
            write(raw / f"{split}.{lang}", lines)
    pipeline = text_only(recipe(filter_on=filter_on), raw, tmp_path / "out")
    sizes = {split: [len(read(path)) for path in pipeline.text("filter", split)] for split in pipeline.splits()}
    assert sizes == {"train": [198, 198], "valid": [20, 20], "test": [20, 20]}
    stage = "tokenise" if filter_on == "words" else "filter"
    report = next(done.report() for done in pipeline.chain if done.name == stage)
    assert report["train"] == {"in": 200, "out": 198, "dropped": {"empty": 2}}
    assert read(pipeline.text("filter", "test")[1])[5] == ""


@pytest.mark.slow
def test_a_line_of_100_000_tokens(tmp_path):
    """Dropped where there is a limit, in reasonable time; kept in a test, with a warning about fairseq's limit."""
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


def test_the_commands_say_so_and_fail(tmp_path):
    """Through the shell script: the message alone, no traceback, a non-zero status, nothing written."""
    raw = tmp_path / "raw"
    for name in ("train", "val", "test_2016_flickr", "test_2017_flickr"):
        parallel(raw, name, 30)
    write(raw / "train.en", read(raw / "train.en")[:-1])
    done = script("multi30k", "de-en", "--raw", raw, "--out", tmp_path / "out", check=False)
    assert done.returncode == 1
    assert done.stderr.split("\n")[-4].startswith(
        "multi30k.sh: train: the two sides do not have the same number of lines"
    )
    assert "30 lines in" in done.stderr
    assert "29 lines in" in done.stderr
    assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["raw"]


CUSTOM = ["custom", "--source-lang", "de", "--target-lang", "en", "--train", "x", "--valid", "y"]
GIVEN = [*CUSTOM, "--tokenised", "--bpe-given", "no-code"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["multi30k", "fr-de"], "argument pair: invalid choice: 'fr-de'"),
        (["multi30k", "de-en", "--merges", "0"], "argument --merges: must be a whole number, at least 1, not '0'"),
        (["multi30k", "de-en", "--raw", "/nowhere"], "/nowhere: has no train.de"),
        ([*CUSTOM[:5], "--train", "/nowhere/c", "--valid", "y"], "there is no /nowhere/c.de and no /nowhere/c."),
        ([*CUSTOM[:5], "--train", "/usr", "--valid", "y"], "/usr is a folder: give what its two files' names"),
        (["custom", "--source-lang", "de", "--target-lang", "de", "--train", "x", "--valid", "y"], "differ"),
        (["custom", "--source-lang", "de", "--target-lang", "en", "--train", "x"], "needs either --valid PREFIX or"),
        (["custom", "--source-lang", "de-AT"], "code like de or de_AT, not 'de-AT'; for a region write de_AT"),
        ([*CUSTOM[:-2], "--valid-every", "1"], "argument --valid-every: must be at least 2"),
        ([*CUSTOM, "--name", "../../evil"], "argument --name: must be the name of a folder in data/"),
        ([*CUSTOM, "--tokenizer", "none", "--tokenised"], "--tokenizer cannot be had with --tokenised"),
        ([*CUSTOM, "--bpe-given", "code"], "--bpe-given goes with --tokenised"),
        ([*CUSTOM, "--tokenised", "--split-dashes"], "--split-dashes cannot be had with --tokenised"),
        ([*GIVEN], "custom.sh: no-code: No such file or directory; check the path"),
        (["sample", "--train", "3"], "--train 3: cannot make"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_arguments(tmp_path, arguments, message):
    done = script(*arguments, "--out", tmp_path / "out", check=False)
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["multi30k", "custom"])
def test_help(tmp_path, name):
    done = script(name, "--help", cwd=tmp_path)
    assert done.stdout.startswith(f"usage: {name}.sh")
    assert "--workers" in done.stdout
    assert ".py" not in done.stdout, "no command but the one that was asked"


@pytest.mark.slow
def test_strict(tmp_path):
    """Other numbers of pairs than expected are marked, and with --strict refused before there is a data folder."""
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


def test_expected_counts_are_those_that_are_known():
    assert corpora.multi30k("de", "en").expected == {"train": 29_000, "valid": 1_014, "test": 1_000, "test1": 1_000}
    assert corpora.iwslt14_de_en().expected == {"train": 160_239, "valid": 7_283, "test": 6_750}
    assert corpora.wmt14_en_de().expected == corpora.wmt14_en_fr().expected == {"test": 3_003}
