"""Records of finished runs, from which a fresh clone writes every table again.

scores.jsonl                     a row for each run, split and settings of translation: its scores, and its training
hypotheses/RECIPE.SPLIT.tsv.gz   translations: a line for each sentence, a column for each digest in the first line
logs/NAME.jsonl                  run.json of a run as the first line, then its log.jsonl

A row names its run ("run": RECIPE/NAME, as its folder below runs/reproduce), its column and its log.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gzip
import hashlib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, NotRequired

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # typing has none that pydantic takes before Python 3.12

from ea_artifacts.command import REPO, UserError
from ea_artifacts.files import digest, read_json, read_lines, replacing
from ea_artifacts.preparation import Preparation
from ea_tools.forms import first_fault
from ea_tools.metrics import compare
from ea_tools.training import logs, recipes, record
from ea_tools.training.record import Record
from ea_tools.translating.evaluate import references

UNKNOWN = "not recorded"


class Training(TypedDict):
    """The training of a run. A list has one item, or one for each change from start to start."""

    recipe: str
    data: str  # a digest
    commits: list[str]  # the first runs' records lack them, and devices
    devices: list[str]
    precisions: list[str]
    hours: float | None  # by the speeds in the log
    command: str
    flags: list[dict[str, str]]


class Metric(TypedDict):
    """One metric of a row, with whatever else evaluate.sh wrote of it."""

    score: float
    signature: str


class Score(TypedDict):
    """A row of scores.jsonl: what tables read of evaluate.sh's result, whose other entries it has too, and the rest."""

    run: str
    data: str
    subset: str
    direction: str
    arch: str | None
    training_seed: int | None
    settings_name: str
    scores: dict[str, Metric]  # by name
    tokenizer: str
    references: str  # a digest, as is `hypotheses`
    averaged: list[str]
    updates: int | None
    command: str
    commit: str | None
    device: str
    date: str
    unfinished: NotRequired[str | None]  # how far a training was that had not ended
    against: NotRequired[dict[str, Any]]
    paired: NotRequired[dict[str, dict[str, Any]]]  # by the other run's name: difference, p, ...
    hypotheses: NotRequired[str]
    training: NotRequired[Training]
    log: NotRequired[str]


FORM = TypeAdapter(Score)


class Text(NamedTuple):
    """The references of a split."""

    data: Preparation
    digest: str  # by which a row names them
    written: list[str]  # as people write them
    tokens: list[str]


@functools.cache
def text_of(folder: Path, subset: str) -> Text:
    """The references of prepared data, or an error that names the missing file."""
    data = Preparation.at(folder)
    written, tokens = references(folder / "raw" / f"{subset}.{data.target_lang}", data)
    return Text(data, digest(written), written, tokens)


def log_name(run: str) -> str:
    """The name of a run's file in logs/."""
    return f"{hashlib.sha256(run.encode()).hexdigest()[:12]}.jsonl"


class Records:
    """The records of a folder such as results/. Open them with `opened` to change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = {_key(row): row for row in _read(folder / "scores.jsonl")}
        self._hypotheses: dict[str, dict[str, list[str]]] = {}  # file -> digest -> lines, of the files that were needed
        self._changed: set[str] = set()

    def keep(self, folder: Path, run: str, subset: str, settings: str) -> None:
        """Take the scores of a run's folder by these settings, with its translations, run.json and log.

        Those of a training that has not ended do not replace those of one that had.
        """
        evaluation = folder / "eval" / f"{subset}.{settings}.json"
        if not evaluation.exists():
            return
        scored, earlier = read_json(evaluation), self.rows.get((run, subset, settings))
        if earlier and scored.get("unfinished") and not earlier.get("unfinished"):
            return
        paired = earlier.get("paired", {}) if earlier else {}
        # The machine's paths say nothing elsewhere; the run's name stands before each checkpoint.
        row = {"run": run} | scored | {"run": run, "averaged": [Path(path).name for path in scored["averaged"]]}
        if "checkpoint" in row:
            row["checkpoint"] = Path(row["checkpoint"]).name
        line = json.dumps(row | {"paired": paired}, ensure_ascii=False).replace(f"{REPO}/", "")
        self.add(_row(line, str(evaluation)), read_lines(evaluation.with_suffix(".hyp.txt")))
        if (started := folder / record.FILE).exists():
            log = folder / "log.jsonl"
            self.add_training(run, record.read(started), log.read_text("utf-8") if log.exists() else "")

    def add(self, row: Score, lines: list[str]) -> None:
        """Put a row in its place, and its translations into a column."""
        row["hypotheses"] = digest(lines)
        self._columns(row)[row["hypotheses"]] = lines
        self._changed.add(_hypotheses_name(row))
        self.rows[_key(row)] = row

    def add_training(self, run: str, started: Record, log: str) -> None:
        """Put the record of a training (run.json) and its log into logs/, and the facts of it into the run's rows."""
        name = log_name(run)
        with replacing(self.folder / "logs" / name) as temporary:
            temporary.write_text(json.dumps(started, ensure_ascii=False) + "\n" + log, encoding="utf-8")
        for row in self.rows.values():
            if row["run"] == run:
                row["training"], row["log"] = training(started, log), name

    def translations(self, row: Score) -> list[str] | None:
        """The translations of a row, or None where none are kept."""
        return self._columns(row).get(row.get("hypotheses", ""))

    def test_against(self, row: Score, baseline: Score, text: Text | None) -> dict[str, Any] | None:
        """The paired bootstrap test of two rows' translations, by sacreBLEU; None where they or `text` lack.

        It is computed once and kept in the row, so that it is there without the text, too. A test of other
        translations is made again.
        """
        name, digests = Path(baseline["run"]).name, [row.get("hypotheses"), baseline.get("hypotheses")]
        test = row.get("paired", {}).get(name)
        if test and test["translations"] == digests:
            return test
        system, other = self.translations(row), self.translations(baseline)
        if not text or not system or not other or {row["references"], baseline["references"]} != {text.digest}:
            return None
        texts, lowercase = {"system": system, "baseline": other, "references": text.written}, text.data.lowercase
        test = compare(**texts, lowercase=lowercase, tokenizer=row["tokenizer"], kinds=["sacrebleu"])["sacrebleu"]
        row.setdefault("paired", {})[name] = {"translations": digests, **test}
        return row["paired"][name]

    def write(self) -> None:
        """Write the changes. Columns that no row names any more go."""
        wanted = {(_hypotheses_name(row), row.get("hypotheses")) for row in self.rows.values()}
        for name in sorted(self._changed):
            columns = {key: lines for key, lines in sorted(self._hypotheses[name].items()) if (name, key) in wanted}
            text = "".join("\t".join(line) + "\n" for line in (columns, *zip(*columns.values(), strict=True)))
            with replacing(self.folder / "hypotheses" / name) as temporary:
                temporary.write_bytes(gzip.compress(text.encode(), mtime=0))  # no date: the same text, the same file
        with replacing(self.folder / "scores.jsonl") as temporary:
            rows = (json.dumps(row, ensure_ascii=False) + "\n" for _, row in sorted(self.rows.items()))
            temporary.write_text("".join(rows), encoding="utf-8")

    def _columns(self, row: Score) -> dict[str, list[str]]:
        """The translations in the file of a row's recipe and split, by their digests."""
        name = _hypotheses_name(row)
        path = self.folder / "hypotheses" / name
        if name not in self._hypotheses:
            text = gzip.decompress(path.read_bytes()).decode("utf-8") if path.exists() else ""
            table = zip(*(line.split("\t") for line in text.split("\n")[:-1]), strict=True)
            self._hypotheses[name] = {head: list(lines) for head, *lines in table}
        return self._hypotheses[name]


@contextlib.contextmanager
def opened(folder: Path) -> Iterator[Records]:
    """Records that may be changed, and are written at the end. One process at a time has them."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        records = Records(folder)
        yield records
        records.write()
    finally:
        os.close(lock)


def _read(path: Path) -> Iterator[Score]:
    for number, line in enumerate(read_lines(path) if path.exists() else (), 1):
        yield _row(line, f"{path}:{number}")


def _row(line: str, where: str) -> Score:
    try:
        FORM.validate_json(line, strict=True)
    except ValidationError as error:  # torn, after a merge perhaps, or without an entry that is needed
        raise UserError(first_fault(where, error)) from None
    return json.loads(line)  # as it is there: the form would change the order of its entries


def _key(row: Score) -> tuple[str, str, str]:
    return row["run"], row["subset"], row["settings_name"]


def _hypotheses_name(row: Score) -> str:
    return f"{Path(row['run']).parent}.{row['subset']}.tsv.gz"


def training(started: Record, log: str) -> Training:
    """The facts of a training by run.json and log.jsonl."""

    def changes(values: list) -> list:
        return [value for value, _ in itertools.groupby(values)]

    starts = started.get("starts", [])
    precisions = [recipes.precision_of(start["flags"]) for start in starts]
    _, hours = logs.clock(logs.entries_of(log))
    return {
        "recipe": started["identity"].get("recipe", UNKNOWN),
        "data": started["identity"].get("data", UNKNOWN),
        "commits": changes([start["commit"] or UNKNOWN for start in starts if "commit" in start]),
        "devices": changes(
            [
                (f"{start['processes']} x " if start["processes"] > 1 else "")
                + start["device"]
                + (f", {precision}" if precision != "fp32" else "")
                for start, precision in zip(starts, precisions, strict=True)
                if "device" in start
            ]
        ),
        "precisions": changes(precisions),
        "hours": float(hours[-1]) if len(hours) else None,
        "command": started.get("command", UNKNOWN),
        "flags": changes([recipes.learning_flags(start["flags"]) for start in starts]),
    }
