"""Evolving attention for the GPU: four Triton kernels, and the functions that launch them.

Triton must be there to import this module; ``gpu`` does that when it needs it. The kernels, each the work of several
elementwise passes over a map:

    mix_kernel              mixed   = a * previous + b * logits, zero where hidden; what the convolution reads
                            carried = d * previous + e * logits; what its result is added to
    evolve_kernel           A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried, its softmax and dropout
    soften_backward_kernel  gradient of the probabilities -> gradient of A_logit, and of the convolution's result / c
    mix_backward_kernel     these two -> gradients of logits, of ``previous``, of the convolution's weight and bias, and
                            of a, b, c, d and e where they are learnt

The logits are scale * q k^T, or given. Where carried is mixed itself, it is not written a second time. Without a
convolution, A_logit is carried.

Axes: B batch, K heads (1 to 16), T target (query) length, S source (key) length, D head size, k kernel size.
Every map is B x K x T x S; in memory a row takes its ``pitch``, the multiple of 16 from S up, and columns from S on
are zero. Masks: True = masked; bool, broadcast to B x 1 x T x S, read by their strides (0 where broadcast).

A convolution is a matrix product over M = K * k * k taps, of which tap m is the kernel's row a and column b of channel
c: m = (c * k + a) * k + b, as the weight K x K x k x k lies in memory. Pixel (i, j) reads row i + a - top, column
j + b - left; ``Taps`` says top and left for each geometry. Products take their factors in the maps' type and add up in
float32. Nothing is added atomically, so the same input gives the same bits.

Each of the five shares a, b, c, d and e is 0 and has no effect, or a constant, or learnt: then kernels get the address
of a number on the GPU, and nobody waits for its value. The constants KIND_A to KIND_E of the kernels say which.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...evolution import Coefficients, Geometry, Share, reach

#: matrix products need at least 16 channels: what is beyond K is zero
CHANNELS = tl.constexpr(16)
#: taps that are multiplied at a time
CHUNK = tl.constexpr(16)
#: how products of float32 are made: three products of tensor cores, about as exact as float32 (others: no difference)
PRECISION = tl.constexpr("tf32x3")
#: whether the kernels run in Triton's interpreter, on the CPU: Triton decides so when it is imported
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: Rounds of the Philox generator. Seven are the fewest that pass every test of randomness (Salmon et al. 2011,
#: table 2).
ROUNDS = tl.constexpr(7)
#: partial sums of the weight's gradient, four for each multiprocessor of an H100; the same on every device, so that the
#: order of the sum is, too
PARTIAL_SUMS = 528
#: What the kernels know of a share when they are compiled: it is 0, a constant, or the address of a number.
NONE, CONSTANT, LEARNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


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
    def of(cls, probability: float, seed: int | None = None) -> "Dropout":
        """Without a seed it comes from the CPU's generator: no wait for the GPU, and checkpointed layers restore it."""
        if seed is None:
            seed = int(torch.randint(2**31 - 1, (), device="cpu")) if probability > 0 else 0
        threshold = round(probability * 65536)
        return cls(seed, threshold, 65536 / (65536 - threshold) if threshold < 65536 else 0.0)


# ---- pieces of kernels


@triton.jit
def _number(share, KIND: tl.constexpr):
    """A share as a number: a constant is one already; one that is learnt stands at an address."""
    if KIND == LEARNT:
        share = tl.load(share).to(tl.float32)
    return share


@triton.jit
def _read(maps, offsets, stored, exists):
    """A block of a map that others may have made, in float32: what lies in memory from column S on is anything.

    It is read all the same, and left out then: of a mask at a multiple of 16 Triton makes loads of 16 bytes.
    """
    return tl.where(exists, tl.load(maps + offsets, mask=stored, other=0).to(tl.float32), 0)


@triton.jit
def _weighted(of_x, x, of_y, y, X: tl.constexpr, Y: tl.constexpr):
    """of_x * x + of_y * y, of the kinds X and Y; what has no share is not touched, infinities included."""
    total = tl.zeros_like(x)
    if X != NONE:
        total += _number(of_x, X) * x
    if Y != NONE:
        total += _number(of_y, Y) * y
    return total


@triton.jit
def _is_hidden(hidden, b, i, j, exists, hidden_b, hidden_t, hidden_s):
    """Which pixels of rows i and columns j the convolution must not see; all that do not exist."""
    places = hidden + b * hidden_b + i.to(tl.int64) * hidden_t + j * hidden_s
    return tl.load(places, mask=exists, other=1) != 0


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


@triton.jit(do_not_specialize=["T", "S", "hidden_b", "hidden_t"])
def mix_kernel(
    q, k, given, previous, hidden, mixed, carried,
    T, S, pitch, D, q_b, q_h, q_t, q_d, k_b, k_h, k_s, k_d, hidden_b, hidden_t, hidden_s, scale,
    share_a, share_b, share_d, share_e,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, KIND_D: tl.constexpr, KIND_E: tl.constexpr,
    K: tl.constexpr, GIVEN: tl.constexpr, HIDDEN: tl.constexpr, MIXED: tl.constexpr, CARRIED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """A tile, rows x columns, of one head, of mixed, of carried or of both.

    One program for each tile, those of a head one after the other.
    """
    across = tl.cdiv(S, COLUMNS)
    tiles = tl.cdiv(T, ROWS) * across
    head = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    b, h = head // K, head % K
    i = tile // across * ROWS + tl.arange(0, ROWS)
    j = tile % across * COLUMNS + tl.arange(0, COLUMNS)
    exists = (i < T)[:, None] & (j < S)[None, :]
    stored = (i < T)[:, None] & (j < pitch)[None, :]
    offsets = (head * T + i[:, None]) * pitch + j[None, :]

    logits = tl.zeros([ROWS, COLUMNS], tl.float32)
    before = tl.zeros([ROWS, COLUMNS], tl.float32)
    if GIVEN:
        logits = _read(given, offsets, stored, exists)
    elif KIND_B + KIND_E > 0:
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
            logits = _product(rows, columns, logits)
        logits *= scale
    if KIND_A + KIND_D > 0:
        before = _read(previous, offsets, stored, exists)
    if MIXED:
        x = _weighted(share_a, before, share_b, logits, KIND_A, KIND_B)
        if HIDDEN:
            x = tl.where(_is_hidden(hidden, b, i[:, None], j[None, :], exists, hidden_b, hidden_t, hidden_s), 0, x)
        tl.store(mixed + offsets, tl.where(exists, x, 0).to(mixed.dtype.element_ty), mask=stored)
    if CARRIED:
        x = _weighted(share_d, before, share_e, logits, KIND_D, KIND_E)
        tl.store(carried + offsets, tl.where(exists, x, 0).to(carried.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["T", "S", "masked_b", "masked_t", "seed", "threshold"])
def evolve_kernel(
    mixed, carried, weight, bias, masked, a_logit, active, probs, weights, peaks, totals,
    T, S, pitch, masked_b, masked_t, masked_s, share_c, lowest, seed, threshold, scale,
    K: tl.constexpr, HEADS: tl.constexpr, CONVOLVED: tl.constexpr, KIND_C: tl.constexpr, KERNEL: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr, MASKED: tl.constexpr, DROPPED: tl.constexpr,
    WEIGHTED: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """A_logit, and the probabilities after dropout, of one row of a sentence's map, all heads. One program a row.

    ``carried`` is ``mixed`` where the two are the same. Without a convolution it is A_logit, which is not written.
    ``weights`` are the probabilities before dropout, in float32, where they are wanted (WEIGHTED).

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
        x = tl.load(carried + offsets, mask=stored, other=0).to(tl.float32)
        if CONVOLVED:
            convolved = tl.zeros([BLOCK, CHANNELS], tl.float32)
            for first in range(0, K * KERNEL * KERNEL, CHUNK):
                m = first + tl.arange(0, CHUNK)
                channel, down, right, tap = _taps(m, K, KERNEL, TOP, LEFT, TRIANGULAR)
                pixels = _neighbours(mixed, b, i, j, channel, down, right, tap, T, S, pitch, K)
                taps = tl.load(
                    weight + o[None, :] * (K * KERNEL * KERNEL) + m[:, None],
                    mask=tap[:, None] & (o < K)[None, :], other=0,
                )  # fmt: skip
                convolved = _product(pixels, taps.to(pixels.dtype), convolved)
            convolved += tl.load(bias + o, mask=o < K, other=0).to(tl.float32)[None, :]
            off = convolved <= 0  # what is not a number stays so: that is how a loss scale that is too high shows
            share = _number(share_c, KIND_C)
            x = share * tl.where(off, 0, convolved) + (1 - share) * x
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
        if WEIGHTED:
            tl.store(weights + offsets, p, mask=stored)
        if DROPPED:
            p = tl.where(_kept(seed, row, j, h, threshold), p * scale, 0)
        tl.store(probs + offsets, p.to(probs.dtype.element_ty), mask=stored)


# ---- backward


@triton.jit(do_not_specialize=["T", "S", "masked_b", "masked_t", "seed", "threshold"])
def soften_backward_kernel(
    a_logit, masked, active, peaks, totals, grad_map, grad_weights, grad, probs, grad_conv,
    T, S, pitch, masked_b, masked_t, masked_s, lowest, seed, threshold, scale,
    K: tl.constexpr, HEADS: tl.constexpr, CONVOLVED: tl.constexpr, MASKED: tl.constexpr, DROPPED: tl.constexpr,
    PASSED_ON: tl.constexpr, WEIGHTED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Softmax and dropout backwards for one row of a sentence's map, all heads. One program a row.

    With P the probabilities before dropout and G the gradient of P: made of ``grad``, that of P after dropout, and of
    ``grad_weights``, where the weights were wanted and used (WEIGHTED):
        ``grad``, in place = P * (G - sum over the row of P * G), 0 where masked, + ``grad_map`` (from the layer above):
            the gradient of A_logit
        ``probs`` = P after dropout, for the gradient of the values
        ``grad_conv`` = the gradient of A_logit where ReLU was active, else 0: times c it is that of Conv(mixed)
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
        exists = (j < S)[:, None] & (h < K)[None, :]
        stored = (j < pitch)[:, None] & (h < K)[None, :]
        offsets = (stats * pitch)[None, :] + j[:, None]
        p, _ = _softened(a_logit, masked, offsets, j, peak, total, S, masked_s, lowest, stored, MASKED)
        g = tl.load(grad + offsets, mask=stored, other=0).to(tl.float32)
        if DROPPED:
            g = tl.where(_kept(seed, row, j, h, threshold), g * scale, 0)
        if WEIGHTED:
            g += _read(grad_weights, offsets, stored, exists)
        inner += tl.sum(p * g, 0)

    tl.debug_barrier()  # ``grad`` is overwritten only when every thread has read it
    for start in range(0, S, WIDE):
        j = start + tl.arange(0, WIDE)
        exists = (j < S)[:, None] & (h < K)[None, :]
        stored = (j < pitch)[:, None] & (h < K)[None, :]
        offsets = (stats * pitch)[None, :] + j[:, None]
        p, hide = _softened(a_logit, masked, offsets, j, peak, total, S, masked_s, lowest, stored, MASKED)
        g = tl.load(grad + offsets, mask=stored, other=0).to(tl.float32)
        dropped = p
        if DROPPED:
            keep = _kept(seed, row, j, h, threshold)
            g = tl.where(keep, g * scale, 0)
            dropped = tl.where(keep, p * scale, 0)
        if WEIGHTED:
            g += _read(grad_weights, offsets, stored, exists)
        tl.store(probs + offsets, dropped.to(probs.dtype.element_ty), mask=stored)

        g = tl.where(hide[:, None], 0, p * (g - inner[None, :]))
        if PASSED_ON:
            g += _read(grad_map, offsets, stored, exists)
        tl.store(grad + offsets, g.to(grad.dtype.element_ty), mask=stored)
        if CONVOLVED:
            bits = tl.load(active + row.to(tl.int64) * pitch + j, mask=j < pitch, other=0).to(tl.int32)
            on = ((bits[:, None] >> h[None, :]) & 1) != 0
            tl.store(grad_conv + offsets, tl.where(on, g, 0).to(grad_conv.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=["rows", "sums", "T", "S", "hidden_b", "hidden_t"])
def mix_backward_kernel(
    mixed, previous, logits, weight, hidden, grad_conv, grad, grad_previous, partial, of_shares,
    rows, sums, T, S, pitch, hidden_b, hidden_t, hidden_s, share_a, share_b, share_c, share_d, share_e,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, KIND_C: tl.constexpr, KIND_D: tl.constexpr, KIND_E: tl.constexpr,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    CONVOLVED: tl.constexpr, SEPARATE: tl.constexpr, HIDDEN: tl.constexpr, LEARNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The mix and the convolution backwards, from ``grad``, G, the gradient of A_logit, and Z = ``grad_conv``.

        gradient of weight[o, c, a, b] = c * sum over (i, j) of Z[o, i, j] * mixed[c, i + a - top, j + b - left]
        gradient of bias[o]            = c * sum over (i, j) of Z[o, i, j]
        gradient of mixed[c, i, j]     = c * sum over (o, a, b) of weight[o, c, a, b] * Z[o, i - a + top, j - b + left],
                                         0 where hidden
        gradient of carried            = (1 - c) * G, part of mixed's own where the two are the same (not SEPARATE)
        ``grad_previous``              = a * gradient of mixed + d * gradient of carried
        ``grad``, in place             = b * gradient of mixed + e * gradient of carried: that of the logits

    The first programs, ``sums`` for each chunk of taps, leave partial sums of the first two, without c where a share
    is learnt (LEARNS). Then one program for each of the ``rows``, B * T, makes the others. Where a share is learnt, it
    also leaves its part of the gradients of a to e in ``of_shares``, rows x 5. Those of a, b, d and e are sums of the
    gradient of mixed or carried times ``previous`` or ``logits``. That of c is the sum of
    G * (ReLU(Conv(mixed)) - carried), of which it leaves the second half; ``mix_backward`` adds the first.
    """
    chunks: tl.constexpr = (K * KERNEL * KERNEL + CHUNK - 1) // CHUNK
    row = tl.program_id(0) - sums * chunks
    if row < 0:
        _convolve_backward_weight(
            mixed, grad_conv, partial, tl.program_id(0) // chunks, tl.program_id(0) % chunks,
            rows, sums, T, S, pitch, share_c, KIND_C, K, KERNEL, TOP, LEFT, TRIANGULAR, LEARNS, BLOCK,
        )  # fmt: skip
    else:
        _mix_backward_row(
            mixed, previous, logits, weight, hidden, grad_conv, grad, grad_previous, of_shares + row.to(tl.int64) * 5,
            (row // T).to(tl.int64), row % T, T, S, pitch, hidden_b, hidden_t, hidden_s,
            share_a, share_b, share_c, share_d, share_e, KIND_A, KIND_B, KIND_C, KIND_D, KIND_E,
            K, KERNEL, TOP, LEFT, TRIANGULAR, CONVOLVED, SEPARATE, HIDDEN, LEARNS, BLOCK,
        )  # fmt: skip


@triton.jit
def _convolve_backward_weight(
    mixed, grad_conv, partial, index, chunk, rows, sums, T, S, pitch, share_c, KIND_C: tl.constexpr,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    LEARNS: tl.constexpr, BLOCK: tl.constexpr,
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
            pixels = _neighbours(mixed, b, i, j, channel, down, right, tap, T, S, pitch, K)
            stored = (j < pitch)[:, None] & (o < K)[None, :]
            z = tl.load(grad_conv + (lines[None, :] + j[:, None]), mask=stored, other=0)
            of_weight = _product(tl.trans(pixels), z, of_weight)
            of_bias += tl.sum(z.to(tl.float32), 0)
    if not LEARNS:
        of_weight *= _number(share_c, KIND_C)
        of_bias *= _number(share_c, KIND_C)
    partial += index * (K * M + K)
    tl.store(partial + o[None, :] * M + m[:, None], of_weight, mask=(m < M)[:, None] & (o < K)[None, :])
    if chunk == 0:
        tl.store(partial + K * M + o, of_bias, mask=o < K)


@triton.jit
def _mix_backward_row(
    mixed, previous, logits, weight, hidden, grad_conv, grad, grad_previous, of_shares,
    b, i, T, S, pitch, hidden_b, hidden_t, hidden_s, share_a, share_b, share_c, share_d, share_e,
    KIND_A: tl.constexpr, KIND_B: tl.constexpr, KIND_C: tl.constexpr, KIND_D: tl.constexpr, KIND_E: tl.constexpr,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    CONVOLVED: tl.constexpr, SEPARATE: tl.constexpr, HIDDEN: tl.constexpr, LEARNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Gradients of row i of the logits and of ``previous``, all heads, and the row's part of the shares' gradients."""
    c = tl.arange(0, CHANNELS)
    lines = ((b * K + c) * T + i) * pitch
    of_a = tl.zeros([CHANNELS], tl.float32)
    of_b = tl.zeros([CHANNELS], tl.float32)
    of_c = tl.zeros([CHANNELS], tl.float32)
    of_d = tl.zeros([CHANNELS], tl.float32)
    of_e = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, S, BLOCK):
        j = start + tl.arange(0, BLOCK)
        exists = (j < S)[:, None] & (c < K)[None, :]
        stored = (j < pitch)[:, None] & (c < K)[None, :]
        offsets = lines[None, :] + j[:, None]
        g = tl.load(grad + offsets, mask=stored, other=0).to(tl.float32)
        of_mixed = tl.zeros([BLOCK, CHANNELS], tl.float32)
        of_carried = g
        if CONVOLVED:
            share = _number(share_c, KIND_C)
            of_mixed = share * _convolve_backward(
                weight, grad_conv, b, i, j, c, T, S, pitch, K, KERNEL, TOP, LEFT, TRIANGULAR, BLOCK
            )
            of_carried = (1 - share) * g
            if not SEPARATE:
                of_mixed += of_carried
            if HIDDEN:
                hide = _is_hidden(hidden, b, i, j, j < S, hidden_b, hidden_t, hidden_s)
                of_mixed = tl.where(hide[:, None], 0, of_mixed)
            of_mixed = tl.where(exists, of_mixed, 0)
        if KIND_A + KIND_D > 0:
            x = _weighted(share_a, of_mixed, share_d, of_carried, KIND_A, KIND_D)
            tl.store(grad_previous + offsets, x.to(grad_previous.dtype.element_ty), mask=stored)
        # In the place of what was read above: what is stored depends on that, so it is read first. A rule for which it
        # did not (no share of what is carried, which is not what is mixed) would need a barrier here.
        x = _weighted(share_b, of_mixed, share_e, of_carried, KIND_B, KIND_E)
        tl.store(grad + offsets, x.to(grad.dtype.element_ty), mask=stored)
        if LEARNS:
            before = tl.zeros([BLOCK, CHANNELS], tl.float32)
            if KIND_A + KIND_D > 0:
                before = _read(previous, offsets, stored, exists)
            scores = _read(logits, offsets, stored, exists)
            carried = _weighted(share_d, before, share_e, scores, KIND_D, KIND_E)
            if not SEPARATE:
                carried = tl.load(mixed + offsets, mask=stored, other=0).to(tl.float32)
            of_a += tl.sum(of_mixed * before, 0)
            of_b += tl.sum(of_mixed * scores, 0)
            of_c -= tl.sum(g * carried, 0)
            of_d += tl.sum(of_carried * before, 0)
            of_e += tl.sum(of_carried * scores, 0)
    if LEARNS:
        tl.store(of_shares, tl.sum(of_a, 0))
        tl.store(of_shares + 1, tl.sum(of_b, 0))
        tl.store(of_shares + 2, tl.sum(of_c, 0))
        tl.store(of_shares + 3, tl.sum(of_d, 0))
        tl.store(of_shares + 4, tl.sum(of_e, 0))


@triton.jit
def _convolve_backward(
    weight, grad_conv, b, i, j, c, T, S, pitch,
    K: tl.constexpr, KERNEL: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, TRIANGULAR: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """What reaches columns j of row i of channels c through the convolution, before c: columns x channels."""
    M: tl.constexpr = K * KERNEL * KERNEL
    total = tl.zeros([BLOCK, CHANNELS], tl.float32)
    for first in range(0, M, CHUNK):
        m = first + tl.arange(0, CHUNK)
        o, down, right, tap = _taps(m, K, KERNEL, TOP, LEFT, TRIANGULAR)
        z = _neighbours(grad_conv, b, i, j, o, -down, -right, tap, T, S, pitch, K)
        taps = tl.load(
            weight + (o * M + m % (KERNEL * KERNEL))[:, None] + c[None, :] * (KERNEL * KERNEL),
            mask=tap[:, None] & (c < K)[None, :], other=0,
        )  # fmt: skip
        total = _product(z, taps.to(z.dtype), total)
    return total


# ---- launchers


class Shares(NamedTuple):
    """The five numbers of the sum as the kernels take them, and what follows from which of them there are."""

    a: Share
    b: Share
    c: Share
    d: Share
    e: Share
    convolved: bool  # else A_logit is carried: a, b and c are 0
    separate: bool  # else carried is mixed, also where that is zero: d and e are 0

    @classmethod
    def of(cls, coefficients: Coefficients, has_previous: bool, has_convolution: bool) -> "Shares":
        """As ``Evolution`` takes them: without a map before it has no share; a convolution of share 0 is not made."""
        a, b, c, d, e = (share if isinstance(share, Tensor) else float(share) for share in coefficients)
        if not has_previous:
            a = d = 0.0
        if not has_convolution or kind(c) == NONE.value:
            return cls(0.0, 0.0, 0.0, d, e, convolved=False, separate=True)
        if Coefficients(a, b, c, d, e).carries_what_it_reads:
            return cls(a, b, c, 0.0, 0.0, convolved=True, separate=False)
        return cls(a, b, c, d, e, convolved=True, separate=True)

    @property
    def learns(self) -> bool:
        """Whether any share is learnt."""
        return any(isinstance(share, Tensor) for share in self[:5])

    @property
    def use_previous(self) -> bool:
        """Whether the map of the layer before has a share."""
        return kind(self.a) + kind(self.d) > 0


def kind(share: Share) -> int:
    """What the kernels know of a share when they are compiled."""
    if isinstance(share, Tensor):
        return LEARNT.value
    return CONSTANT.value if share != 0 else NONE.value


class Evolved(NamedTuple):
    """What ``evolve`` leaves; all but the last two are kept for the backward pass."""

    a_logit: Tensor  # B x K x T x S
    active: Tensor  # B x T x pitch, int16: bit h = ReLU let head h through; empty without a convolution
    peaks: Tensor  # B x K x T, float32: each row's largest logit
    totals: Tensor  # B x K x T, float32: each row's sum of exp(logit - peak)
    probs: Tensor | None  # B x K x T x S, after dropout
    weights: Tensor | None  # B x K x T x S, float32, before dropout; None where they are not wanted


def mix(
    q: Tensor,
    k: Tensor,
    given: Tensor | None,
    previous: Tensor | None,
    hidden: Tensor | None,
    scale: float,
    of_mixed: tuple[Share, Share] | None,
    of_carried: tuple[Share, Share] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """mixed and carried, B x K x T x S, each where shares of ``previous`` and of the logits are given for it.

    Args:
        q: B x K x T x D; k: B x K x S x D; of any strides. Not read where logits are given, but for their sizes.
        given: B x K x T x S, logits in the place of scale * q k^T.
        hidden: for mixed alone.
    """
    if of_mixed is None and of_carried is None:
        return None, None
    batch, heads, length, width = q.shape
    columns = k.size(2)
    mixed = None if of_mixed is None else new_maps(q, columns)
    carried = None if of_carried is None else new_maps(q, columns)
    a, b = of_mixed or (0.0, 0.0)
    d, e = of_carried or (0.0, 0.0)
    side = _largest_side(q)
    tile_rows, tile_columns = block(length, side), block(columns, side)
    tiles = _ceiling(length, tile_rows) * _ceiling(columns, tile_columns)
    hidden = None if mixed is None else hidden
    mix_kernel[(batch * heads * tiles,)](
        q, k, q if given is None else padded(given), q if previous is None else padded(previous), _or(hidden, q),
        _or(mixed, q), _or(carried, q),
        length, columns, pitch(columns), width, *q.stride(), *k.stride(), *_strides(hidden, (batch, length, columns)),
        scale, a, b, d, e, KIND_A=kind(a), KIND_B=kind(b), KIND_D=kind(d), KIND_E=kind(e),
        K=heads, GIVEN=given is not None, HIDDEN=hidden is not None, MIXED=mixed is not None,
        CARRIED=carried is not None,
        ROWS=tile_rows, COLUMNS=tile_columns, WIDTH=block(width, side), num_warps=4,
    )  # fmt: skip
    return mixed, carried


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b^T as a map, B x K x T x S, of a B x K x T x D and b B x K x S x D of any strides."""
    return mix(a, b, None, None, None, 1.0, None, (0.0, 1.0))[1]


def evolve(
    mixed: Tensor | None,
    carried: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    masked: Tensor | None,
    taps: Taps,
    shares: Shares,
    dropout: Dropout,
    need_weights: bool,
) -> Evolved:
    """A_logit (``carried`` itself without a convolution) and the probabilities.

    ``mixed`` is None without a convolution, and ``carried`` where it is the same as mixed.
    """
    maps = mixed if carried is None else carried
    batch, heads, length, columns = maps.shape
    convolved = shares.convolved
    a_logit = new_maps(maps, columns) if convolved else maps
    active = maps.new_empty((batch, length, pitch(columns)) if convolved else 0, dtype=torch.int16)
    peaks, totals = maps.new_empty(2, batch, heads, length, dtype=torch.float32)
    probs = new_maps(maps, columns)
    weights = new_maps(maps, columns, torch.float32) if need_weights else None
    wide = _wide(heads, columns)
    evolve_kernel[(batch * length,)](
        _or(mixed, maps), maps, _or(weight, maps), _or(bias, maps), _or(masked, maps), a_logit, active, probs,
        _or(weights, maps), peaks, totals,
        length, columns, pitch(columns), *_strides(masked, (batch, length, columns)),
        shares.c, torch.finfo(maps.dtype).min, *dropout,
        K=heads, HEADS=_power_of_2(heads), CONVOLVED=convolved, KIND_C=kind(shares.c), **_constants(taps),
        MASKED=masked is not None, DROPPED=dropout.threshold > 0, WEIGHTED=need_weights,
        BLOCK=_convolved_block(maps) if convolved else wide, WIDE=wide, num_warps=_warps(columns),
    )  # fmt: skip
    return Evolved(a_logit, active, peaks, totals, probs, weights)


def soften_backward(
    evolved: Evolved,
    masked: Tensor | None,
    grad_map: Tensor | None,
    grad_weights: Tensor | None,
    grad: Tensor,
    dropout: Dropout,
) -> tuple[Tensor, Tensor | None]:
    """See ``soften_backward_kernel``: changes ``grad`` in place; returns ``probs`` and ``grad_conv``.

    ``evolved.probs`` and ``evolved.weights`` are not read. ``grad_conv`` is None without a convolution.
    """
    a_logit = evolved.a_logit
    batch, heads, length, columns = a_logit.shape
    convolved = evolved.active.numel() > 0
    probs = new_maps(a_logit, columns)
    grad_conv = new_maps(a_logit, columns) if convolved else None
    soften_backward_kernel[(batch * length,)](
        a_logit, _or(masked, a_logit), evolved.active, evolved.peaks, evolved.totals,
        a_logit if grad_map is None else padded(grad_map), a_logit if grad_weights is None else padded(grad_weights),
        grad, probs, _or(grad_conv, a_logit),
        length, columns, pitch(columns), *_strides(masked, (batch, length, columns)),
        torch.finfo(a_logit.dtype).min, *dropout,
        K=heads, HEADS=_power_of_2(heads), CONVOLVED=convolved,
        MASKED=masked is not None, DROPPED=dropout.threshold > 0,
        PASSED_ON=grad_map is not None, WEIGHTED=grad_weights is not None,
        WIDE=_wide(heads, columns), num_warps=_warps(columns),
    )  # fmt: skip
    return probs, grad_conv


class MixGradients(NamedTuple):
    """What ``mix_backward`` gives; None where there is nothing of this kind."""

    previous: Tensor | None  # B x K x T x S
    weight: Tensor | None  # K x K x k x k; float32 where a share is learnt, else of the weight's type
    bias: Tensor | None  # K; the same
    shares: Tensor | None  # 5, float32, of a, b, c, d and e, where one of them is learnt; others mean nothing


def mix_backward(
    mixed: Tensor | None,
    previous: Tensor | None,
    logits: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    hidden: Tensor | None,
    grad_conv: Tensor | None,
    grad: Tensor,
    taps: Taps,
    shares: Shares,
) -> MixGradients:
    """See ``mix_backward_kernel``: changes ``grad`` in place, from the gradient of A_logit to that of the logits.

    Without a convolution ``mixed``, ``weight``, ``bias`` and ``grad_conv`` are None. ``logits`` are read only where a
    share is learnt.
    """
    batch, heads, length, columns = grad.shape
    rows = batch * length
    grad_previous = new_maps(grad, columns) if shares.use_previous else None
    of_shares = grad.new_empty(rows, 5, dtype=torch.float32) if shares.learns else None
    sums = min(PARTIAL_SUMS, rows) if shares.convolved else 0
    partial = grad.new_empty(sums, weight.numel() + heads, dtype=torch.float32) if shares.convolved else None
    mix_backward_kernel[(sums * _ceiling(heads * taps.kernel_size**2, CHUNK.value) + rows,)](
        _or(mixed, grad), padded(previous) if shares.use_previous else grad,
        grad if logits is None else padded(logits), _or(weight, grad), _or(hidden, grad), _or(grad_conv, grad), grad,
        _or(grad_previous, grad), _or(partial, grad), _or(of_shares, grad),
        rows, sums, length, columns, pitch(columns), *_strides(hidden, (batch, length, columns)), *shares[:5],
        **{f"KIND_{name}": kind(share) for name, share in zip("ABCDE", shares[:5], strict=True)},
        K=heads, **_constants(taps), CONVOLVED=shares.convolved, SEPARATE=shares.separate,
        HIDDEN=hidden is not None and shares.convolved, LEARNS=shares.learns,
        BLOCK=_convolved_block(grad), num_warps=_warps(columns),
    )  # fmt: skip
    if of_shares is not None:
        of_shares = of_shares.sum(0)  # the same order every time
    if partial is None:
        return MixGradients(grad_previous, None, None, of_shares)
    total = partial.sum(0)  # the same order every time
    if of_shares is None:
        total = total.to(weight.dtype)
    grad_weight, grad_bias = total.split([weight.numel(), heads])
    grad_weight = grad_weight.view_as(weight)
    if of_shares is not None:
        # The sum of G * ReLU(Conv(mixed)): where ReLU is active, Conv(mixed) is linear in weight and bias.
        active_weight = weight.tril() if taps.triangular else weight  # a tap that is removed may hold anything
        of_shares[2] += (grad_weight * active_weight).sum() + (grad_bias * bias).sum()
        grad_weight, grad_bias = grad_weight * shares.c, grad_bias * shares.c
    return MixGradients(grad_previous, grad_weight, grad_bias, of_shares)


def pitch(columns: int) -> int:
    """Numbers that a row of a map takes in memory: rows begin where 16 can be read at once, whatever S is."""
    return _ceiling(columns, 16) * 16


def new_maps(like: Tensor, columns: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty map, B x K x T x columns, with the first three axes of a tensor, and its type if no other is named."""
    shape = (*like.shape[:3], columns)
    whole = like.new_empty(*shape[:3], pitch(columns), dtype=dtype)
    # not whole[..., :columns]: autograd lets nobody write in place to a view that one of its functions returns
    return whole.new_empty(0).set_(whole.untyped_storage(), 0, shape, whole.stride())


def padded(maps: Tensor) -> Tensor:
    """The same map, each row at its ``pitch``: itself where it is so already, as what ``new_maps`` makes."""
    batch, heads, length, columns = maps.shape
    wide = pitch(columns)
    strides = (heads * length * wide, length * wide, wide, 1)
    available = maps.untyped_storage().nbytes() // maps.element_size() - maps.storage_offset()
    if maps.stride() == strides and available >= batch * strides[0]:
        return maps
    return new_maps(maps, columns).copy_(maps)


def _ceiling(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own takes a hundred times as long: two microseconds, some 40 times a layer."""
    return -(-a // b)


def _power_of_2(n: int) -> int:
    """The least power of two from n up. Triton's own takes as long as its division."""
    return 1 << (n - 1).bit_length()


def block(size: int, most: int) -> int:
    """The power of two, 16 to ``most``, that covers size best."""
    return min(most, max(16, _power_of_2(size)))


def largest_blocks(maps: Tensor) -> tuple[int, int]:
    """Rows and columns from which on more of them get more blocks, and not larger ones, in any kernel."""
    side = _largest_side(maps)
    return side, max(2 * side, _wide(maps.size(1), 2048))


def _largest_side(maps: Tensor) -> int:
    """Rows or columns of the largest blocks that are multiplied: more would not fit in a program's registers."""
    return 64 if maps.element_size() == 2 else 32


def _convolved_block(maps: Tensor) -> int:
    """Columns of a block to be convolved."""
    return block(maps.size(3), 2 * _largest_side(maps))


def _wide(heads: int, columns: int) -> int:
    """Columns of a block for the softmax alone."""
    return block(columns, 2048 // _power_of_2(heads))


def _warps(columns: int) -> int:
    """Warps of a program that works on a row."""
    return 1 if columns <= 32 else 4


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """What a kernel gets for a tensor: itself, or another that it will not read. Bool is read as bytes."""
    tensor = other if tensor is None else tensor
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def _strides(mask: Tensor | None, sizes: tuple[int, int, int]) -> tuple[int, int, int]:
    """Strides of a mask over the B sentences, T rows and S columns of maps of these sizes; 0 where it is broadcast."""
    if mask is None:
        return 0, 0, 0
    batch, length, columns = sizes
    over_sentences, _, over_rows, over_columns = mask.expand(batch, 1, length, columns).stride()
    return over_sentences, over_rows, over_columns


def _constants(taps: Taps) -> dict[str, int | bool]:
    return {"KERNEL": taps.kernel_size, "TOP": taps.top, "LEFT": taps.left, "TRIANGULAR": taps.triangular}
