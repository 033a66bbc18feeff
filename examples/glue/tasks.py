"""The nine tasks of GLUE: where their files have what, and their metrics.

Raw files are those of gluebenchmark.com: train.tsv and dev.tsv (MNLI: dev_matched.tsv and dev_mismatched.tsv), plain or
.gz, in DIR or in DIR/TASK.
"""

import gzip
import io
import urllib.request
import zipfile
import zlib
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from scipy import stats
from sklearn import metrics

URL = "https://dl.fbaipublicfiles.com/glue/data/"
ENTAILS = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")


class DataError(Exception):
    """Data that are not there, or are not those of the task: one line for the user."""


@dataclass(frozen=True)
class Task:
    """Columns are names in the header, or numbers where a file has none."""

    sentences: tuple[str | int, ...]
    label: str | int
    metrics: tuple[str, ...]
    #: in the order of their classes; None: numbers
    labels: tuple[str, ...] | None = ("0", "1")
    dev: tuple[str, ...] = ("dev",)
    #: below URL
    archive: str | None = None
    #: some rows of the published file lack columns
    drops_short_rows: bool = False


TASKS = {
    "CoLA": Task((3,), 1, ("matthews",), archive="CoLA.zip"),
    "SST-2": Task(("sentence",), "label", ("accuracy",), archive="SST-2.zip"),
    "MRPC": Task(("#1 String", "#2 String"), "Quality", ("f1", "accuracy")),
    "STS-B": Task(PAIR, "score", ("pearson", "spearman"), None, archive="STS-B.zip"),
    "QQP": Task(
        *(("question1", "question2"), "is_duplicate", ("f1", "accuracy")),
        archive="QQP-clean.zip",
        drops_short_rows=True,
    ),
    "MNLI": Task(
        *(PAIR, "gold_label", ("accuracy",), ("contradiction", "neutral", "entailment")),
        dev=("dev_matched", "dev_mismatched"),
        archive="MNLI.zip",
    ),
    "QNLI": Task(("question", "sentence"), "label", ("accuracy",), ENTAILS, archive="QNLIv2.zip"),
    "RTE": Task(PAIR, "label", ("accuracy",), ENTAILS, archive="RTE.zip"),
    "WNLI": Task(PAIR, "label", ("accuracy",), archive="WNLI.zip"),
}

#: one row: its sentences, and its class or number
Row = tuple[list[str], int | float]


def read(folder: Path, name: str, split: str) -> list[Row]:
    """The rows of a split. Quotation marks mean nothing in the files.

    Raises:
        DataError: no such file, a row without its columns, or a label that the task does not have.
    """
    task, path = TASKS[name], _find(folder, name, split)
    try:
        content = path.read_bytes()
        text = (gzip.decompress(content) if path.suffix == ".gz" else content).decode("utf-8-sig")
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); expected a .tsv file in UTF-8, or one in .gz") from error
    lines = [line.rstrip("\r") for line in text.removesuffix("\n").split("\n")]
    start, places = _columns(path, lines[0], task)
    rows = []
    for number, line in enumerate(lines[start:], start + 1):
        fields = line.split("\t")
        if len(fields) > max(places):
            *sentences, label = (fields[place].strip() for place in places)
            rows.append((sentences, _label(label, task, f"{path}, line {number}")))
        elif not task.drops_short_rows:
            raise DataError(f"{path}, line {number}: has {len(fields)} columns, expected at least {max(places) + 1}")
    if not rows:
        raise DataError(f"{path}: has no rows")
    return rows


def download(name: str, folder: Path) -> None:
    """Put a task's files into folder/NAME, unless they are there.

    Raises:
        DataError: a task without an archive, no network, or a damaged archive.
    """
    archive = TASKS[name].archive
    if (folder / name / "train.tsv").is_file():
        return
    if archive is None:
        raise DataError(f"{name}: no archive holds its files; make train.tsv and dev.tsv, and give --data DIR")
    try:
        with urllib.request.urlopen(URL + archive, timeout=60) as answer:
            contents = zipfile.ZipFile(io.BytesIO(answer.read()))
        # train.tsv comes last: with it the task is complete.
        for member in sorted(contents.namelist(), key=lambda member: member.endswith("/train.tsv")):
            if member.endswith(".tsv"):
                (folder / name).mkdir(parents=True, exist_ok=True)
                part = folder / name / (Path(member).name + ".part")
                part.write_bytes(contents.read(member))
                part.rename(part.with_suffix(""))
    except (OSError, HTTPException, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"{URL}{archive}: {error}; download it elsewhere, unpack it, and give --data DIR") from error


def score(name: str, expected: list, predicted: list) -> list[float]:
    """The task's metrics x 100, in the order of ``Task.metrics``."""
    return [100 * METRICS[metric](expected, predicted) for metric in TASKS[name].metrics]


def _correlation(name: str, expected: list, predicted: list) -> float:
    """0 where one side is constant, which has no correlation."""
    if len(set(expected)) == 1 or len(set(predicted)) == 1:
        return 0.0
    return float(getattr(stats, name)(expected, predicted).statistic)


METRICS = {
    "matthews": metrics.matthews_corrcoef,
    "accuracy": metrics.accuracy_score,
    "f1": metrics.f1_score,
    "pearson": lambda expected, predicted: _correlation("pearsonr", expected, predicted),
    "spearman": lambda expected, predicted: _correlation("spearmanr", expected, predicted),
}


def _find(folder: Path, name: str, split: str) -> Path:
    for path in (folder / below / f"{split}.tsv{end}" for below in (name, ".") for end in ("", ".gz")):
        if path.is_file():
            return path
    raise DataError(f"{folder}: has no {split}.tsv and no {split}.tsv.gz, there or in {name}/")


def _columns(path: Path, header: str, task: Task) -> tuple[int, list[int]]:
    """How many lines the header takes, and where the sentences and the label stand."""
    names = [*task.sentences, task.label]
    if all(isinstance(name, int) for name in names):
        return 0, names
    there = header.split("\t")
    if missing := [name for name in names if name not in there]:
        raise DataError(f"{path}, line 1: the header has no column {', '.join(missing)}; is it a file of this task?")
    return 1, [there.index(name) for name in names]


def _label(text: str, task: Task, where: str) -> int | float:
    if task.labels is not None:
        if text not in task.labels:
            raise DataError(f"{where}: the label is {text!r}, expected one of {', '.join(task.labels)}")
        return task.labels.index(text)
    try:
        return float(text)
    except ValueError:
        raise DataError(f"{where}: the label is {text!r}, expected a number") from None
