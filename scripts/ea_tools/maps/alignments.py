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


def read_gold(path: Path, sentences: int, first: int | None = None, target_first: bool = False) -> list[Gold | None]:
    """[(sure, possible), ...] of a file: sets of (source word, target word) from 0; possible holds the sure ones too.

    Two formats are known. Pharaoh's has a line for each sentence: 1-2 is a sure link, 1?2 and 1p2 are possible ones.
    NAACL's has a line for each link: "sentence source-word target-word", and S (or nothing) or P behind it, all counted
    from 1; word 0 is no word, but what stands for having no counterpart. A sentence that no line names is None.

    Args:
        sentences: how many there are.
        first: the number of a sentence's first word; by default 0, and 1 in NAACL's format.
        target_first: in the links the target word is written first.

    Raises:
        UserError: a line that fits neither format, or words that seem to be counted otherwise.
    """
    lines = read_lines(path)
    if next((_is_naacl(line) for line in lines if line.strip()), False):
        return _naacl(path, lines, sentences, 1 if first is None else first, target_first)
    gold = [_links(line, f"{path}:{number}", first or 0, target_first) for number, line in enumerate(lines, 1)]
    links = [link for _, possible in gold for link in possible]
    if first is None and links and not any(0 in link for link in links):
        raise UserError(
            f"{path}: no link is of word 0, so it seems that words are counted from 1; say --gold-from 1, or 0 if not"
        )
    return gold


def _is_naacl(line: str) -> bool:
    return re.fullmatch(r"[0-9]+( +[0-9]+){2}( .*)?", line.strip().replace("\t", " ")) is not None


def _naacl(path: Path, lines: Sequence[str], sentences: int, first: int, target_first: bool) -> list[Gold | None]:
    gold: list[Gold | None] = [None] * sentences
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        place = f"{path}:{number}"
        # A fourth or fifth column may be the annotator's confidence, which is not used.
        kinds = [word for word in words[3:] if word in ("S", "P")]
        if not _is_naacl(line) or len(words) > 5 or len(kinds) != min(1, len(words[3:])):
            raise UserError(
                f'{place}: {line.strip()!r} is no link; wanted is "sentence word word", and S or P behind it'
            )
        sentence = int(words[0])
        if not 1 <= sentence <= sentences:
            raise UserError(f"{place}: sentence {sentence} is out of range: there are {sentences:,}, counted from 1")
        sure, possible = gold[sentence - 1] or (set(), set())
        gold[sentence - 1] = sure, possible
        if first == 1 and 0 in map(int, words[1:3]):
            continue
        link = _link(words[1], words[2], place, first, target_first)
        possible.add(link)
        if kinds != ["P"]:
            sure.add(link)
    return gold


def _links(line: str, place: str, first: int, target_first: bool) -> Gold:
    sure, possible = set(), set()
    for word in line.split():
        match = re.fullmatch(r"([0-9]+)([-?p])([0-9]+)", word)
        if not match:
            raise UserError(f"{place}: {word!r} is no link; a sure one is written 1-2, a possible one 1?2 or 1p2")
        link = _link(match[1], match[3], place, first, target_first)
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return sure, possible


def _link(one: str, other: str, place: str, first: int, target_first: bool) -> Link:
    """Source and target word from 0, of two numbers as they are written."""
    link = int(one) - first, int(other) - first
    if min(link) < 0:
        raise UserError(f"{place}: the link between words {one} and {other}: words are said to count from {first}")
    return link[::-1] if target_first else link


def check_range(gold: Gold, words: Sequence[int], place: str) -> None:
    """Refuse links to words that the sentence does not have; words: how many source and target words it has."""
    for link in sorted(gold[1]):
        for word, there, side in zip(link, words, ("source", "target"), strict=True):
            if word >= there:
                raise UserError(
                    f"{place}: the link between words {link[0]} and {link[1]}, counted from 0, is out of range: the "
                    f"{side} sentence has {there} words. Is the file of these sentences, in the same tokens, source "
                    "word first (else --gold-target-first), counted from where --gold-from says?"
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
