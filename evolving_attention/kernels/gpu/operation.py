"""The GPU's kernels as an operation of PyTorch: its launches, its gradients, and its entry in the dispatcher.

Eager mode calls ``Attend``, an autograd.Function. torch.compile, torch.export and counters of FLOPs see the same as
``torch.ops.evolving_attention.gpu_forward``.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size, k kernel size.
Masks: True = masked.
"""

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from ..call import PLAIN
from ..derivatives import readable, refuse_second_derivatives
from . import kernels
from .kernels import backward_kernel, forward_kernel

INTERPRETED = kernels.INTERPRETED.value
GIVEN, PREVIOUS, HIDDEN, MASKED, WEIGHTED, SEPARATE, LEARNT, GRAD_MAP, TRIANGULAR = (bit.value for bit in kernels.FLAGS)
#: the longest map whose sentences are done by one program each
SHORT = 64
#: eight warps: so no variant in half precision needs more registers than there are
OPTIONS = {"num_warps": 8, "num_stages": 2}

_compiled: dict[tuple, Any] = {}


class Inputs(NamedTuple):
    """The operation's inputs: of a ``Call``, but for those that are explained."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Tensor | None
    previous: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    learnt: Tensor | None  # a to e in float32, where any of them is learnt; else they are ``shares``
    hidden: Tensor | None
    masked: Tensor | None
    seed: Tensor | None  # of dropout, one number, int64; on the device, so that CUDA graphs can be captured
    shares: list[float]
    separate: bool  # carried is not mixed: the convolution, if any, reads one sum and is added to another
    scale: float
    reach: list[int]  # see ``evolution.reach``
    dropout: float
    need_weights: bool

    @property
    def maps(self) -> tuple[int, int, int, int]:
        """B, K, T, S."""
        return *self.q.shape[:3], self.v.size(2)

    @property
    def kernel_size(self) -> int:
        """k, 0 where there is no convolution."""
        return 0 if self.weight is None else self.weight.size(3)


#: the first inputs, which are tensors; of these, the first, which may have gradients
TENSORS, DIFFERENTIABLE = 11, 8


class Grads(NamedTuple):
    """The backward pass's inputs beside ``Inputs``: three gradients, and results of the forward pass."""

    grad_context: Tensor | None
    grad_map: Tensor | None
    grad_weights: Tensor | None
    context: Tensor
    stats: Tensor
    weights: Tensor | None


def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The attention of ``Inputs``.

    Returns:
        context B x K x T x D, in the memory of a T x B x C tensor; A_logit B x K x T x S; stats B x K x T x 2, each
        row's largest score and sum of exp(score - largest); weights B x K x T x S, float32, or empty if not needed.
    """
    x = Inputs(*arguments)
    context, a_logit = _vectors(x.v, x.q), x.v.new_empty(x.maps)
    stats = x.v.new_empty(*x.q.shape[:3], 2, dtype=torch.float32)
    weights = stats.new_empty(x.maps if x.need_weights else 0)
    size, pitch = _size(x)
    left = (x.v.new_empty(size), a_logit, context, weights)
    _launch(forward_kernel, x, stats, left, pitch, x.need_weights, [x.q, x.k, x.v], 2)
    return context, a_logit, stats, weights


def backward(*arguments: Any) -> list[Tensor]:
    """The gradients of ``Inputs``, from ``Grads``.

    Returns:
        those of q, k, v, given and previous, or empty tensors; the others as one, float32: weight, bias, five shares.
    """
    grads, x = Grads(*arguments[:6]), Inputs(*arguments[6:])
    stats, weighted = grads.stats, grads.grad_weights is not None
    grad_context = torch.zeros_like(grads.context) if grads.grad_context is None else grads.grad_context
    if grad_context.stride(3) != 1 or not _is_aligned(grad_context):
        grad_context = grad_context.contiguous()
    inner = (grads.weights * grads.grad_weights).sum(3) if weighted else stats.new_empty(stats.shape[:3])
    grad, (size, pitch) = x.v.new_empty(x.maps), _size(x)
    of_vectors = [_vectors(x.q, x.q), _vectors(x.v, x.v), _vectors(x.v, x.v)]
    if x.given is not None:
        of_vectors[:2] = x.v.new_empty(0), x.v.new_empty(0)
    grad_previous = x.v.new_empty(0) if x.previous is None else torch.empty_like(grad)
    programs = _steps(x, 4)[0][1]
    partial = stats.new_empty(programs, (0 if x.weight is None else x.weight.numel()) + x.q.size(1) + 5)
    scratch = x.v.new_empty(2 * size + (1 if x.learnt is None else 2) * grad.numel())
    left = (
        *(scratch, grads.context, inner, grad_context, *_contiguous(x.v, grads.grad_map)),
        *(grads.grad_weights.contiguous() if weighted else stats, grad, *of_vectors, grad_previous, partial),
    )
    vectors = [x.q, x.k, x.v, grad_context]
    _launch(
        backward_kernel,
        x,
        stats,
        left,
        pitch,
        weighted,
        vectors,
        4,
        GRAD_MAP * (grads.grad_map is not None),
    )
    of_given = x.v.new_empty(0) if x.given is None else grad
    return [*of_vectors, of_given, grad_previous, partial.sum(0)]  # the same order every time


# ---- launches


def _launch(
    kernel: Any,
    x: Inputs,
    stats: Tensor,
    others: tuple[Tensor, ...],
    pitch: int,
    weighted: bool,
    vectors: list[Tensor],
    count: int,
    flags: int = 0,
) -> None:
    """Launch a kernel. Only this kernel takes ``others``; it reads ``vectors`` by their strides."""
    unit, dtype = unit_of(x.q, x.k, x.v, x.given), x.v.dtype
    vectors = [x.v if x.given is not None and index < 2 else _by_rows(y) for index, y in enumerate(vectors)]
    previous, given, weight, bias = _contiguous(x.v, x.previous, x.given, x.weight, x.bias)
    nothing = stats.view(torch.bool) if x.hidden is None or x.masked is None else None  # kernels do not read it
    tensors = (
        *(*vectors[:3], given, previous, weight, bias, stats if x.learnt is None else x.learnt),
        *(nothing if x.hidden is None else x.hidden, nothing if x.masked is None else x.masked),
        *(stats.view(torch.int64) if x.seed is None else x.seed, stats, *others),
    )
    flags |= GIVEN * (x.given is not None) | PREVIOUS * (x.previous is not None) | LEARNT * (x.learnt is not None)
    flags |= HIDDEN * (x.hidden is not None) | MASKED * (x.masked is not None)
    flags |= WEIGHTED * weighted | SEPARATE * x.separate | TRIANGULAR * x.reach[2]
    threshold = round(x.dropout * 65536)  # a place survives dropout where its 16 random bits are not below that
    numbers = (
        *(*x.maps, x.v.size(3) // unit, pitch // 16, *_mask_strides(x.hidden), *_mask_strides(x.masked)),
        *(x.reach[1], x.reach[0], flags, threshold, x.scale, *x.shares, torch.finfo(dtype).min),
        # float16's sums are kept within half of its range, as in evolution.py
        torch.finfo(dtype).max / 2 if dtype == torch.float16 else float("inf"),
        65536 / (65536 - threshold) if threshold < 65536 else 0.0,
        *[stride // unit for y in vectors for stride in y.stride()[:3]],
    )
    heads, kernel_size, width = constants_of(x.v.size(1), x.kernel_size, x.v.size(3))
    for step, programs in _steps(x, count):
        constants = (heads, kernel_size, unit, width, _columns(x.v), step)
        _run(kernel, (programs, 1, 1), (*tensors, *numbers, *constants), (dtype, x.v.device, constants))


def _run(kernel: Any, grid: tuple[int, int, int], arguments: tuple, key: tuple) -> None:
    """Launch a kernel on the device of its tensors.

    Triton inspects every argument of every launch. Here ``key`` decides the outcome, so later launches skip that.
    """
    if type(arguments[2]) not in PLAIN:  # it is being traced
        if not INTERPRETED:
            torch.library.wrap_triton(kernel)[grid](*arguments, **OPTIONS)
    elif INTERPRETED:
        kernel[grid](*arguments, **OPTIONS)
    else:
        with torch.cuda.device_of(arguments[2]):
            compiled = _compiled.get((kernel, *key))
            if compiled is None:
                compiled = _compiled[kernel, *key] = kernel.warmup(*arguments, grid=grid, **OPTIONS)
            compiled[grid](*arguments)


def is_short(rows: int, columns: int) -> bool:
    """Whether a program does a whole sentence, in one launch."""
    return max(rows, columns) <= SHORT


def _steps(x: Inputs, count: int) -> list[tuple[int, int]]:
    """The launches, ``count`` for long maps: their steps and programs."""
    batch, heads, rows, columns = x.maps
    if is_short(rows, columns):
        return [(0, batch)]
    bands = batch * -(-rows // kernels.BAND.value)
    blocks = batch * heads * -(-columns // _columns(x.v))
    return [(step, blocks if step == 4 else bands) for step in range(1, count + 1)]


def _columns(v: Tensor) -> int:
    """Columns of a head's tile: as many as there are registers for."""
    return 128 // v.element_size() if v.size(3) <= 64 else 64 // (v.element_size() // 2) ** 2


def constants_of(heads: int, kernel_size: int, width: int) -> tuple[int, int, int]:
    """Heads and head size, both rounded up to powers of two, and k between them: kernels are compiled for these."""
    return 1 << (heads - 1).bit_length(), kernel_size, max(16, 1 << (width - 1).bit_length())


def unit_of(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None) -> int:
    """8 if vectors begin and end at multiples of 8 numbers, so that one load reads 8; else 1."""
    read = (q, k, v) if given is None else (v,)
    return 8 if v.size(3) % 8 == 0 and all(_is_aligned(x) for x in read) else 1


def _is_aligned(x: Tensor) -> bool:
    a, b, c, _ = x.stride()
    return a % 8 == 0 and b % 8 == 0 and c % 8 == 0 and x.storage_offset() % 8 == 0


def _size(x: Inputs) -> tuple[int, int]:
    """The size of framed maps, and their pitch."""
    batch, heads, rows, columns = x.maps
    gap, lead = max(0, x.kernel_size - 1), kernels.LEAD.value
    pitch = (columns + gap + 15) // 16 * 16
    return (batch * (lead + (heads * (rows + gap) + gap) * pitch) + lead if x.kernel_size else 0), pitch


def _vectors(like: Tensor, of: Tensor) -> Tensor:
    """New vectors, as wide as some and as many as others, in memory length x B x K x D, as projections take them."""
    return like.new_empty(of.size(2), *of.shape[:2], like.size(3)).permute(1, 2, 0, 3)


def _by_rows(x: Tensor) -> Tensor:
    """The same vectors, each contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _contiguous(other: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [other if x is None else x.contiguous() for x in tensors]


def _mask_strides(mask: Tensor | None) -> list[int]:
    """Strides over the B sentences, T rows and S columns; 0 where a mask broadcasts."""
    if mask is None:
        return [0, 0, 0]
    return [mask.stride(axis) if mask.size(axis) > 1 else 0 for axis in (0, 2, 3)]


# ---- gradients


def looked_at() -> bool:
    """Whether operations are traced or counted. Else the dispatcher is skipped: it takes longer than the launches."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _keep(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    context, _, stats, weights = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(context, stats, weights if inputs[-1] else None, *inputs[:TENSORS])
    ctx.settings = inputs[TENSORS:]


def _go_back(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives()
    of_context, of_map, _, of_weights = readable(*grads)
    saved = ctx.saved_tensors  # to be asked for once: a checkpointed layer is computed again for it
    kept, inputs = saved[:3], (*saved[3:], *ctx.settings)
    x = Inputs(*inputs)
    run = torch.ops.evolving_attention.gpu_backward if looked_at() else backward
    *found, rest = run(of_context, of_map, of_weights if x.need_weights else None, *kept, *inputs)
    found = [gradient if gradient.numel() else None for gradient in found]
    of_weight = of_bias = None
    if x.weight is not None:
        both = rest[:-5].to(x.weight.dtype)
        of_weight, of_bias = both[: x.weight.numel()].view(x.weight.shape), both[x.weight.numel() :]
    of_shares = None if x.learnt is None else rest[-5:]
    return *found, of_weight, of_bias, of_shares, *(None,) * (len(inputs) - DIFFERENTIABLE)


class Attend(torch.autograd.Function):
    """``forward`` with its gradients."""

    @staticmethod
    def forward(ctx: FunctionCtx, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        output = forward(*arguments)
        _keep(ctx, arguments, output)  # as a ``setup_context``, autograd would call it more slowly
        return output

    backward = staticmethod(_go_back)


# ---- the dispatcher


def _declare(name: str, function: Any, *inputs: type[NamedTuple]) -> Any:
    """Make an operation of a function whose arguments are the fields of named tuples."""
    fields = [item for kind in inputs for item in kind.__annotations__.items()]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    named = [inspect.Parameter(field, kind, annotation=annotation) for field, annotation in fields]
    function.__signature__ = inspect.Signature(named, return_annotation=function.__annotations__["return"])
    # Triton's interpreter can run nothing but real tensors, so PyTorch does not look into the kernels there.
    declare = torch.library.custom_op if INTERPRETED else torch.library.triton_op
    operation = declare(f"evolving_attention::{name}", function, mutates_args=())
    if INTERPRETED:
        operation.register_fake(function)
    return operation


_declare("gpu_forward", forward, Inputs).register_autograd(_go_back, setup_context=_keep)
_declare("gpu_backward", backward, Grads, Inputs)


@register_flop_formula(torch.ops.evolving_attention.gpu_forward)
def forward_flops(*shapes: Any, **_: Any) -> int:
    """Products and convolution, 2 x multiply-adds, from the shapes of ``Inputs``."""
    x = Inputs(*shapes)
    products = 2 if x.given is None else 1
    size = 0 if x.weight is None else x.weight[3]
    taps = size * (size + 1) // 2 if x.reach[2] else size * size
    pixels = x.q[0] * x.q[1] * x.q[2] * x.v[2]
    return 2 * pixels * (products * x.v[3] + x.q[1] * taps)


@register_flop_formula(torch.ops.evolving_attention.gpu_backward)
def backward_flops(*shapes: Any, **_: Any) -> int:
    """The same for the backward pass: 5 products, or 2 where logits are given, and 3 convolutions."""
    x = Inputs(*shapes[6:])
    products = 2 * x.q[0] * x.q[1] * x.q[2] * x.v[2] * x.v[3]
    forward_products = (2 if x.given is None else 1) * products
    return 3 * (forward_flops(*x) - forward_products) + (5 if x.given is None else 2) * products
