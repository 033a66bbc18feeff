"""Token labels for matplotlib: fonts that have their characters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

BASE = "DejaVu Sans"  # comes with matplotlib; has Latin, Greek, Cyrillic, Arabic, Hebrew and many symbols


def families(text: str) -> tuple[tuple[str, ...], set[str]]:
    """Font families that between them have every character of `text`, as far as the installed fonts do.

    Returns:
        the families, best first; the characters that no installed font has.
    """
    from matplotlib.font_manager import get_font

    names: list[str] = []
    missing = {letter for letter in text if letter.isprintable()}
    for name, path in _fonts():
        covered = {letter for letter in missing if get_font(path).get_char_index(ord(letter))}
        if covered or not names:
            names.append(name)
            missing -= covered
        if not missing:
            break
    return tuple(names), missing


def _fonts() -> Iterator[tuple[str, str]]:
    """Names and files of the installed fonts, the best first."""
    from matplotlib.font_manager import findSystemFonts, fontManager

    yield BASE, fontManager.findfont(BASE)
    # matplotlib keeps a list of the fonts there were when it first ran. Some may have come since, and some be gone.
    for path in sorted(set(findSystemFonts()) - {font.fname for font in fontManager.ttflist}):
        with contextlib.suppress(Exception):  # bitmap fonts, among them the coloured emoji, cannot be drawn
            fontManager.addfont(path)
    for font in sorted(fontManager.ttflist, key=lambda font: ("Sans" not in font.name, font.name, font.fname)):
        is_regular = font.style == "normal" and not (isinstance(font.weight, int) and abs(font.weight - 400) > 100)
        # matplotlib's own Last Resort has a box for every character.
        if is_regular and not font.name.startswith("Last Resort") and Path(font.fname).exists():
            yield font.name, font.fname
