"""Token labels for matplotlib, which neither joins Arabic letters nor writes from right to left.

A label is one token, so a few rules do: one direction per label, letters joined by Unicode's presentation forms.
Browsers need none of this.
"""

from __future__ import annotations

import contextlib
import functools
import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # imported where it is used: it takes half a second
    from matplotlib.font_manager import FontEntry

BASE = "DejaVu Sans"  # comes with matplotlib; has Latin, Greek, Cyrillic, Arabic, Hebrew and many symbols
_RIGHT_TO_LEFT = {"R", "AL"}
_CLASSES = {"L": "l", "EN": "l", "AN": "l", "CS": "s", "ES": "s"}  # letters and digits, what stands between digits
_MIRRORED = str.maketrans("()[]{}<>«»⟨⟩", ")(][}{><»«⟩⟨")


def visual(label: str) -> str:
    """A label's characters in the form and order in which matplotlib must set them, from left to right."""
    if not any(unicodedata.bidirectional(character) in _RIGHT_TO_LEFT for character in label):
        return label
    turned = _join(_letters(label))[::-1]
    classes = "".join(_CLASSES.get(unicodedata.bidirectional(letter[0]), "-") for letter in turned)
    # Fonts set a mark over the Hebrew or Arabic letter that stands to its right, where the mark comes first.
    turned = [letter if kind == "l" else letter[::-1] for letter, kind in zip(turned, classes, strict=True)]
    # Parts that run from left to right all the same: numbers, with the points and colons in them, and foreign letters.
    for run in re.finditer("l+(?:sl+)*", classes):
        turned[slice(*run.span())] = reversed(turned[slice(*run.span())])
    return "".join(turned).translate(_MIRRORED)


def _letters(text: str) -> list[str]:
    """The letters of a text, each with the marks that stand above or below it; lam with alef is one letter."""
    letters = []
    for character in text:
        if letters and (unicodedata.combining(character) or (letters[-1] == "ل" and character in "آأإا")):
            letters[-1] += character
        else:
            letters.append(character)
    return letters


@functools.cache
def _forms() -> dict[str, dict[str, str]]:
    """{letters: {"isolated" | "final" | "initial" | "medial": character}}, from Unicode's presentation forms."""
    forms = {}
    for block in (range(0xFE70, 0xFEFD), range(0xFB50, 0xFBB2), range(0xFBD3, 0xFC00)):
        for character in map(chr, block):
            kind, *codes = unicodedata.decomposition(character).split() or [""]
            letters = "".join(chr(int(code, 16)) for code in codes)
            forms.setdefault(letters, {})[kind.strip("<>")] = character
    return forms


def _join(letters: Sequence[str]) -> list[str]:
    """Arabic letters in the form that their neighbours ask for, in logical order; other characters as they are."""
    forms = _forms()
    bases = [letter if letter in forms else letter[0] for letter in letters]
    out, joins_next = [], False
    for letter, base, following in zip(letters, bases, [*bases[1:], ""], strict=True):
        own = forms.get(base, {})
        before = joins_next and "final" in own
        joins_next = "initial" in own and "final" in forms.get(following, {})
        kind = ("medial" if joins_next else "final") if before else ("initial" if joins_next else "isolated")
        out.append(own.get(kind, base) + letter[len(base) :])
    return out


def families(text: str) -> tuple[tuple[str, ...], set[str]]:
    """Font families that between them have every character of `text`, as far as the installed fonts do.

    Returns:
        the families, best first; the characters that no installed font has.
    """
    from matplotlib.font_manager import fontManager

    names, missing = [BASE], _missing(fontManager.findfont(BASE), {letter for letter in text if letter.isprintable()})
    if missing:
        _notice_new_fonts()
    regular = (font for font in fontManager.ttflist if font.style == "normal" and 300 <= _weight(font) <= 500)
    for font in sorted(regular, key=lambda font: ("Sans" not in font.name, font.name, font.fname)):
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


@functools.cache
def width(text: str, names: tuple[str, ...], size: float) -> float:
    """The width of a text in these font families, in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    properties = FontProperties(family=list(names), size=size)
    return text_to_path.get_text_width_height_descent(text, properties, ismath=False)[0] / 72
