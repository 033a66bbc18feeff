"""Sentences that a split shares with the training text, and training pairs that occur twice.

Sentences are compared by digests of 8 bytes. One digest is kept for each pair of the training text.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable

import numpy as np

from .corpora import Rules
from .parallel import Chunk
from .rules import faults

HELD_OUT = "in a held-out split"
Digests = tuple[frozenset[bytes], ...]  # of sources, of targets, of pairs


def digests(chunk: Chunk) -> list[tuple[bytes, bytes, bytes]]:
    """Digests of each pair's source, its target and both."""
    rows = zip(*chunk, strict=True)
    return [(_digest(source), _digest(target), _digest(source, target)) for source, target in rows]


def _digest(*lines: bytes) -> bytes:
    return hashlib.blake2b(b"\n".join(line.strip() for line in lines), digest_size=8).digest()


def held_out(rows: Iterable[tuple[bytes, bytes, bytes]]) -> Digests:
    """The sentences of one or more splits."""
    return tuple(map(frozenset, list(zip(*rows, strict=True)) or [(), (), ()]))


def measure(held_out: Digests, chunk: Chunk) -> tuple[tuple[Counter[str], ...], Digests, np.ndarray]:
    """Each side's subwords, the held-out sources, targets and pairs in this training text, a digest of each pair."""
    subwords = tuple(Counter(b"".join(lines).decode().split()) for lines in chunk)
    sides = list(zip(*digests(chunk), strict=True))
    pairs = np.frombuffer(b"".join(sides[2]), np.uint64)
    return subwords, tuple(known.intersection(side) for known, side in zip(held_out, sides, strict=True)), pairs


def faults_and_leaks(rules: Rules, held_out: Digests, chunk: Chunk) -> list[str | None]:
    """As `faults`; a training pair is dropped too where its source or its target is a sentence of a held-out split."""
    sources, targets, _ = held_out
    leaks = [source in sources or target in targets for source, target, _ in digests(chunk)]
    return [fault or (HELD_OUT if leak else None) for fault, leak in zip(faults(rules, chunk), leaks, strict=True)]


def count(rows: list[tuple[bytes, bytes, bytes]], seen: tuple[set[bytes], ...]) -> dict[str, int]:
    """The number of pairs of a split whose source, target or both were seen in the training text."""
    sides = ("source", "target", "both")
    return {side: sum(row[at] in seen[at] for row in rows) for at, side in enumerate(sides)}


def duplicates(pairs: list[np.ndarray]) -> int:
    """The number of training pairs that repeat another."""
    digests_of_all = np.concatenate(pairs)
    return len(digests_of_all) - len(np.unique(digests_of_all))
