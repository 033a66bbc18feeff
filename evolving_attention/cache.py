"""The state of an attention between two steps of decoding.

Axes: B batch, which counts hypotheses during beam search, K heads, D head size, S positions so far.
Masks: True = masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .masks import append_padding


@dataclass(frozen=True)
class Cache:
    """Keys, values, padding, and the last rows of the map that the convolution read.

    A cache never changes, so that copies of it may be continued in several ways, by several threads: every method
    returns another one. Start with ``Cache()``.
    """

    keys: Tensor | None = None  # B x K x S x D
    values: Tensor | None = None  # B x K x S x D
    padding: Tensor | None = None  # B x S; None: nothing is padded
    rows: Tensor | None = None  # B x K x (kernel size - 1) x S; None: no steps yet, or no convolution

    def append(self, keys: Tensor, values: Tensor, padding: Tensor | None = None) -> Cache:
        """With the keys and values of new positions, B x K x T x D, and their padding, B x T or None."""
        padding = None if padding is None else padding.bool()
        if self.keys is None:
            return replace(self, keys=keys, values=values, padding=padding)
        return replace(
            self,
            keys=_joined(self.keys, keys),
            values=_joined(self.values, values),
            padding=append_padding(self.padding, padding, self.keys, keys.size(2)),
        )

    def reorder(self, order: Tensor) -> Cache:
        """Row b continues row order[b], as beam search requires."""
        return Cache(*(None if x is None else x.index_select(0, order) for x in vars(self).values()))


def _joined(before: Tensor, new: Tensor) -> Tensor:
    """B x K x S x D each, in memory B x S x K x D, where a position's heads are copied in one piece."""
    return torch.cat([before.transpose(1, 2), new.transpose(1, 2)], dim=1).transpose(1, 2)
