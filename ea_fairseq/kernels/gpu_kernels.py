"""Evolving attention for the GPU: four Triton kernels, and the functions that launch them.

Triton must be there to import this module; ``gpu`` does that when it needs it. The kernels, each the work of several
elementwise passes over a map:

    mix                A_in    = alpha * previous + (1 - alpha) * q k^T, zero where hidden
    evolve             A_logit = beta * ReLU(Conv(A_in)) + (1 - beta) * A_in, its softmax and dropout
    soften_backward    gradient of the probabilities -> gradient of A_logit -> of ReLU's input, and of A_in beside it
    convolve_backward  gradients of A_in, of the convolution's weight and of its bias

Axes: B batch, K heads (1 to 16), T target (query) length, S source (key) length, D head size, k kernel size.
Every map is B x K x T x S; in memory a row takes its ``pitch``, the multiple of 16 from S up, and columns from S on
are zero. Masks: True = masked; bool, broadcast to B x 1 x T x S, read by their strides (0 where broadcast).

A convolution is a matrix product over M = K * k * k taps, of which tap m is the kernel's row a and column b of channel
c: m = (c * k + a) * k + b, as the weight K x K x k x k lies in memory. Pixel (i, j) reads row i + a - top, column
j + b - left; ``Taps`` says top and left for each geometry. Products take their factors in the maps' type and add up in
float32. Nothing is added atomically, so the same input gives the same bits.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .evolution import Geometry, reach

#: matrix products need at least 16 channels: what is beyond K is zero
CHANNELS = tl.constexpr(16)
#: taps that are multiplied at a time
CHUNK = tl.constexpr(16)
#: how products of float32 are made: three products of tensor cores, about as exact as float32 (others: no difference)
PRECISION = tl.constexpr("tf32x3")
#: whether the kernels run in Triton's interpreter, on the CPU: Triton decides so when it is imported
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: of Philox: as many as pass all tests of randomness (Salmon et al. 2011, table 2)
ROUNDS = tl.constexpr(7)
#: partial sums of the weight's gradient, four for each multiprocessor of an H100; the same on every device, so that the
#: order of the sum is, too
PARTIAL_SUMS = 528


class Taps(NamedTuple):
    """Which pixels a convolution reads: see ``Geometry``."""

    kernel_size: int
    top: int
    left: int
    triangular: bool  # taps right of the kernel's diagonal are removed, whatever their weights hold

    @classmethod
    def of(cls, geometry: Geometry, kernel_size: int) -> "Taps":
        left, top, triangular = reach(geometry, kernel_size)
        return cls(kernel_size, top, left, triangular)


class Dropout(NamedTuple):
    """Dropout's mask as a function of a seed: a place is kept where its 16 random bits are not below the threshold."""

    seed: int
    threshold: int  # of 65536
    scale: float  # of what is kept

    @classmethod
    def of(cls, probability: float) -> "Dropout":
        """The seed comes from the CPU's generator: no wait for the GPU, and checkpointed layers restore it."""
        seed = int(torch.randint(2**31 - 1, (), device="cpu")) if probability > 0 else 0
        threshold = round(probability * 65536)
        return cls(seed, threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0)


# ---- pieces of kernels


@triton.jit
def _store_gradient(
    g, grad, grad_previous, offsets, stored, hidden, b, i, j, S, hidden_b, hidden_t, hidden_s, alpha,
    HIDDEN: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """From the gradient of A_in, places j of row i: that of q k^T, and of the map before where there is one."""
    if HIDDEN:
        places = hidden + b * hidden_b + i.to(tl.int64) * hidden_t + j * hidden_s
        g = tl.where((tl.load(places, mask=j < S, other=1) != 0)[:, None], 0, g)
    if SKIP:
        tl.store(grad_previous + offsets, (alpha * g).to(grad_previous.dtype.element_ty), mask=stored)
        g = (1 - alpha) * g
    tl.store(grad + offsets, g.to(grad.dtype.element_ty), mask=stored)


@triton.jit
def _product(a, b, plus):
    """a @ b + plus, added up in float32."""
    if INTERPRETED:  # it would multiply the bits of bfloat16 as integers (Triton's issue 11584)
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, plus, input_precision=PRECISION)


@triton.jit
def _taps(m, K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr):
    """Of each tap: its channel, how far down and right of the pixel it looks, and whether there is such a tap."""
    a, b = m // KERNEL % KERNEL, m % KERNEL
    exists = m < K * KERNEL * KERNEL
    if TRIANGULAR:
        exists = exists & (b <= a)
    return m // (KERNEL * KERNEL), a - TOP, b - LEFT, exists


@triton.jit
def _neighbours(maps, sentence, i, j, channel, down, right, exists, T, S, pitch, K: tl.constexpr):
    """What each tap sees from the pixels of row i and columns j: columns x taps, zero outside of the map."""
    y = i + down
    z = j[:, None] + right[None, :]
    lines = ((sentence * K + channel) * T + y) * pitch
    seen = (exists & (y >= 0) & (y < T))[None, :] & (z >= 0) & (z < S)
    return tl.load(maps + (lines[None, :] + z), mask=seen, other=0)


@triton.jit
def _softened(a_logit, masked, offsets, j, peak, total, S, masked_s, lowest, stored, MASKED: tl.constexpr):
    """Probabilities before dropout of a block of one row, columns x heads, and which columns are masked."""
    x = tl.load(a_logit + offsets, mask=stored, other=0).to(tl.float32)
    hide = j >= S
    if MASKED:
        hide = tl.load(masked + j * masked_s, mask=j < S, other=1) != 0
        x = tl.where(hide[:, None], lowest, x)
    p = tl.exp(x - peak[None, :]) / total[None, :]
    return tl.where((j < S)[:, None], p, 0), hide


@triton.jit
def _kept(seed, row, j, h, threshold):
    """Which of columns x heads survive dropout. One draw of 128 bits serves eight heads of a pixel, 16 bits each."""
    zero = j * 0
    word = (h % 8 // 2)[None, :]
    bits = tl.zeros([j.shape[0], h.shape[0]], tl.uint32)
    for group in tl.static_range((h.shape[0] + 7) // 8):
        r0, r1, r2, r3 = tl.philox(seed, j, zero + row, zero + group, zero, ROUNDS)
        low = tl.where(word == 0, r0[:, None], r1[:, None])
        high = tl.where(word == 2, r2[:, None], r3[:, None])
        bits = tl.where((h // 8 == group)[None, :], tl.where(word < 2, low, high), bits)
    bits = tl.where((h % 2 == 0)[None, :], bits & 0xFFFF, bits >> 16)
    return bits.to(tl.int32) >= threshold


# ---- forward


@triton.jit(do_not_specialize=["T", "hidden_b", "hidden_t"])
def mix_kernel(
    q, k, previous, hidden, maps,
    T, S, pitch, D, q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, hidden_b, hidden_t, hidden_s, alpha,
    K: tl.constexpr, SKIP: tl.constexpr, HIDDEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A_in of a tile, rows x columns, of one head. One program for each tile, those of a head one after the other."""
    across = tl.cdiv(S, COLUMNS)
    tiles = tl.cdiv(T, ROWS) * across
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, h = head // K, head % K
    i = tile // across * ROWS + tl.arange(0, ROWS)
    j = tile % across * COLUMNS + tl.arange(0, COLUMNS)

    mixed = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, D, WIDTH):
        d = start + tl.arange(0, WIDTH)
        rows = tl.load(
            q + b * q_b + h * q_h + i[:, None].to(tl.int64) * q_t + d[None, :] * q_d,
            mask=(i < T)[:, None] & (d < D)[None, :], other=0,
        )  # fmt: skip
        columns = tl.load(
            k + b * k_b + h * k_h + j[None, :].to(tl.int64) * k_s + d[:, None] * k_d,
            mask=(j < S)[None, :] & (d < D)[:, None], other=0,
        )  # fmt: skip
        mixed = _product(rows, columns, mixed)

    exists = (i < T)[:, None] & (j < S)[None, :]
    stored = (i < T)[:, None] & (j < pitch)[None, :]
    offsets = (head * T + i[:, None]) * pitch + j[None, :]
    if SKIP:
        mixed = alpha * tl.load(previous + offsets, mask=stored, other=0).to(tl.float32) + (1 - alpha) * mixed
    if HIDDEN:
        places = hidden + b * hidden_b + i[:, None].to(tl.int64) * hidden_t + j[None, :] * hidden_s
        mixed = tl.where(tl.load(places, mask=exists, other=1) != 0, 0, mixed)
    tl.store(maps + offsets, tl.where(exists, mixed, 0).to(maps.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["T", "masked_b", "masked_t", "seed", "threshold"])
def evolve_kernel(
    maps, weight, bias, masked, a_logit, active, probs, peaks, totals,
    T, S, pitch, masked_b, masked_t, masked_s, beta, lowest, seed, threshold, scale,
    K: tl.constexpr, HEADS: tl.constexpr, CONVOLVED: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr,
    LEFT: tl.constexpr, TRIANGULAR: tl.constexpr, MASKED: tl.constexpr, DROPPED: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A_logit, and the probabilities after dropout, of one row of a sentence's map, all heads. One program a row.

    Also leaves what the backward pass needs: of every pixel one bit a head in ``active``, whether ReLU let it through;
    and of every row ``peaks``, its largest logit, and ``totals``, the sum of the exponentials of its logits less that.
    """
    row = tl.program_id(0)
    i = row % T
    b = (row // T).to(tl.int64)
    if MASKED:
        masked += b * masked_b + i.to(tl.int64) * masked_t

    # Convolution, and the softmax's sums, block by block.
    o = tl.arange(0, CHANNELS if CONVOLVED else HEADS)
    stats = (b * K + o) * T + i
    peak = tl.full([o.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([o.shape[0]], tl.float32)
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        exists = (j < S)[:, None]
        stored = (j < pitch)[:, None] & (o < K)[None, :]
        offsets = (stats * pitch)[None, :] + j[:, None]
        x = tl.load(maps + offsets, mask=stored, other=0).to(tl.float32)
        if CONVOLVED:
            convolved = tl.zeros([BLOCK, CHANNELS], tl.float32)
            for first in range(0, K * KERNEL * KERNEL, CHUNK):
                m = first + tl.arange(0, CHUNK)
                channel, down, right, tap = _taps(m, K, KERNEL, TOP, LEFT, TRIANGULAR)
                pixels = _neighbours(maps, b, i, j, channel, down, right, tap, T, S, pitch, K)
                taps = tl.load(
                    weight + o[None, :] * (K * KERNEL * KERNEL) + m[:, None],
                    mask=tap[:, None] & (o < K)[None, :], other=0,
                )  # fmt: skip
                convolved = _product(pixels, taps.to(pixels.dtype), convolved)
            convolved += tl.load(bias + o, mask=o < K, other=0).to(tl.float32)[None, :]
            off = convolved <= 0  # what is not a number stays so: that is how a loss scale that is too high shows
            x = beta * tl.where(off, 0, convolved) + (1 - beta) * x
            x = tl.where(exists, x, 0).to(a_logit.dtype.element_ty)
            tl.store(a_logit + offsets, x, mask=stored)
            x = x.to(tl.float32)
            bits = tl.sum(tl.where(off, 0, 1) << o[None, :], 1)
            tl.store(active + row.to(tl.int64) * pitch + j, bits.to(tl.int16), mask=j < pitch)
        if MASKED:
            # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked.
            x = tl.where((tl.load(masked + j * masked_s, mask=j < S, other=0) != 0)[:, None], lowest, x)
        x = tl.where(exists, x, float("-inf"))
        higher = tl.maximum(peak, tl.max(x, 0))
        total = total * tl.exp(peak - higher) + tl.sum(tl.exp(x - higher[None, :]), 0)
        peak = higher
    tl.store(peaks + stats, peak, mask=o < K)
    tl.store(totals + stats, total, mask=o < K)

    tl.debug_barrier()  # what follows reads what other threads of this program wrote
    h = tl.arange(0, HEADS)
    stats = (b * K + h) * T + i
    peak = tl.load(peaks + stats, mask=h < K, other=0)
    total = tl.load(totals + stats, mask=h < K, other=1)
    for start in range(0, S, WIDE):
        j = start + tl.arange(0, WIDE)
        stored = (j < pitch)[:, None] & (h < K)[None, :]
        offsets = (stats * pitch)[None, :] + j[:, None]
        p, _ = _softened(a_logit, masked, offsets, j, peak, total, S, masked_s, lowest, stored, MASKED)
        if DROPPED:
            p = tl.where(_kept(seed, row, j, h, threshold), p * scale, 0)
        tl.store(probs + offsets, p.to(probs.dtype.element_ty), mask=stored)


# ---- backward


@triton.jit(do_not_specialize=["T", "masked_b", "masked_t", "hidden_b", "hidden_t", "seed", "threshold"])
def soften_backward_kernel(
    a_logit, masked, hidden, active, peaks, totals, grad_map, grad, probs, grad_conv, grad_previous,
    T, S, pitch, masked_b, masked_t, masked_s, hidden_b, hidden_t, hidden_s,
    alpha, beta, lowest, seed, threshold, scale,
    K: tl.constexpr, HEADS: tl.constexpr, CONVOLVED: tl.constexpr, MASKED: tl.constexpr, HIDDEN: tl.constexpr,
    DROPPED: tl.constexpr, PASSED_ON: tl.constexpr, SKIP: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Softmax and dropout backwards for one row of a sentence's map, all heads. One program a row.

    With P the probabilities before dropout and G the gradient of P (made of ``grad``, that of P after dropout):
        gradient of A_logit = P * (G - sum over the row of P * G), 0 where masked, + ``grad_map`` (from the layer above)
        ``probs`` = P after dropout, for the gradient of the values
        ``grad_conv`` = beta * gradient of A_logit where ReLU was active, else 0
        ``grad``, in place = (1 - beta) * gradient of A_logit: what reaches A_in beside the convolution
    Without a convolution A_logit is A_in: ``grad`` becomes that of the logits, and ``grad_previous`` is written.
    """
    row = tl.program_id(0)
    i = row % T
    b = (row // T).to(tl.int64)
    if MASKED:
        masked += b * masked_b + i.to(tl.int64) * masked_t
    h = tl.arange(0, HEADS)
    stats = (b * K + h) * T + i
    peak = tl.load(peaks + stats, mask=h < K, other=0)
    total = tl.load(totals + stats, mask=h < K, other=1)

    inner = tl.zeros([HEADS], tl.float32)
    for start in range(0, S, WIDE):
        j = start + tl.arange(0, WIDE)
        stored = (j < pitch)[:, None] & (h < K)[None, :]
        offsets = (stats * pitch)[None, :] + j[:, None]
        p, _ = _softened(a_logit, masked, offsets, j, peak, total, S, masked_s, lowest, stored, MASKED)
        g = tl.load(grad + offsets, mask=stored, other=0).to(tl.float32)
        if DROPPED:
            g = tl.where(_kept(seed, row, j, h, threshold), g * scale, 0)
        inner += tl.sum(p * g, 0)

    tl.debug_barrier()  # ``grad`` is overwritten only when every thread has read it
    for start in range(0, S, WIDE):
        j = start + tl.arange(0, WIDE)
        stored = (j < pitch)[:, None] & (h < K)[None, :]
        offsets = (stats * pitch)[None, :] + j[:, None]
        p, hide = _softened(a_logit, masked, offsets, j, peak, total, S, masked_s, lowest, stored, MASKED)
        g = tl.load(grad + offsets, mask=stored, other=0).to(tl.float32)
        dropped = p
        if DROPPED:
            keep = _kept(seed, row, j, h, threshold)
            g = tl.where(keep, g * scale, 0)
            dropped = tl.where(keep, p * scale, 0)
        tl.store(probs + offsets, dropped.to(probs.dtype.element_ty), mask=stored)

        g = tl.where(hide[:, None], 0, p * (g - inner[None, :]))
        if PASSED_ON:
            above = tl.load(grad_map + offsets, mask=stored, other=0).to(tl.float32)
            g += tl.where((j < S)[:, None], above, 0)
        if CONVOLVED:
            bits = tl.load(active + row.to(tl.int64) * pitch + j, mask=j < pitch, other=0).to(tl.int32)
            on = ((bits[:, None] >> h[None, :]) & 1) != 0
            tl.store(grad_conv + offsets, tl.where(on, beta * g, 0).to(grad_conv.dtype.element_ty), mask=stored)
            tl.store(grad + offsets, ((1 - beta) * g).to(grad.dtype.element_ty), mask=stored)
        else:
            _store_gradient(
                g, grad, grad_previous, offsets, stored, hidden, b, i, j, S, hidden_b, hidden_t, hidden_s, alpha,
                HIDDEN, SKIP,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "sums", "T", "hidden_b", "hidden_t"])
def convolve_backward_kernel(
    maps, weight, hidden, grad_conv, grad, grad_previous, partial,
    rows, sums, T, S, pitch, hidden_b, hidden_t, hidden_s, alpha,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    HIDDEN: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The convolution and the mix backwards. With Z = ``grad_conv`` and the number of ``rows`` = B * T:

        gradient of weight[o, c, a, b] = sum over (i, j) of Z[o, i, j] * A_in[c, i + a - top, j + b - left]
        gradient of bias[o]            = sum over (i, j) of Z[o, i, j]
        gradient of A_in[c, i, j]      = sum over (o, a, b) of weight[o, c, a, b] * Z[o, i - a + top, j - b + left]
                                         + ``grad``; 0 where hidden

    The first programs, ``sums`` for each chunk of taps, leave partial sums of the first two; then one program for each
    row makes the third: alpha times it is ``grad_previous``, and ``grad`` becomes in place 1 - alpha times it, the
    gradient of the logits.
    """
    chunks: tl.constexpr = (K * KERNEL * KERNEL + CHUNK - 1) // CHUNK
    row = tl.program_id(0) - sums * chunks
    if row < 0:
        _convolve_backward_weight(
            maps, grad_conv, partial, tl.program_id(0) // chunks, tl.program_id(0) % chunks,
            rows, sums, T, S, pitch, K, KERNEL, TOP, LEFT, TRIANGULAR, BLOCK,
        )  # fmt: skip
    else:
        _convolve_backward_row(
            weight, hidden, grad_conv, grad, grad_previous, (row // T).to(tl.int64), row % T, T, S, pitch,
            hidden_b, hidden_t, hidden_s, alpha, K, KERNEL, TOP, LEFT, TRIANGULAR, HIDDEN, SKIP, BLOCK,
        )  # fmt: skip


@triton.jit
def _convolve_backward_weight(
    maps, grad_conv, partial, index, chunk, rows, sums, T, S, pitch,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Partial sum number ``index``, over each ``sums``-th row, of the gradients of a chunk of taps and of the bias.

    ``partial`` is sums x (K * M of the weight, then K of the bias).
    """
    M: tl.constexpr = K * KERNEL * KERNEL
    m = chunk * CHUNK + tl.arange(0, CHUNK)
    channel, down, right, tap = _taps(m, K, KERNEL, TOP, LEFT, TRIANGULAR)
    o = tl.arange(0, CHANNELS)
    of_weight = tl.zeros([CHUNK, CHANNELS], tl.float32)
    of_bias = tl.zeros([CHANNELS], tl.float32)
    for row in range(index, rows, sums):
        i = row % T
        b = (row // T).to(tl.int64)
        lines = ((b * K + o) * T + i) * pitch
        for start in range(0, S, BLOCK):
            j = start + tl.arange(0, BLOCK)
            pixels = _neighbours(maps, b, i, j, channel, down, right, tap, T, S, pitch, K)
            stored = (j < pitch)[:, None] & (o < K)[None, :]
            z = tl.load(grad_conv + (lines[None, :] + j[:, None]), mask=stored, other=0)
            of_weight = _product(tl.trans(pixels), z, of_weight)
            of_bias += tl.sum(z.to(tl.float32), 0)
    partial += index * (K * M + K)
    tl.store(partial + o[None, :] * M + m[:, None], of_weight, mask=(m < M)[:, None] & (o < K)[None, :])
    if chunk == 0:
        tl.store(partial + K * M + o, of_bias, mask=o < K)


@triton.jit
def _convolve_backward_row(
    weight, hidden, grad_conv, grad, grad_previous, b, i, T, S, pitch, hidden_b, hidden_t, hidden_s, alpha,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    HIDDEN: tl.constexpr, SKIP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of row i of the logits and of ``previous``, all heads."""
    M: tl.constexpr = K * KERNEL * KERNEL
    c = tl.arange(0, CHANNELS)
    lines = ((b * K + c) * T + i) * pitch
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        g = tl.zeros([BLOCK, CHANNELS], tl.float32)
        for first in range(0, M, CHUNK):
            m = first + tl.arange(0, CHUNK)
            o, down, right, tap = _taps(m, K, KERNEL, TOP, LEFT, TRIANGULAR)
            z = _neighbours(grad_conv, b, i, j, o, -down, -right, tap, T, S, pitch, K)
            taps = tl.load(
                weight + (o * M + m % (KERNEL * KERNEL))[:, None] + c[None, :] * (KERNEL * KERNEL),
                mask=tap[:, None] & (c < K)[None, :], other=0,
            )  # fmt: skip
            g = _product(z, taps.to(z.dtype), g)
        stored = (j < pitch)[:, None] & (c < K)[None, :]
        offsets = lines[None, :] + j[:, None]
        g += tl.load(grad + offsets, mask=stored, other=0).to(tl.float32)
        g = tl.where((j < S)[:, None], g, 0)
        _store_gradient(
            g, grad, grad_previous, offsets, stored, hidden, b, i, j, S, hidden_b, hidden_t, hidden_s, alpha,
            HIDDEN, SKIP,
        )  # fmt: skip


# ---- launchers


class Evolved(NamedTuple):
    """What ``evolve`` leaves; all but ``probs`` are kept for the backward pass."""

    a_logit: Tensor  # B x K x T x S
    active: Tensor  # B x T x pitch, int16: bit h = ReLU let head h through; empty without a convolution
    peaks: Tensor  # B x K x T, float32: each row's largest logit
    totals: Tensor  # B x K x T, float32: each row's sum of exp(logit - peak)
    probs: Tensor | None  # B x K x T x S, after dropout


def mix(q: Tensor, k: Tensor, previous: Tensor | None, hidden: Tensor | None, alpha: float) -> Tensor:
    """A_in, B x K x T x S, of q B x K x T x D and k B x K x S x D of any strides."""
    batch, heads, length, width = q.shape
    columns = k.size(2)
    maps = new_maps(q, columns)
    side, deep = (64, 64) if q.element_size() == 2 else (32, 32)
    tile_rows, tile_columns = _block(length, side), _block(columns, side)
    tiles = triton.cdiv(length, tile_rows) * triton.cdiv(columns, tile_columns)
    mix_kernel[(batch * heads * tiles,)](
        q, k, q if previous is None else padded(previous), _or(hidden, q), maps,
        length, columns, pitch(columns), width, *q.stride(), *k.stride(), *_strides(hidden, maps), alpha,
        K=heads, SKIP=previous is not None, HIDDEN=hidden is not None,
        ROWS=tile_rows, COLUMNS=tile_columns, WIDTH=_block(width, deep), num_warps=4,
    )  # fmt: skip
    return maps


def evolve(
    maps: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    masked: Tensor | None,
    taps: Taps,
    beta: float,
    dropout: Dropout,
) -> Evolved:
    """A_logit (``maps`` itself without a convolution) and the probabilities."""
    batch, heads, length, columns = maps.shape
    convolved = weight is not None
    a_logit = new_maps(maps, columns) if convolved else maps
    active = maps.new_empty((batch, length, pitch(columns)) if convolved else 0, dtype=torch.int16)
    peaks, totals = maps.new_empty(2, batch, heads, length, dtype=torch.float32)
    probs = new_maps(maps, columns)
    wide = _wide(heads, columns)
    evolve_kernel[(batch * length,)](
        maps, _or(weight, maps), _or(bias, maps), _or(masked, maps), a_logit, active, probs, peaks, totals,
        length, columns, pitch(columns), *_strides(masked, maps), beta, torch.finfo(maps.dtype).min, *dropout,
        K=heads, HEADS=triton.next_power_of_2(heads), CONVOLVED=convolved, **_constants(taps),
        MASKED=masked is not None, DROPPED=dropout.threshold > 0,
        BLOCK=_convolved_block(maps) if convolved else wide, WIDE=wide, num_warps=_warps(columns),
    )  # fmt: skip
    return Evolved(a_logit, active, peaks, totals, probs)


def soften_backward(
    evolved: Evolved,
    masked: Tensor | None,
    hidden: Tensor | None,
    grad_map: Tensor | None,
    grad: Tensor,
    skip: bool,
    alpha: float,
    beta: float,
    dropout: Dropout,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See ``soften_backward_kernel``: changes ``grad`` in place; returns ``probs``, ``grad_conv``, ``grad_previous``.

    ``evolved.probs`` is not read. ``grad_conv`` is None without a convolution, ``grad_previous`` with one.
    """
    a_logit = evolved.a_logit
    batch, heads, length, columns = a_logit.shape
    convolved = evolved.active.numel() > 0
    probs = new_maps(a_logit, columns)
    grad_conv = new_maps(a_logit, columns) if convolved else None
    grad_previous = new_maps(a_logit, columns) if skip and not convolved else None
    soften_backward_kernel[(batch * length,)](
        a_logit, _or(masked, a_logit), _or(hidden, a_logit), evolved.active, evolved.peaks, evolved.totals,
        a_logit if grad_map is None else padded(grad_map), grad, probs,
        _or(grad_conv, a_logit), _or(grad_previous, a_logit),
        length, columns, pitch(columns), *_strides(masked, a_logit), *_strides(hidden, a_logit),
        alpha, beta, torch.finfo(a_logit.dtype).min, *dropout,
        K=heads, HEADS=triton.next_power_of_2(heads), CONVOLVED=convolved,
        MASKED=masked is not None, HIDDEN=hidden is not None and not convolved, DROPPED=dropout.threshold > 0,
        PASSED_ON=grad_map is not None, SKIP=grad_previous is not None,
        WIDE=_wide(heads, columns), num_warps=_warps(columns),
    )  # fmt: skip
    return probs, grad_conv, grad_previous


def convolve_backward(
    maps: Tensor,
    weight: Tensor,
    hidden: Tensor | None,
    grad_conv: Tensor,
    grad: Tensor,
    skip: bool,
    alpha: float,
    taps: Taps,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """See ``convolve_backward_kernel``: changes ``grad`` in place; gradients of weight, bias and ``previous``."""
    batch, heads, length, columns = maps.shape
    grad_previous = new_maps(maps, columns) if skip else None
    rows = batch * length
    sums = min(PARTIAL_SUMS, rows)
    partial = maps.new_empty(sums, weight.numel() + heads, dtype=torch.float32)
    convolve_backward_kernel[(sums * triton.cdiv(weight[0].numel(), CHUNK.value) + rows,)](
        maps, weight, _or(hidden, maps), grad_conv, grad, _or(grad_previous, maps), partial,
        rows, sums, length, columns, pitch(columns), *_strides(hidden, maps), alpha,
        K=heads, **_constants(taps), HIDDEN=hidden is not None, SKIP=skip,
        BLOCK=_convolved_block(maps), num_warps=_warps(columns),
    )  # fmt: skip
    grad_weight, grad_bias = partial.sum(0).to(weight.dtype).split([weight.numel(), heads])  # the same order every time
    return grad_weight.view_as(weight), grad_bias, grad_previous


def pitch(columns: int) -> int:
    """Numbers that a row of a map takes in memory: rows begin where 16 can be read at once, whatever S is."""
    return triton.cdiv(columns, 16) * 16


def new_maps(like: Tensor, columns: int) -> Tensor:
    """An empty map, B x K x T x columns, with the first three axes and the type of a tensor."""
    shape = (*like.shape[:3], columns)
    whole = like.new_empty(*shape[:3], pitch(columns))
    # not whole[..., :columns]: autograd lets nobody write in place to a view that one of its functions returns
    return like.new_empty(0).set_(whole.untyped_storage(), 0, shape, whole.stride())


def padded(maps: Tensor) -> Tensor:
    """The same map, each row at its ``pitch``: itself where it is so already, as what ``new_maps`` makes."""
    batch, heads, length, columns = maps.shape
    wide = pitch(columns)
    strides = (heads * length * wide, length * wide, wide, 1)
    available = maps.untyped_storage().nbytes() // maps.element_size() - maps.storage_offset()
    if maps.stride() == strides and available >= batch * strides[0]:
        return maps
    return new_maps(maps, columns).copy_(maps)


def _block(size: int, most: int) -> int:
    """The power of two, 16 to ``most``, that covers size best."""
    return min(most, max(16, triton.next_power_of_2(size)))


def _convolved_block(maps: Tensor) -> int:
    """Columns of a block to be convolved; more would not fit in a program's registers."""
    return _block(maps.size(3), 128 if maps.element_size() == 2 else 64)


def _wide(heads: int, columns: int) -> int:
    """Columns of a block for the softmax alone."""
    return _block(columns, 2048 // triton.next_power_of_2(heads))


def _warps(columns: int) -> int:
    """Warps of a program that works on a row."""
    return 1 if columns <= 32 else 4


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel gets for a tensor: itself, or another that it will not read. Bool is read as bytes."""
    tensor = other if tensor is None else tensor
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _strides(mask: Tensor | None, maps: Tensor) -> tuple[int, int, int]:
    """Strides of a mask over sentences, rows and columns of the maps; 0 where it is broadcast."""
    if mask is None:
        return 0, 0, 0
    batch, _, length, columns = maps.shape
    over_sentences, _, over_rows, over_columns = mask.expand(batch, 1, length, columns).stride()
    return over_sentences, over_rows, over_columns


def _constants(taps: Taps) -> dict[str, int | bool]:
    return {"KERNEL": taps.kernel_size, "TOP": taps.top, "LEFT": taps.left, "TRIANGULAR": taps.triangular}
