"""GLUE's files to fairseq's data: the right columns of each task, and what is wrong with a file by name and line."""

import errno
import gzip
import json
import sys
import zipfile
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

from ea_data import glue
from ea_data.text import PrepError

SENTENCES = ["the dog sees a cat", "a bird sings", 'he said "no', "trees grow"]
ROWS = {
    "CoLA": ["x\t{label}\t*\t{a}"],
    "SST-2": ["sentence\tlabel", "{a}\t{label}"],
    "MRPC": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "{label}\t7\t8\t{a}\t{b}"],
    "STS-B": [
        "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
        "0\tg\tf\ty\t1\ts\ts\t{a}\t{b}\t{label}",
    ],
    "QQP": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\t{a}\t{b}\t{label}"],
    "MNLI": [
        "index\tpairID\tgenre\tsentence1\tsentence2\tlabel1\tgold_label",
        "0\tp\tg\t{a}\t{b}\tneutral\t{label}",
    ],
    "QNLI": ["index\tquestion\tsentence\tlabel", "0\t{a}\t{b}\t{label}"],
    "RTE": ["index\tsentence1\tsentence2\tlabel", "0\t{a}\t{b}\t{label}"],
}


def label(task, i):
    labels = glue.TASKS[task].labels
    return labels[i % len(labels)] if labels else ["0.0", "2.500", "5.0"][i % 3]


def write(folder, task, rows=12, end=".tsv"):
    *header, form = ROWS[task]
    for split in ("train", *glue.TASKS[task].dev):
        lines = [form.format(label=label(task, i), a=SENTENCES[i % 4], b=SENTENCES[(i + 1) % 4]) for i in range(rows)]
        folder.mkdir(parents=True, exist_ok=True)
        content = "".join(f"{line}\n" for line in [*header, *lines]).encode()
        (folder / f"{split}{end}").write_bytes(gzip.compress(content) if end.endswith(".gz") else content)
    return folder


def column(folder, split):
    """The sentences of one column of a prepared split, from fairseq's own reader."""
    words = Dictionary.load(str(folder / "dict.txt"))
    return [words.string(row) for row in data_utils.load_indexed_dataset(str(folder / split), words)]


def plain(pieces):
    return pieces.replace(" ", "").replace("▁", " ").strip()


@pytest.mark.parametrize("task", ROWS)
def test_columns_and_labels(task, tmp_path):
    glue.prepare(task, write(tmp_path / "raw" / task, task).parent, tmp_path / "out", 40, None)
    expected = [SENTENCES[i % 4] for i in range(12)]
    splits = ["train", "valid", "valid1"] if task == "MNLI" else ["train", "valid"]
    for split in splits:
        assert list(map(plain, column(tmp_path / "out/input0", split))) == expected
        if len(glue.TASKS[task].sentences) == 2:
            second = [SENTENCES[(i + 1) % 4] for i in range(12)]
            assert list(map(plain, column(tmp_path / "out/input1", split))) == second
        if task == "STS-B":
            numbers = (tmp_path / f"out/label/{split}.label").read_text().split()
            assert list(map(float, numbers)) == [0.0, 0.5, 1.0] * 4
        else:
            assert column(tmp_path / "out/label", split) == [label(task, i) for i in range(12)]
    prep = json.loads((tmp_path / "out/PREP.json").read_text())
    assert prep["task"] == task and prep["splits"]["train"] == {"rows": 12, "dropped": 0}


def test_classes_are_numbered_in_the_tasks_order_whatever_is_more_frequent(tmp_path):
    """Public models count contradiction, neutral, entailment: fairseq numbers the lines of the dictionary."""
    path = write(tmp_path / "raw", "MNLI") / "train.tsv"
    path.write_text(path.read_text() + "0\tp\tg\ta bird\ta bird sings\tneutral\tentailment\n" * 5)
    glue.prepare("MNLI", tmp_path / "raw", tmp_path / "out", 40, None)
    words = [line.split()[0] for line in (tmp_path / "out/label/dict.txt").read_text().splitlines()]
    assert words == ["contradiction", "neutral", "entailment"]


def test_compressed_files_and_the_subwords_of_gpt2(tmp_path):
    letters = list(bytes_to_unicode().values())
    given = tmp_path / "gpt2"
    given.mkdir()
    (given / "encoder.json").write_text(json.dumps({letter: i for i, letter in enumerate([*letters, "th"])}))
    (given / "vocab.bpe").write_text("#version: 0.2\nt h\n")
    (given / "dict.txt").write_text("".join(f"{i} 1\n" for i in range(257)))
    glue.prepare("SST-2", write(tmp_path / "raw", "SST-2", end=".tsv.gz"), tmp_path / "out", 40, given)
    first = column(tmp_path / "out/input0", "train")[0].split()
    assert first[0] == "256" and len(first) == len(SENTENCES[0]) - 1
    assert (tmp_path / "out/input0/dict.txt").read_bytes() == (given / "dict.txt").read_bytes()
    assert json.loads((tmp_path / "out/PREP.json").read_text())["unknown_subwords"] == 0


@pytest.mark.parametrize(
    "task, line, message",
    [
        ("CoLA", "x\t2\t*\ta b", r"train.tsv, line 13: the label is '2', and must be one of 0, 1"),
        ("CoLA", "x\t1", r"train.tsv, line 13: has 2 columns, and 4 are needed"),
        ("CoLA", "x\t1\t*\t ", r"train.tsv, line 13: has an empty sentence"),
        ("RTE", "0\ta\tb\tneutral", r"train.tsv, line 14: the label is 'neutral', and must be one of entailment, not_"),
        ("STS-B", "0\tg\tf\ty\t1\ts\ts\ta\tb\t5.1", r"line 14: the label is '5.1', and must be a number from 0 to 5"),
        ("STS-B", "0\tg\tf\ty\t1\ts\ts\ta\tb\tnan", r"line 14: the label is 'nan', and must be a number from 0 to 5"),
    ],
)
def test_rows_that_do_not_fit_are_named_and_nothing_is_left(task, line, message, tmp_path):
    path = write(tmp_path / "raw", task) / "train.tsv"
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(PrepError, match=message):
        glue.prepare(task, tmp_path / "raw", tmp_path / "out", 40, None)
    assert [entry.name for entry in tmp_path.iterdir()] == ["raw"]


def test_rows_of_qqp_that_lack_columns_are_dropped_and_counted(tmp_path):
    path = write(tmp_path / "raw", "QQP") / "train.tsv"
    path.write_text(path.read_text() + "0\t1\t2\n")
    glue.prepare("QQP", tmp_path / "raw", tmp_path / "out", 40, None)
    assert json.loads((tmp_path / "out/PREP.json").read_text())["splits"]["train"] == {"rows": 12, "dropped": 1}


def test_what_is_finished_is_not_made_twice_and_an_own_folder_is_replaced(tmp_path):
    raw, out = write(tmp_path / "raw", "RTE"), tmp_path / "out"
    assert glue.prepare("RTE", raw, out, 40, None)
    before = (out / "PREP.json").stat().st_ino
    assert not glue.prepare("RTE", raw, out, 40, None)
    assert (out / "PREP.json").stat().st_ino == before
    assert glue.prepare("RTE", raw, out, 38, None)
    assert json.loads((out / "PREP.json").read_text())["subwords"] == {"pieces": 38}
    write(raw, "RTE", rows=14)
    assert glue.prepare("RTE", raw, out, 38, None)
    assert json.loads((out / "PREP.json").read_text())["splits"]["train"]["rows"] == 14
    assert {entry.name for entry in tmp_path.iterdir()} == {"raw", "out"}
    (out / "raw/RTE").mkdir()
    with pytest.raises(PrepError, match=r"--out .*/out: holds the files of --raw .*/out/raw; choose another"):
        glue.prepare("RTE", out / "raw", out, 38, None)


def test_somebody_elses_folder_is_left_alone(tmp_path):
    """The folder of the raw files themselves, one with a PREP.json of something else, and a file."""
    raw = write(tmp_path / "raw", "RTE")
    other = tmp_path / "other"
    other.mkdir()
    (other / "PREP.json").write_text('{"name": "multi30k-de-en"}')
    for out in (raw, other, raw / "dev.tsv"):
        with pytest.raises(PrepError, match=f"{out}: exists and was not made here; move it away or choose another"):
            glue.prepare("RTE", raw, out, 40, None)
    assert {path.name for path in tmp_path.rglob("*.*")} == {"train.tsv", "dev.tsv", "PREP.json"}


def test_a_file_whose_unpacking_was_cut_off_is_unpacked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(glue, "DATA", tmp_path)
    folder = tmp_path / "downloads/glue"
    raw = write(tmp_path / "raw", "RTE")
    folder.mkdir(parents=True)
    with zipfile.ZipFile(folder / "RTE.zip", "w") as archive:
        archive.write(raw / "train.tsv", "RTE/train.tsv")

    def write_half(path, content):
        with path.open("wb") as file:
            file.write(content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space"):
        patch.setattr(Path, "write_bytes", write_half)
        glue.downloaded("RTE")
    assert (glue.downloaded("RTE") / "train.tsv").read_bytes() == (raw / "train.tsv").read_bytes()
    assert [path.name for path in (folder / "RTE").iterdir()] == ["train.tsv"]


def test_interrupted(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(glue, "prepare", interrupted)
    monkeypatch.setattr(sys, "argv", ["glue.py", "RTE", "--raw", str(tmp_path), "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit) as end:
        glue.main()
    assert end.value.code == 130
    assert capsys.readouterr().err == "\nglue.sh: interrupted; run it again\n"


def test_a_file_of_another_task_a_missing_one_and_files_that_are_not_gpt2s(tmp_path):
    write(tmp_path / "raw", "SST-2")
    with pytest.raises(PrepError, match=r"train.tsv, line 1: the header has no column sentence1, sentence2"):
        glue.prepare("RTE", tmp_path / "raw", tmp_path / "out", 40, None)
    (tmp_path / "raw/dev.tsv").unlink()
    with pytest.raises(PrepError, match=r"raw: has no dev.tsv and no dev.tsv.gz, there or in SST-2/"):
        glue.prepare("SST-2", tmp_path / "raw", tmp_path / "out", 40, None)
    with pytest.raises(PrepError, match=r"--gpt2 .*: has no encoder.json, vocab.bpe, dict.txt"):
        glue.prepare("CoLA", write(tmp_path / "cola", "CoLA"), tmp_path / "out", 40, tmp_path)
    with pytest.raises(PrepError, match="MRPC: its files are not in one place"):
        glue.downloaded("MRPC")
