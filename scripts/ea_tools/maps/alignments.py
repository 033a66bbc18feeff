"""Word alignments: those that people made, those that attention maps amount to, and how they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ea_artifacts.command import UserError
from ea_artifacts.files import read_lines
from ea_tools.maps.words import merged

Link = tuple[int, int]  # source word, target word, counted from 0
Gold = tuple[set[Link], set[Link]]  # sure links; possible ones, which hold the sure ones too


def read_gold(path: Path, first: int | None = None) -> list[Gold]:
    """[(sure, possible), ...] of a file in Pharaoh's format: sets of (source word, target word) from 0.

    A line for each sentence: 1-2 is a sure link, 1?2 and 1p2 are possible ones. Sure links are possible, too.

    Args:
        first: the number of a sentence's first word (default: 0).

    Raises:
        UserError: a line of another format, or words that seem to be counted otherwise.
    """
    gold = [_links(line, f"{path}:{number}", first or 0) for number, line in enumerate(read_lines(path), 1)]
    links = [link for _, possible in gold for link in possible]
    if first is None and links and not any(0 in link for link in links):
        raise UserError(f"{path}: no link is of word 0, as if words counted from 1; give --gold-from 1, or 0 if not")
    return gold


def _links(line: str, place: str, first: int) -> Gold:
    sure, possible = set(), set()
    for word in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", word)
        if not match:
            raise UserError(f"{place}: {word!r} is no link; a sure one is written 1-2, a possible one 1?2 or 1p2")
        link = int(match[1]) - first, int(match[3]) - first
        if min(link) < 0:
            raise UserError(f"{place}: the link {word}: expected words from {first} on")
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
                    f"{place}: the link between words {link[0]} and {link[1]}, counted from 0, is out of range: the "
                    f"{side} sentence has {there} words. Expected the same tokens, the source word first, and words "
                    "that count from --gold-from"
                )


def hard_alignment(weights: np.ndarray, source_words: np.ndarray, target_words: np.ndarray) -> set[Link]:
    """{(source word, target word)}: for each target word the source word that gets most of its subwords' attention.

    Args:
        weights: subwords of the target x subwords of the source, without the ends of sentences.
        source_words, target_words: the number of the word that each subword belongs to, from 0 and in order.
    """
    if not weights.size:
        return set()
    by_word = merged(weights[None], target_words, source_words)[0]
    return {(int(source), target) for target, source in enumerate(by_word.argmax(axis=1))}


def alignment_errors(links: set[Link], sure: set[Link], possible: set[Link]) -> tuple[int, int]:
    """(errors, links) of a sentence; over a corpus, AER = the sum of errors / the sum of links."""
    count = len(links) + len(sure)
    return count - len(links & sure) - len(links & possible), count
