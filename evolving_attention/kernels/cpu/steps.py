"""Step-by-step decoding on the CPU by ``kernel.c``: an attention with its projections in one call for each step.

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
from .structures import Problem, Projection, Step, address, mask, vectors

#: weight and bias of an attention's linear layers; of keys and values None where these are known already
Projections = dict[str, tuple[Tensor, Tensor | None] | None]

#: numbers of the query, at most, that the C file projects faster than PyTorch
_FEW = 6144


class Steps:
    """The steps of a search after its first, of one attention with its projections: only their input changes.

    The rest is checked once, so a model must not change while a state of a search lives, which keeps this.
    """

    @classmethod
    def after(cls, call: Call, projections: Projections) -> Steps | None:
        """The steps after one that the kernel knows; None where they cannot be prepared."""
        width = call.q.size(1) * call.q.size(3)
        pairs = [pair for pair in projections.values() if pair is not None]
        constants = [x for pair in pairs for x in pair if x is not None]
        constants += [] if call.weight is None else [call.weight, call.bias]
        known = (
            call.q.size(2) == 1
            and call.given is None
            and call.dropout == 0
            and not any(isinstance(share, Tensor) for share in call.coefficients)
            and all(weight.shape == (width, width) for weight, _ in pairs)
            and all(_is_plain(x) and x.is_contiguous() for x in constants)
        )
        return cls(call, projections) if known else None

    def __init__(self, call: Call, projections: Projections):
        step = Step(attention=Problem.of(inputs_of(call)))
        for name, pair in projections.items():
            if pair is not None:
                setattr(step, name, Projection(*(address(x, []) for x in pair)))
        self._step = bytes(step)
        self._tensors = (call.weight, call.bias)  # whose addresses are in there
        self._projections = projections
        _, self._heads, _, self._size = call.q.shape
        self._rows_above = 0 if call.weight is None else call.kernel_size - 1

    def __deepcopy__(self, memo: dict[int, object]) -> Steps:
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Addresses mean nothing in another process: it reads None."""
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
            or not all(_is_plain(x) for x in (query, cache.keys, cache.values, above) if x is not None)
            or torch.is_autocast_enabled("cpu")
            or batch % cache.keys.size(0)
            or any(x.size(0) != batch for x in (above, cache.padding) if x is not None)
            or (above is not None and above.size(3) > cache.keys.size(2))
        ):
            return None
        if self._projections["k"] is not None:  # room for this position
            room = query.new_empty(batch, 1, heads, size)  # where the C file writes rows of C numbers
            keys, values = (torch.cat([x.transpose(1, 2), room], 1).transpose(1, 2) for x in (cache.keys, cache.values))
            cache = replace(cache, keys=keys, values=values)
        maps = batch, heads, 1, cache.keys.size(2)
        step, copies = Step.from_buffer_copy(self._step), []
        problem = step.attention
        problem.B, problem.S, problem.beams = batch, maps[3], batch // cache.keys.size(0)
        problem.key, problem.v = vectors(cache.keys, copies), vectors(cache.values, copies)
        problem.hidden = problem.masked = mask(None if cache.padding is None else cache.padding[:, None, None, :])
        if above is not None:
            problem.above, problem.before = address(above, copies), above.size(3)
        weights = problem.result("weights", maps) if need_weights else None
        rows = problem.result("kept", (batch, heads, self._rows_above, maps[3])) if self._rows_above else None
        output = self._project_and_run(step, query.contiguous(), cache, maps)
        return output, weights, replace(cache, rows=rows)

    def _project_and_run(self, step: Step, query: Tensor, cache: Cache, maps: tuple[int, int, int, int]) -> Tensor:
        (_, batch, width), problem, by = query.shape, step.attention, self._projections
        context = query.new_empty(query.shape)
        problem.context = context.data_ptr(), width, self._size, width
        if batch * width <= _FEW:
            q, output = query.new_empty(query.shape), query.new_empty(query.shape)
            step.input, step.output = query.data_ptr(), output.data_ptr()
            problem.q = q.data_ptr(), width, self._size, width
            library.call("evolving_attention_step", step, maps)
            return output
        q = F.linear(query, *by["q"])
        problem.q = q.data_ptr(), width, self._size, width
        if by["k"] is not None:
            for of, name in ((cache.keys, "k"), (cache.values, "v")):
                of[:, :, -1] = F.linear(query, *by[name]).view(batch, self._heads, self._size)
        library.call("evolving_attention_forward", problem, maps)
        return F.linear(context, *by["out"])


def _is_plain(x: Tensor) -> bool:
    return type(x) in PLAIN and x.dtype is torch.float32 and x.is_cpu and not x.is_neg()
