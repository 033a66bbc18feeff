"""Word alignments: those that people made, those that attention maps amount to, and how they differ."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from ea_tools.common import UserError
from ea_tools.maps.words import merged
from ea_tools.text import read_lines

Link = tuple[int, int]  # source word, target word, counted from 0
Gold = tuple[set[Link], set[Link]]  # sure links; possible ones, which hold the sure ones too
#: A line of NAACL's format; a number at its end is the annotator's confidence, which is not used.
NAACL = re.compile(r"\s*(\d+)\s+(\d+)\s+(\d+)(?:\s+([SP]))?(?:\s+[\d.]+)?\s*")


def read_gold(path: Path, sentences: int, first: int | None = None) -> list[Gold | None]:
    """[(sure, possible), ...] of a file: sets of (source word, target word) from 0; possible holds the sure ones too.

    Pharaoh's format has a line for each sentence: 1-2 is a sure link, 1?2 and 1p2 are possible ones. NAACL's format has
    a line for each link: "sentence source-word target-word", and S (or nothing) or P behind it. It counts from 1; word
    0 stands for no counterpart. A sentence that no line names is None.

    Args:
        sentences: how many there are.
        first: the number of a sentence's first word; by default 0, and 1 in NAACL's format.

    Raises:
        UserError: a line that fits neither format, or words that seem to be counted otherwise.
    """
    lines = read_lines(path)
    if next((NAACL.fullmatch(line) for line in lines if line.strip()), None):
        return _naacl(path, lines, sentences, 1 if first is None else first)
    gold = [_links(line, f"{path}:{number}", first or 0) for number, line in enumerate(lines, 1)]
    links = [link for _, possible in gold for link in possible]
    if first is None and links and not any(0 in link for link in links):
        raise UserError(f"{path}: no link is of word 0, as if words counted from 1; give --gold-from 1, or 0 if not")
    return gold


def _naacl(path: Path, lines: Sequence[str], sentences: int, first: int) -> list[Gold | None]:
    gold: list[Gold | None] = [None] * sentences
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        place, match = f"{path}:{number}", NAACL.fullmatch(line)
        if not match:
            raise UserError(f'{place}: expected "sentence word word", and S or P behind it, found {line.strip()!r}')
        sentence = int(match[1])
        if not 1 <= sentence <= sentences:
            raise UserError(f"{place}: sentence {sentence} is out of range: there are {sentences:,}, counted from 1")
        sure, possible = gold[sentence - 1] = gold[sentence - 1] or (set(), set())
        if first == 1 and 0 in (int(match[2]), int(match[3])):
            continue
        link = _link(match[2], match[3], place, first)
        possible.add(link)
        if match[4] != "P":
            sure.add(link)
    return gold


def _links(line: str, place: str, first: int) -> Gold:
    sure, possible = set(), set()
    for word in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", word)
        if not match:
            raise UserError(f"{place}: {word!r} is no link; a sure one is written 1-2, a possible one 1?2 or 1p2")
        link = _link(match[1], match[3], place, first)
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return sure, possible


def _link(source: str, target: str, place: str, first: int) -> Link:
    """Source and target word from 0, of two numbers as they are written."""
    link = int(source) - first, int(target) - first
    if min(link) < 0:
        raise UserError(f"{place}: the link between words {source} and {target}: expected words from {first} on")
    return link


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
