"""Token labels for matplotlib: fonts that have their characters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where it is used: it takes half a second
    from matplotlib.font_manager import FontEntry

BASE = "DejaVu Sans"  # comes with matplotlib; has Latin, Greek, Cyrillic, Arabic, Hebrew and many symbols


def families(text: str) -> tuple[tuple[str, ...], set[str]]:
    """Font families that between them have every character of `text`, as far as the installed fonts do.

    Returns:
        the families, best first; the characters that no installed font has.
    """
    from matplotlib.font_manager import fontManager

    names, missing = [BASE], _missing(fontManager.findfont(BASE), {letter for letter in text if letter.isprintable()})
    if missing:
        _notice_new_fonts()
    # matplotlib's own Last Resort has a box for every character. Its list of fonts may name some that are gone.
    fonts = (font for font in fontManager.ttflist if not font.name.startswith("Last Resort"))
    regular = (font for font in fonts if font.style == "normal" and 300 <= _weight(font) <= 500)
    there = (font for font in regular if Path(font.fname).exists())
    for font in sorted(there, key=lambda font: ("Sans" not in font.name, font.name, font.fname)):
        if not missing:
            break
        left = _missing(font.fname, missing)
        if len(left) < len(missing):
            names.append(font.name)
            missing = left
    return tuple(names), missing


def _notice_new_fonts() -> None:
    """matplotlib keeps a list of the fonts there were when it first ran: add those that came since."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    for path in sorted(set(findSystemFonts()) - {font.fname for font in fontManager.ttflist}):
        with contextlib.suppress(Exception):  # bitmap fonts, among them the coloured emoji, cannot be drawn
            fontManager.addfont(path)


def _weight(font: FontEntry) -> int:
    return font.weight if isinstance(font.weight, int) else 400


def _missing(path: str, characters: Iterable[str]) -> set[str]:
    """Those of the characters that a font file does not have."""
    from matplotlib.font_manager import get_font

    font = get_font(path)
    return {character for character in characters if not font.get_char_index(ord(character))}
