"""Step-by-step decoding on the CPU by ``kernel.c``: an attention with its projections, prepared once for a search.

Axes: B hypotheses, C channels, K heads, D = C / K, S key length. Masks: True = masked.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache import Cache
from ..call import PLAIN, Call
from ..operation import inputs_of
from . import library
from .structures import Problem, address, mask, vectors

#: a linear layer's weight and bias
Projection = tuple[Tensor, Tensor | None]


class Steps:
    """The steps of a search after its first, of one attention with its projections: only their input changes.

    The rest is checked once, so a model must not change while a state of a search lives, which keeps this.

    Args:
        call: the first step.
        inner: the projections of each step's input: queries', and keys' and values' where these grow.
        outer: the context's projection.
    """

    def __init__(self, call: Call, inner: list[Projection], outer: Projection):
        inputs = inputs_of(call)
        problem = Problem.of(inputs)
        self._problem = bytes(problem)
        self._tensors = inputs.weight, inputs.bias, problem.copies  # whose addresses are in there
        weights, biases = zip(*inner, strict=True)
        self._inner = torch.cat(weights), None if biases[0] is None else torch.cat(biases)  # one product, not three
        self._outer = outer
        _, self._heads, _, self._size = call.q.shape
        self._rows_above = max(0, inputs.kernel_size - 1)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Addresses mean nothing in a copy, or in another process: it is None."""
        return type(None), ()

    def run(self, query: Tensor, cache: Cache, need_weights: bool) -> tuple[Tensor, Tensor | None, Cache] | None:
        """The next step, or None where it is not like the first.

        Args:
            query: 1 x B x C.
            cache: of the steps before; its padding is that of all keys, this step's included.
            need_weights: whether to return the weights.

        Returns:
            output 1 x B x C; weights B x K x 1 x S or None; the cache for the step after.
        """
        batch, heads, size, above = query.size(1), self._heads, self._size, cache.rows
        if (
            query.shape != (1, batch, heads * size)
            or not all(is_plain(x) for x in (query, cache.keys, cache.values, above) if x is not None)
            or torch.is_autocast_enabled("cpu")
            or any(x.size(0) != batch for x in (above, cache.padding) if x is not None)
            or (above is not None and above.size(3) > cache.keys.size(2))
        ):
            return None
        x = F.linear(query, *self._inner).view(batch, -1, heads, size)
        if x.size(1) == 3:
            keys, values = (
                torch.cat([old.transpose(1, 2), x[:, number, None]], 1).transpose(1, 2)
                for number, old in enumerate((cache.keys, cache.values), 1)
            )
            cache = replace(cache, keys=keys, values=values)
        maps = batch, heads, 1, cache.keys.size(2)
        problem = Problem.from_buffer_copy(self._problem)
        problem.copies = copies = []
        problem.B, problem.S, problem.beams = batch, maps[3], batch // cache.keys.size(0)
        problem.q = x.data_ptr(), x.stride(0), size, 0
        problem.key, problem.v = vectors(cache.keys, copies), vectors(cache.values, copies)
        problem.hidden = problem.masked = mask(None if cache.padding is None else cache.padding[:, None, None, :])
        if above is not None:
            problem.above, problem.before = address(above, copies), above.size(3)
        weights = problem.result("weights", maps) if need_weights else None
        rows = problem.result("kept", (batch, heads, self._rows_above, maps[3])) if self._rows_above else None
        context = query.new_empty(query.shape)
        problem.context = context.data_ptr(), heads * size, size, 0
        library.call("evolving_attention_forward", problem, maps)
        return F.linear(context, *self._outer), weights, replace(cache, rows=rows)


def is_plain(x: Tensor) -> bool:
    """Whether the C file may read this tensor's memory as it is."""
    return type(x) in PLAIN and x.dtype is torch.float32 and x.is_cpu and not x.is_neg()
