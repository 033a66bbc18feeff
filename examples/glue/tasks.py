"""The nine tasks of GLUE: their sentences and metrics, read from Hugging Face's hub or from files.

Files are those of gluebenchmark.com: train.tsv and dev.tsv (MNLI: dev_matched.tsv and dev_mismatched.tsv), plain or
.gz, in DIR or in DIR/TASK.
"""

import csv
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas
from datasets import Dataset, DatasetDict, load_dataset
from datasets.exceptions import DatasetsError
from scipy import stats
from sklearn import metrics

from ea_artifacts.command import UserError

HUB = "nyu-mll/glue"
ENTAILS = ("entailment", "not_entailment")
PAIR = ("sentence1", "sentence2")


class Task(NamedTuple):
    """A task's columns, classes and metrics."""

    #: columns of the hub
    sentences: tuple[str, ...]
    metrics: tuple[str, ...] = ("accuracy",)
    #: as the files name them, in the order of the hub's numbers; None: the label is a number
    labels: tuple[str, ...] | None = ("0", "1")
    #: the files' columns where they have other names: sentences, then the label; numbers where there is no header
    columns: tuple[str | int, ...] = ()
    dev: tuple[str, ...] = ("dev",)
    #: some rows of the published file lack columns
    drops_short_rows: bool = False


TASKS = {
    "CoLA": Task(("sentence",), ("matthews",), columns=(3, 1)),
    "SST-2": Task(("sentence",)),
    "MRPC": Task(PAIR, ("f1", "accuracy"), columns=("#1 String", "#2 String", "Quality")),
    "STS-B": Task(PAIR, ("pearson", "spearman"), None, (*PAIR, "score")),
    "QQP": Task(
        *(("question1", "question2"), ("f1", "accuracy")),
        columns=("question1", "question2", "is_duplicate"),
        drops_short_rows=True,
    ),
    "MNLI": Task(
        ("premise", "hypothesis"),
        labels=("entailment", "neutral", "contradiction"),
        columns=(*PAIR, "gold_label"),
        dev=("dev_matched", "dev_mismatched"),
    ),
    "QNLI": Task(("question", "sentence"), labels=ENTAILS),
    "RTE": Task(PAIR, labels=ENTAILS),
    "WNLI": Task(PAIR),
}


def load(name: str, folder: Path | None) -> DatasetDict:
    """train and each development set of a task, from a folder's files or the hub: columns of sentences, and a label."""
    splits = ("train", *TASKS[name].dev)
    if folder is not None:
        return DatasetDict({split: _read(folder, name, split) for split in splits})
    try:
        hub = load_dataset(HUB, name.lower().replace("-", ""))
    except (OSError, DatasetsError) as error:
        raise UserError(f"{HUB}: {error}; get the task's files elsewhere, and give --data DIR") from error
    return DatasetDict({split: hub[split.replace("dev", "validation")] for split in splits})


#: A constant side has no correlation, for which SciPy has "nan".
METRICS = {
    "matthews": metrics.matthews_corrcoef,
    "accuracy": metrics.accuracy_score,
    "f1": metrics.f1_score,
    "pearson": lambda expected, predicted: np.nan_to_num(stats.pearsonr(expected, predicted).statistic),
    "spearman": lambda expected, predicted: np.nan_to_num(stats.spearmanr(expected, predicted).statistic),
}


def score(name: str, expected: list, predicted: list) -> dict[str, float]:
    """The task's metrics x 100."""
    return {metric: 100 * float(METRICS[metric](expected, predicted)) for metric in TASKS[name].metrics}


def _read(folder: Path, name: str, split: str) -> Dataset:
    """A split's file. Quotation marks mean nothing there."""
    task = TASKS[name]
    paths = (folder / below / f"{split}.tsv{end}" for below in (name, ".") for end in ("", ".gz"))
    path = next(filter(Path.is_file, paths), None)
    if path is None:
        raise UserError(f"{folder}: has no {split}.tsv and no {split}.tsv.gz, there or in {name}/")
    columns = list(task.columns or (*task.sentences, "label"))
    header = None if isinstance(columns[0], int) else 0
    # Words such as NA and null are words; only an empty field is missing.
    words = {"quoting": csv.QUOTE_NONE, "keep_default_na": False, "na_values": [""], "dtype": str, "index_col": False}
    try:
        table = pandas.read_csv(path, sep="\t", header=header, usecols=columns, encoding="utf-8-sig", **words)[columns]
    except (OSError, EOFError, ValueError) as error:
        raise UserError(f"{path}: {error}; expected the task's columns in UTF-8, plain or in .gz") from error
    table.columns = [*task.sentences, "label"]
    table = table.dropna() if task.drops_short_rows else table
    if table.empty:
        raise UserError(f"{path}: has no rows")
    if (short := table.isna().any(axis=1)).any():
        raise UserError(f"{path}, row {short.idxmax() + 1}: a column is empty or missing")
    table = table.apply(lambda column: column.str.strip())
    if task.labels is None:
        labels, expected = pandas.to_numeric(table.label, errors="coerce").astype(float), "a number"
    else:
        places = {label: place for place, label in enumerate(task.labels)}
        labels, expected = table.label.map(places), f"one of {', '.join(task.labels)}"
    if (wrong := labels.isna()).any():
        row = wrong.idxmax()
        raise UserError(f"{path}, row {row + 1}: the label is {table.label[row]!r}, expected {expected}")
    return Dataset.from_pandas(table.assign(label=labels), preserve_index=False)
