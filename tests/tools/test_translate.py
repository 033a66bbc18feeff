"""scripts/translate.sh: raw text in, raw text out, line for line."""

import json
import shutil

import pytest
from helpers.toy import Payload, script

from ea_tools.common import UserError
from ea_tools.text import Source, Words, decode, read_prep


def test_source_text_becomes_what_the_model_was_trained_on(data):
    source = Source(data, read_prep(data))
    assert source("Hund, Katze.").replace("@@ ", "") == "hund , katze ."
    assert source("  ") == source("") == ""


def test_rules_of_the_data_are_followed(data):
    prep = {**read_prep(data), "lowercase": False}
    words = Words({"tokenizer": "moses", "rules": {"split_dashes": True, "plain_apostrophes": True}}, "en")
    assert words.tokenize("state-of-the-art, isn’t it?") == "state @-@ of @-@ the @-@ art , isn &apos;t it ?"
    assert words.detokenize("state @-@ of @-@ the @-@ art , isn &apos;t it ?") == "state-of-the-art, isn't it?"
    assert Source(data, prep)("Hund").replace("@@ ", "") == "Hund"
    normalising = Source(data, {**prep, "rules": {"normalise": True}})
    assert "„" not in normalising("„Hund“")
    with pytest.raises(UserError, match=r"sentencepiece\.bpe\.model: no such file"):
        Source(data, {**prep, "bpe": "sentencepiece"})


def test_bad_bytes_are_named():
    assert decode(b" gut \r\n", "x", 1) == " gut "
    with pytest.raises(UserError, match=r"x:7: not UTF-8: .* at byte 3"):
        decode(b"ab\xff", "x", 7)


@pytest.mark.slow
def test_lines_stay_in_step(data, run, tmp_path):
    """Order, empty lines and doubles are kept; the buffer changes nothing; a file is a pipe."""
    lines = ["Hund, Katze, Haus, Baum, Buch.", "", "Haus.", "   ", "Garten, Vogel.\r", "Haus.", "x\u2028y", ""]
    text = "".join(f"{line}\n" for line in lines)
    flags = ["--run", run, "--checkpoint", run / "checkpoint3.pt", "--beam", 2]
    flags_after = ["--", "--max-len-b", 20]
    piped = script("translate.sh", *flags, *flags_after, input=text)
    assert piped.returncode == 0, piped.stderr
    assert "+ " in piped.stderr
    assert "fairseq-interactive" in piped.stderr
    out = piped.stdout.split("\n")[:-1]
    assert [bool(line) for line in out] == [bool(line.strip()) for line in lines]
    assert out[2] == out[5]

    (tmp_path / "in").write_text(text, newline="")
    into_file = script(
        "translate.sh", *flags, "--buffer", 1, "--input", tmp_path / "in", "--output", tmp_path / "out", *flags_after
    )
    assert into_file.returncode == 0, into_file.stderr
    assert (tmp_path / "out").read_text().split("\n")[:-1] == out


@pytest.mark.slow
def test_mistakes(data, run, tmp_path):
    (tmp_path / "in").write_bytes(b"Hund.\nKa\xfftze.\n")
    flags = ["--input", tmp_path / "in", "--output", tmp_path / "out"]
    result = script("translate.sh", "--run", run, *flags)
    assert result.returncode == 1
    assert f"{tmp_path / 'in'}:2: not UTF-8" in result.stderr
    assert not (tmp_path / "out").exists()

    def error(*flags):
        result = script("translate.sh", *flags, input="Hund.\n")
        assert result.returncode not in (0, None)
        assert "Traceback" not in result.stderr
        return result.stderr

    assert "has no checkpoint" in error("--run", tmp_path)
    assert "PREP.json: no such file" in error("--run", run, "--data", tmp_path)
    assert "unrecognized arguments: --nonsense" in error("--run", run, "--", "--nonsense")
    import torch

    torch.save({"model": {}, "cfg": Payload(tmp_path / "trace")}, tmp_path / "bad.pt")
    assert "refused" in error("--checkpoint", tmp_path / "bad.pt")
    assert not (tmp_path / "trace").exists()


@pytest.mark.slow
def test_a_line_longer_than_the_model_takes(data, run, tmp_path):
    copy = shutil.copytree(data, tmp_path / "data")
    prep = json.loads((copy / "PREP.json").read_text())
    (copy / "PREP.json").write_text(json.dumps(prep))
    text = "Hund. " * 1100 + "\nHaus.\n"
    flags = ["--run", run, "--data", copy, "--beam", 1, "--", "--max-len-b", 5]
    result = script("translate.sh", *flags, input=text)
    assert result.returncode == 0, result.stderr
    assert "standard input:1: " in result.stderr
    assert "the model takes 1,023" in result.stderr
    assert result.stdout.count("\n") == 2
