"""Some of a model's maps as a picture: a line of panels for each place, sizes that follow from the tokens."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from ea_tools.common import UserError, say
from ea_tools.figures import style
from ea_tools.figures.labels import families, width
from ea_tools.maps.look import AXES, PARTS, Look, Row, of_words, one_head, parts_of

if TYPE_CHECKING:  # imported where a figure is made
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DOTS, MOST_DOTS = 200, 30_000  # per inch; from top to bottom
NARROWEST = 0.135  # inches of a cell beside which a label can be read
LABELLED = 90  # so many tokens have a label each; with more of them a picture would be wider than can be drawn


@dataclass(frozen=True)
class Sizes:
    """Sizes in inches, but for the fonts' points, which follow from the number of tokens."""

    cell: float
    font: float
    families: tuple[str, ...]
    heading: float
    gap: float = 0.22
    every: int = 1  # of the tokens, counted from the first, has its label

    @property
    def small(self) -> float:
        """The font size of text beside the maps."""
        return self.heading * 0.83

    @property
    def line(self) -> float:
        """The height of a line of text."""
        return self.heading * 1.5 / 72


def picture(look: Look, rows: list[Row], parts: list[str], form: str) -> bytes:
    """PNG or SVG: a line of panels for each row.

    Raises:
        UserError: a PNG of more pixels than can be drawn.
    """
    import matplotlib

    sizes = _sizes(look)
    settings = {"font.family": sizes.families, "axes.linewidth": 0.6, "text.parse_math": False}
    file = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # _sizes has said so
        lines = [_Line(look, row, parts, sizes) for row in rows]
        dots = round(sum(line.height for line in lines) * DOTS)
        if form == "png" and dots > MOST_DOTS:
            raise UserError(
                f"the picture would be {dots:,} pixels high: choose fewer layers and heads, or .svg or .html"
            )
        style.save(_figure(lines, len(parts), sizes), file, form, dots=DOTS)
    return file.getvalue()


def _figure(lines: list[_Line], parts: int, sizes: Sizes) -> Figure:
    """The lines of panels, one below the other; sizes in inches."""
    from matplotlib.figure import Figure

    left, right = max(line.left for line in lines), 0.1 + 4.5 * sizes.small / 72
    panel = max(line.panel for line in lines)
    height = sum(line.height for line in lines) + 0.1
    figure = Figure(figsize=(left + parts * (panel + sizes.gap) + right, height))
    top = height - 0.05
    for line in lines:
        line.draw(figure, left, top, panel)
        top -= line.height
    return figure


def _sizes(look: Look) -> Sizes:
    """Cells wide enough for a readable label each, and fonts to go with them.

    A map of more tokens than have room for that is as large as one of LABELLED, and only every so manyth has a label.
    """
    shown = [look.labels(name) for name in look.tokens]
    longest = max(map(len, shown))
    every = -(-longest // LABELLED)
    cell = min(0.32, max(NARROWEST, 2.4 / longest)) if every == 1 else NARROWEST * LABELLED / longest
    if every > 1:
        unit = "words" if look.in_words else "tokens"
        say(
            f"plot_attention: note: of {longest} {unit} every {every}. has its label in the picture; an .html page has "
            "all of them",
        )
    names, missing = families("".join(label for labels in shown for label in labels))
    if missing:
        say(
            f"plot_attention: warning: no installed font has {' '.join(sorted(missing))}; install one that does, for "
            "example Noto Sans of that script, or use an .html page, for which browsers find fonts",
        )
    font = min(8.5, max(cell, NARROWEST) * 72 * 0.68)
    return Sizes(cell, font, names, heading=max(9.0, 1.6 * cell * longest), every=every)


class _Line:
    """One row of panels, and the room that it needs."""

    def __init__(self, look: Look, row: Row, parts: list[str], sizes: Sizes) -> None:
        self._row, self._sizes = row, sizes
        there = parts_of(look, row.kind, row.layer)
        if look.in_words:
            there = {part: of_words(look, row.kind, values) for part, values in there.items()}
        self._maps = {part: one_head(there[part], row.head) if part in there else None for part in parts}
        rows, columns, self._row_title, self._column_title = AXES[row.kind]
        if look.in_words:
            self._row_title, self._column_title = (
                title.replace("token", "word") for title in (self._row_title, self._column_title)
            )
        self._down, self._across = look.labels(rows), look.labels(columns)
        self._below = max(width(label, sizes.families, sizes.font) for label in self._across) + 0.15
        self.left = max(width(label, sizes.families, sizes.font) for label in self._down) + 0.15 + sizes.line
        self.panel = max(len(self._across) * sizes.cell, 1.45)
        self._map_height = len(self._down) * sizes.cell
        self.height = 2 * sizes.line + 0.05 + self._map_height + self._below + sizes.line + 0.15

    def draw(self, figure: Figure, left: float, top: float, panel: float) -> None:
        """Draw this row with its upper edge at `top`, its first panel at `left`, panels `panel` apart; in inches."""
        wide, high = figure.get_size_inches()
        heading = {"fontsize": self._sizes.heading, "va": "top"}
        figure.text(left / wide, top / high, str(self._row), fontweight="bold", **heading)
        top -= 2 * self._sizes.line + 0.05
        most = max(numpy.nanmax(values) for values in self._maps.values() if values is not None)
        for number, (part, values) in enumerate(self._maps.items()):
            x = left + number * (panel + self._sizes.gap)
            figure.text(x / wide, (top + self._sizes.line) / high, PARTS[part], **heading)
            if values is None:
                figure.text(x / wide, top / high, "none in this attention", color="0.4", **heading)
                continue
            size = (len(self._across) * self._sizes.cell, self._map_height)
            axes = figure.add_axes((x / wide, (top - size[1]) / high, size[0] / wide, size[1] / high))
            image = self._map(axes, values, most, labelled=number == 0)
        x = left + len(self._maps) * (panel + self._sizes.gap)
        bar = figure.add_axes((x / wide, (top - self._map_height) / high, 0.1 / wide, self._map_height / high))
        figure.colorbar(image, cax=bar)
        bar.tick_params(labelsize=self._sizes.small, length=2)

    def _map(self, axes: Axes, values: numpy.ndarray, most: float, labelled: bool) -> AxesImage:
        """One panel; the tokens of the rows stand beside the first one only."""
        axes.set_facecolor("0.93")  # places outside the map
        image = axes.imshow(values, cmap=style.MAP_COLOURS, vmin=0, vmax=most, aspect="auto", interpolation="nearest")
        font = {"fontsize": self._sizes.font}
        across, down = (range(0, len(side), self._sizes.every) for side in (self._across, self._down))
        axes.set_xticks(across, [self._across[place] for place in across], rotation=90, **font)
        axes.set_yticks(down, [self._down[place] for place in down] if labelled else [], **font)
        axes.tick_params(length=0, pad=2)
        axes.set_xlabel(self._column_title, fontsize=self._sizes.small, color="0.3", labelpad=4)
        if labelled:
            axes.set_ylabel(self._row_title, fontsize=self._sizes.small, color="0.3", labelpad=4)
        return image
