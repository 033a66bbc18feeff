"""Learning curves of runs: training and validation loss, and validation BLEU, against updates, epochs and time.

A RUN is a folder of scripts/train.sh, or its log.jsonl. It may also be the name of a run in results/scores.jsonl:
multi30k-laptop-en-de/transformer_lite-seed1

Runs that differ in the seed alone become one line, their mean. The range from the lowest to the highest is shaded, up
to the end of the shortest run. The last column of the printed table is the update at which a run reached the lowest
validation loss of the first RUN.

A training loss is the mean over a stretch between two lines of the log, and stands in the stretch's middle. After a
kill, repeated updates replace the log from there on. Time is that between updates, validation and saving included,
without pauses, start-up and lost work. Epochs are updates divided by those of one epoch.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ea_artifacts.command import REPO, Parser, reporting, say
from ea_artifacts.files import replacing
from ea_tools.figures import style
from ea_tools.tables.records import log_name
from ea_tools.training.logs import AXES, QUANTITIES, NoLossError, Run, read

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.lines import Line2D


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: read the runs, draw, print where they stand: last, since its reader may have gone."""
    args = parse(arguments)
    with reporting("plot_curves"):
        runs = read_all(args.runs)
        lines = group(runs)
        with replacing(args.out) as temporary:
            draw(lines, args.x, temporary, args.out.suffix[1:].lower())
        report(runs)
        print(f"written: {args.out}")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="plot_curves.sh", description=__doc__)
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder, its log.jsonl, or a name")
    out, names = REPO / "results" / "curves.png", ", ".join(style.SUFFIXES)
    add("--out", type=style.output(style.SUFFIXES), default=out, metavar="FILE", help=f"{names} (default: {out})")
    add("--x", nargs="+", choices=AXES, default=AXES, help="what to draw against (default: all three)")
    args = parser.parse_args(arguments)
    twice = [str(path) for path, count in Counter(path.resolve() for path in args.runs).items() if count > 1]
    if twice:
        parser.error(f"given twice: {', '.join(twice)}")
    return args


def read_all(paths: Sequence[Path]) -> list[Run]:
    """The runs; one that has no loss yet is left out with a warning, unless none is left."""
    runs, without = [], []
    for path in paths:
        try:
            record = REPO / "results" / "logs" / log_name(str(path))
            runs.append(read(path) if path.exists() or not record.exists() else replace(read(record), path=path))
        except NoLossError as error:
            without.append(error)
    if not runs:
        raise without[0]
    for reason in without:
        say(f"plot_curves: warning: left out: {reason}")
    return runs


# --- lines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One line: the runs of one model, which differ in the seed alone."""

    label: str
    runs: list[Run]


def group(runs: Sequence[Run]) -> list[Line]:
    """Lines, in the order of the runs. A run without a description, or with a repeated seed, is a separate line."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps(run.settings, sort_keys=True) if run.settings else str(run.path)
        groups.setdefault(key, []).append(run)
    lines = []
    for members in groups.values():
        name = _name(members[0], runs)
        if len({run.seed for run in members}) == len(members):
            lines.append(Line(name + _seeds(members), members))
        else:
            lines += [Line(f"{name}, {run.path.name}", [run]) for run in members]
    times = Counter(line.label for line in lines)
    return [line if times[line.label] == 1 else Line(f"{line.label}, {line.runs[0].path}", line.runs) for line in lines]


def _name(run: Run, runs: Sequence[Run]) -> str:
    """The settings in which the runs differ: "ea_transformer_lite, ea-alpha 0.5"."""
    if not run.settings:
        return run.path.stem if run.path.is_file() else run.path.resolve().name
    described = [other.settings for other in runs if other.settings]
    alike = [settings for settings in described if settings["arch"] == run.settings["arch"]]

    def differs(name: str) -> bool:
        """Between runs that have it, or within the architecture: flags that another architecture lacks are left out."""
        stated = {settings[name] for settings in described if name in settings}
        return len(stated) > 1 or len({settings.get(name) for settings in alike}) > 1

    words = [run.settings["arch"]] + ([run.settings["recipe"]] if differs("recipe") else [])
    # A digest of the data says nothing to a reader: where nothing else differs, the run's path is added.
    shown = [name for name in run.settings if name not in ("arch", "recipe", "data") and differs(name)]
    return ", ".join([*words, *(f"{name} {run.settings[name]}".strip() for name in shown)])


def _seeds(members: Sequence[Run]) -> str:
    seeds = [run.seed for run in members if run.seed is not None]
    return f" (seeds {', '.join(seeds)})" if len(seeds) > 1 else ""


def band(line: Line, quantity: str, axis: str) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(x, mean, lowest, highest) over the runs of a line, up to the end of the shortest; else empty."""
    curves = []
    for run in line.runs:
        if quantity in run.points:
            updates, values = run.points[quantity]
            x = run.x(axis, updates)
            curves.append((x[~np.isnan(x)], values[~np.isnan(x)]))
    curves = [(x, values) for x, values in curves if len(x)]
    if len(curves) < len(line.runs):  # the label names all of the line's seeds
        return (np.array([]),) * 4
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    grid = np.unique(np.concatenate([x for x, _ in curves]))
    grid = grid[(grid >= first) & (grid <= last)]
    values = np.array([np.interp(grid, *one) for one in curves])
    return grid, values.mean(axis=0), values.min(axis=0), values.max(axis=0)


# --- showing ----------------------------------------------------------------------------------------------------------


def report(runs: Sequence[Run]) -> None:
    """Print where each run stands, and when it first reached the first run's lowest validation loss."""
    width = max(len(str(run.path)) for run in runs)
    heads = f"{'training':>8}  {'validation: best':>22}  {'BLEU: best':>20}  first run's best"
    print(f"{'run':<{width}}  updates  epochs   hours  {heads}")
    level = np.nanmin(runs[0].points["valid"][1]) if "valid" in runs[0].points else np.nan
    for run in runs:
        last = np.array([run.last])
        train = _loss(run.points["train"][1][-1]) if "train" in run.points else "-"
        print(
            f"{run.path!s:<{width}}  {run.last:7,.0f}  {_plain(run.x('epochs', last)[0], 1):>6}  "
            f"{_plain(run.x('hours', last)[0], 2):>6}  {train:>8}  {_best(run, 'valid', np.nanargmin, 3):>22}  "
            f"{_best(run, 'bleu', np.nanargmax, 2):>20}  {_reached(run, level):>16}"
        )


def _reached(run: Run, level: float) -> str:
    """ "@ 1,000": the first update with a validation loss of at most this level."""
    updates, losses = run.points.get("valid", (np.array([]), np.array([])))
    reached = updates[losses <= level]
    return f"@ {reached[0]:,.0f}" if len(reached) else "-"


def _plain(value: float, digits: int) -> str:
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def _loss(value: float, digits: int = 3) -> str:
    return f"{value:.3g}" if abs(value) >= 1e5 else f"{value:.{digits}f}"


def _best(run: Run, name: str, choose: Callable[[np.ndarray], int], digits: int) -> str:
    """ "4.368: 4.265 @ 1,000": the last value, the best one and its update."""
    if name not in run.points or np.isnan(run.points[name][1]).all():
        return "-"
    updates, values = run.points[name]
    best = choose(values)
    return f"{_loss(values[-1], digits)}: {_loss(values[best], digits)} @ {updates[best]:,.0f}"


def draw(lines: Sequence[Line], axes: Sequence[str], path: Path, form: str) -> None:
    """A row of panels for each quantity that there is, a column for each axis."""
    from matplotlib.ticker import MaxNLocator

    rows = [name for name in QUANTITIES if any(name in run.points for line in lines for run in line.runs)]
    limits = {name: _limits(lines, name) for name in rows if name != "bleu"}
    tops = {name: top for name, (_, top) in limits.items()}
    lines = [_marked(line, tops) for line in lines]
    size = (1.0 + 3.7 * len(axes), 1.0 + 2.7 * len(rows))
    figure, panels = style.panels(len(rows), len(axes), size, sharex="col", sharey="row")
    for row, quantity in zip(panels, rows, strict=True):
        for panel, axis in zip(row, axes, strict=True):
            handles = _panel(panel, lines, quantity, axis)
        row[0].set_ylabel(QUANTITIES[quantity])
        if quantity in limits:
            row[0].set_ylim(*limits[quantity])
    for panel, axis in zip(panels[-1], axes, strict=True):
        panel.set_xlabel("training time (hours)" if axis == "hours" else axis)
        panel.set_xlim(left=0)
        panel.xaxis.set_major_locator(MaxNLocator(6, steps=[1, 2, 5, 10]))
    recipes = dict.fromkeys(run.settings["recipe"] for line in lines for run in line.runs if run.settings)
    figure.suptitle(textwrap.fill(", ".join(recipes), 45 * len(axes)))
    labels = [line.label for line in lines]
    wrapped = [textwrap.fill(label, 45 * len(axes), break_on_hyphens=False) for label in labels]
    columns = max(1, int(45 * len(axes) // (max(map(len, labels)) + 8)))
    figure.legend(handles, wrapped, loc="outside lower center", ncols=min(len(labels), columns))
    style.save(figure, path, form)


def _marked(line: Line, tops: Mapping[str, float | None]) -> Line:
    """The line, with a note in its label where a run of it leaves the picture or ends without a number."""
    for quantity, top in tops.items():
        x, mean, _, _ = band(line, quantity, "updates")
        lost = np.array([not np.isfinite(run.points[quantity][1][-1]) for run in line.runs if quantity in run.points])
        if lost.any():
            return replace(line, label=f"{line.label} (diverged: {QUANTITIES[quantity]} is no number at the end)")
        if top and len(x) and mean[-1] > top:
            return replace(line, label=f"{line.label} (above the picture: {QUANTITIES[quantity]} {mean[-1]:.4g})")
    return line


def _panel(panel: Axes, lines: Sequence[Line], quantity: str, axis: str) -> list[Line2D]:
    """Draw the lines, and return them for the legend."""
    handles = []
    looks = zip(cycle(style.COLOURS), cycle(style.LINES), strict=False)
    for line, (colour, dashes) in zip(lines, looks, strict=False):
        x, mean, lowest, highest = band(line, quantity, axis)
        marker = "o" if len(x) <= 30 else None
        handles += panel.plot(x, mean, dashes, color=colour, linewidth=1.6, marker=marker, markersize=3)
        if len(line.runs) > 1:
            panel.fill_between(x, lowest, highest, color=colour, alpha=0.2, linewidth=0)
    panel.grid(alpha=0.3)
    return handles


def _limits(lines: Sequence[Line], quantity: str) -> tuple[float | None, float | None]:
    """The lowest and the highest value of a loss's axis; None where there is no number.

    The first tenth of training is steep, and a diverged run is high: neither may press the others together. So no loss
    counts for more than twice the first one after that tenth, and no run of twice the lowest such loss counts.
    """
    start = max(run.last for line in lines for run in line.runs) / 10
    tops, lows = [], []
    for x, _, lowest, highest in (band(line, quantity, "updates") for line in lines):
        later = highest[x >= min(start, x[-1])] if len(x) else x
        later = later[np.isfinite(later)]
        if len(later):
            tops.append(min(later.max(), 2 * later[0]))
            lows.append(lowest[np.isfinite(lowest)].min())
    if not tops:
        return None, None
    top = 1.02 * max(top for top in tops if top <= 2 * min(tops))
    return min(lows) - 0.05 * (top - min(lows)), top
