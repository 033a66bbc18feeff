"""Some of a model's maps as a picture: a line of panels for each place, on one page that matplotlib lays out."""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from ea_artifacts.command import UserError, say
from ea_tools.figures import style
from ea_tools.figures.labels import families
from ea_tools.maps.look import AXES, PARTS, Look, Row, of_words, one_head, parts_of

if TYPE_CHECKING:  # imported where a figure is made
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

DOTS, MOST_DOTS = 200, 30_000  # per inch; from top to bottom
NARROWEST = 0.135  # inches of a cell beside which a label can be read
HEADING, TITLE = 4.3, 1.6  # inches of the longest of a row and of a panel
LABELLED = 90  # so many tokens have a label each; with more of them a picture would be wider than can be drawn


@dataclass(frozen=True)
class Sizes:
    """Sizes that follow from the number of tokens: cells in inches, fonts in points."""

    cell: float
    font: float
    families: tuple[str, ...]
    heading: float
    every: int  # of the tokens, counted from the first, has its label

    @property
    def small(self) -> float:
        """The font size of text beside the maps."""
        return self.heading * 0.83


def picture(look: Look, rows: list[Row], parts: list[str], form: str) -> bytes:
    """PNG or SVG: a line of panels for each row.

    Raises:
        UserError: a PNG of more pixels than can be drawn.
    """
    import matplotlib

    sizes, file = sizes_of(look), io.BytesIO()
    settings: dict[Any, Any] = {"font.family": sizes.families, "axes.linewidth": 0.6, "text.parse_math": False}
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # sizes_of has said so
        shown = figure(look, rows, parts, sizes)
        dots = round(shown.get_figheight() * DOTS)
        if form == "png" and dots > MOST_DOTS:
            raise UserError(
                f"the picture would be {dots:,} pixels high: choose fewer layers and heads, or .svg or .html"
            )
        style.save(shown, file, form, dots=DOTS)
    return file.getvalue()


def sizes_of(look: Look) -> Sizes:
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


def figure(look: Look, rows: list[Row], parts: list[str], sizes: Sizes) -> Figure:
    """The lines of panels, one below the other, with cells of their size and room for every text."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    counts = [[len(look.labels(side)) for side in AXES[row.kind][:2]] for row in rows]  # rows and columns of each map
    down, widest = [count for count, _ in counts], max(count for _, count in counts)
    across = max(widest * sizes.cell, *(inches / len(parts) for inches in (HEADING, len(parts) * TITLE)))
    layout = ConstrainedLayoutEngine(w_pad=0.05, h_pad=0.08, wspace=0, hspace=0)
    page = Figure(figsize=(len(parts) * across + 2, sum(down) * sizes.cell + 2), layout=layout)
    panels = page.subplots(len(rows), len(parts), squeeze=False, gridspec_kw={"height_ratios": down})
    for row, line in zip(rows, panels, strict=True):
        _line(look, row, parts, line, sizes)
    # The size of texts does not depend on the page. A first layout takes room for them from the maps, by which the page
    # grows. Maps fill their places in both layouts; then they become as narrow as they have columns.
    layout.execute(page)
    width, height = page.get_size_inches()
    slots = [[axes.get_position(original=True) for axes in line] for line in panels]
    width += sum(across - slot.width * width for slot in slots[0])
    height += sum(count * sizes.cell - line[0].height * height for count, line in zip(down, slots, strict=True))
    page.set_size_inches(width, height)
    layout.execute(page)
    page.set_layout_engine("none")
    for axes in panels.flat:
        axes.set_aspect("equal", anchor="NW")
    return page


def _line(look: Look, row: Row, parts: list[str], panels: numpy.ndarray, sizes: Sizes) -> None:
    """The panels of one row: one colour scale, the tokens of the map's rows beside the first of them."""
    all_heads = parts_of(look, row.kind, row.layer)
    if look.in_words:
        all_heads = {part: of_words(look, row.kind, values) for part, values in all_heads.items()}
    maps = {part: one_head(all_heads[part], row.head) if part in all_heads else None for part in parts}
    most = max(numpy.nanmax(values) for values in maps.values() if values is not None)
    for axes, (part, values) in zip(panels, maps.items(), strict=True):
        axes.set_title(PARTS[part], loc="left", fontsize=sizes.heading)
        if values is None:
            axes.axis("off")
            axes.text(0, 1, "none in this attention", va="top", color="0.4", fontsize=sizes.heading)
        else:
            image = _map(look, row.kind, axes, values, most, sizes, labelled=axes is panels[0])
    panels[0].set_title(
        f"{row}\n", x=0, ha="left", fontsize=sizes.heading, fontweight="bold"
    )  # above that of the panel
    wide = len(look.labels(AXES[row.kind][1])) * sizes.cell
    bar = panels[-1].inset_axes((1 + 0.07 / wide, 0, 0.1 / wide, 1))
    bar.figure.colorbar(image, cax=bar)
    bar.tick_params(labelsize=sizes.small, length=2)


def _map(
    look: Look, kind: str, axes: Axes, values: numpy.ndarray, most: float, sizes: Sizes, labelled: bool
) -> AxesImage:
    """One panel, T x S."""
    axes.set_facecolor("0.93")  # places outside the map
    image = axes.imshow(values, cmap=style.MAP_COLOURS, vmin=0, vmax=most, aspect="auto", interpolation="nearest")
    *sides, of_rows, of_columns = AXES[kind]
    down, across = (dict(list(enumerate(look.labels(side)))[:: sizes.every]) for side in sides)
    axes.set_xticks(list(across), across.values(), rotation=90, fontsize=sizes.font)
    axes.set_yticks(list(down), down.values() if labelled else [""] * len(down), fontsize=sizes.font)
    axes.tick_params(length=0, pad=2)
    for name, title in (("xlabel", of_columns), *([("ylabel", of_rows)] * labelled)):
        text = title.replace("token", "word") if look.in_words else title
        getattr(axes, f"set_{name}")(text, fontsize=sizes.small, color="0.3", labelpad=4)
    return image
