"""The result of a sweep: the report, its conclusion in words, and a picture."""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ea_tools.common import listed
from ea_tools.figures import style
from ea_tools.metrics import LABELS
from ea_tools.tables import report as table_report
from ea_tools.tables.records import settings
from ea_tools.tables.sweep_grid import Scores, Sweep, Values, candidates, gather, scores_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def write(sweep: Sweep, args: argparse.Namespace) -> None:
    """results/sweep-NAME.md and, where there is anything to show, .png."""
    summaries = gather(sweep)
    scores = scores_of(sweep, summaries)
    picture = any(scores.values())
    text = "\n".join(report(sweep, summaries, scores, args.command, picture)) + "\n"
    table_report.write_page(args.results, sweep.name, text, partial(draw, sweep, scores) if picture else None)


def report(
    sweep: Sweep, summaries: dict[tuple[str, str], dict], scores: Scores, command: str, picture: bool
) -> list[str]:
    """The lines of the report: the grid, the confirmation, the conclusion, the sources of the numbers."""
    lines = [f"# {sweep.table.title}", "", f"{LABELS[sweep.score]} on the validation set, seed {sweep.seeds[0]}:", ""]
    lines += [*grid_table(sweep, scores), "", *confirmation(sweep, scores), ""]
    if mixed := unlike(summaries):
        lines += [f"Beware: {mixed}", ""]
    if early := table_report.scored_early(sweep.table, summaries):
        lines += [early, ""]
    if picture:
        lines += [f"![{sweep.table.title}]({sweep.name}.png)", ""]
    return [*lines, f"Made by `{command}`.", "", *table_report.provenance(sweep.table, summaries, sweep.flags)]


def grid_table(sweep: Sweep, scores: Scores) -> list[str]:
    """The scores of the first seed: two flags as rows and columns, else a cell a line. The highest is bold."""
    seed = sweep.seeds[0]
    highest = max((of_cell[seed] for of_cell in scores.values() if seed in of_cell), default=None)

    def cell(key: Values) -> str:
        if seed not in scores[key]:
            return "not run"
        text = f"{scores[key][seed]:.2f}" + (" (default)" if key == sweep.default else "")
        return f"**{text}**" if scores[key][seed] == highest else text

    names = list(sweep.grid)
    if len(names) == 2:
        rows, columns = sweep.grid.values()
        head = [f"{names[0]} ↓, {names[1]} →", *columns]
        body = [[row, *(cell((row, column)) for column in columns)] for row in rows]
    else:
        head = [*names, "score"]
        body = [[*key, cell(key)] for key in sweep.rows]
    return [table_report.markdown_row(row) for row in [head, ["---:"] * len(head), *body]]


def confirmation(sweep: Sweep, scores: Scores) -> list[str]:
    """The other seeds' results of the best cells: a table, and the conclusion in words."""
    keys, seeds = candidates(sweep, scores), sweep.seeds
    if not keys:
        return ["Nothing has been run yet."]
    lines = []
    if missing := sum(seeds[0] not in of_cell for of_cell in scores.values()):
        lines = [f"{missing} of {len(scores)} cells have not been run; what follows is about the others.", ""]
    if len(seeds) == 1:
        best = sweep.label(keys[0])
        return [*lines, f"{best} is highest with one seed, which does not make it the best: --seeds gives more."]
    head = ["", *(f"seed {seed}" for seed in seeds), "mean ± deviation"]
    lines += [table_report.markdown_row(head), table_report.markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for key in keys:
        columns = [f"{scores[key][seed]:.2f}" if seed in scores[key] else "not run" for seed in seeds]
        lines.append(table_report.markdown_row([sweep.label(key), *columns, _mean(scores[key].values())]))
    unfinished = [sweep.label(key) for key in keys if any(seed not in scores[key] for seed in seeds)]
    if unfinished:
        return [*lines, "", f"None is called the best yet: not run with every seed: {'; '.join(unfinished)}."]
    return [*lines, "", *verdict(sweep, {key: [scores[key][seed] for seed in seeds] for key in keys})]


def _mean(values: Iterable[float]) -> str:
    values = list(values)
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def verdict(sweep: Sweep, scores: dict[Values, list[float]]) -> list[str]:
    """Sentences: which cell has the highest mean, and from which of the others the seeds tell it apart."""
    means = {key: statistics.mean(of_cell) for key, of_cell in scores.items()}
    best = max(means, key=means.get)
    lines = [f"**{sweep.label(best)}** has the highest mean, {_mean(scores[best])} over seeds {listed(sweep.seeds)}."]
    for key in (key for key in scores if key != best):
        difference = f"{means[best] - means[key]:.2f} above {sweep.label(key)}: "
        if min(scores[best]) > max(scores[key]):
            lines.append(
                f"{difference}more than the spread between seeds, each of its seeds is above all of the other's."
            )
        else:
            lines.append(f"{difference}within the spread between seeds, which do not tell the two apart.")
    fresh = "; ".join(f"{sweep.label(key)} {statistics.mean(of_cell[1:]):.2f}" for key, of_cell in scores.items())
    lines.append(
        f"Seed {sweep.seeds[0]} chose among the cells, which flatters some. Means over the other seeds alone: {fresh}."
    )
    lines.append("The test set had no part in the choice: score the chosen model on it once, with scripts/evaluate.sh.")
    return lines


def unlike(summaries: dict[tuple[str, str], dict]) -> str:
    """The reason why the results are not comparable, or ""."""
    records = [record for summary in summaries.values() for record in summary["results"].values()]
    of = {
        "settings": {settings(record) for record in records},
        "reference texts": {record.get("references") for record in records},
    }
    different = [f"{name} ({listed(sorted(values, key=str))})" for name, values in of.items() if len(values) > 1]
    return f"the cells were scored with different {' and '.join(different)}." if different else ""


def draw(sweep: Sweep, scores: Scores, path: Path) -> None:
    """A heat-map where the grid has two flags, and for each flag the score against its values."""
    names, heat = list(sweep.grid), len(sweep.grid) == 2
    widths = [1.3] * heat + [1] * len(names)
    figure, panels = style.panels(1, len(widths), (1 + 4.2 * sum(widths), 4.6), width_ratios=widths)
    panels = list(panels[0])
    if heat:
        _heat_map(figure, panels.pop(0), sweep, scores)
    for panel, name in zip(panels, names, strict=True):
        _curves(panel, sweep, scores, name)
        if panel is not panels[0]:
            panel.sharey(panels[0])
            panel.tick_params(labelleft=False)
    panels[0].set_ylabel(f"validation {LABELS[sweep.score]}")
    confirmed = any(len(of_cell) > 1 for of_cell in scores.values())
    bars = "; bars: lowest to highest of its seeds" if confirmed else ""
    figure.suptitle(
        f"{sweep.table.title}: validation {LABELS[sweep.score]}, seed {sweep.seeds[0]}{bars}", fontsize="medium"
    )
    style.save(figure, path, "png")


def _heat_map(figure: Figure, panel: Axes, sweep: Sweep, scores: Scores) -> None:
    """First flag downwards, second to the right; the colour is the first seed's score, a frame is round the highest."""
    import matplotlib
    import numpy as np

    seed = sweep.seeds[0]
    (down, rows), (right, columns) = sweep.grid.items()
    grid = np.array([[scores[row, column].get(seed, math.nan) for column in columns] for row in rows])
    colours = matplotlib.colormaps[style.GRID_COLOURS].with_extremes(bad="0.9")
    image = panel.imshow(grid, cmap=colours, aspect="auto")
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        of_cell = scores[row, column]
        lines = [f"{grid[i, j]:.2f}" if seed in of_cell else "not run"]
        if len(of_cell) > 1:
            lines += [_mean(of_cell.values()), f"{len(of_cell)} seeds"]
        lines += ["default"] * ((row, column) == sweep.default)
        dark = seed in of_cell and image.norm(grid[i, j]) < 0.5
        panel.text(j, i, "\n".join(lines), ha="center", va="center", color="white" if dark else "black")
    if not np.isnan(grid).all():
        i, j = np.unravel_index(np.nanargmax(grid), grid.shape)
        frame = {"fill": False, "color": style.COLOURS[1], "linewidth": 3}
        panel.add_patch(matplotlib.patches.Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, **frame))
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xlabel(right)
    panel.set_ylabel(down)
    figure.colorbar(image, ax=panel)


def _curves(panel: Axes, sweep: Sweep, scores: Scores, name: str) -> None:
    """Score against the values of one flag: a line for each value of the other; of several, through the highest."""
    seed = sweep.seeds[0]
    position = list(sweep.grid).index(name)
    highest = max((key for key in scores if seed in scores[key]), key=lambda key: scores[key][seed], default=None)
    others = dict.fromkeys(key[:position] + key[position + 1 :] for key in sweep.rows)
    if len(sweep.grid) > 2:
        others = [highest[:position] + highest[position + 1 :]] if highest else []
    for number, fixed in enumerate(others):
        keys = [(*fixed[:position], value, *fixed[position:]) for value in sweep.grid[name]]
        heights = [scores[key].get(seed, math.nan) for key in keys]
        colour, dashes = style.COLOURS[number % len(style.COLOURS)], style.LINES[number % len(style.LINES)]
        names = [other for other in sweep.grid if other != name]
        label = ", ".join(f"{other} {value}" for other, value in zip(names, fixed, strict=True))
        aside = 0.02 * (number - (len(others) - 1) / 2)  # lines stand beside each other, not over
        places = [place + aside for place in range(len(keys))]
        panel.plot(places, heights, dashes, marker="o", color=colour, label=label)
        for x, key in zip(places, keys, strict=True):
            if len(scores[key]) > 1:
                lowest, highest_of_cell = min(scores[key].values()), max(scores[key].values())
                panel.vlines(x, lowest, highest_of_cell, color=colour, linewidth=4, alpha=0.4)
    panel.set_xticks(range(len(sweep.grid[name])), sweep.grid[name])
    panel.set_xlabel(name)
    panel.grid(alpha=0.3)
    if len(sweep.grid) > 1:
        panel.legend(fontsize="small")
