"""The launches of the GPU's kernel.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size, k kernel size.
Masks: True = masked.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from ...call import PLAIN, Call
from ...evolution import Geometry, reach
from ..operation import Gradients, Operation, Outputs, new_vectors
from . import kernels
from .kernels import attention_kernel

INTERPRETED = kernels.INTERPRETED.value
BAND, PIXELS = kernels.BAND.value, kernels.PIXELS.value
MIX, ATTEND, UNATTEND, VECTORS, EVOLVE, SOFTEN, UNMIX = range(7)
GIVEN, PREVIOUS, HIDDEN, MASKED, WEIGHTED, SEPARATE, LEARNT, GRAD_MAP, TRIANGULAR, ABOVE, UNHIDDEN = (
    1 << bit for bit in range(11)
)
#: Four warps, like BAND and PIXELS, were the fastest of those tried on an H200, in kernels with another grid.
OPTIONS = {"num_warps": 4, "num_stages": 1}
#: So many programs keep a GPU busy; with more of them, more parts of the convolution's gradients are added up.
PROGRAMS = 2048
#: the kernel's tensors, in order
TENSORS = attention_kernel.arg_names[: attention_kernel.arg_names.index("B")]
#: the types of those that are not of the maps' type
TYPES = {"hidden": torch.bool, "masked": torch.bool, "seed": torch.int64} | dict.fromkeys(
    ("learnt", "stats", "weights", "inner", "of_weights", "partial"), torch.float32
)

#: inputs that the kernel reads as if they were contiguous
CONTIGUOUS = ("given", "previous", "above", "weight", "bias")

Grid = tuple[int, int, int]
_compiled: dict[tuple, Any] = {}


def forward(x: Call) -> Outputs:
    """The outputs of a reduced call; stats, B x K x T x 2: each row's largest score and sum of exp(score - largest)."""
    batch, heads, rows, columns = x.maps
    context, a_logit, empty = new_vectors(x.v, x.q), x.v.new_empty(x.maps), x.v.new_empty(0)
    stats = x.v.new_empty(batch, heads, rows, 2, dtype=torch.float32)
    weights = stats.new_empty(x.maps if x.need_weights else 0)
    kept = empty if x.above is None else x.v.new_empty(batch, heads, x.kernel_size - 1, columns)
    tensors = {"stats": stats, "evolved": a_logit, "context": context, "weights": weights, "kept": kept}
    if x.kernel_size:
        tensors["mixed"] = torch.empty_like(a_logit)
    _launch(x, (MIX, EVOLVE, ATTEND) if x.kernel_size else (MIX, ATTEND), tensors, WEIGHTED * x.need_weights)
    return Outputs(context, a_logit, weights, kept, stats)


def backward(of: Gradients, x: Call) -> list[Tensor]:
    """The gradients of the call's first fields."""
    stats, flags = of.stats, 0
    # a hook on saved tensors may give it in another layout than the one that the kernel reads
    context = of.context.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    of_context = torch.zeros_like(context) if of.of_context is None else of.of_context
    if of_context.stride(3) != 1 or not _is_aligned(of_context):
        of_context = of_context.contiguous()
    empty, grad = x.v.new_empty(0), x.v.new_empty(x.maps)
    of_vectors = [new_vectors(x.q, x.q), new_vectors(x.v, x.v), new_vectors(x.v, x.v)]
    if x.given is not None:
        of_vectors[:2] = empty, empty
    of_previous = empty if x.previous is None else torch.empty_like(grad)
    taps = 0 if x.weight is None else x.weight.numel()
    partial = stats.new_empty(x.maps[0] * _strips(x)[0], taps + x.maps[1] + 5)
    scratch = ["evolved", *["mixed", "grad_conv"] * (x.weight is not None), *["logits"] * (x.learnt is not None)]
    tensors = {name: torch.empty_like(grad) for name in scratch} | {
        "stats": stats,
        "context": context,
        "of_context": of_context,
        "inner": stats.new_empty(stats.shape[:3]),
        "grad": grad,
        **dict(zip(("of_q", "of_k", "of_v"), of_vectors, strict=True)),
        "of_previous": of_previous,
        "partial": partial,
    }
    if of.of_a_logit is not None:
        tensors["of_map"], flags = of.of_a_logit.contiguous(), GRAD_MAP
    if of.of_weights is not None and of.weights is not None:
        tensors |= {"inner": (of.weights * of.of_weights).sum(3), "of_weights": of.of_weights.contiguous()}
        flags |= WEIGHTED
    _launch(x, (UNATTEND, SOFTEN, UNMIX, VECTORS), tensors, flags)
    of_convolution = [empty, empty]
    if x.weight is not None:  # sums of their own: results may not share memory. The same order every time
        of_convolution = [partial[:, :taps].sum(0).view(x.weight.shape), partial[:, taps:-5].sum(0)]
        of_convolution = [y.to(x.weight.dtype) for y in of_convolution]
    of_shares = empty if x.learnt is None else partial[:, -5:].sum(0)
    found = [*of_vectors, empty if x.given is None else grad, of_previous, *of_convolution, of_shares]
    return [y if want else x.v.new_empty(0) for y, want in zip(found, of.wanted, strict=True)]


# ---- launches


def _launch(x: Call, steps: tuple[int, ...], others: dict[str, Tensor], flags: int) -> None:
    """Launch phases, which read the inputs and, by their names in kernels.py, other tensors."""
    if type(x.v) not in PLAIN:  # torch.compile asks for the shapes only
        return
    batch, heads, rows, columns = x.maps
    dtype, device, unit = x.v.dtype, x.v.device, unit_of(x.q, x.k, x.v, x.given)
    q, k, v = (_by_rows(y) for y in ((x.q, x.k, x.v) if x.given is None else (x.v, x.v, x.v)))
    of_context = others.get("of_context", q)
    inputs = {name: y for name in ("learnt", "hidden", "masked", "seed") if (y := getattr(x, name)) is not None}
    maps = {name: y.contiguous() for name in CONTIGUOUS if (y := getattr(x, name)) is not None}
    tensors = {**_nothing(dtype, device), **inputs, **maps, **others, "q": q, "k": k, "v": v}
    flags |= GIVEN * (x.given is not None) | PREVIOUS * (x.previous is not None) | LEARNT * (x.learnt is not None)
    flags |= HIDDEN * (x.hidden is not None) | MASKED * (x.masked is not None)
    left, top, triangular = reach(Geometry(x.geometry), x.kernel_size)
    flags |= SEPARATE * (not x.same) | TRIANGULAR * triangular | ABOVE * (x.above is not None)
    if x.same and x.hidden is not None and (x.keep_map or x.hidden is not x.masked):
        flags |= UNHIDDEN  # what is carried has no zeros there, and somebody looks
    threshold = round(x.dropout * 65536)  # a place survives dropout where its 16 random bits are not below that
    numbers = (
        *(*_mask_strides(x.hidden), *_mask_strides(x.masked), top, left, flags, threshold),
        *[stride // unit for y in (q, k, v, of_context) for stride in y.stride()[:3]],
        # float16's sums are kept within half of its range, as in evolution.py
        *(x.scale, *x.coefficients, torch.finfo(dtype).min),
        torch.finfo(dtype).max / 2 if dtype == torch.float16 else float("inf"),
        65536 / (65536 - threshold) if threshold < 65536 else 0.0,
    )
    sizes = (*x.maps, x.v.size(3) // unit, x.q.size(0) // x.v.size(0), 0 if x.above is None else x.above.size(3))
    most, kernel_size, width = constants_of(heads, x.kernel_size, x.v.size(3))
    block = _block(x.v)
    bands, blocks = -(-rows // BAND), -(-columns // block)
    launches = []
    for step in steps:
        if step >= EVOLVE:
            parts, tiles = _strips(x)
            programs = batch * parts
        else:
            tiles, parts = 0, bands if step != VECTORS else blocks + bands * (x.given is None)
            programs = batch * heads * parts
        constants = (most, kernel_size, unit, width, block, step)
        launches.append(((programs, 1, 1), (*sizes, parts, tiles, *numbers), constants))
    _run(attention_kernel, tuple(tensors.values()), launches, (dtype, device))


def _run(kernel: Any, tensors: tuple[Tensor, ...], launches: list[tuple[Grid, tuple, tuple]], types: tuple) -> None:
    """Launch a kernel on the device of its tensors, once for each grid, numbers and constants.

    Triton inspects every argument of every launch. Here types and constants decide the outcome, so later launches skip
    that. They pass addresses, since Triton asks the driver about every tensor. So callers must have checked the
    tensors' devices.
    """
    if INTERPRETED:
        for grid, numbers, constants in launches:
            kernel[grid](*tensors, *numbers, *constants, **OPTIONS)
        return
    with torch.cuda.device_of(tensors[2]):
        addresses = [x.data_ptr() for x in tensors]
        for grid, numbers, constants in launches:
            key = (kernel, types, constants)
            if key not in _compiled:
                _compiled[key] = kernel.warmup(*tensors, *numbers, *constants, grid=grid, **OPTIONS)
            _compiled[key][grid](*addresses, *numbers, *constants)


def _strips(x: Call) -> tuple[int, int]:
    """Programs of a sentence for a phase of all heads, and tiles of pixels of each."""
    batch, _, rows, columns = x.maps
    tiles = -(-rows * (-(-columns // 4) * 4) // PIXELS)
    each = 2 + batch * tiles // PROGRAMS  # at least two, so that the trial sees a program that does several
    return -(-tiles // each), each


def _block(v: Tensor) -> int:
    """Columns of a head's tile: as many as there are registers for."""
    return 32 if v.element_size() == 2 or v.size(3) <= 64 else 16


@functools.cache
def _nothing(dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    """In the place of tensors that phases do not read: the kernel's, by name, in order."""
    return {name: torch.empty(16, dtype=TYPES.get(name, dtype), device=device) for name in TENSORS}


def constants_of(heads: int, kernel_size: int, width: int) -> tuple[int, int, int]:
    """Heads and head size, both rounded up to powers of two, and k between them: kernels are compiled for these."""
    return 1 << (heads - 1).bit_length(), kernel_size, max(16, 1 << (width - 1).bit_length())


def unit_of(q: Tensor, k: Tensor, v: Tensor, given: Tensor | None) -> int:
    """8 if vectors begin and end at multiples of 8 numbers, so that one load reads 8; else 1."""
    read = (q, k, v) if given is None else (v,)
    return 8 if v.size(3) % 8 == 0 and all(_is_aligned(x) for x in read) else 1


def _is_aligned(x: Tensor) -> bool:
    a, b, c, _ = x.stride()
    # Dynamo cannot ask for the offset; the operation itself can, when it runs.
    begins = torch.compiler.is_dynamo_compiling() or x.storage_offset() % 8 == 0
    return a % 8 == 0 and b % 8 == 0 and c % 8 == 0 and begins


def _by_rows(x: Tensor) -> Tensor:
    """The same vectors, each contiguous."""
    return x if x.stride(3) == 1 else x.contiguous()


def _mask_strides(mask: Tensor | None) -> list[int]:
    """Strides over the B sentences, T rows and S columns; 0 where a mask broadcasts."""
    if mask is None:
        return [0, 0, 0]
    return [mask.stride(axis) if mask.size(axis) > 1 else 0 for axis in (0, 2, 3)]


#: Not by PyTorch's ``triton_op``: with it Inductor copies the kernels' source, but not the class ``kernels.Call``.
operation = Operation("gpu", forward, backward, fakes=(forward, backward))
