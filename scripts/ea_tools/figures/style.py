"""The look of every figure, and its saving. matplotlib is imported when a figure is made, not by planning one."""

from __future__ import annotations

import argparse
import io
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq has every library tell all that it does

#: Okabe and Ito's colours, which colour-blind people can tell apart. Lines and markers tell them apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^")
MAP_COLOURS = "viridis"  # of attention maps: its steps look equal to colour-blind readers too, and in grey print

#: What a figure can be saved as.
SUFFIXES = (".png", ".svg", ".pdf")
DOTS = 150  # of a .png, to the inch


def output(suffixes: tuple[str, ...]) -> Callable[[str], Path]:
    """An argparse type: the name of a file that ends in one of `suffixes`, and is no folder."""

    def parse(text: str) -> Path:
        if Path(text).suffix.lower() not in suffixes:
            raise argparse.ArgumentTypeError(f"{text}: the name must end in {', '.join(suffixes)}")
        if Path(text).is_dir():
            raise argparse.ArgumentTypeError(f"{text}: is a folder; give the name of a file")
        return Path(text)

    return parse


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, numpy.ndarray]:
    """An empty figure, and its panels as rows x columns.

    Args:
        size: width and height in inches.
        options: of matplotlib's Figure.subplots.
    """
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["text.parse_math"] = False  # names and sentences may have dollars in them
    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


def save(figure: Figure, target: Path | io.BytesIO, form: str, dots: int = DOTS) -> None:
    """Write a figure as "png", "svg" or "pdf": the same figure gives the same bytes whenever it is saved.

    Args:
        dots: of a .png, to the inch.
    """
    import matplotlib

    options: dict[str, dict[str, Any]] = {
        "svg": {"metadata": {"Date": None}},
        "pdf": {"metadata": {"CreationDate": None}},
        "png": {"pil_kwargs": {"optimize": True}},
    }
    with matplotlib.rc_context({"svg.hashsalt": "ea_fairseq"}):
        figure.savefig(target, dpi=dots, format=form, **options.get(form, {}))
