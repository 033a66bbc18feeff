"""scripts/translate.sh: raw text in, raw text out, line for line."""

import os
import signal
import subprocess
import sys

import pytest
import torch
from helpers.mistakes import check_refusal, mistakes
from helpers.toy import ENVIRONMENT, Payload, done, tool

from ea_artifacts.command import UserError
from ea_tools.translating import translate


def output(path, *flags, lines=(b"x\n", b"y\n"), checkpoint=__file__):
    args = translate.parse(["--checkpoint", str(checkpoint), "--output", str(path), *flags])
    return translate._output(args, args.checkpoint, lines)


def test_an_interrupted_output_goes_on_with_the_same_input(tmp_path):
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), output(out, lines=[b"eins\n", b"zwei\n"]) as (lines, write, _):
        assert list(lines) == [b"eins\n", b"zwei\n"], "lines are read ahead of those that are written"
        write("first")
        raise KeyboardInterrupt
    assert (tmp_path / "out.partial").read_text() == "first\n", "written as it came"
    with (tmp_path / "out.partial").open("a") as file:
        file.write("half a li")
    with pytest.raises(UserError, match=r"out\.partial: .* 1 .*--resume"), output(out):
        pass
    for other, message in (([b"anders\n", b"zwei\n"], "out.partial .* line 1 "), ([], "out.partial .* 1 .* 0")):
        with pytest.raises(UserError, match=message), output(out, "--resume", lines=other) as (lines, *_):
            list(lines)
    with output(out, "--resume", lines=[b"eins\n", b"zwei, anders\n"]) as (lines, write, done):
        list(lines)
        write(f"after {done}")
    assert out.read_text() == "first\nafter 1\n"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_other_settings_do_not_go_on_with_an_output(tmp_path):
    out, checkpoint = tmp_path / "out", tmp_path / "average.pt"
    checkpoint.write_text("weights")
    with pytest.raises(KeyboardInterrupt), output(out, "--nbest", "2", checkpoint=checkpoint) as (lines, write, _):
        list(lines)
        for line in ("0 ||| a ||| -1", "0 ||| b ||| -2", "1 ||| c ||| -1"):
            write(line)
        raise KeyboardInterrupt
    for other, message in [
        (["--beam", "4"], "beam 5, .*4"),
        (["--nbest", "3"], "nbest 2, .*3"),
        (["--", "--max-len-b", "9"], r"search_flags {}, .*{'max-len-b': \['9'\]}"),
    ]:
        flags = ["--resume", "--nbest", "2", *other]
        with pytest.raises(UserError, match=message), output(out, *flags, checkpoint=checkpoint):
            pass
    again = ("--nbest", "2", "--resume")
    checkpoint.write_text("Weights")  # made again under its name, and as long
    named = r"checkpoint .*average\.pt .*average\.pt"
    with pytest.raises(UserError, match=named), output(out, *again, checkpoint=checkpoint):
        pass
    checkpoint.write_text("weights")
    with output(out, *again, checkpoint=checkpoint) as (*_, done):
        assert done == 1
    assert out.read_text() == "0 ||| a ||| -1\n0 ||| b ||| -2\n", "a line's n best are whole"


def test_two_at_once_do_not_write_one_file(tmp_path):
    code = "import fcntl, sys\nfile = open(sys.argv[1], 'a')\n"
    code += "fcntl.lockf(file, fcntl.LOCK_EX)\nprint('locked', flush=True)\ninput()"
    words = [sys.executable, "-c", code, str(tmp_path / "out.partial")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        refused = pytest.raises(UserError, match=r"out\.partial: .*--output")
        with refused, output(tmp_path / "out", "--resume"):
            pass
        other.communicate(b"\n")


@pytest.mark.parametrize("name", ["in", "symbolic", "hard"])
def test_the_input_is_not_replaced(tmp_path, capsys, name):
    (tmp_path / "in").write_text("Hund.\n")
    (tmp_path / "symbolic").symlink_to("in")
    (tmp_path / "hard").hardlink_to(tmp_path / "in")
    words = ["--checkpoint", __file__, "--input", tmp_path / "in", "--output", tmp_path / name, "--resume"]
    check_refusal(capsys, translate.main, words, [f"--output {tmp_path / name}: "], writes_to=tmp_path)


def test_a_pipe_is_written_to_and_keeps_nothing(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with output(tmp_path / "pipe") as (_, write, _):
        write("new")
        assert os.read(reader, 100) == b"new\n"
    os.close(reader)
    refused = pytest.raises(UserError, match=r"--resume: --output .*pipe ")
    with refused, output(tmp_path / "pipe", "--resume"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]


def test_n_best_with_scores():
    hypotheses = [("A B", -0.5), ("A", -0.7), ("C", -0.9)]
    assert translate._written(7, hypotheses[:2], 2) == ["7 ||| A B ||| -0.5", "7 ||| A ||| -0.7"]
    assert translate._written(8, hypotheses, None) == ["A B"]


@pytest.mark.slow
def test_ctrl_c_at_a_waiting_terminal_is_one_line(run):
    """Python used to abort, since a thread held its standard input."""
    words = [*tool("translating.translate"), "--run", run, "--buffer", "1", "--beam", "1", "--", "--max-len-b", "5"]
    process = subprocess.Popen(
        [str(word) for word in words],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT, text=True,
    )  # fmt: skip
    process.stdin.write("Hund.\n")
    process.stdin.flush()
    assert process.stdout.readline().endswith("\n")
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("translate: interrupted; ")
    assert "Traceback" not in said
    assert "Fatal" not in said


@pytest.mark.slow
def test_lines_stay_in_step(run, tmp_path):
    """Order, empty lines and doubles are kept; the buffer changes nothing; a file is a pipe."""
    lines = ["Hund, Katze, Haus, Baum, Buch.", "", "Haus.", "   ", "Garten, Vogel.\r", "Haus.", "x\u2028y", ""]
    text = "".join(f"{line}\n" for line in lines)
    words = ["--run", run, "--checkpoint", run / "checkpoint3.pt", "--beam", 2, "--", "--max-len-b", 20]
    out = done("translate.sh", *words, input=text).stdout.split("\n")[:-1]
    assert [bool(line) for line in out] == [bool(line.strip()) for line in lines]
    assert out[2] == out[5]
    (tmp_path / "in").write_text(text, newline="")
    files = ["--buffer", 1, "--input", tmp_path / "in", "--output", tmp_path / "out"]
    translate.main([*map(str, [*files, *words])])
    assert (tmp_path / "out").read_text().split("\n")[:-1] == out


def test_lines_before_one_that_is_no_text_are_translated():
    found = []
    with pytest.raises(UserError, match="in:3: not UTF-8"):
        for batch in translate.batches([b"a\n", b"b\n", b"\xff\n"], "in", 9):
            found.append(batch)
    assert found == [(1, ["a", "b"])]


@mistakes("""
    --run {here} | {here} checkpoint
    --run {here}/nowhere | {here}/nowhere:
    --run {run} --input {here}/nope | '--input {here}/nope: '
    --run {run} --input {here} | {here}: directory
    --run {run} --output {here}/nodir/out | '--output {here}/nodir/out: ' {here}/nodir
    --run {run} --data {here} | PREP.json:
    --run {run} -- --nonsense | '-- --nonsense: '
    --run {run} -- --min-len 999 | min_len max_len
    --run {run} --output {here}/out --lenpen 1e20 | 'lenpen: ' 10
    --run {run} --nbest 6 | '--nbest 6: ' '--beam 5'
    --checkpoint {here}/language_modeling.pt | 'language_modeling.pt: ' 'task language_modeling'
    --checkpoint {here}/denoising.pt | 'denoising.pt: ' 'task denoising'
    --checkpoint {here}/bad.pt | 'bad.pt: refused'
""")
def test_mistakes_are_named(run, tmp_path, capsys, monkeypatch, words, named):
    for task in ("language_modeling", "denoising"):
        torch.save({"model": {}, "cfg": {"task": {"_name": task}}}, tmp_path / f"{task}.pt")
    torch.save({"model": {}, "cfg": Payload(tmp_path / "trace")}, tmp_path / "bad.pt")
    if "--input" not in words:
        (tmp_path / "in").write_text("Hund.\n")
        words = ["--input", tmp_path / "in", *words]
    check_refusal(capsys, translate.main, words, named, writes_to=tmp_path, here=tmp_path, run=run)
