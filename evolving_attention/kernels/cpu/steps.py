"""The steps of a search after its first, on the CPU: they differ in queries, keys and rows alone.

All else is checked and entered once, which takes longer than the arithmetic of a step.

Axes: B hypotheses, K heads, D head size, S key length; k kernel size. Masks: True = masked.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...cache import Cache
from ..call import PLAIN, Call, Result
from ..operation import inputs_of
from . import library
from .structures import Problem, address, mask, vectors


class Steps:
    """An attention's steps after the first. A model must not change while a search's state lives, which keeps this."""

    def __init__(self, call: Call):
        """call: the first step, which the CPU's kernel knows."""
        self._problem, self._tensors = bytes(Problem.of(inputs_of(call))), call.tensors  # whose addresses are in there
        self._rows_above = 0 if call.weight is None else call.kernel_size - 1

    def __deepcopy__(self, memo: dict[int, object]) -> Steps:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Addresses mean nothing in another process: it reads None."""
        return type(None), ()

    def run(self, q: Tensor, cache: Cache, need_weights: bool) -> Result | None:
        """The next step, or None where it is not like the first.

        Args:
            q: B x K x 1 x D.
            cache: with this step's keys, and the rows of the step before.
            need_weights: whether to return the weights.
        """
        keys, values, above = cache.keys, cache.values, cache.rows
        maps = *q.shape[:3], keys.size(2)
        if (
            q.size(2) != 1
            or not all(_is_plain(x) for x in (q, keys, values, above) if x is not None)
            or q.size(0) % keys.size(0)
            or any(x.size(0) != q.size(0) for x in (above, cache.padding) if x is not None)
            or (above is not None and above.size(3) > keys.size(2))
        ):
            return None
        problem = Problem.from_buffer_copy(self._problem)
        problem.copies = copies = []
        problem.B, problem.S, problem.beams = maps[0], maps[3], maps[0] // keys.size(0)
        problem.q, problem.key, problem.v = (vectors(x, copies) for x in (q, keys, values))
        problem.hidden = problem.masked = mask(None if cache.padding is None else cache.padding[:, None, None, :])
        if above is not None:
            problem.above, problem.before = address(above, copies), above.size(3)
        weights = problem.result("weights", maps) if need_weights else None
        rows = problem.result("kept", (*maps[:2], self._rows_above, maps[3])) if self._rows_above else None
        context = problem.enter("context", torch.empty_like(q))
        library.call("evolving_attention_forward", problem, maps)
        return Result(context, None, weights, rows)


def _is_plain(x: Tensor) -> bool:
    return type(x) in PLAIN and x.dtype is torch.float32 and x.is_cpu and not x.is_neg()
