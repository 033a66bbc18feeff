"""Faults in a user's data and options: the message names them, and nothing is left behind."""

import dataclasses
import gzip
import json
import os
import signal

import pytest
from helpers.data_toy import (
    CUSTOM,
    corpus,
    corpus_of,
    custom,
    prepare,
    read,
    recipe,
    text_only,
    write,
)  # fmt: skip
from helpers.mistakes import check_refusal, mistakes

from ea_artifacts.command import UserError
from ea_data import parallel as in_parallel
from ea_data.text import checked_lines


def nothing(lines):
    return []


@pytest.mark.parametrize(
    ("faults", "rules", "message"),
    [
        (
            {"valid.en": lambda lines: lines[:-3]}, {},
            r"(?s)valid: .*same number.*20 lines in .*/valid\.de\n.*17 lines in .*/valid\.en",
        ),
        ({"train.de": nothing}, {}, r"(?s)train: .*\b0 lines in .*/train\.de"),
        ({"test.de": nothing, "test.en": nothing}, {}, r"test: no lines in .*/test\.de and .*/test\.en"),
        ({"train.en": lambda lines: [" "] * 200}, {}, r"train: no pair is left: 200 empty; "),
        ({}, {"filter_on": "subwords", "max_ratio": 0.1}, "train: no pair is left: 200 length ratio; "),
        ({"valid.de": None}, {}, r"raw: has no valid\.de and no valid\.de\.gz"),
        # the quick one first
        ({"test.en": lambda lines: [*lines[:7], b"caf\xe9"], "train.de": nothing}, {}, r"/test\.en:8: .* byte 4"),
        ({"train.de": lambda lines: gzip.compress("".join(lines).encode())[:-20]}, {}, r"train\.de\.gz: truncated"),
        ({}, {"valid_every": 201, "filter_on": "subwords"}, "valid: no pair is left: .*--valid-every"),
    ],
)  # fmt: skip
def test_faulty_text_is_refused_by_file_and_line(tmp_path, faults, rules, message):
    raw, rules = corpus(tmp_path / "raw"), recipe(**rules)
    for name, change in faults.items():
        lines = read(raw / name)
        (raw / name).unlink()
        changed = change and change(lines)
        if isinstance(changed, bytes):
            (raw / f"{name}.gz").write_bytes(changed)
        elif changed is not None:
            write(raw / name, changed)
    if rules.rules.valid_every:
        rules = dataclasses.replace(rules, valid=())
    with pytest.raises(UserError, match=message):
        text_only(rules, raw, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir() if path.name != "out.work"] == ["raw"]


def test_nul_bytes_are_removed_where_non_printing_characters_are(tmp_path):
    raw = corpus(tmp_path / "raw")
    write(raw / "train.de", ["a\0b", *read(raw / "train.de")[1:]])
    pipeline = text_only(recipe(normalise=True), raw, tmp_path / "out")
    assert read(pipeline.text("tokens", "train")[0])[0] == "a b"


def test_tests_of_one_name_are_told_apart_by_their_folders(tmp_path):
    prefixes = [tmp_path / "a/test", tmp_path / "b/test"]
    made = corpus_of("--test", *prefixes)
    assert made.test_names() == {"test": str(prefixes[0]), "test1": str(prefixes[1])}
    members = [part.member for parts in made.tests.values() for part in parts]
    assert members == [f"{prefix}.{{lang}}" for prefix in prefixes]


def test_a_killed_worker_is_reported():
    def killed(chunk):
        os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(UserError, match="--workers"):
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
    counts = tokens if filter_on == "words" else in_subwords["filters"]
    assert counts["train"] == {"in": 200, "out": 198, "dropped": {"empty": 2}}
    assert read(pipeline.text("subwords", "test")[1])[5] == ""


@pytest.mark.slow
def test_a_line_of_100_000_tokens_is_dropped_in_training_and_kept_in_a_test(tmp_path):
    """In a folder whose name is not UTF-8, and stands in the recorded command."""
    raw = corpus(tmp_path / os.fsdecode(b"caf\xe9"), train=60)
    for path in (raw / "train.de", raw / "test.de"):
        write(path, [*read(path)[:-1], "wort1 " * 100_000])
    said = custom(raw, tmp_path / "out", "--merges", "60")
    assert "warning: test: its longest de sentence has 100,000 subwords" in said
    assert len(read(tmp_path / "out/raw/test.de")) == 20
    prep = json.loads((tmp_path / "out/PREP.json").read_text(encoding="utf-8"))
    assert prep["dropped"] == {"too long": 1}
    assert "caf" in prep["command"]


@mistakes("""
    multi30k fr-de | pair fr-de
    multi30k de-en --merges 0 | 'multi30k.sh: error: ' --merges 'multi30k.sh --help'
    multi30k de-en --raw /nowhere | '/nowhere: has no train.de'
    custom --source-lang de --target-lang en --train x | --valid --valid-every
    --train {raw}/train --valid '' | 'is a folder'
    --train /nowhere/c | '/nowhere/c.de and no /nowhere/c.de.gz'
    --train /usr | '/usr is a folder'
    --source-lang en | --source-lang --target-lang en
    --source-lang de-AT | 'de_AT?'
    --valid-every 1 | --valid-every 'at least 2'
    --merges 9999999999 | --merges 'at most 2147483647'
    --tokenizer none --tokenised | --tokenizer --tokenised
    --bpe-given code | --bpe-given --tokenised
    --tokenised --bpe-given no-code | 'no-code: No such file'
    --test {raw}/test.de | '{raw}/test.de: is a file'
    --target-lang th --split-dashes | --split-dashes --tokenizer 'for de and th'
    --target-lang th --normalise | --normalise --tokenizer
    --like runs/x | --like --name --out
""")
def test_mistakes_in_options_are_named(tmp_path, words, named, capsys):
    raw = corpus(tmp_path / "raw", train=2)
    words = [*(CUSTOM if words[0].startswith("--") else []), *words]
    out = [] if "--like" in words else ["--out", tmp_path / "out"]
    check_refusal(capsys, prepare.main, [*words, *out], named, writes_to=tmp_path, raw=raw)


def test_line_ends_and_the_mark_at_the_beginning_are_normalised():
    lines = [b"\xef\xbb\xbfone\r\n", b"two\n", b"\xef\xbb\xbfthree\rand\r\n", b"last"]
    expected = [b"one\n", b"two\n", b"\xef\xbb\xbfthree and\n", b"last\n"]
    assert list(checked_lines(lines, "file")) == expected
    assert list(checked_lines([b"c\0d\n"], "file", keep_nul=True)) == [b"c\1d\n"], "left to a later step"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"fine\n" * 4099 + b"Stra\xdfe\n" + b"fine\n" * 10, "file:4100: not UTF-8: .* at byte 5"),
        ("Hallo\nWelt\n".encode("UTF-16"), "file:1: not UTF-8 but UTF-16; .*iconv -f UTF-16 -t UTF-8$"),
        (gzip.compress(b"a\n", mtime=0), r"file: is compressed by gzip; .*\.gz"),
        (b"a\nb\nc\0d\n", "file:3: a NUL byte"),
    ],
)
def test_text_of_another_form_is_named_by_file_line_and_byte(content, message):
    """test_common.py has the other forms."""
    with pytest.raises(UserError, match=f"^{message}"):
        list(checked_lines([line + b"\n" for line in content.split(b"\n")], "file"))


def test_only_newlines_end_lines(tmp_path):
    """A character at which str.splitlines breaks lines must not put the two sides out of step."""
    odd = "\u2028"
    raw = corpus(tmp_path / "raw")
    for split in ("train", "valid", "test"):
        lines = read(raw / f"{split}.de")
        lines[3] = f"eins{odd}zwei"
        write(raw / f"{split}.de", lines)
    pipeline = text_only(recipe(), raw, tmp_path / "out")
    for split, number in (("train", 200), ("valid", 20), ("test", 20)):
        german, english = (read(path) for path in pipeline.text("subwords", split))
        assert len(german) == len(english) == number
        assert german[3].replace("@@ ", "") == "eins zwei"
    assert read(pipeline.text("subwords", "test", raw=True)[0])[3] == f"eins{odd}zwei"  # references stay as they were
