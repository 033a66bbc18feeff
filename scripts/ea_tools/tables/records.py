"""Records of finished runs, from which a fresh clone writes every table again.

scores.jsonl                     a row for each run, split and settings of translation: its scores, and its training
hypotheses/RECIPE.SPLIT.tsv.gz   translations: a line for each sentence, a column for each digest in the first line
logs/NAME.jsonl                  run.json of a run as the first line, then its log.jsonl

A row names its run ("run": RECIPE/NAME, as its folder below runs/reproduce), its column and its log.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ea_artifacts.command import REPO, UserError, say
from ea_artifacts.files import digest, read_json, read_lines, replacing
from ea_tools.metrics import compare
from ea_tools.training import logs, recipes

UNKNOWN = "not recorded"

Row = dict[str, Any]  # of scores.jsonl: what evaluate.sh writes, with "training", "hypotheses" and "log" besides


def log_name(run: str) -> str:
    """The name of a run's file in logs/."""
    return f"{hashlib.sha256(run.encode()).hexdigest()[:12]}.jsonl"


class Records:
    """The records of a folder such as results/. Open them with `opened` to change them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows: dict[tuple[str, str, str], Row] = {_key(row): row for row in _read(folder / "scores.jsonl")}
        self._hypotheses: dict[str, dict[str, list[str]]] = {}  # file -> digest -> lines, of the files that were needed
        self._changed: set[str] = set()

    def find(self, run: str, subset: str, settings: str) -> Row | None:
        """The row of a run's split: by these settings, else by others, where a run was only scored by those."""
        rows = [row for (*names, _), row in self.rows.items() if names == [run, subset]]
        return self.rows.get((run, subset, settings), rows[0] if rows else None)

    def keep(self, folder: Path, run: str, subset: str, settings: str) -> None:
        """Take the scores of a run's folder by these settings, with its translations, run.json and log.

        An evaluation by other settings, made by hand, is not taken.
        """
        evaluation, last = (folder / "eval" / f"{stem}.json" for stem in (f"{subset}.{settings}", subset))
        if not evaluation.exists():
            if last.exists():
                say(f"note: {last} is by other settings than this table's, {settings}: not taken; leave out --collect")
            return
        scored, kept = read_json(evaluation), self.rows.get((run, subset, settings), {})
        if kept and scored.get("unfinished") and not kept.get("unfinished"):
            say(f"note: {evaluation} is of a training that has not ended: not taken; the record is of a finished one")
            return
        lines = read_lines(evaluation.with_suffix(".hyp.txt"))
        self.add({**scored, "run": run, "paired": kept.get("paired", {})}, lines)
        if (folder / "run.json").exists():
            log = folder / "log.jsonl"
            self.add_training(run, read_json(folder / "run.json"), log.read_text("utf-8") if log.exists() else "")

    def add(self, row: Row, lines: list[str] | None) -> None:
        """Put a row in its place, and its translations into a column."""
        # The machine's paths say nothing elsewhere; the run's name stands before each checkpoint.
        row = {"run": row["run"], **row, "averaged": [Path(path).name for path in row["averaged"]]}
        if "checkpoint" in row:
            row["checkpoint"] = Path(row["checkpoint"]).name
        row = json.loads(json.dumps(row, ensure_ascii=False).replace(f"{REPO}/", ""))
        if lines is not None:
            row["hypotheses"] = digest(lines)
            self._columns(row)[row["hypotheses"]] = lines
            self._changed.add(_hypotheses_name(row))
        self.rows[_key(row)] = row

    def add_training(self, run: str, started: dict[str, Any], log: str) -> None:
        """Put the record of a training (run.json) and its log into logs/, and the facts of it into the run's rows."""
        name = log_name(run)
        with replacing(self.folder / "logs" / name) as temporary:
            temporary.write_text(json.dumps(started, ensure_ascii=False) + "\n" + log, encoding="utf-8")
        facts = {"training": training(started, log), "log": name}
        self.rows = {key: row | (facts if row["run"] == run else {}) for key, row in self.rows.items()}

    def translations(self, row: Row) -> list[str] | None:
        """The translations of a row, or None where none are kept.

        Raises:
            UserError: they are not those that were scored.
        """
        if "hypotheses" not in row:
            return None
        lines = self._columns(row).get(row["hypotheses"], [])
        if digest(lines) != row["hypotheses"]:
            raise UserError(
                f"{self.folder}/hypotheses/{_hypotheses_name(row)}: {row['hypotheses']}: other translations were scored"
            )
        return lines

    def test_against(self, row: Row, baseline: Row, references: list[str] | None, lowercase: bool) -> Row | None:
        """The paired bootstrap test of two rows' translations, by sacreBLEU: {"difference", "p", "signature", ...}.

        It is computed once and kept in the row, so that it is there without `references`, too. A test of other
        translations is made again.
        """
        name, digests = Path(baseline["run"]).name, [row.get("hypotheses"), baseline.get("hypotheses")]
        test = row.get("paired", {}).get(name)
        if test and test["translations"] == digests:
            return test
        system, other = self.translations(row), self.translations(baseline)
        if not references or not system or not other or not len(system) == len(other) == len(references):
            return None
        texts = {"system": system, "baseline": other, "references": references}
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

    def _columns(self, row: Row) -> dict[str, list[str]]:
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


def _read(path: Path) -> Iterator[Row]:
    for number, line in enumerate(read_lines(path) if path.exists() else (), 1):
        try:
            yield json.loads(line)
        except ValueError as error:  # after a merge, perhaps
            raise UserError(f"{path}:{number}: not JSON: {error}") from None


def _key(row: Row) -> tuple[str, str, str]:
    return row["run"], row["subset"], row["settings_name"]


def _hypotheses_name(row: Row) -> str:
    return f"{Path(row['run']).parent}.{row['subset']}.tsv.gz"


# --- how a run was trained --------------------------------------------------------------------------------------------


def training(started: dict[str, Any], log: str) -> Row:
    """The facts of a training by run.json and log.jsonl, where several starts differ one for each change.

    The first runs' records lack commits and devices.
    """
    starts = started["starts"]
    _, hours = logs.clock(logs.entries_of(log))
    return {
        "recipe": started["identity"]["recipe"],
        "data": started["identity"]["data"],  # a digest
        "commits": _changes([start["commit"] or UNKNOWN for start in starts if "commit" in start]),
        "devices": _changes([_device(start) for start in starts if "device" in start]),
        "precisions": _changes([recipes.precision_of(start["flags"]) for start in starts]),
        "hours": float(hours[-1]) if len(hours) else None,  # by the speeds in the log
        "command": started["command"],
        "flags": _changes([recipes.learning_flags(start["flags"]) for start in starts]),
    }


def _changes(values: list) -> list:
    """The values without those that repeat the one before."""
    return [value for number, value in enumerate(values) if number == 0 or value != values[number - 1]]


def _device(start: dict[str, Any]) -> str:
    several = f"{start['processes']} x " if start["processes"] > 1 else ""
    precision = recipes.precision_of(start["flags"])
    return f"{several}{start['device']}" + ("" if precision == "fp32" else f", {precision}")
