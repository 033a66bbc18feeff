"""The content of training logs: losses and validation BLEU, against updates, epochs and hours.

A log is log.jsonl in a folder of scripts/train.sh, or a copy of it in results/logs, which begins with run.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ea_artifacts.command import UserError
from ea_artifacts.files import parse_json
from ea_tools.training import recipes, record

QUANTITIES = {"train": "training loss", "valid": "validation loss", "bleu": "validation BLEU"}
AXES = ("updates", "epochs", "hours")

Numbers = dict[str, float]
Entry = tuple[str, int, Numbers]  # tag, update, numbers
Points = tuple[np.ndarray, np.ndarray]  # updates, values


class NoLossError(UserError):
    """A log in which no loss stands yet."""


@dataclass(frozen=True)
class Run:
    """One run's curves."""

    path: Path
    settings: dict[str, str]  # recipe, arch and flags, without the seed; {} where they are not recorded
    seed: str | None
    points: dict[str, Points]  # by quantity
    clock: Points  # updates and hours; empty where the log has no speeds
    epoch: int | None  # updates in an epoch, None where no epoch was finished
    last: int  # the last update in the log

    def x(self, axis: str, updates: np.ndarray) -> np.ndarray:
        """Updates on one of the AXES; NaN where the log does not tell."""
        if axis == "updates":
            return updates
        if axis == "epochs":
            return updates / (self.epoch or np.nan)
        return np.interp(updates, *self.clock) if len(self.clock[0]) else np.full(len(updates), np.nan)


def read(path: Path) -> Run:
    """The Run of a folder or a log file."""
    if not path.exists():
        raise UserError(f"{path}: no such run folder, log file or name of a run in results/scores.jsonl")
    log = path / "log.jsonl" if path.is_dir() else path
    if not log.exists():
        if (path / record.FILE).exists():
            raise NoLossError(f"{path}: has no log.jsonl yet: its training has come to no loss")
        raise UserError(f"{path}: has no log.jsonl, so scripts/train.sh did not make this run")
    entries = entries_of(log.read_text(encoding="utf-8", errors="replace"))
    curves = {name: curve(entries, name) for name in QUANTITIES}
    points = {name: (updates, values) for name, (updates, values) in curves.items() if len(updates)}
    if not points:
        raise NoLossError(f"{log}: holds no loss; is it a log.jsonl of scripts/train.sh, and has it come to the first?")
    settings, seed = identity(path / record.FILE if path.is_dir() else path)
    epoch = next((update for tag, update, _ in entries if tag == "train"), None)
    return Run(path, settings, seed, points, clock(entries), epoch, entries[-1][1])


def parse_line(line: str) -> Entry | None:
    """(tag, update, {name: number}) of a line with numbers, else None. Tags: train_inner, train (an epoch's), valid.

    A line that a kill has torn is none; the next process may have written an entry behind it.
    """
    try:
        content = json.loads(line[max(0, line.rfind("{")) :])
        numbers = {name: number for name, value in content.items() if (number := _number(value)) is not None}
        return content["tag"], int(numbers["num_updates"]), {**numbers, "loss": numbers["loss"]}
    except (ValueError, LookupError, AttributeError):
        return None


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def entries_of(log: str) -> list[Entry]:
    """The entries of a log, in the order of updates."""
    return join(filter(None, map(parse_line, log.splitlines())))


def join(entries: Iterable[Entry]) -> list[Entry]:
    """Entries in the order of updates: a process that goes back replaces the entries after its first update."""
    kept: list[Entry] = []
    seen = set()
    for tag, update, numbers in entries:
        if kept and (update < kept[-1][1] or (tag, update) in seen):
            kept = [entry for entry in kept if entry[1] < update]
            seen = {(tag, update) for tag, update, _ in kept}
        kept.append((tag, update, numbers))
        seen.add((tag, update))
    return kept


def training(entries: Sequence[Entry]) -> list[tuple[int, Numbers]]:
    """[(update, numbers), ...] to read loss and speed from: every --log-interval, or every epoch if that is more."""
    inner, epochs = (
        [(update, numbers) for tag, update, numbers in entries if tag == t] for t in ("train_inner", "train")
    )
    return inner if len(inner) >= len(epochs) else epochs


def curve(entries: Sequence[Entry], name: str) -> Points:
    """(updates, values) of one of the QUANTITIES."""
    if name == "train":
        stretches = training(entries)
        starts = [0, *(update for update, _ in stretches)]  # of the stretches that the losses are means of
        middles = ((start + end) / 2 for start, (end, _) in zip(starts, stretches, strict=False))
        points = [(middle, numbers["loss"]) for middle, (_, numbers) in zip(middles, stretches, strict=True)]
    else:
        key = "loss" if name == "valid" else name
        points = [(update, numbers[key]) for tag, update, numbers in entries if tag == "valid" and key in numbers]
    return np.array([update for update, _ in points], float), np.array([value for _, value in points], float)


def clock(entries: Sequence[Entry]) -> Points:
    """(updates, hours) from the speeds in the log: tokens an update over tokens a second, times updates.

    Not from its field "wall": fairseq's stands still in a process that took up its work in the middle of an epoch.
    """
    updates, seconds = [0.0], [0.0]
    for update, numbers in training(entries):
        if not (numbers.get("wps", 0) > 0 and numbers.get("wpb", 0) > 0):
            continue
        pace = numbers["wpb"] / numbers["wps"]
        seconds.append(seconds[-1] + (update - updates[-1]) * pace)
        updates.append(float(update))
    if len(updates) == 1:
        return np.array([]), np.array([])
    last = entries[-1][1]  # a validation behind the last training loss
    if last > updates[-1]:
        seconds.append(seconds[-1] + (last - updates[-1]) * pace)
        updates.append(float(last))
    return np.array(updates), np.array(seconds) / 3600


def identity(path: Path) -> tuple[dict[str, str], str | None]:
    """(settings, seed) of run.json: the run's settings, and the flags of its first start.

    A log in results/logs has run.json as its first line; other logs tell neither.
    """
    if not path.exists():
        return {}, None
    if path.name == record.FILE:
        content = record.read(path)
    else:
        with path.open(encoding="utf-8", errors="replace") as log:
            first = log.readline()
        if not first.startswith('{"identity": '):
            return {}, None
        content = parse_json(first, f"{path}:1")
    settings, starts = {**content.get("identity", {})}, content.get("starts")
    if missing := {"recipe", "arch"} - settings.keys():
        raise UserError(f"{path}: identity: {min(missing)} is missing, which scripts/train.sh writes")
    flags = starts[0]["flags"] if starts else {}
    settings |= {**recipes.learning_flags(flags), "precision": recipes.precision_of(flags)}
    return settings, settings.pop("seed", None)
