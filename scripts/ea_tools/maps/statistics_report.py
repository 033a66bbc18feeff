"""The statistics of maps as JSON, as tables in Markdown, and as a picture."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ea_tools.common import json_text
from ea_tools.figures import style
from ea_tools.maps import KINDS
from ea_tools.maps.measures import PARTS, Estimate, Place

if TYPE_CHECKING:  # imported where a figure is made
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

STATISTICS = {
    "entropy": "entropy (nats)",
    "normalised": "normalised entropy",
    "same_head": "similarity to the layer before: same head",
    "head_mean": "similarity to the layer before: mean over heads",
    "own": "share of the logits: own query-key logits",
    "skip": "share of the logits: skip connection",
    "convolution": "share of the logits: convolution",
    "aer": "alignment error rate",
}
DIFFERENCE = ": difference"

LOOKS = {kind: (style.COLOURS[number], style.MARKERS[number]) for number, kind in enumerate(KINDS)}
STYLES = (("-", None), ("--", "white"))  # of the model, of the baseline: line, inside of the markers


@dataclass(frozen=True)
class Report:
    """Everything that is written down."""

    facts: dict[str, Any]  # the source of the numbers
    names: list[str]  # of the model and, if there is one, of the baseline
    estimates: list[dict[Place, Estimate]]  # of each model
    differences: dict[Place, Estimate]  # model - baseline; {} without one
    mixes: list[dict[str, float]]  # of each model: {"alpha_encoder_2": 0.1, ...}, its learnt alpha and beta; or {}


def render(report: Report, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".json":
        return json_text(as_json(report)).encode()
    return table(report).encode() if suffix == ".md" else picture(report, suffix.removeprefix("."))


def as_json(report: Report) -> dict[str, Any]:
    """{..., "statistics": {statistic: {kind: {layer: {"run": ..., "compare": ..., "difference": ...}}}}}"""
    statistics = {}
    for who, estimates in zip(("run", "compare"), report.estimates, strict=False):
        _insert(statistics, who, estimates)
    _insert(statistics, "difference", report.differences)
    return {**report.facts, "names": report.names, "statistics": statistics, "learnt_mixes": report.mixes}


def _insert(statistics: dict[str, dict], who: str, estimates: Mapping[Place, Estimate]) -> None:
    for (statistic, kind, layer), one in estimates.items():
        layers = statistics.setdefault(statistic, {}).setdefault(kind, {})
        layers.setdefault(str(layer), {})[who] = vars(one)


def table(report: Report) -> str:
    """Markdown: a table for each statistic, a column for each layer."""
    facts = report.facts
    aligned = f", {facts['aligned_sentences']:,} of them with gold alignments" if facts["gold"] else ""
    in_means = ", alignments in the mean of a layer's heads" if facts["gold"] else ""
    lines = [
        f"{facts['data']}, {facts['subset']}: {facts['sentences']:,} sentences{aligned}. Means over heads and "
        f"rows{in_means}, ± half of the 95% interval by bootstrap over sentences."
    ]
    if report.differences:
        lines[0] += " Differences: {} - {}, paired by sentence; bold: zero is not in the interval.".format(
            *report.names
        )
    for statistic, title in STATISTICS.items():
        rows = {
            name: {layer: _cell(one, "+" if name.endswith(DIFFERENCE) else "") for layer, one in by_layer.items()}
            for name, by_layer in _rows(report, statistic)
        }
        lines += _markdown(title, rows)
    for name, mixes in zip(report.names, report.mixes, strict=True):
        rows = {}
        for place, value in mixes.items():
            share, kind, layer = place.split("_")
            rows.setdefault(f"{kind}: {share}", {})[int(layer)] = f"{value:.4f}"
        lines += _markdown(f"learnt by {name}", rows)
    lines += ["", *(f"- {name}: `{path}`" for name, path in zip(report.names, facts["checkpoints"], strict=True))]
    lines += [f"- `{facts['command']}`", f"- commit {facts['commit']}, {facts['device']}, {facts['date']}"]
    return "\n".join(lines) + "\n"


def _markdown(title: str, rows: Mapping[str, Mapping[int, str]]) -> list[str]:
    """Lines of Markdown: a row for each name, a column for each layer; none without any row."""
    layers = sorted({layer for cells in rows.values() for layer in cells})
    if not layers:
        return []
    body = [[name, *(cells.get(layer, "-") for layer in layers)] for name, cells in rows.items()]
    head = ["", f"| {title} | layer {' | '.join(map(str, layers))} |", f"|---|{'---|' * len(layers)}"]
    return head + [f"| {' | '.join(row)} |" for row in body]


def _rows(report: Report, statistic: str) -> list[tuple[str, dict[int, Estimate]]]:
    """[(name, {layer: Estimate}), ...]: for each kind the models, then their difference."""
    rows = []
    for kind in KINDS:
        for name, estimates in zip(report.names, report.estimates, strict=True):
            rows.append((f"{kind}: {name}", of_layers(estimates, statistic, kind)))
        rows.append((f"{kind}{DIFFERENCE}", of_layers(report.differences, statistic, kind)))
    return [(name, by_layer) for name, by_layer in rows if by_layer]


def of_layers(estimates: Mapping[Place, Estimate], statistic: str, kind: str) -> dict[int, Estimate]:
    """{layer: Estimate}, the lowest layer first."""
    return {place[2]: one for place, one in sorted(estimates.items()) if place[:2] == (statistic, kind)}


def _cell(one: Estimate, sign: str) -> str:
    mean = f"{one.mean:{sign}.3f}"
    return f"{f'**{mean}**' if sign and one.clear else mean} ± {one.half:.3f}"


def picture(report: Report, form: str) -> bytes:
    """PNG or SVG: a panel for each statistic, layers across."""
    shown = [name for name in STATISTICS if name != "own" and _rows(report, name)]
    columns = 3 if len(shown) < 7 else 4
    rows = -(-len(shown) // columns)
    figure, panels = style.panels(rows, columns, (3.6 * columns, 0.9 + 2.9 * rows), sharex=True)
    for panel, statistic in zip(panels.flat, [*shown, *[None] * (rows * columns - len(shown))], strict=True):
        _panel(panel, report, statistic) if statistic else panel.remove()
    figure.legend(handles=_legend(report), loc="outside lower center", ncols=len(LOOKS), fontsize=9, frameon=False)
    file = io.BytesIO()
    style.save(figure, file, form)
    return file.getvalue()


def _legend(report: Report) -> list[Artist]:
    """Kinds of attention above, models below: matplotlib fills column after column."""
    from matplotlib.lines import Line2D

    kinds = [Line2D([], [], color=colour, marker=marker, label=KINDS[kind]) for kind, (colour, marker) in LOOKS.items()]
    models = [
        Line2D([], [], color="0.2", linestyle=dashes, marker="o", markerfacecolor=fill, label=textwrap.fill(name, 40))
        for name, (dashes, fill) in zip(report.names, STYLES, strict=False)
    ]
    models += [Line2D([], [], linestyle="", label=" ") for _ in range(len(kinds) - len(models))]
    return [handle for column in zip(kinds, models, strict=True) for handle in column]


def _panel(panel: Axes, report: Report, statistic: str) -> None:
    """Lines over layers: a colour for each kind of attention, a style for each model; the interval is shaded."""
    from matplotlib.ticker import MaxNLocator

    for estimates, (dashes, fill) in zip(report.estimates, STYLES, strict=False):
        for kind, (colour, marker) in LOOKS.items():
            by_layer = of_layers(estimates, statistic, kind)
            means, low, high = ([getattr(one, name) for one in by_layer.values()] for name in ("mean", "low", "high"))
            face = {"markerfacecolor": fill or colour, "markersize": 5}
            panel.plot(list(by_layer), means, dashes, color=colour, marker=marker, **face)
            panel.fill_between(list(by_layer), low, high, color=colour, alpha=0.2, linewidth=0)
    panel.set_title(STATISTICS[statistic].replace(": ", ":\n"), fontsize=10)
    panel.set_xlabel("layer", fontsize=9)
    panel.tick_params(labelsize=9, labelbottom=True)
    panel.xaxis.set_major_locator(MaxNLocator(integer=True))
    if statistic in PARTS.values():
        panel.set_ylim(0, 1.08 * panel.dataLim.y1 or 1)
    panel.grid(alpha=0.3)
