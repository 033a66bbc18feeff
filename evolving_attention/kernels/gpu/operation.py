"""The GPU's kernels as an operation of PyTorch: its launches, its gradients, and its entry in the dispatcher.

In eager mode ``Attend`` is called, an autograd.Function. ``torch.ops.evolving_attention.gpu_forward`` is the same for
whoever looks at operations: torch.compile, torch.export, counters of FLOPs. It must be imported with Triton there.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size, k kernel size. Masks: True = masked.
"""

from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import FunctionCtx
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.flop_counter import register_flop_formula

from ..call import PLAIN
from ..derivatives import readable, refuse_second_derivatives
from . import kernels
from .kernels import backward_kernel, forward_kernel

INTERPRETED = kernels.INTERPRETED.value
#: the longest map whose sentences are done by one program each
SHORT = 64
#: float16's sums are kept within half of its range, as in evolution.py
LIMITS = {torch.float16: torch.finfo(torch.float16).max / 2}
#: which inputs of ``forward`` may have gradients: q, k, v, given, previous, weight, bias, learnt
DIFFERENTIABLE = 8
TENSORS = 11

#: eight warps: no variant in half precision needs more registers than there are
OPTIONS = {"num_warps": 8, "num_stages": 2}

_compiled: dict[tuple, Any] = {}


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    previous: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    learnt: Tensor | None,
    hidden: Tensor | None,
    masked: Tensor | None,
    seed: Tensor | None,
    shares: list[float],
    separate: bool,
    scale: float,
    reach: list[int],
    dropout: float,
    need_weights: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Attention from queries, keys and values to the context.

    Args:
        q, k, v, given, previous, weight, bias, hidden, masked, scale, dropout, need_weights: see ``Call``.
        learnt: 5 numbers, float32, a to e where any of them is learnt; else ``shares`` holds them.
        seed: of dropout, one number, int64; on the device, so that CUDA graphs can be captured.
        separate: carried is not mixed: the convolution, if there is one, is added to something else than what it reads.
        reach: left, top, triangular: see ``evolution.reach``.

    Returns:
        context B x K x T x D; A_logit B x K x T x S; B x K x T x 2, each row's largest score and its sum of
        exp(score - largest); weights B x K x T x S in float32, empty where they are not needed.
    """
    batch, heads, rows, _ = q.shape
    columns, width = v.shape[2:]
    maps = (batch, heads, rows, columns)
    context = v.new_empty(rows, batch, heads, width).permute(1, 2, 0, 3)
    a_logit = v.new_empty(maps)
    stats = v.new_empty(batch, heads, rows, 2, dtype=torch.float32)
    weights = v.new_empty(maps if need_weights else 0, dtype=torch.float32)
    size, pitch = _size(maps, weight)
    scratch = v.new_empty(size)
    nothing = stats.view(torch.uint8)  # what kernels get for a tensor that they will not read
    q, k, v = _by_rows(q), _by_rows(k), _by_rows(v)
    tensors = (
        *(q, k, v, *_contiguous(v, given, previous, weight, bias), stats if learnt is None else learnt),
        *(_bytes(hidden, nothing), _bytes(masked, nothing), stats.view(torch.int64) if seed is None else seed),
        *(scratch, a_logit, context, stats, weights if need_weights else stats),
    )
    flags = _flags(given, previous, hidden, masked, learnt, need_weights, separate, reach)
    unit, strides = _strides(width, (q, k, v) if given is None else (v, v, v))
    numbers = (
        *(batch, heads, rows, columns, width // unit, pitch // 16, *strides),
        *(*_mask_strides(hidden, maps), *_mask_strides(masked, maps), reach[1], reach[0], flags),
        *_scalars(v.dtype, shares, scale, dropout),
    )
    for step, grid in _steps(maps, v.element_size(), 2):
        _launch(forward_kernel, grid, tensors, numbers, (*_constants(v, weight, unit), step))
    return context, a_logit, stats, weights


def backward(
    grad_context: Tensor | None,
    grad_map: Tensor | None,
    grad_weights: Tensor | None,
    context: Tensor,
    stats: Tensor,
    weights: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    given: Tensor | None,
    previous: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    learnt: Tensor | None,
    hidden: Tensor | None,
    masked: Tensor | None,
    seed: Tensor | None,
    shares: list[float],
    separate: bool,
    scale: float,
    reach: list[int],
    dropout: float,
    need_weights: bool,
) -> list[Tensor]:
    """Gradients of the first eight inputs of ``forward``, empty where there is no such input."""
    batch, heads, rows, _ = q.shape
    columns, width = v.shape[2:]
    maps = (batch, heads, rows, columns)
    if grad_context is None:
        grad_context = torch.zeros_like(context)
    weighted = grad_weights is not None
    if weighted:
        inner = (weights * grad_weights).sum(3)
    else:
        inner = stats.new_empty(batch, heads, rows)
    grad = v.new_empty(maps)
    grad_v = v.new_empty(columns, batch, heads, width).permute(1, 2, 0, 3)
    grad_q = v.new_empty(0) if given is not None else v.new_empty(rows, batch, heads, width).permute(1, 2, 0, 3)
    grad_k = v.new_empty(0) if given is not None else v.new_empty(columns, batch, heads, width).permute(1, 2, 0, 3)
    grad_previous = v.new_empty(0) if previous is None else v.new_empty(maps)
    steps = _steps(maps, v.element_size(), 4)
    count = 0 if weight is None else weight.numel()
    partial = stats.new_empty(steps[0][1], count + heads + 5)
    size, pitch = _size(maps, weight)
    scratch = v.new_empty(2 * size + (1 if learnt is None else 2) * grad.numel())
    nothing = stats.view(torch.uint8)
    q, k, v, grad_context = _by_rows(q), _by_rows(k), _by_rows(v), _by_rows(grad_context)
    tensors = (
        *(q, k, v, *_contiguous(v, given, previous, weight, bias), stats if learnt is None else learnt),
        *(_bytes(hidden, nothing), _bytes(masked, nothing), stats.view(torch.int64) if seed is None else seed),
        *(scratch, context, stats, inner, grad_context, *_contiguous(v, grad_map)),
        *(grad_weights.contiguous() if weighted else stats, grad, grad_q, grad_k, grad_v, grad_previous, partial),
    )
    flags = _flags(given, previous, hidden, masked, learnt, weighted, separate, reach)
    flags |= 0 if grad_map is None else kernels.GRAD_MAP.value
    unit, strides = _strides(width, (*((q, k) if given is None else (v, v)), v, grad_context))
    numbers = (
        *(batch, heads, rows, columns, width // unit, pitch // 16, *strides),
        *(*_mask_strides(hidden, maps), *_mask_strides(masked, maps), reach[1], reach[0], flags),
        *_scalars(v.dtype, shares, scale, dropout),
    )
    for step, grid in steps:
        _launch(backward_kernel, grid, tensors, numbers, (*_constants(v, weight, unit), step))
    of_weight, of_bias, of_shares = (v.new_empty(0) for _ in range(3))
    if weight is not None or learnt is not None:
        total = partial.sum(0)  # the same order every time
        of_shares = v.new_empty(0) if learnt is None else total[-5:].clone()
    if weight is not None:
        of_both = total[:-5].to(weight.dtype)
        of_weight, of_bias = of_both[:count].view(weight.shape), of_both[count:].clone()
    return [
        grad_q,
        grad_k,
        grad_v,
        grad if given is not None else v.new_empty(0),
        grad_previous,
        of_weight,
        of_bias,
        of_shares,
    ]


# ---- launches


def _launch(kernel: Any, programs: int, tensors: tuple, numbers: tuple, constants: tuple) -> None:
    """Launch a kernel on the device of its tensors.

    What Triton looks at in every launch is fixed here by the types, the device and the constants, so that a kernel that
    has been launched before goes without it, which takes a fifth of the time.
    """
    v = tensors[2]
    if type(v) not in PLAIN:  # it is being traced
        if not INTERPRETED:
            torch.library.wrap_triton(kernel)[(programs, 1, 1)](*tensors, *numbers, *constants, **OPTIONS)
        return
    if INTERPRETED:
        kernel[(programs, 1, 1)](*tensors, *numbers, *constants, **OPTIONS)
        return
    key = (kernel, v.dtype, v.device, constants)
    with torch.cuda.device_of(v):
        compiled = _compiled.get(key)
        if compiled is None:
            compiled = _compiled[key] = kernel.warmup(*tensors, *numbers, *constants, grid=(programs, 1, 1), **OPTIONS)
        compiled[(programs, 1, 1)](*tensors, *numbers, *constants)


def is_short(rows: int, columns: int) -> bool:
    """Whether a program does a whole sentence, in one launch."""
    return max(rows, columns) <= SHORT


def _steps(maps: tuple[int, int, int, int], element_size: int, count: int) -> list[tuple[int, int]]:
    """The launches, ``count`` for long maps: their steps and programs."""
    batch, heads, rows, columns = maps
    if is_short(rows, columns):
        return [(0, batch)]
    bands = batch * -(-rows // kernels.BAND.value)
    blocks = batch * heads * -(-columns // (128 // element_size))
    return [(step, blocks if step == 4 else bands) for step in range(1, count + 1)]


def constants_of(heads: int, kernel_size: int, width: int) -> tuple[int, int, int]:
    """Heads and head size rounded up to powers of two, and the convolution's size, 0 where there is none."""
    return 1 << (heads - 1).bit_length(), kernel_size, max(16, 1 << (width - 1).bit_length())


def _constants(v: Tensor, weight: Tensor | None, unit: int) -> tuple[int, ...]:
    heads, kernel_size, width = constants_of(v.size(1), 0 if weight is None else weight.size(3), v.size(3))
    columns = 128 // v.element_size()
    return heads, kernel_size, unit, width, columns


def _size(maps: tuple[int, int, int, int], weight: Tensor | None) -> tuple[int, int]:
    """Numbers that what the convolution reads takes, with its gaps, and its pitch."""
    batch, heads, rows, columns = maps
    gap = 0 if weight is None else weight.size(3) - 1
    pitch = (columns + gap + 15) // 16 * 16
    lead = kernels.LEAD.value
    return 0 if weight is None else batch * (lead + (heads * (rows + gap) + gap) * pitch) + lead, pitch


def _by_rows(x: Tensor) -> Tensor:
    """The same vectors, each contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _contiguous(other: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [other if x is None else x.contiguous() for x in tensors]


def _bytes(mask: Tensor | None, other: Tensor) -> Tensor:
    return other if mask is None else mask.view(torch.uint8)


def _flags(
    given: Tensor | None,
    previous: Tensor | None,
    hidden: Tensor | None,
    masked: Tensor | None,
    learnt: Tensor | None,
    weighted: bool,
    separate: bool,
    reach: list[int],
) -> int:
    """The kernels' ``flags``."""
    flags = (given is not None) * kernels.GIVEN.value | (previous is not None) * kernels.PREVIOUS.value
    flags |= (hidden is not None) * kernels.HIDDEN.value | (masked is not None) * kernels.MASKED.value
    flags |= weighted * kernels.WEIGHTED.value | separate * kernels.SEPARATE.value
    return flags | (learnt is not None) * kernels.LEARNT.value | reach[2] * kernels.TRIANGULAR.value


def unit_of(*vectors: Tensor) -> int:
    """8 where all vectors begin at multiples of 8 numbers and have as many, so that they can be read 8 at once."""
    sizes = [size for x in vectors for size in (*x.stride()[:3], x.size(3), x.storage_offset())]
    return 1 if any(size % 8 for size in sizes) else 8


def _strides(width: int, vectors: tuple[Tensor, ...]) -> tuple[int, list[int]]:
    """The unit, and all strides in units."""
    unit = unit_of(*vectors)
    return unit, [stride // unit for x in vectors for stride in x.stride()[:3]]


def _mask_strides(mask: Tensor | None, maps: tuple[int, int, int, int]) -> tuple[int, int, int]:
    """Strides over the B sentences, T rows and S columns; 0 where a mask broadcasts."""
    if mask is None:
        return 0, 0, 0
    over_b, _, over_t, over_s = mask.stride()
    size_b, _, size_t, size_s = mask.shape
    return over_b if size_b > 1 else 0, over_t if size_t > 1 else 0, over_s if size_s > 1 else 0


def _scalars(dtype: torch.dtype, shares: list[float], scale: float, dropout: float) -> tuple[float, ...]:
    """Numbers from ``threshold`` on: a place survives dropout where its 16 random bits are not below that."""
    threshold = round(dropout * 65536)
    kept_scale = 65536 / (65536 - threshold) if threshold < 65536 else 0.0
    return threshold, scale, *shares, torch.finfo(dtype).min, LIMITS.get(dtype, float("inf")), kept_scale


# ---- gradients


def _keep(ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    context, _, stats, weights = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(stats)
    ctx.save_for_backward(context, stats, weights if inputs[-1] else None, *inputs[:TENSORS])
    ctx.settings = inputs[TENSORS:]


def _go_back(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    refuse_second_derivatives()
    of_context, of_map, _, of_weights = readable(*grads)
    context, stats, weights, *inputs = ctx.saved_tensors
    looked_at = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    run = torch.ops.evolving_attention.gpu_backward if looked_at else backward
    if not ctx.settings[-1]:
        of_weights = None
    gradients = run(of_context, of_map, of_weights, context, stats, weights, *inputs, *ctx.settings)
    without = inputs[3] is not None  # queries and keys, where logits are given
    found = [
        None if x is None or (without and index < 2) else gradient
        for index, (gradient, x) in enumerate(zip(gradients, inputs[:DIFFERENTIABLE], strict=True))
    ]
    return *found, *(None,) * (TENSORS - DIFFERENTIABLE + len(ctx.settings))


class Attend(torch.autograd.Function):
    """``forward`` with its gradients."""

    @staticmethod
    def forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return forward(*arguments)

    setup_context = staticmethod(_keep)
    backward = staticmethod(_go_back)


# ---- the dispatcher

# Triton's interpreter can run nothing but real tensors, so PyTorch does not look into the kernels there.
_declare = torch.library.custom_op if INTERPRETED else torch.library.triton_op
_forward = _declare("evolving_attention::gpu_forward", forward, mutates_args=())
_backward = _declare("evolving_attention::gpu_backward", backward, mutates_args=())
if INTERPRETED:
    _forward.register_fake(forward)
    _backward.register_fake(backward)
_forward.register_autograd(_go_back, setup_context=_keep)


@register_flop_formula(torch.ops.evolving_attention.gpu_forward)
def forward_flops(q: tuple, k: tuple, v: tuple, given: tuple | None, *others: Any, **options: Any) -> int:
    """Products and convolution, 2 x multiply-adds, from the shapes of ``forward``'s tensors."""
    return _flops(v, q, given, others[1], others[10], products=2, convolutions=1)


@register_flop_formula(torch.ops.evolving_attention.gpu_backward)
def backward_flops(*shapes: Any, **options: Any) -> int:
    """The same of ``backward``, with what it computes again."""
    q, _, v, given, _, weight = shapes[6:12]
    return _flops(v, q, given, weight, shapes[20], products=5, convolutions=3)


def _flops(
    v: tuple, q: tuple, given: tuple | None, weight: tuple | None, reach: list[int], products: int, convolutions: int
) -> int:
    batch, heads, rows, _ = q
    pixels = batch * heads * rows * v[2]
    if given is not None:  # the logits, and the gradients of queries and keys, are others'
        products -= 1 if products == 2 else 3
    size = 0 if weight is None else weight[3]
    taps = size * (size + 1) // 2 if reach[2] else size * size
    return 2 * pixels * (products * v[3] + convolutions * heads * taps)
