"""From maps of subwords to maps of words, and attention rollout.

Axes: K heads, T target (query) length, S source (key) length.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Words:
    """The words that the tokens of a sentence belong to."""

    numbers: np.ndarray  # of the word of each token, from 0 and in order
    labels: list[str]  # of the words

    def read(self, first: str) -> Words:
        """The words of a decoder's input: the token `first`, then all but the last token of this sentence."""
        numbers = np.concatenate([[0], self.numbers[:-1] + 1])
        return Words(numbers, [first, *self.labels][: numbers[-1] + 1])


def starts(symbols: Sequence[str], bpe: str) -> list[bool]:
    """Whether a word begins with each subword of a sentence.

    SentencePiece marks the space before a word by ▁, subword-nmt marks every subword but the last of a word by @@.
    """
    if bpe == "sentencepiece":
        return [symbol.startswith("▁") for symbol in symbols]
    return [not before.endswith("@@") for before in ("", *symbols)][: len(symbols)]


def join(symbols: Sequence[str], bpe: str) -> str:
    """The word that consecutive subwords make."""
    if bpe == "sentencepiece":
        return "".join(symbols).removeprefix("▁") or "▁"
    return "".join(symbol.removesuffix("@@") for symbol in symbols)


def words_of(symbols: Sequence[str], known: Sequence[bool], starts: Sequence[bool], bpe: str) -> Words:
    """The words of a sentence.

    Args:
        symbols: its subwords.
        known: of each whether the model knows it; a word with an unknown one stands in ⟨⟩.
        starts: of each whether a word begins with it; the first always does.
        bpe: the kind of subwords, as PREP.json names it.
    """
    begins = [number for number, start in enumerate(starts) if start or not number]
    spans = [slice(*span) for span in itertools.pairwise([*begins, len(symbols)])]
    words = [join(symbols[span], bpe) for span in spans]
    labels = [word if all(known[span]) else f"⟨{word}⟩" for word, span in zip(words, spans, strict=True)]
    return Words(np.repeat(np.arange(len(spans)), [span.stop - span.start for span in spans]), labels)


def merged(maps: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Maps of tokens as maps of words, K x T x S to K x words x words, as Clark et al. (2019, section 4) have it.

    Attention to a word is the sum of the attention to its tokens; attention from a word is the mean over its tokens. So
    rows still add up to 1.

    Args:
        maps: NaN where a pixel is no part of the map. A pixel of the result is NaN where all of its pixels are.
        rows, columns: the number of each row's and column's word, from 0 and in order.
    """
    seen = ~np.isnan(maps)
    across = _sums(np.where(seen, maps, 0.0), columns, axis=2)
    whole = _sums(across, rows, axis=1) / np.bincount(rows)[:, None]
    visible = _sums(_sums(seen.astype(int), columns, axis=2), rows, axis=1) > 0
    return np.where(visible, whole, np.nan)


def _sums(maps: np.ndarray, words: np.ndarray, axis: int) -> np.ndarray:
    """Sums over the tokens of each word along an axis."""
    return np.add.reduceat(maps, np.flatnonzero(np.diff(words, prepend=-1)), axis=axis)


def rollout(layers: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Attention rollout (Abnar and Zuidema 2020): how much of each first token is in each place after layer 1, 2, ...

    Each layer's map is the mean over heads, mixed half and half with the identity for the residual connection. The maps
    of a layer and of all layers before it are multiplied.

    Args:
        layers: the self-attention of every layer, K x T x T each, 0 where a pixel is no part of the map.

    Returns:
        T x T for each layer; rows are places after that layer, columns the tokens that went into the first.
    """
    results: list[np.ndarray] = []
    for maps in layers:
        mixed = 0.5 * maps.mean(axis=0) + 0.5 * np.eye(maps.shape[1])
        results.append(mixed @ results[-1] if results else mixed)
    return results
