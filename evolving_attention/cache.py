"""The state of an attention between two steps of decoding.

Axes: B batch, which counts hypotheses during beam search, K heads, D head size, S positions so far.
Masks: True = masked.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


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
        if self.keys is None or self.values is None:
            return replace(self, keys=keys, values=values, padding=padding)
        if padding is not None or self.padding is not None:
            padding = torch.cat([_whole(self.padding, self.keys), _whole(padding, keys)], dim=1)
        keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        return replace(self, keys=keys, values=values, padding=padding)

    def reorder(self, order: Tensor) -> Cache:
        """Row b continues row order[b], as beam search requires."""
        return Cache(*(None if x is None else x.index_select(0, order) for x in vars(self).values()))


def _whole(padding: Tensor | None, keys: Tensor) -> Tensor:
    """The padding of keys, B x S, where None stands for no padding."""
    if padding is not None:
        return padding
    return torch.zeros(keys.size(0), keys.size(2), dtype=torch.bool, device=keys.device)
