"""Attention maps as numbers: measures of a layer's maps, and means over sentences with their intervals.

docs/attention.md has the formulas. Maps are numpy arrays, B x K x T x S, in float64; `visible`, B x 1 x T x S, is
the mask's opposite. Axes: B batch, K heads, T target (query) length, S source (key) length.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypedDict

import numpy as np

if TYPE_CHECKING:  # imported where a model is loaded
    from torch import Tensor

    from ea_tools.maps.collect import LayerMaps

Place = tuple[str, str, int]  # statistic, kind of attention, layer
Sums = np.ndarray  # 2 x sentences: for each sentence the sum over heads and rows, and how many were summed

#: Names of the logits' summands in LayerMaps -> their names in the statistics.
PARTS = {"logits": "own", "previous": "skip", "convolution": "convolution"}
RESAMPLES = 1000


def entropy(weights: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """-sum_j A_ij ln A_ij over the visible keys, in nats: B x K x T."""
    return -_times_log(np.where(visible, weights, 0.0)).sum(axis=3)


def similarity(one: np.ndarray, other: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """1 - the Jensen-Shannon divergence in bits of two maps' rows, from 0 (nothing shared) to 1 (equal): B x K x T."""
    one, other = np.where(visible, one, 0.0), np.where(visible, other, 0.0)
    divergence = (_times_log(one) + _times_log(other)).sum(axis=3) / 2 - _times_log((one + other) / 2).sum(axis=3)
    return 1 - divergence / np.log(2)


def _times_log(p: np.ndarray) -> np.ndarray:
    """p ln p, 0 for p = 0."""
    return p * np.log(np.where(p > 0, p, 1.0))


def shares(parts: Mapping[str, np.ndarray], visible: np.ndarray) -> dict[str, np.ndarray]:
    """Each part's share of the logits' variation along a row, part -> B x K x T; NaN in a row where nothing varies.

    The softmax does not see a summand that all keys of a row share. So a part's size is its standard deviation over the
    row's visible keys, and its share that size over the sum of the sizes.
    """
    sizes = {name: spread(part, visible) for name, part in parts.items()}
    total = sum(sizes.values())
    total = np.where(total > 0, total, np.nan)
    return {name: size / total for name, size in sizes.items()}


def spread(part: np.ndarray, visible: np.ndarray) -> np.ndarray:
    """Standard deviation over the visible keys of each row: B x K x T; 0 where there are none."""
    keys = np.maximum(visible.sum(axis=3), 1)
    mean = np.where(visible, part, 0.0).sum(axis=3) / keys
    return np.sqrt((np.where(visible, part - mean[..., None], 0.0) ** 2).sum(axis=3) / keys)


def statistics_of(maps: LayerMaps, before: LayerMaps | None) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(statistic, sums, counts) of one layer, two arrays over the sentences of the batch; their quotient is the mean.

    Over heads and rows. A row that sees fewer than two keys has nothing to divide its attention between, and is left
    out of everything: padding, and the decoder's first.

    Args:
        before: the same kind's map in the layer before; None in the first.
    """
    weights, visible = _numpy(maps.weights), ~maps.masked.numpy()
    keys = visible.sum(axis=3)  # B x 1 x T
    rows = keys > 1
    own_entropy = entropy(weights, visible)
    statistics = {"entropy": own_entropy, "normalised": own_entropy / np.log(np.maximum(keys, 2))}
    if before is not None:
        earlier = _numpy(before.weights)
        statistics["same_head"] = similarity(weights, earlier, visible)
        statistics["head_mean"] = similarity(
            weights.mean(axis=1, keepdims=True), earlier.mean(axis=1, keepdims=True), visible
        )
    if len(maps.parts) > 1:
        parts = {PARTS[name]: part.share * _numpy(part.map) for name, part in maps.parts.items()}
        statistics |= shares(parts, visible)
    for name, values in statistics.items():
        counted = rows & ~np.isnan(values)
        yield name, np.where(counted, values, 0.0).sum(axis=(1, 2)), counted.sum(axis=(1, 2))


def _numpy(x: Tensor) -> np.ndarray:
    return x.double().numpy()


class Estimate(TypedDict):
    """A mean over the rows of all sentences, and its 95% interval by bootstrap over sentences."""

    mean: float
    low: float
    high: float


@functools.cache
def resamples(sentences: int) -> np.ndarray:
    """The count of each sentence in RESAMPLES samples with replacement, RESAMPLES x sentences; always the same."""
    return np.random.default_rng(1).multinomial(sentences, np.full(sentences, 1 / sentences), size=RESAMPLES)


def estimate(one: Sums, other: Sums | None = None) -> Estimate:
    """The mean of one statistic, or its difference from another's on the same samples of sentences."""
    times = np.vstack([np.ones(len(one[0])), resamples(len(one[0]))])
    with np.errstate(invalid="ignore"):  # a sample may hold no sentence that counts
        mean, *values = _quotient(times, one) - (0 if other is None else _quotient(times, other))
    low, high = np.nanpercentile(values, [2.5, 97.5])
    return {"mean": float(mean), "low": float(low), "high": float(high)}


def _quotient(times: np.ndarray, statistic: Sums) -> np.ndarray:
    sums, counts = statistic
    return (times @ sums) / (times @ counts)
