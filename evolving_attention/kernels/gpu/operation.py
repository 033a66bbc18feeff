"""The launches of the GPU's kernels.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size, k kernel size.
Masks: True = masked.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...evolution import Geometry, reach
from ..call import PLAIN
from ..operation import Inputs, Operation, new_vectors, parted
from . import kernels
from .kernels import backward_kernel, forward_kernel

INTERPRETED = kernels.INTERPRETED.value
GIVEN, PREVIOUS, HIDDEN, MASKED, WEIGHTED, SEPARATE, LEARNT, GRAD_MAP, TRIANGULAR, ABOVE, UNHIDDEN = (
    bit.value for bit in kernels.FLAGS
)
#: a map up to this length is done by one program
SHORT = 32
#: Four warps, like BAND, PIXELS and ``_columns``, were the fastest of those tried on an H200.
OPTIONS = {"num_warps": 4, "num_stages": 1}

_compiled: dict[tuple, Any] = {}


def forward(*arguments: Any) -> tuple[Tensor, ...]:
    """``Inputs`` -> ``Outputs``; stats, B x K x T x 2: each row's largest score and sum of exp(score - largest)."""
    x = Inputs(*arguments)
    context, a_logit = new_vectors(x.v, x.q), x.v.new_empty(x.maps)
    stats = x.v.new_empty(*x.q.shape[:3], 2, dtype=torch.float32)
    weights = stats.new_empty(x.maps if x.need_weights else 0)
    frame = Frame.of(x)
    scratch = x.v.new_empty(frame.size)
    _launch(forward_kernel, x, stats, (scratch, a_logit, context, weights), frame, x.need_weights, [x.q, x.k, x.v], 2)
    return context, a_logit, weights, x.v.new_empty(0) if x.above is None else frame.last_rows(x, scratch), stats


def backward(*arguments: Any) -> list[Tensor]:
    """``Gradients`` and ``Inputs`` -> the gradients of the first inputs."""
    of, x = parted(arguments)
    stats, weighted = of.stats, of.of_weights is not None
    # a hook on saved tensors may give it in another layout than the one that the kernel reads
    context = of.context.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3)
    of_context = torch.zeros_like(context) if of.of_context is None else of.of_context
    if of_context.stride(3) != 1 or not _is_aligned(of_context):
        of_context = of_context.contiguous()
    inner = (of.weights * of.of_weights).sum(3) if weighted else stats.new_empty(stats.shape[:3])
    grad, frame = x.v.new_empty(x.maps), Frame.of(x)
    of_vectors = [new_vectors(x.q, x.q), new_vectors(x.v, x.v), new_vectors(x.v, x.v)]
    if x.given is not None:
        of_vectors[:2] = x.v.new_empty(0), x.v.new_empty(0)
    of_previous = x.v.new_empty(0) if x.previous is None else torch.empty_like(grad)
    programs = _steps(x, 4)[0][1]
    taps = 0 if x.weight is None else x.weight.numel()
    partial = stats.new_empty(programs, taps + x.q.size(1) + 5)
    scratch = x.v.new_empty(2 * frame.size + (1 if x.learnt is None else 2) * grad.numel())
    left = (
        *(scratch, context, inner, of_context, *_contiguous(x.v, of.of_a_logit)),
        *(of.of_weights.contiguous() if weighted else stats, grad, *of_vectors, of_previous, partial),
    )
    flags = GRAD_MAP * (of.of_a_logit is not None)
    _launch(backward_kernel, x, stats, left, frame, weighted, [x.q, x.k, x.v, of_context], 4, flags)
    nothing = x.v.new_empty(0)
    of_convolution = [nothing, nothing]
    if x.weight is not None:  # sums of their own: results may not share memory. The same order every time
        of_convolution = [partial[:, :taps].sum(0).view(x.weight.shape), partial[:, taps:-5].sum(0)]
        of_convolution = [y.to(x.weight.dtype) for y in of_convolution]
    of_shares = nothing if x.learnt is None else partial[:, -5:].sum(0)
    found = [*of_vectors, nothing if x.given is None else grad, of_previous, *of_convolution, of_shares]
    return [y if want else x.v.new_empty(0) for y, want in zip(found, of.wanted, strict=True)]


class Frame(NamedTuple):
    """The room of framed maps, in numbers: see kernels.py."""

    pitch: int  # of a row
    channel: int
    sentence: int
    size: int  # of the whole; 0 without a convolution

    @classmethod
    def of(cls, x: Inputs) -> "Frame":
        """The frame of a call's maps."""
        batch, heads, rows, columns = x.maps
        gap, lead = max(0, x.kernel_size - 1), kernels.LEAD.value
        pitch = (columns + gap + 15) // 16 * 16
        channel = (rows + gap) * pitch
        sentence = lead + heads * channel + gap * pitch
        return cls(pitch, channel, sentence, batch * sentence + lead if x.kernel_size else 0)

    def last_rows(self, x: Inputs, framed: Tensor) -> Tensor:
        """The last k - 1 rows of each channel, those above it included: B x K x (k - 1) x S."""
        batch, heads, rows, columns = x.maps
        shape, strides = (batch, heads, x.kernel_size - 1, columns), (self.sentence, self.channel, self.pitch, 1)
        return framed.as_strided(shape, strides, kernels.LEAD.value + rows * self.pitch).contiguous()  # frees the frame


# ---- launches


def _launch(
    kernel: Any,
    x: Inputs,
    stats: Tensor,
    others: tuple[Tensor, ...],
    frame: "Frame",
    weighted: bool,
    vectors: list[Tensor],
    count: int,
    flags: int = 0,
) -> None:
    """Launch a kernel. Only this kernel takes ``others``; it reads ``vectors`` by their strides."""
    unit, dtype = unit_of(x.q, x.k, x.v, x.given), x.v.dtype
    vectors = [x.v if x.given is not None and index < 2 else _by_rows(y) for index, y in enumerate(vectors)]
    given, previous, above, weight, bias = _contiguous(x.v, x.given, x.previous, x.above, x.weight, x.bias)
    nothing = stats.view(torch.bool) if x.hidden is None or x.masked is None else None  # kernels do not read it
    tensors = (
        *(*vectors[:3], given, previous, above, weight, bias, stats if x.learnt is None else x.learnt),
        *(nothing if x.hidden is None else x.hidden, nothing if x.masked is None else x.masked),
        *(stats.view(torch.int64) if x.seed is None else x.seed, stats, *others),
    )
    flags |= GIVEN * (x.given is not None) | PREVIOUS * (x.previous is not None) | LEARNT * (x.learnt is not None)
    flags |= HIDDEN * (x.hidden is not None) | MASKED * (x.masked is not None)
    left, top, triangular = reach(Geometry(x.geometry), x.kernel_size)
    flags |= WEIGHTED * weighted | SEPARATE * (not x.same) | TRIANGULAR * triangular | ABOVE * (x.above is not None)
    if x.same and x.hidden is not None and (x.keep_map or x.hidden is not x.masked):
        flags |= UNHIDDEN  # what is carried has no zeros there, and somebody looks
    threshold = round(x.dropout * 65536)  # a place survives dropout where its 16 random bits are not below that
    numbers = (
        *(*x.maps, x.v.size(3) // unit, x.q.size(0) // x.v.size(0), 0 if x.above is None else x.above.size(3)),
        *(frame.pitch // 16, *_mask_strides(x.hidden), *_mask_strides(x.masked)),
        *(top, left, flags, threshold, x.scale, *x.shares, torch.finfo(dtype).min),
        # float16's sums are kept within half of its range, as in evolution.py
        torch.finfo(dtype).max / 2 if dtype == torch.float16 else float("inf"),
        65536 / (65536 - threshold) if threshold < 65536 else 0.0,
        *[stride // unit for y in vectors for stride in y.stride()[:3]],
    )
    heads, kernel_size, width = constants_of(x.v.size(1), x.kernel_size, x.v.size(3))
    for step, programs in _steps(x, count):
        constants = (heads, kernel_size, unit, width, _columns(x), step)
        _run(kernel, (programs, 1, 1), tensors, (*numbers, *constants), (dtype, x.v.device, constants))


def _run(kernel: Any, grid: tuple[int, int, int], tensors: tuple[Tensor, ...], others: tuple, key: tuple) -> None:
    """Launch a kernel on the device of its tensors.

    Triton inspects every argument of every launch. Here ``key`` decides the outcome, so later launches skip that. They
    pass addresses, since Triton asks the driver about every tensor. So callers must have checked the tensors' devices.
    """
    if type(tensors[2]) not in PLAIN:  # torch.compile asks for the shapes only
        return
    if INTERPRETED:
        kernel[grid](*tensors, *others, **OPTIONS)
    else:
        with torch.cuda.device_of(tensors[2]):
            compiled = _compiled.get((kernel, *key))
            if compiled is None:
                compiled = _compiled[kernel, *key] = kernel.warmup(*tensors, *others, grid=grid, **OPTIONS)
            compiled[grid](*[x.data_ptr() for x in tensors], *others)


def is_short(rows: int, columns: int) -> bool:
    """Whether a program does a whole sentence, in one launch: a short one, or a step of decoding."""
    return rows == 1 or max(rows, columns) <= SHORT


def _steps(x: Inputs, count: int) -> list[tuple[int, int]]:
    """The launches, ``count`` for long maps: their steps and programs."""
    batch, heads, rows, columns = x.maps
    if is_short(rows, columns):
        return [(0, batch)]
    bands = batch * -(-rows // kernels.BAND.value)
    blocks = batch * heads * -(-columns // _columns(x))
    return [(step, blocks if step == 4 else bands) for step in range(1, count + 1)]


def _columns(x: Inputs) -> int:
    """Columns of a head's tile: a short map's, or as many as there are registers for."""
    size = x.v.element_size()
    most = 128 // size if x.v.size(3) <= 64 else 64 // (size // 2) ** 2
    return min(SHORT, most) if is_short(*x.maps[2:]) else most


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


def _contiguous(other: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    return [other if x is None else x.contiguous() for x in tensors]


def _mask_strides(mask: Tensor | None) -> list[int]:
    """Strides over the B sentences, T rows and S columns; 0 where a mask broadcasts."""
    if mask is None:
        return [0, 0, 0]
    return [mask.stride(axis) if mask.size(axis) > 1 else 0 for axis in (0, 2, 3)]


#: Not by PyTorch's ``triton_op``: with it Inductor copies the kernels' source, but not the class ``kernels.Call``.
operation = Operation("gpu", forward, backward, fakes=(forward, backward))
