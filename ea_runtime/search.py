"""Beam search as fairseq's: the same hypotheses in the same order, with the same scores.

Axes: N sentences, b beams, R = N x b hypotheses, V words. Positions count from 0.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

#: The widest search: each hypothesis holds caches of megabytes.
MOST_BEAM = 500
#: (tokens N x b, step, order R, kept sentences or None, bias V, top, forced R)
#: -> log-probabilities and words, R x top, best first
Step = Callable[..., tuple[NDArray, NDArray]]


def check_whole(name: str, value: object, least: int = 1, most: int = 1_000_000) -> None:
    """Raise ValueError unless the value is a whole number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not least <= value <= most:
        raise ValueError(f"{name}: must be a whole number from {least} to {most}, not {reprlib.repr(value)}")


def check_number(name: str, value: object, least: float, most: float) -> None:
    """Raise ValueError unless the value is a number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number) or not least <= value <= most:
        raise ValueError(f"{name}: must be a number from {least} to {most}, not {reprlib.repr(value)}")


def check_n_best(n_best: object, beam: int) -> None:
    """Raise ValueError unless a beam of this size gives so many."""
    check_whole("n_best (at most the beam)", n_best, most=beam)


@dataclass(frozen=True)
class Settings:
    """Settings of the search, by fairseq-generate's names and with its defaults.

    Raises:
        ValueError: a value that no search can have, by name.
    """

    beam: int = 5
    lenpen: float = 1.0
    unkpen: float = 0.0
    max_len_a: float = 0.0
    max_len_b: int = 200
    min_len: int = 1
    unnormalized: bool = False

    def __post_init__(self) -> None:
        # beyond these, sums, or powers of long lengths, overflow, or memory ends
        for name, least, most in (("beam", 1, MOST_BEAM), ("max_len_b", 0, 1_000_000), ("min_len", 1, 1_000_000)):
            check_whole(name, getattr(self, name), least, most)
        for name, most in (("lenpen", 10), ("unkpen", 1_000_000), ("max_len_a", 1000)):
            check_number(name, getattr(self, name), -most, most)
        if not isinstance(self.unnormalized, bool):
            raise ValueError(f"unnormalized: must be True or False, not {reprlib.repr(self.unnormalized)}")

    def normalised(self, score: float, length: int) -> float:
        """A hypothesis' sum of log-probabilities over its length, the end counted, to the length penalty."""
        return score if self.unnormalized else score / length**self.lenpen


class Limits(Protocol):
    """The settings of every search, by fairseq's names."""

    @property
    def beam(self) -> int: ...
    @property
    def max_len_a(self) -> float: ...
    @property
    def max_len_b(self) -> int: ...


def max_len(settings: Limits, source_length: int, longest: int) -> int:
    """The most tokens of a translation, its end not counted; source_length counts the end of the sentence.

    Args:
        longest: the most tokens that the model writes, the end counted.
    """
    return min(int(settings.max_len_a * source_length + settings.max_len_b), longest - 1)


@dataclass(frozen=True)
class Hypothesis:
    """A finished translation."""

    tokens: tuple[int, ...]  # without the end of the sentence
    score: float


def search(
    step: Step,
    sentences: int,
    max_len: int,
    settings: Settings,
    *,
    words: int,
    eos: int,
    pad: int,
    unk: int,
    prefixes: Sequence[Sequence[int]] | None = None,
) -> list[list[Hypothesis]]:
    """The best hypotheses of each of N sentences, best first.

    Args:
        step: the model; see ``Step``.
        sentences: N.
        max_len: see the function.
        settings: of the search.
        words: V.
        eos, pad, unk: token ids.
        prefixes: tokens that each translation begins with.
    """
    beams = min(settings.beam, words - 1)
    if settings.min_len > max_len:
        raise ValueError(f"min_len {settings.min_len} is above the longest translation, {max_len}")
    bias = np.zeros(words, np.float32)
    bias[pad], bias[unk] = -np.inf, -settings.unkpen
    begins, ends = bias.copy(), np.full(words, -np.inf, np.float32)
    begins[eos], ends[eos] = -np.inf, bias[eos]
    top = min(2 * beams, words)
    finished: list[list[Hypothesis]] = [[] for _ in range(sentences)]
    running = np.arange(sentences)  # the numbers of the sentences in the batch
    tokens = np.full((sentences, beams, 1), eos)  # N x b x (steps + 1)
    scores = np.zeros((sentences, beams), np.float32)
    ignored = np.zeros((sentences, beams), bool)  # hypotheses that ended, but still hold their place
    order, kept = np.arange(sentences * beams), None
    for position in range(max_len + 1):
        forced = _forced(prefixes, running, position, beams, max_len)
        added = ends if position >= max_len else begins if position < settings.min_len else bias
        if position < settings.min_len and (forced >= 0).any():
            added = bias  # a prefix may be the end alone, as of an empty line that a language model scores
        best, next_words = step(tokens[:, :, -1], position, order, kept, added, top, forced)
        best, next_words = (x.reshape(len(running), beams, top) for x in (best, next_words))
        if position == 0:  # all beams are the same then
            best, next_words = best[:, :1], next_words[:, :1]
        else:
            best = best + scores[:, :, None]
        limit = min(2 * beams, best.shape[1] * words - 1)  # one fewer than all candidates: none is padding
        totals, place = _best_of(best.reshape(len(running), -1), limit)  # N x 2b
        parent, word = place // top, _at(next_words.reshape(len(running), -1), place)

        ended = (word == eos) & (totals != -np.inf)
        ended[:, :beams] &= ~ignored
        kept = None
        if ended[:, :beams].any():
            for row, column in np.argwhere(ended[:, :beams]):
                if len(hypotheses := finished[running[row]]) < beams:
                    score = settings.normalised(float(totals[row, column]), position + 1)
                    hypotheses.append(Hypothesis(tuple(tokens[row, parent[row, column], 1:].tolist()), score))
            complete = ended[:, :beams].any(axis=1) & [len(finished[n]) == beams for n in running]
            if complete.all():
                break
            if complete.any():
                kept = np.flatnonzero(~complete)
                running, tokens, ignored = running[kept], tokens[kept], ignored[kept]
                totals, parent, word, ended = totals[kept], parent[kept], word[kept], ended[kept]
        if position == max_len:
            break
        # The first candidates that go on; where there are too few, those that ended hold a place and are ignored.
        ended[:, :beams] |= ignored
        rank = ended * limit + np.arange(limit)
        going_on = np.argsort(rank, axis=1, kind="stable")[:, :beams]
        ignored = _at(rank, going_on) >= limit
        parent, word, scores = (_at(x, going_on) for x in (parent, word, totals))
        tokens = np.concatenate([_at(tokens, parent), word[:, :, None]], axis=2)
        first = np.arange(len(running)) if kept is None else kept
        order = (first[:, None] * beams + parent).reshape(-1)
    return [sorted(hypotheses, key=lambda one: -one.score) for hypotheses in finished]


def _forced(
    prefixes: Sequence[Sequence[int]] | None, running: NDArray, position: int, beams: int, max_len: int
) -> NDArray:
    """R: the prefix's token at this position, or -1."""
    if prefixes is None or position >= max_len:
        return np.full(len(running) * beams, -1)
    tokens = [prefixes[n][position] if position < len(prefixes[n]) else -1 for n in running]
    return np.repeat(np.array(tokens), beams)


def _at(x: NDArray, places: NDArray) -> NDArray:
    """The values at these places of each row: np.take_along_axis, of which a step has many, in a fifth of its time."""
    return x[np.arange(len(x))[:, None], places]


def _best_of(candidates: NDArray, count: int) -> tuple[NDArray, NDArray]:
    """The best of each row, best first, and their places."""
    place = np.argsort(-candidates, axis=1, kind="stable")[:, :count]
    return _at(candidates, place), place
