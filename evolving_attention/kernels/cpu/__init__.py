"""Evolving attention on the CPU, in float32, by ``kernel.c``: the plain composition's numbers, in one pass.

It is an operation of PyTorch's dispatcher, so that torch.compile and torch.export keep it, and FLOP counters see it.
The plain composition does the work if the C file cannot be compiled (library.py).

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ...evolution import Coefficients, Geometry
from ..call import Call, Result
from . import library
from .structures import Problem, carries_mixed

#: the fields of a call that may have gradients; the five coefficients, where they are learnt, follow as one tensor
_DIFFERENTIABLE = ("q", "k", "v", "given", "previous", "weight", "bias")


def knows(call: Call) -> bool:
    """Whether this kernel gives the numbers of this call, whose types and shapes agree: see ``_fits`` of this package.

    Step by step, and where hypotheses share keys, it has no backward pass, and refuses where a gradient is needed.
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
        # a convolution without a share would still hide places
        and (call.weight is None or isinstance(c, Tensor) or c != 0)
        and not (by_rows and call.geometry == Geometry.ENCODER_SELF)
        and not ((by_rows or call.v.size(0) != call.q.size(0)) and _wants_gradients(call))
        and library.is_there()
    )


def attend(call: Call) -> Result:
    """The result of a call that this kernel knows.

    Dropout's random bits are a function of one number, which is drawn from PyTorch's generator for the CPU.
    """
    if call.step and not torch.compiler.is_compiling():
        return Result(
            *_forward(call, 0, carries_mixed(call))
        )  # the dispatcher would slow a search's thousands of short steps
    learnt = any(isinstance(x, Tensor) for x in call.coefficients)
    shares = None
    if learnt:
        numbers = [x if isinstance(x, Tensor) else call.v.new_tensor(x) for x in call.coefficients]
        shares = torch.stack(numbers)
    constants = [0.0 if isinstance(x, Tensor) else float(x) for x in call.coefficients]
    seed = torch.randint(2**63 - 1, (), device="cpu") if call.dropout > 0 else torch.zeros((), dtype=torch.int64)
    context, a_logit, weights, kept = _operation(
        *(getattr(call, name) for name in _DIFFERENTIABLE),
        *(shares, call.hidden, call.masked, call.above, seed, constants, carries_mixed(call)),
        *(call.scale, call.geometry.value, call.kernel_size, call.dropout),
        *(call.keep_map, call.need_weights, call.step),
    )
    return Result(
        context,
        a_logit if call.keep_map else None,
        weights if call.need_weights else None,
        kept if kept.numel() else None,
    )


def _wants_gradients(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors)


def _forward(call: Call, seed: int, same: bool) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Context, A_logit, weights and the rows to keep; None where they are not asked for."""
    problem = Problem.of(call, seed, same)
    batch, heads, rows, columns = call.maps
    rows_above = call.kernel_size - 1 if call.step and call.weight is not None else 0
    a_logit = problem.result("a_logit", call.maps) if call.keep_map else None
    weights = problem.result("weights", call.maps) if call.need_weights else None
    kept = problem.result("kept", (batch, heads, rows_above, columns)) if rows_above else None
    context = problem.vectors_result("context", (batch, heads, rows, call.v.size(3)))
    library.call("evolving_attention_forward", problem, call.maps)
    return context, a_logit, weights, kept


def _call(
    tensors: Sequence[Tensor | None], shares: Tensor | None, constants: Sequence[float], same: bool, *rest: Any
) -> Call:
    """The call that the arguments of the operation stand for."""
    hidden, masked, above, scale, geometry, kernel_size, dropout, keep_map, need_weights, step = rest
    q, k, v, given, previous, weight, bias = tensors
    numbers = list(constants) if shares is None else shares.tolist()
    if same:
        numbers[3:] = numbers[:2]
    return Call(
        *(q, k, v, scale, Geometry(geometry), kernel_size, Coefficients(*numbers), weight, bias, given, hidden, masked),
        *(previous, above, step, dropout, keep_map, need_weights),
    )


@torch.library.custom_op("evolving_attention::cpu", mutates_args=(), device_types="cpu")
def _operation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    previous: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shares: Tensor | None,
    hidden: Tensor | None,
    masked: Tensor | None,
    above: Tensor | None,
    seed: Tensor,
    constants: Sequence[float],
    same: bool,
    scale: float,
    geometry: str,
    kernel_size: int,
    dropout: float,
    keep_map: bool,
    need_weights: bool,
    step: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Context, A_logit, weights and rows to keep, empty where they are not asked for: a schema has no optional outputs.

    ``shares``: the five coefficients where one is learnt, else ``constants`` are. ``same``: carried is always mixed.
    """
    tensors = (q, k, v, given, previous, weight, bias)
    rest = (hidden, masked, above, scale, geometry, kernel_size, dropout, keep_map, need_weights, step)
    results = _forward(_call(tensors, shares, constants, same, *rest), int(seed), same)
    return tuple(v.new_empty(0) if x is None else x for x in results)


@_operation.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, given: Any, previous: Any, weight: Tensor | None, *others: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    kernel_size, _, keep_map, need_weights, step = others[-5:]
    maps = batch, heads, rows, columns = *q.shape[:3], v.size(2)
    return (
        q.new_empty(rows, batch, heads, v.size(3)).permute(1, 2, 0, 3),
        q.new_empty(maps if keep_map else 0),
        q.new_empty(maps if need_weights else 0),
        q.new_empty((batch, heads, kernel_size - 1, columns) if step and weight is not None else 0),
    )


def _keep(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    ctx.set_materialize_grads(False)
    *tensors, seed = inputs[:12]
    ctx.save_for_backward(*tensors, seed)
    ctx.rest = inputs[12:]


def _backward(
    ctx: Any, d_context: Tensor | None, d_a_logit: Tensor | None, d_weights: Tensor | None, d_kept: Any
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: checkpointing computes them anew
    wanted, given = list(ctx.needs_input_grad[:8]), saved[3]
    wanted[0] &= given is None
    wanted[1] &= given is None
    wanted[2] &= d_context is not None
    gradients = _backward_operation(*saved, *ctx.rest, d_context, d_a_logit, d_weights, wanted)
    return *(x if want else None for x, want in zip(gradients, wanted, strict=True)), *(None,) * 13


def _refuse(ctx: Any, *gradients: Any) -> None:
    raise RuntimeError(
        "The kernels of evolving attention have no second derivatives (create_graph, torch.autograd.functional): use "
        "the plain composition, --ea-plain or plain=True."
    )


@register_flop_formula(torch.ops.evolving_attention.cpu)
def _flops(q: Any, k: Any, v: Any, given: Any, previous: Any, weight: Any, *others: Any, **_: Any) -> int:
    """The plain composition's: both products, and the convolution."""
    batch, heads, rows, depth = q
    pixels = batch * heads * rows * v[2]
    taps = 0 if weight is None else weight[1] * weight[2] * weight[3]
    return 2 * pixels * ((0 if given is not None else depth) + taps + v[3])


@torch.library.custom_op("evolving_attention::cpu_backward", mutates_args=(), device_types="cpu")
def _backward_operation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    previous: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    shares: Tensor | None,
    hidden: Tensor | None,
    masked: Tensor | None,
    above: Tensor | None,
    seed: Tensor,
    constants: Sequence[float],
    same: bool,
    scale: float,
    geometry: str,
    kernel_size: int,
    dropout: float,
    keep_map: bool,
    need_weights: bool,
    step: bool,
    d_context: Tensor | None,
    d_a_logit: Tensor | None,
    d_weights: Tensor | None,
    wanted: Sequence[bool],
) -> list[Tensor]:
    """The gradients of the operation's first eight arguments, empty where they are not wanted."""
    tensors = (q, k, v, given, previous, weight, bias)
    rest = (hidden, masked, above, scale, geometry, kernel_size, dropout, keep_map, need_weights, step)
    call = _call(tensors, shares, constants, same, *rest)
    problem = Problem.of(call, int(seed), same)
    problem.read(d_a_logit=d_a_logit, d_weights=d_weights, d_context=d_context)
    gradients = {"v": problem.vectors_result("d_v", v.shape)}
    if wanted[0] or wanted[1]:
        gradients["q"] = problem.vectors_result("d_q", q.shape)
        gradients["k"] = problem.vectors_result("d_key", k.shape)
    for name, is_wanted in (("given", wanted[3]), ("previous", wanted[4])):
        if is_wanted:
            gradients[name] = problem.result(f"d_{name}", call.maps)
    # Each sentence has a separate part of these, summed in order: bits do not depend on the number of threads.
    parts = {}
    if weight is not None:
        parts["weight"] = problem.result("d_kernel", (call.maps[0], *weight.shape))
        parts["bias"] = problem.result("d_bias", (call.maps[0], *bias.shape))
    if wanted[7]:
        parts["shares"] = problem.result("d_shares", (call.maps[0], 5), torch.float64)
    library.call("evolving_attention_backward", problem, call.maps)
    gradients |= {name: part.sum(0) for name, part in parts.items()}
    if wanted[7]:
        gradients["shares"] = gradients["shares"].float() * _that_count(call, same)
    names = zip((*_DIFFERENTIABLE, "shares"), wanted, strict=True)
    return [gradients[name] if want else q.new_empty(0) for name, want in names]


@register_flop_formula(torch.ops.evolving_attention.cpu_backward)
def _backward_flops(*shapes: Any, **_: Any) -> int:
    """Each product of the way forward has two on the way back."""
    return 2 * _flops(*shapes)


def _that_count(call: Call, same: bool) -> Tensor:
    """1 for each of the five coefficients that has an effect, else 0.

    Without a convolution a, b and c have none; a and d belong to the previous map. Where carried is always mixed, the
    gradients of a and b hold those of d and e.
    """
    none = set("abc" if call.weight is None else "") | set("" if call.previous is not None else "ad")
    none |= set("de" if same else "")
    return torch.tensor([float(name not in none) for name in "abcde"])


_operation.register_autograd(_backward, setup_context=_keep)
_backward_operation.register_autograd(_refuse)


@_backward_operation.register_fake
def _(*inputs: Any) -> list[Tensor]:
    wanted, tensors = inputs[-1], inputs[:8]
    results = [
        x.new_empty(x.shape) if want else inputs[0].new_empty(0) for x, want in zip(tensors, wanted, strict=True)
    ]
    for place in range(3):  # queries, keys and values lie where projections want them: see ``vectors_result``
        if wanted[place]:
            batch, heads, length, depth = tensors[place].shape
            results[place] = inputs[0].new_empty(length, batch, heads, depth).permute(1, 2, 0, 3)
    return results
