"""Step-by-step decoding on the CPU by ``kernel.c``: an attention with its projections in one call for each step.

Axes: B hypotheses, C channels, K heads, D = C / K, S key length. Masks: True = masked.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import PLAIN, Call
from . import library
from .structures import Problem, Projection, Step, address, mask_of, vectors


class Projections(NamedTuple):
    """Weight and bias of an attention's linear layers; keys' and values' are None where these are known already."""

    q: tuple[Tensor, Tensor | None]
    k: tuple[Tensor, Tensor | None] | None
    v: tuple[Tensor, Tensor | None] | None
    out: tuple[Tensor, Tensor | None]


class Steps:
    """The steps of a search after its first, of one attention with its projections: only their input changes.

    Everything else is looked at once, for nobody changes a model while a search's state lives. This is kept in that
    state, and never changed itself.
    """

    FEW = 6144  # numbers of the query, at most, that this projects faster than PyTorch

    def __init__(self, call: Call, projections: Projections):
        step = Step(attention=Problem.of(call, 0))
        for name, pair in projections._asdict().items():
            if pair is not None:
                setattr(step, name, Projection(*(address(x, []) for x in pair)))
        self._step = bytes(step)
        self._tensors = (call.weight, call.bias)  # whose addresses are in there
        self._projections = projections
        _, self._heads, _, self._size = call.q.shape
        self._rows_above = 0 if call.weight is None else call.kernel_size - 1

    @staticmethod
    def knows(call: Call, projections: Projections) -> bool:
        """Whether steps like this one, which the kernel knows, can be prepared: most can."""
        width = call.q.size(1) * call.q.size(3)
        pairs = [pair for pair in projections if pair is not None]
        return (
            call.q.size(2) == 1
            and call.given is None
            and call.dropout == 0
            and not any(isinstance(share, Tensor) for share in call.coefficients)
            and (call.weight is None or (call.weight.is_contiguous() and call.bias.is_contiguous()))
            and all(weight.shape == (width, width) for weight, _ in pairs)
            and all(is_plain(x) and x.is_contiguous() for pair in pairs for x in pair if x is not None)
        )

    def __deepcopy__(self, memo: dict[int, object]) -> "Steps":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Addresses mean nothing in another process: what is read there is None."""
        return type(None), ()

    def run(
        self,
        query: Tensor,
        k: Tensor,
        v: Tensor,
        sources: Tensor | None,
        masked: Tensor | None,
        above: Tensor | None,
        need_weights: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None] | None:
        """A step, or None where it is not like the one before.

        Args:
            query: 1 x B x C.
            k, v: as in ``Call``; where keys and values are projected, their last position is written.
            others: as in ``Call``; what is masked is hidden too.

        Returns:
            output 1 x B x C; weights B x K x 1 x S, where they are wanted; what is above the next step's row.
        """
        (rows, batch, width), (sentences, _, columns, _) = query.shape, v.shape
        heads, size = self._heads, self._size
        if (
            (rows, width) != (1, heads * size)
            or not all(is_plain(x) for x in (query, k, v, above) if x is not None)
            or torch.is_autocast_enabled("cpu")
            or not k.shape == v.shape == (sentences, heads, columns, size)
            or (sentences != batch if sources is None else sources.shape != (batch,))
            or (masked is not None and masked.shape != (batch, 1, 1, columns))
            or (above is None) != (self._rows_above == 0)
            or (above is not None and above.shape[:3] != (batch, heads, self._rows_above))
            or (above is not None and above.size(3) > columns)
        ):
            return None
        step, copies = Step.from_buffer_copy(self._step), []
        problem, (project_q, project_k, project_v, project_out) = step.attention, self._projections
        problem.copies = copies
        problem.B, problem.S = batch, columns
        problem.key, problem.v = vectors(k, copies), vectors(v, copies)
        problem.sources = address(sources, copies)
        problem.hidden = problem.masked = mask_of(masked)
        if above is not None:
            problem.above, problem.before = address(above, copies), above.size(3)
        maps = batch, heads, 1, columns
        weights = problem.result("weights", maps) if need_weights else None
        kept = problem.result("kept", (batch, heads, self._rows_above, columns)) if self._rows_above else None
        context = query.new_empty(query.shape)  # of its type, whatever the default is: C writes there
        problem.context = context.data_ptr(), width, size, width
        if batch * width <= self.FEW:
            q, output = query.new_empty(query.shape), query.new_empty(query.shape)
            step.input, step.output = address(query, copies), output.data_ptr()
            problem.q = q.data_ptr(), width, size, width
            library.call("evolving_attention_step", step, maps)
            return output, weights, kept
        q = F.linear(query, *project_q)
        problem.q = q.data_ptr(), width, size, width
        if project_k is not None:
            k[:, :, -1] = F.linear(query, *project_k).view(batch, heads, size)
            v[:, :, -1] = F.linear(query, *project_v).view(batch, heads, size)
        library.call("evolving_attention_forward", problem, maps)
        return F.linear(context, *project_out), weights, kept


def is_plain(x: Tensor) -> bool:
    return type(x) in PLAIN and x.dtype is torch.float32 and x.is_cpu and not x.is_neg()
