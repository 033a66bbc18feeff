"""Learning curves of runs: training and validation loss, and validation BLEU, against updates, epochs and time.

scripts/plot_curves.sh is how it is called. A RUN is a folder of scripts/train.sh, or a file that holds what
fairseq-train wrote (its screen, or --log-file; --log-format simple or json). Runs that differ in the seed alone become
one line, their mean, with the range from the lowest to the highest shaded, as far as all of them have got.

A training loss is the mean over a stretch between two lines of the log, and stands in the stretch's middle. What a
process repeats after a kill replaces what the log held from that update on. Time is that between updates, validation
and saving included; pauses, start-up and the work that a kill lost are not in it. Epochs are updates divided by those
of one epoch.
"""

import argparse
import csv
import json
import re
import shlex
import textwrap
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from ea_tools.common import REPO, UserError, replacing, reporting
from ea_tools.recipes import parse_flags
from ea_tools.tables import LAUNCH

QUANTITIES = {"train": "training loss", "valid": "validation loss", "bleu": "validation BLEU"}
AXES = ("updates", "epochs", "hours")
SUFFIXES = (".png", ".svg", ".pdf")

# Okabe and Ito's colours, which colour-blind people can tell apart; the styles tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
STYLES = ("-", "--", "-.", ":")


def main(arguments=None):
    """Command line: read the runs, print where they stand, draw."""
    args = parse(arguments)
    with reporting("plot_curves"):
        runs = [read(path) for path in args.runs]
        lines = group(runs, args.labels)
        report(runs)
        with replacing(args.out) as temporary:
            draw(lines, args.x, args.title, temporary, args.out.suffix[1:])
        if args.csv:
            with replacing(args.csv) as temporary:
                write_csv(lines, temporary)
    print(f"written: {args.out}" + (f", {args.csv}" if args.csv else ""))


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="plot_curves.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, or fairseq-train's log")
    default = REPO / "results" / "curves.png"
    parser.add_argument(
        "--out", type=Path, default=default, metavar="FILE", help=".png, .svg or .pdf (default: %(default)s)"
    )
    parser.add_argument("--x", nargs="+", choices=AXES, default=AXES, help="what to draw against (default: all three)")
    parser.add_argument("--labels", nargs="+", metavar="TEXT", help="names for the lines, in the order of the runs")
    parser.add_argument("--title", help="(default: the runs' recipe)")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="the numbers too, a point a line")
    args = parser.parse_args(arguments)
    if args.out.suffix not in SUFFIXES:
        parser.error(f"--out {args.out}: its name should end in {', '.join(SUFFIXES)}")
    twice = [str(path) for path, count in Counter(path.resolve() for path in args.runs).items() if count > 1]
    if twice:
        parser.error(f"given twice: {', '.join(twice)}")
    return args


# --- reading ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One run's curves."""

    path: Path
    settings: dict  # recipe, arch and flags, without the seed; {} where nobody wrote them down
    seed: str | None
    points: dict  # quantity -> (updates, values), two arrays
    clock: tuple  # (updates, hours), two arrays; empty where the log has no speeds
    epoch: int | None  # updates in an epoch, None where no epoch was finished
    last: int  # the last update in the log

    def x(self, axis, updates):
        """Updates on one of the AXES; NaN where the log does not tell."""
        if axis == "updates":
            return updates
        if axis == "epochs":
            return updates / (self.epoch or np.nan)
        return np.interp(updates, *self.clock) if len(self.clock[0]) else np.full(len(updates), np.nan)


def read(path):
    """The Run of a folder or a log file."""
    if not path.exists():
        raise UserError(f"{path}: no such run folder or log file")
    log = path / "log.jsonl" if path.is_dir() else path
    if not log.exists():
        raise UserError(
            f"{path}: has no log.jsonl, so scripts/train.sh did not make this run; give the file that holds what "
            "fairseq-train printed"
        )
    text = log.read_text(encoding="utf-8", errors="replace")
    entries = join(filter(None, map(parse_line, text.splitlines())))
    points = {name: found for name in QUANTITIES if len((found := curve(entries, name))[0])}
    if not points:
        raise UserError(f"{log}: holds no loss; is it fairseq-train's log, and has it come to the first?")
    settings, seed = identity(path / "run.json") if path.is_dir() else ({}, None)
    human = path / "train.log"
    if path.is_dir() and human.exists():
        text = human.read_text(encoding="utf-8", errors="replace")
    return Run(path, settings, seed, points, clock(entries), epoch_length(text, entries), entries[-1][1])


def parse_line(line):
    """(tag, update, {name: number}) of a line with numbers, else None. Tags: train_inner, train (an epoch's), valid.

    Three forms: log.jsonl, and the simple and json formats of fairseq, with or without date and tag in front. A line
    that a kill has torn is none, but for what the next process wrote behind it.
    """
    if (brace := line.rfind("{")) >= 0:
        try:
            found = json.loads(line[brace:])
        except ValueError:
            return None
        tag = found.pop("tag", None) or next((t for t in ("train", "valid") if f"{t}_loss" in found), "train_inner")
        numbers = {name.removeprefix(f"{tag}_"): value for name, value in found.items()}
    elif match := re.search(r"\bepoch \d+(:\s+\d+ / \d+ | \| )(.*)", line):
        inner, subset = match[1][0] == ":", re.search(r"valid on '(\S+)' subset", line)
        tag = "train_inner" if inner else subset[1] if subset else "train"
        numbers = dict(re.findall(r"(\w+)[= ]([-+.\w]+)", match[2]))
    else:
        return None
    numbers = {name: number for name, value in numbers.items() if (number := _number(value)) is not None}
    if "num_updates" not in numbers or "loss" not in numbers:
        return None
    return tag, int(numbers["num_updates"]), numbers


def _number(value):
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def join(entries):
    """Entries in the order of updates: a process that goes back replaces what came after that update before."""
    kept, seen = [], set()
    for tag, update, numbers in entries:
        if kept and (update < kept[-1][1] or (tag, update) in seen):
            kept = [entry for entry in kept if entry[1] < update]
            seen = {(tag, update) for tag, update, _ in kept}
        kept.append((tag, update, numbers))
        seen.add((tag, update))
    return kept


def training(entries):
    """[(update, numbers), ...] to read loss and speed from: every --log-interval, or every epoch if that is more."""
    inner, epochs = (
        [(update, numbers) for tag, update, numbers in entries if tag == t] for t in ("train_inner", "train")
    )
    return inner if len(inner) >= len(epochs) else epochs


def curve(entries, name):
    """(updates, values) of one of the QUANTITIES."""
    if name == "train":
        found = training(entries)
        starts = [0, *(update for update, _ in found)]  # of the stretches that the losses are means of
        found = [((start + end) / 2, numbers["loss"]) for start, (end, numbers) in zip(starts, found, strict=False)]
    else:
        key = "loss" if name == "valid" else name
        found = [(update, numbers[key]) for tag, update, numbers in entries if tag == "valid" and key in numbers]
    return np.array([update for update, _ in found], float), np.array([value for _, value in found], float)


def clock(entries):
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


def epoch_length(text, entries):
    """Updates in an epoch: as fairseq counts them down ("100 / 129"), or up to the end of the first."""
    if match := re.search(r"\bepoch \d+:\s+\d+ / (\d+) ", text):
        return int(match[1])
    return next((update for tag, update, _ in entries if tag == "train"), None)


def identity(record):
    """(settings, seed) of run.json: what the run is, and what its command said beyond that."""
    if not record.exists():
        return {}, None
    try:
        content = json.loads(record.read_text(encoding="utf-8"))
        settings, words = dict(content["identity"]), shlex.split(content["command"])
        given = {name: " ".join(values) for name, values in parse_flags(words[3:]).items()}
    except (ValueError, KeyError, TypeError, UserError) as error:
        raise UserError(f"{record}: not what scripts/train.sh writes: {error}") from None
    settings |= {name: value for name, value in given.items() if name not in LAUNCH | {"run", "data"}}
    return settings, settings.pop("seed", None)


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """What becomes one line: the runs of one model, which differ in the seed alone."""

    label: str
    runs: list


def group(runs, labels=None):
    """Lines, in the order of the runs. A run that nobody described, or that shares even the seed, is one by itself."""
    groups = {}
    for run in runs:
        key = json.dumps(run.settings, sort_keys=True) if run.settings else str(run.path)
        groups.setdefault(key, []).append(run)
    named = []
    for members in groups.values():
        if len({run.seed for run in members}) == len(members):
            named.append((members, _name(members[0], runs)))
        else:
            named += [([run], f"{_name(run, runs)}, {run.path.name}") for run in members]
    if labels and len(labels) != len(named):
        raise UserError(f"--labels: {len(labels)} for {len(named)} lines: " + "; ".join(name for _, name in named))
    names = labels or [name + _seeds(members) for members, name in named]
    return [Line(name, members) for (members, _), name in zip(named, names, strict=True)]


def _name(run, runs):
    """The settings in which the runs differ: "ea_transformer_lite, ea-alpha 0.5"."""
    if not run.settings:
        return run.path.stem if run.path.is_file() else run.path.name
    described = [other.settings for other in runs if other.settings]
    names = dict.fromkeys(name for settings in described for name in settings)
    differ = [name for name in names if len({settings.get(name) for settings in described}) > 1]
    words = [run.settings["arch"]] + ([run.settings["recipe"]] if "recipe" in differ else [])
    # What a different architecture does not have at all need not be said.
    alike = [settings for settings in described if settings["arch"] == run.settings["arch"]]
    differ = [name for name in differ if len({settings.get(name) for settings in alike}) > 1]
    differ = [name for name in differ if name not in ("arch", "recipe") and name in run.settings]
    return ", ".join([*words, *(f"{name} {run.settings[name]}".strip() for name in differ)])


def _seeds(members):
    seeds = [run.seed for run in members if run.seed is not None]
    return f" (seeds {', '.join(seeds)})" if len(seeds) > 1 else ""


def band(line, quantity, axis):
    """(x, mean, lowest, highest) over the runs of a line, as far as all of them have got; empty arrays if nowhere."""
    curves = []
    for run in line.runs:
        if quantity in run.points:
            updates, values = run.points[quantity]
            x = run.x(axis, updates)
            curves.append((x[~np.isnan(x)], values[~np.isnan(x)]))
    curves = [(x, values) for x, values in curves if len(x)]
    if not curves:
        return (np.array([]),) * 4
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    values = np.array([np.interp(grid, *one) for one in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


# --- showing ----------------------------------------------------------------------------------------------------------


def report(runs):
    """Print where each run stands."""
    width = max(len(str(run.path)) for run in runs)
    print(f"{'run':<{width}}  updates  epochs   hours  {'training':>8}  {'validation: best':>22}  {'BLEU: best':>20}")
    for run in runs:
        last = np.array([run.last])
        train = f"{run.points['train'][1][-1]:.3f}" if "train" in run.points else "-"
        print(
            f"{run.path!s:<{width}}  {run.last:7,.0f}  {_plain(run.x('epochs', last)[0], 1):>6}  "
            f"{_plain(run.x('hours', last)[0], 2):>6}  {train:>8}  {_best(run, 'valid', np.nanargmin, 3):>22}  "
            f"{_best(run, 'bleu', np.nanargmax, 2):>20}"
        )


def _plain(value, digits):
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def _best(run, name, choose, digits):
    """ "4.368: 4.265 @ 1,000": the last value, the best one and its update."""
    if name not in run.points or np.isnan(run.points[name][1]).all():
        return "-"
    updates, values = run.points[name]
    best = choose(values)
    return f"{values[-1]:.{digits}f}: {values[best]:.{digits}f} @ {updates[best]:,.0f}"


def draw(lines, axes, title, path, form):
    """A row of panels for each quantity that there is, a column for each axis."""
    rows = [name for name in QUANTITIES if any(name in run.points for line in lines for run in line.runs)]
    size = (1.0 + 3.7 * len(axes), 1.0 + 2.7 * len(rows))
    figure, panels = plt.subplots(
        len(rows), len(axes), figsize=size, squeeze=False, sharex="col", sharey="row", layout="constrained"
    )
    for row, quantity in zip(panels, rows, strict=True):
        for panel, axis in zip(row, axes, strict=True):
            _panel(panel, lines, quantity, axis)
        row[0].set_ylabel(QUANTITIES[quantity])
        if quantity != "bleu":
            row[0].set_ylim(top=_top(lines, quantity))
    for panel, axis in zip(panels[-1], axes, strict=True):
        panel.set_xlabel("training time (hours)" if axis == "hours" else axis)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    recipes = dict.fromkeys(run.settings["recipe"] for line in lines for run in line.runs if run.settings)
    if title or recipes:
        figure.suptitle(title or ", ".join(recipes))
    handles, labels = panels[0][0].get_legend_handles_labels()
    wrapped = [textwrap.fill(label, 45 * len(axes), break_on_hyphens=False) for label in labels]
    columns = max(1, int(45 * len(axes) // (max(map(len, labels)) + 8)))
    figure.legend(handles, wrapped, loc="outside lower center", ncols=min(len(labels), columns))
    figure.savefig(path, dpi=150, format=form)
    plt.close(figure)


def _panel(panel, lines, quantity, axis):
    styles = zip(cycle(COLOURS), cycle(STYLES), strict=False)
    for line, (colour, style) in zip(lines, styles, strict=False):
        x, mean, lowest, highest = band(line, quantity, axis)
        marker = "o" if len(x) <= 30 else None
        panel.plot(x, mean, style, color=colour, label=line.label, linewidth=1.6, marker=marker, markersize=3)
        if len(line.runs) > 1:
            panel.fill_between(x, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    panel.grid(alpha=0.3)


def _top(lines, quantity):
    """Where a loss's axis ends: the first tenth of training is steep, and would press the rest together."""
    start = max(run.last for line in lines for run in line.runs) / 10
    bands = [band(line, quantity, "updates") for line in lines]
    highest = [values[x >= start].max() for x, _, _, values in bands if len(x) and (x >= start).any()]
    highest = [value for value in highest if np.isfinite(value)]
    return max(highest) * 1.02 if highest else None


def write_csv(lines, path):
    """All points of all runs: label, run, seed, quantity, update, epoch, hours, value."""
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(["label", "run", "seed", "quantity", "update", "epoch", "hours", "value"])
        for line in lines:
            for run in line.runs:
                for quantity, (updates, values) in run.points.items():
                    axes = zip(updates, run.x("epochs", updates), run.x("hours", updates), values, strict=True)
                    for update, epoch, hours, value in axes:
                        place = [f"{update:.0f}", f"{epoch:.4f}", f"{hours:.5f}", value]
                        table.writerow([line.label, run.path, run.seed, quantity, *place])


if __name__ == "__main__":
    main()
