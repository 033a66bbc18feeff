"""Evolving attention on the CPU, in float32, by ``kernel.c``: the plain composition's numbers, one pass.

Where the C file cannot be compiled (library.py), the plain composition does the work.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ...evolution import Coefficients, Geometry
from ..call import Call, Result
from ..derivatives import readable, refuse_second_derivatives
from . import library
from .structures import Problem, carries_mixed, seed_of_dropout

#: the fields of a call that may have gradients, in the order in which autograd is given them
_DIFFERENTIABLE = ("q", "k", "v", "given", "previous", "weight", "bias")


def knows(call: Call) -> bool:
    """Whether this kernel gives the numbers of this call, whose types and shapes agree: see ``_fits`` of this package.

    Step by step, and where hypotheses share keys, it has no backward pass: it refuses where any gradient is wanted.
    """
    c = call.coefficients.c
    by_rows = call.step or call.above is not None
    return (
        call.v.device.type == "cpu"
        and call.v.dtype == torch.float32
        and call.v.size(3) > 0
        and (call.given is not None or call.q.size(3) == call.v.size(3))
        and call.kernel_size % 2 == 1
        and 0 <= call.dropout <= 1
        and all(x.dim() == 0 and x.dtype == torch.float32 for x in call.coefficients if isinstance(x, Tensor))
        # a convolution without a share would still hide what it does not see
        and (call.weight is None or isinstance(c, Tensor) or c != 0)
        and not (by_rows and call.geometry == Geometry.ENCODER_SELF)
        and not ((by_rows or call.sources is not None) and _wants_gradients(call))
        and not any(x.is_neg() for x in call.tensors)  # such a tensor's memory holds its opposite
        and (call.sources is None or 0 <= int(call.sources.min()) <= int(call.sources.max()) < call.v.size(0))
        and library.library() is not None
    )


def attend(call: Call) -> Result:
    """The result of a call that this kernel knows.

    Dropout's random bits are a function of one number, which is drawn from PyTorch's generator for the CPU.
    """
    seed = seed_of_dropout() if call.dropout > 0 else 0
    if not _wants_gradients(call):
        return _forward(call, seed)
    tensors = [getattr(call, name) for name in _DIFFERENTIABLE]
    context, a_logit, weights = _EvolvingAttention.apply(call, seed, *tensors, *call.coefficients)
    return Result(context, a_logit, weights)


def _wants_gradients(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors)


def _forward(call: Call, seed: int) -> Result:
    problem = Problem.of(call, seed)
    batch, heads, rows, columns = call.maps
    rows_above = call.kernel_size - 1 if call.step and call.weight is not None else 0
    a_logit = problem.result("a_logit", call.maps) if call.keep_map else None
    weights = problem.result("weights", call.maps) if call.need_weights else None
    kept = problem.result("kept", (batch, heads, rows_above, columns)) if rows_above else None
    context = problem.vectors_result("context", (batch, heads, rows, call.v.size(3)))
    library.call("evolving_attention_forward", problem, call.maps)
    return Result(context, a_logit, weights, kept)


class _EvolvingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, seed: int, *inputs: Tensor | float | None) -> tuple[Tensor | None, ...]:
        """``inputs`` are the call's tensors of ``_DIFFERENTIABLE``, then its five coefficients."""
        result = _forward(call, seed)
        # What is kept of the call are its constants; its tensors are autograd's to keep.
        ctx.call = replace(call, **dict.fromkeys((*_DIFFERENTIABLE, "hidden", "masked")))
        ctx.seed = seed
        ctx.constants = [None if isinstance(x, Tensor) else x for x in call.coefficients]
        learnt = [x if isinstance(x, Tensor) else None for x in call.coefficients]
        ctx.save_for_backward(*inputs[: len(_DIFFERENTIABLE)], call.hidden, call.masked, *learnt)
        ctx.set_materialize_grads(False)
        return result.context, result.a_logit, result.weights

    @staticmethod
    def backward(
        ctx: FunctionCtx, d_context: Tensor | None, d_a_logit: Tensor | None, d_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        d_context, d_a_logit, d_weights = readable(d_context, d_a_logit, d_weights)
        *tensors, hidden, masked, a, b, c, d, e = ctx.saved_tensors
        values = zip((a, b, c, d, e), ctx.constants, strict=True)
        call = replace(
            ctx.call,
            **dict(zip(_DIFFERENTIABLE, tensors, strict=True)),
            **{"hidden": hidden, "masked": masked},
            coefficients=Coefficients(*(constant if learnt is None else learnt for learnt, constant in values)),
        )
        wanted = dict(zip((*_DIFFERENTIABLE, "a", "b", "c", "d", "e"), ctx.needs_input_grad[2:], strict=True))
        gradients = _gradients(call, ctx.seed, wanted, d_context, d_a_logit, d_weights)
        return None, None, *(gradients.get(name) for name in wanted)


def _gradients(
    call: Call,
    seed: int,
    wanted: dict[str, bool],
    d_context: Tensor | None,
    d_a_logit: Tensor | None,
    d_weights: Tensor | None,
) -> dict[str, Tensor | None]:
    """The gradients of a call by the names of what they are of: the tensors' and a, b, c, d and e."""
    problem = Problem.of(call, seed)
    problem.read(d_a_logit=d_a_logit, d_weights=d_weights, d_context=d_context)
    gradients = {"v": problem.vectors_result("d_v", call.v.shape)}
    if call.given is None and (wanted["q"] or wanted["k"]):
        gradients["q"] = problem.vectors_result("d_q", call.q.shape)
        gradients["k"] = problem.vectors_result("d_key", call.k.shape)
    for name in ("given", "previous"):
        if wanted[name]:
            gradients[name] = problem.result(f"d_{name}", call.maps)
    # Each sentence has a part of its own in these, summed in order: bits do not depend on the number of threads.
    parts = {}
    if call.weight is not None:
        parts["weight"] = problem.result("d_kernel", (call.maps[0], *call.weight.shape))
        parts["bias"] = problem.result("d_bias", (call.maps[0], *call.bias.shape))
    if any(wanted[name] for name in "abcde"):
        parts["shares"] = problem.result("d_shares", (call.maps[0], 5), torch.float64)
    library.call("evolving_attention_backward", problem, call.maps)
    if d_context is None:
        del gradients["v"]
    sums = {name: part.sum(0) for name, part in parts.items()}
    if "shares" in sums:
        gradients |= _gradients_of_coefficients(call, wanted, sums.pop("shares").float())
    return gradients | sums


def _gradients_of_coefficients(call: Call, wanted: dict[str, bool], shares: Tensor) -> dict[str, Tensor]:
    """Those that were used: without a convolution a, b and c are not; a and d belong to the previous map.

    Where what is carried is what is mixed, all that comes of both is in the gradients of a and b.
    """
    unused = set()
    if call.weight is None:
        unused |= set("abc")
    if call.previous is None:
        unused |= set("ad")
    if carries_mixed(call):
        unused |= set("de")
    return {name: share for name, share in zip("abcde", shares, strict=True) if wanted[name] and name not in unused}
