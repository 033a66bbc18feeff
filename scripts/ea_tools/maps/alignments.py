"""Word alignments: those that people made, those that attention maps amount to, and how they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ea_tools.common import UserError
from ea_tools.text import read_lines

Link = tuple[int, int]  # source word, target word, counted from 0
Gold = tuple[set[Link], set[Link]]  # sure links; possible ones, which hold the sure ones too


def read_gold(path: Path) -> list[Gold]:
    """[(sure, possible), ...] of a file in Pharaoh format: sets of (source word, target word); possible holds sure too.

    Words count from 0; 1-2 is a sure link, 1?2 and 1p2 are possible ones.
    """
    return [_links(line, f"{path}:{number}") for number, line in enumerate(read_lines(path), 1)]


def _links(line: str, place: str) -> Gold:
    sure, possible = set(), set()
    for word in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", word)
        if not match:
            raise UserError(f"{place}: {word!r} is no link; a sure one is written 1-2, a possible one 1?2 or 1p2")
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return sure, possible


def check_range(gold: Gold, words: Sequence[int], place: str) -> None:
    """Refuse links to words that the sentence does not have; words: how many source and target words it has."""
    for link in sorted(gold[1]):
        for word, there, side in zip(link, words, ("source", "target"), strict=True):
            if word >= there:
                raise UserError(
                    f"{place}: the link between words {link[0]} and {link[1]} is out of range: the {side} sentence has "
                    f"{there} words, and they count from 0"
                )


def word_numbers(symbols: Sequence[str], bpe: str) -> np.ndarray:
    """The number of the word, from 0, that each subword belongs to."""
    if bpe == "sentencepiece":
        starts = [number == 0 or symbol.startswith("▁") for number, symbol in enumerate(symbols)]
    else:
        starts = [number == 0 or not symbols[number - 1].endswith("@@") for number in range(len(symbols))]
    return np.cumsum(starts, dtype=int) - 1


def hard_alignment(weights: np.ndarray, source_words: np.ndarray, target_words: np.ndarray) -> set[Link]:
    """{(source word, target word)}: for each target word the source word that gets most of its subwords' attention.

    Args:
        weights: subwords of the target x subwords of the source, without the ends of sentences.
        source_words, target_words: the word that each subword belongs to.
    """
    if not weights.size:
        return set()
    mass = np.zeros((target_words[-1] + 1, source_words[-1] + 1))
    np.add.at(mass, (target_words[:, None], source_words[None, :]), weights)
    return {(int(source), target) for target, source in enumerate(mass.argmax(axis=1))}


def alignment_errors(links: set[Link], sure: set[Link], possible: set[Link]) -> tuple[int, int]:
    """(errors, links) of a sentence; over a corpus, AER = the sum of errors / the sum of links."""
    count = len(links) + len(sure)
    return count - len(links & sure) - len(links & possible), count
