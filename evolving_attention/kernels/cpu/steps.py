"""Step-by-step decoding by the CPU's kernel: an attention with its projections, prepared once for a search.

Axes: B hypotheses, C channels, K heads, D = C / K, S key length. Masks: True = masked.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache import Cache
from ...call import PLAIN, Call
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
        call = call.reduced()
        self._problem, self._rows_above = Problem.of(call), max(0, call.kernel_size - 1)
        self._problem.tensors = call.weight, call.bias  # whose addresses are in there
        self._outer = outer
        _, self._heads, _, self._size = call.q.shape
        self._type, self._device = call.v.dtype, call.v.device
        weights, biases = zip(*inner, strict=True)
        self._inner = torch.cat(weights), None if biases[0] is None else torch.cat(biases)  # one product, not three

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """It is None in a copy, or in another process, whose model may be another."""
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
        batch, heads, size = query.size(1), self._heads, self._size
        keys, values, padding, above = cache.keys, cache.values, cache.padding, cache.rows
        tensors = (query, keys, values, above)
        if (
            keys is None
            or values is None
            or query.shape != (1, batch, heads * size)
            or not all(is_readable(x, self._type, self._device) for x in tensors if x is not None)
            or torch.is_autocast_enabled(self._device.type)
            or any(x.size(0) != batch or x.device != self._device for x in (above, padding) if x is not None)
            or (above is not None and above.size(3) > keys.size(2))
        ):
            return None
        x = F.linear(query, *self._inner).view(batch, -1, heads, size)
        if x.size(1) == 3:
            keys, values = (
                torch.cat([old.transpose(1, 2), x[:, number, None]], 1).transpose(1, 2)
                for number, old in enumerate((keys, values), 1)
            )
        maps = batch, heads, 1, keys.size(2)
        problem = Problem.from_buffer_copy(self._problem)
        problem.copies = copies = list[Tensor]()
        problem.B, problem.S, problem.beams = batch, maps[3], batch // keys.size(0)
        q = x[:, 0]
        problem.q = q.data_ptr(), q.stride(0), size, 0
        problem.key, problem.v = vectors(keys, copies), vectors(values, copies)
        problem.hidden = problem.masked = mask(None if padding is None else padding[:, None, None, :])
        if above is not None:
            problem.above, problem.before = address(above, copies), above.size(3)
        weights = problem.result("weights", maps) if need_weights else None
        rows = problem.result("kept", (batch, heads, self._rows_above, maps[3])) if self._rows_above else None
        context = q.new_empty(1, batch, heads * size)
        problem.context = context.data_ptr(), heads * size, size, 0
        problem.run("evolving_attention_forward")
        return F.linear(context, *self._outer), weights, Cache(keys, values, padding, rows)


def is_readable(x: Tensor, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a kernel for this type and device may read this tensor's memory as it is."""
    return type(x) in PLAIN and x.dtype is dtype and x.device == device and not x.is_neg()
