"""Evolving attention for the GPU: two Triton kernels, one for each direction.

Triton must be there to import this module; ``gpu`` imports it where it is needed. Each kernel is a sequence of phases:

    forward   mix       mixed = a * previous + b * logits, zero where hidden; carried = d * previous + e * logits
              evolve    A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried
              attend    softmax, dropout and the product with the values, which never leave the chip
    backward  mix       once more, and the gradient of the probabilities
              evolve    once more; from it the probabilities, and the gradients of A_logit and of Conv(mixed)
              unmix     gradients of the convolution, of the logits and of ``previous``
              vectors   gradients of queries, keys and values

Short maps (see ``is_short``) take one launch: a program does a sentence, phase after phase, and what one phase leaves for
the next stays in the caches. Longer ones take a launch for each step that needs its neighbours' rows: two and four.

Almost everything about a call is a number at run time, so that few variants are compiled: see ``Variant``.

Axes: B batch, K heads (at most 16), T target (query) length, S source (key) length, D head size, k kernel size.
Maps are B x K x T x S, contiguous. Masks: True = masked; bool, read by their strides (0 where they broadcast).

What a convolution reads lies apart, so that a tap is an address plus a number and needs no test of borders: each sentence
has K + 1 gaps of (k - 1) rows of zeros, with the T rows of a channel between two of them, and a row takes ``pitch``
numbers, those from S on zero. Pixel (i, j) reads row i + a - top, column j + b - left; ``reach`` says top and left.

Products take their factors in the maps' type and add up in float32. Nothing is added atomically, so that the same input
gives the same bits.
"""

import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

#: whether the kernels run in Triton's interpreter, on the CPU: Triton decides so when it is imported
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: rows of a head's tile
BAND = tl.constexpr(32)
#: channels (heads, or heads times taps) and pixels of a tile of all heads; products need at least 16
CHANNELS, PIXELS = tl.constexpr(16), tl.constexpr(128)
#: numbers before a sentence's first gap: its first tap may look as far to the left
LEAD = tl.constexpr(16)
#: how products of float32 are made: three products of tensor cores, about as exact as float32 (others: no difference)
PRECISION = tl.constexpr("tf32x3")
#: Rounds of the Philox generator. Seven are the fewest that pass every test of randomness (Salmon et al. 2011,
#: table 2).
ROUNDS = tl.constexpr(7)
#: what a call has: bits of ``flags``
GIVEN, PREVIOUS, HIDDEN, MASKED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
WEIGHTED, SEPARATE, LEARNT, GRAD_MAP = tl.constexpr(16), tl.constexpr(32), tl.constexpr(64), tl.constexpr(128)
TRIANGULAR = tl.constexpr(256)


# ---- pieces of kernels


@triton.jit
def _product(a, b, plus):
    """a @ b + plus, added up in float32."""
    if INTERPRETED:  # it would multiply the bits of bfloat16 as integers (Triton's issue 11584)
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, plus, input_precision=PRECISION)


@triton.jit
def _vectors(x, b, h, i, size, x_b, x_h, x_t, D, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors i of a head, rows x WIDTH; zero where there are none. Strides and D are in units."""
    d = tl.arange(0, WIDTH)
    places = x + (b * x_b + h * x_h) * UNIT + i[:, None].to(tl.int64) * (x_t * UNIT) + d[None, :]
    return tl.load(places, mask=(i < size)[:, None] & (d < D * UNIT)[None, :], other=0)


@triton.jit
def _store_vectors(x, values, b, h, i, size, B, K, D, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Store vectors i of a head of a result B x K x size x D, in memory size x B x K x D, as projections take it."""
    d = tl.arange(0, WIDTH)
    places = x + ((i[:, None].to(tl.int64) * B + b) * K + h) * (D * UNIT) + d[None, :]
    tl.store(places, values.to(x.dtype.element_ty), mask=(i < size)[:, None] & (d < D * UNIT)[None, :])


@triton.jit
def _hides(mask, strides, b, i, j, exists):
    """What a mask hides; all that does not exist."""
    places = mask + b * strides[0] + i.to(tl.int64) * strides[1] + j * strides[2]
    return tl.load(places, mask=exists, other=1) != 0


@triton.jit
def _sentence(T, K, pitch, KERNEL: tl.constexpr):
    """Numbers that what a convolution reads of a sentence takes."""
    return LEAD + (K * (T + KERNEL - 1) + KERNEL - 1).to(tl.int64) * pitch


@triton.jit
def _first_pixel(T, K, pitch, b, KERNEL: tl.constexpr):
    """Where a sentence's channel 0 begins in what a convolution reads."""
    return b * _sentence(T, K, pitch, KERNEL) + LEAD + (KERNEL - 1) * pitch


@triton.jit
def _clear_gaps(maps, b, K, T, pitch, KERNEL: tl.constexpr):
    """Zero a sentence's gaps in what a convolution reads."""
    size = (KERNEL - 1) * pitch
    start = maps + _first_pixel(T, K, pitch, b, KERNEL) - size
    p = tl.arange(0, PIXELS)
    tl.store(start - LEAD + p, tl.zeros([PIXELS], tl.float32).to(maps.dtype.element_ty), mask=p < LEAD)
    for gap in range(K + 1):
        for first in range(0, size, PIXELS):
            places = start + gap * (T + KERNEL - 1) * pitch + first + p
            tl.store(places, tl.zeros([PIXELS], tl.float32).to(maps.dtype.element_ty), mask=first + p < size)


@triton.jit
def _shares(learnt, a, b, c, d, e, flags):
    """The five numbers: constants, or where any is learnt, all from memory."""
    if (flags & LEARNT) != 0:
        a, b, c = tl.load(learnt), tl.load(learnt + 1), tl.load(learnt + 2)
        d, e = tl.load(learnt + 3), tl.load(learnt + 4)
    if (flags & SEPARATE) == 0:  # what is carried is what is mixed: no sum of its own
        d = d * 0
        e = e * 0
    return a, b, c, d, e


@triton.jit
def _clamped(x, limit):
    """x within the limit, a number of float16's range or infinity; what is not a number stays so."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _kept(seed, row, quad, threshold):
    """Which places survive dropout: of each row's number and each four columns' number, four places side by side."""
    zero = quad * 0 + row * 0
    r0, r1, r2, r3 = tl.philox(tl.load(seed), zero + quad, zero + row, zero, zero, ROUNDS)
    bits = tl.join(tl.join(r0, r2), tl.join(r1, r3)) >> 16
    return bits.reshape(zero.shape[0], 4 * zero.shape[1]).to(tl.int32) >= threshold


@triton.jit
def _taps(first, K, flags, HEADS: tl.constexpr, KERNEL: tl.constexpr):
    """Of the 16 rows of a product from tap ``first`` on: channel, row and column of the kernel, whether there is one."""
    m = tl.arange(0, CHANNELS)
    channel, tap = m % HEADS, first + m // HEADS
    a, b = tap // KERNEL, tap % KERNEL
    exists = (channel < K) & (tap < KERNEL * KERNEL) & (((flags & TRIANGULAR) == 0) | (b <= a))
    return channel, a, b, exists


@triton.jit
def _convolved(
    mixed, weight, bias, p, inside, K, T, pitch, top, left, flags, HEADS: tl.constexpr, KERNEL: tl.constexpr
):
    """Conv(mixed) before its ReLU, channels x pixels, of pixels p, counted from ``mixed``, channel 0."""
    o = tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS, PIXELS], tl.float32)
    for first in range(0, KERNEL * KERNEL, CHANNELS // HEADS):
        channel, a, b, tap = _taps(first, K, flags, HEADS, KERNEL)
        away = channel * (T + KERNEL - 1) * pitch + (a - top) * pitch + b - left
        pixels = tl.load(mixed + (away[:, None] + p[None, :]), mask=tap[:, None] & inside[None, :], other=0)
        places = weight + o[:, None] * (K * KERNEL * KERNEL) + ((channel * KERNEL + a) * KERNEL + b)[None, :]
        taps = tl.load(places, mask=(o < K)[:, None] & tap[None, :], other=0)
        total = _product(taps, pixels, total)
    return total + tl.load(bias + o, mask=o < K, other=0).to(tl.float32)[:, None]


# ---- phases


@triton.jit
def _mix(
    q, k, given, previous, hidden, mixed, carried, logits_out, b, band, K, T, S, D, pitch, vectors, hidden_strides,
    scale, shares, limit, flags, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """mixed of a band of rows, and carried where it is not mixed (SEPARATE, or no convolution, KERNEL = 0).

    The raw logits, too, where a share is learnt and ``logits_out`` is not ``carried``.
    """
    of_previous, of_logits, _, carried_previous, carried_logits = shares
    i = tl.arange(0, BAND) + band * BAND
    for h in range(K):
        rows = _vectors(q, b, h, i, T, vectors[0], vectors[1], vectors[2], D, UNIT, WIDTH)
        for start in range(0, pitch, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            exists = (i < T)[:, None] & (j < S)[None, :]
            places = (h * T + i[:, None]) * S + j[None, :]
            logits = tl.zeros([BAND, COLUMNS], tl.float32)
            if (flags & GIVEN) != 0:
                logits = tl.load(given + places, mask=exists, other=0).to(tl.float32)
            else:
                keys = _vectors(k, b, h, j, S, vectors[3], vectors[4], vectors[5], D, UNIT, WIDTH)
                logits = _product(rows, tl.trans(keys), logits) * scale
            before = tl.zeros([BAND, COLUMNS], tl.float32)
            if (flags & PREVIOUS) != 0:
                before = tl.load(previous + places, mask=exists, other=0).to(tl.float32)
            if KERNEL > 0:
                x = of_previous * before + of_logits * logits
                hide = ~exists
                if (flags & HIDDEN) != 0:
                    hide = _hides(hidden, hidden_strides, b, i[:, None], j[None, :], exists)
                x = tl.where(hide, 0, x)
                away = (h * (T + KERNEL - 1) + i[:, None]) * pitch + j[None, :]
                tl.store(mixed + away, x.to(mixed.dtype.element_ty), mask=(i < T)[:, None] & (j < pitch)[None, :])
            if (flags & SEPARATE) != 0:
                x = carried_previous * before + carried_logits * logits
                if KERNEL == 0:
                    x = _clamped(x, limit)
                tl.store(carried + places, x.to(carried.dtype.element_ty), mask=exists)
            if (flags & LEARNT) != 0 and logits_out is not None:
                tl.store(logits_out + places, logits.to(logits_out.dtype.element_ty), mask=exists)


@triton.jit
def _evolve_pixels(
    mixed, carried, weight, bias, at, p, inside, exists, K, T, pitch, top, left, share, limit, flags,
    HEADS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """A_logit before it is clamped, what was carried, and ReLU(Conv(mixed)); whether its gradient reaches Conv(mixed)."""
    if KERNEL == 0:
        x = tl.load(carried + at, mask=exists, other=0).to(tl.float32)
        return x, x, x, exists
    convolved = _convolved(mixed, weight, bias, p, inside, K, T, pitch, top, left, flags, HEADS, KERNEL)
    on = ~(convolved <= 0)  # what is not a number stays so: that is how a loss scale that is too high shows
    convolved = tl.where(on, convolved, 0)
    on = on & ~(convolved > limit)
    convolved = _clamped(convolved, limit)
    o = tl.arange(0, CHANNELS)
    away = o[:, None] * (T + KERNEL - 1) * pitch + p[None, :]
    x = tl.zeros([CHANNELS, PIXELS], tl.float32)
    if (flags & SEPARATE) != 0:
        x = tl.load(carried + at, mask=exists, other=0).to(tl.float32)
    else:
        x = tl.load(mixed + away, mask=(o < K)[:, None] & inside[None, :], other=0).to(tl.float32)
    return share * convolved + (1 - share) * x, x, convolved, on


@triton.jit
def _pixels(start, band, K, T, S, pitch, b):
    """Of a tile of all heads: pixels, counted from a channel's first; rows, columns; what exists; places in a map."""
    p = pitch * band * BAND + start + tl.arange(0, PIXELS)
    i, j = p // pitch, p % pitch
    o = tl.arange(0, CHANNELS)
    inside = (start + tl.arange(0, PIXELS) < pitch * BAND) & (i < T)
    exists = (o < K)[:, None] & (inside & (j < S))[None, :]
    at = (o[:, None] * T + i[None, :]) * S + j[None, :]
    return p, i, j, inside, exists, at


@triton.jit
def _evolve(
    mixed, a_logit, weight, bias, b, band, K, T, S, pitch, top, left, share, limit, flags,
    HEADS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """A_logit of a band of rows, in the place of what is carried."""
    for start in range(0, tl.minimum(pitch * BAND, pitch * (T - band * BAND)), PIXELS):
        p, _, _, inside, exists, at = _pixels(start, band, K, T, S, pitch, b)
        x, _, _, _ = _evolve_pixels(
            mixed, a_logit, weight, bias, at, p, inside, exists, K, T, pitch, top, left, share, limit, flags,
            HEADS, KERNEL,
        )  # fmt: skip
        tl.store(a_logit + at, _clamped(x, limit).to(a_logit.dtype.element_ty), mask=exists)


@triton.jit
def _scores(a_logit, masked, strides, b, h, i, j, K, T, S, lowest, flags):
    """A_logit under its mask, a head's tile, -inf outside of the map; places in a map, and which there are."""
    exists = (i < T)[:, None] & (j < S)[None, :]
    places = (h * T + i[:, None]) * S + j[None, :]
    x = tl.load(a_logit + places, mask=exists, other=0).to(tl.float32)
    if (flags & MASKED) != 0:
        # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked.
        x = tl.where(_hides(masked, strides, b, i[:, None], j[None, :], exists), lowest, x)
    return tl.where((j < S)[None, :], x, float("-inf")), places, exists


@triton.jit
def _attend(
    a_logit, v, masked, seed, context, weights, stats, b, band, B, K, T, S, D, vectors, masked_strides,
    lowest, threshold, kept_scale, flags, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The context of a band of rows, and of each row its largest score and the sum of exp(score - largest)."""
    i = tl.arange(0, BAND) + band * BAND
    for h in range(K):
        row = h * T + i
        peak = tl.full([BAND], float("-inf"), tl.float32)
        total = tl.zeros([BAND], tl.float32)
        sums = tl.zeros([BAND, WIDTH], tl.float32)
        for start in range(0, S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            x, _, _ = _scores(a_logit, masked, masked_strides, b, h, i, j, K, T, S, lowest, flags)
            higher = tl.maximum(peak, tl.max(x, 1))
            p = tl.exp(x - higher[:, None])
            less = tl.exp(peak - higher)
            total = total * less + tl.sum(p, 1)
            peak = higher
            if threshold > 0:
                quad = start // 4 + tl.arange(0, COLUMNS // 4)
                p = tl.where(_kept(seed, (b.to(tl.int32) * K * T + row)[:, None], quad[None, :], threshold), p, 0)
            values = _vectors(v, b, h, j, S, vectors[6], vectors[7], vectors[8], D, UNIT, WIDTH)
            sums = _product(p.to(values.dtype), values, sums * less[:, None])
        _store_vectors(context, sums / total[:, None] * kept_scale, b, h, i, T, B, K, D, UNIT, WIDTH)
        tl.store(stats + 2 * row, peak, mask=i < T)
        tl.store(stats + 2 * row + 1, total, mask=i < T)
        if (flags & WEIGHTED) != 0:
            for start in range(0, S, COLUMNS):
                j = start + tl.arange(0, COLUMNS)
                x, places, exists = _scores(a_logit, masked, masked_strides, b, h, i, j, K, T, S, lowest, flags)
                tl.store(weights + places, tl.exp(x - peak[:, None]) / total[:, None], mask=exists)


@triton.jit
def _grad_probs(
    v, context, grad_context, grad, inner, b, band, B, K, T, S, D, vectors, flags,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``grad`` = that of the probabilities after dropout; ``inner`` += the sum over a row of both, all in a band."""
    i = tl.arange(0, BAND) + band * BAND
    for h in range(K):
        row = h * T + i
        of_context = _vectors(grad_context, b, h, i, T, vectors[9], vectors[10], vectors[11], D, UNIT, WIDTH)
        result = _vectors(context, b, h, i, T, K * D, D, B * K * D, D, UNIT, WIDTH)
        total = tl.sum(of_context.to(tl.float32) * result.to(tl.float32), 1)
        if (flags & WEIGHTED) != 0:
            total += tl.load(inner + row, mask=i < T, other=0)
        tl.store(inner + row, total, mask=i < T)
        for start in range(0, S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            values = _vectors(v, b, h, j, S, vectors[6], vectors[7], vectors[8], D, UNIT, WIDTH)
            x = _product(of_context, tl.trans(values), tl.zeros([BAND, COLUMNS], tl.float32))
            places = (h * T + i[:, None]) * S + j[None, :]
            tl.store(grad + places, x.to(grad.dtype.element_ty), mask=(i < T)[:, None] & (j < S)[None, :])


@triton.jit
def _soften_backward(
    mixed, probs, weight, bias, masked, seed, stats, inner, grad_map, grad_weights, grad, grad_conv,
    b, band, K, T, S, pitch, masked_strides, top, left, share, lowest, limit, threshold, kept_scale, flags,
    HEADS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """A band of rows, with P the probabilities before dropout and G the gradient of P:

        ``grad``, in place = P * (G - sum over the row of P * G), 0 where masked, + ``grad_map``: that of A_logit
        ``grad_conv``      = the same where ReLU was active, else 0: times c it is that of Conv(mixed)
        ``probs``          = P after dropout, in the place of what was carried

    Returns the band's part of the gradient of c.
    """
    of_share = tl.zeros([CHANNELS], tl.float32)
    o = tl.arange(0, CHANNELS)
    for start in range(0, tl.minimum(pitch * BAND, pitch * (T - band * BAND)), PIXELS):
        p, i, j, inside, exists, at = _pixels(start, band, K, T, S, pitch, b)
        x, carried, convolved, on = _evolve_pixels(
            mixed, probs, weight, bias, at, p, inside, exists, K, T, pitch, top, left, share, limit, flags,
            HEADS, KERNEL,
        )  # fmt: skip
        in_range = ~((x > limit) | (x < -limit))
        x = _clamped(x, limit).to(probs.dtype.element_ty).to(tl.float32)
        hide = ~exists
        if (flags & MASKED) != 0:
            hide = hide | _hides(masked, masked_strides, b, i, j, inside & (j < S))[None, :]
            x = tl.where(hide, lowest, x)
        row = o[:, None] * T + i[None, :]
        peak = tl.load(stats + 2 * row, mask=exists, other=0)
        x = tl.exp(x - peak) / tl.load(stats + 2 * row + 1, mask=exists, other=1)
        g = tl.load(grad + at, mask=exists, other=0).to(tl.float32)
        dropped = x
        if threshold > 0:
            quads = (start + pitch * band * BAND) // 4 + tl.arange(0, PIXELS // 4)  # a pitch is whole quads
            number = (b.to(tl.int32) * K + o[:, None]) * T + (quads * 4 // pitch)[None, :]
            keep = _kept(seed, number, (quads % (pitch // 4))[None, :], threshold)
            g = tl.where(keep, g * kept_scale, 0)
            dropped = tl.where(keep, x * kept_scale, 0)
        if (flags & WEIGHTED) != 0:
            g += tl.load(grad_weights + at, mask=exists, other=0)
        g = tl.where(hide, 0, x * (g - tl.load(inner + row, mask=exists, other=0)))
        if (flags & GRAD_MAP) != 0:
            g += tl.load(grad_map + at, mask=exists, other=0).to(tl.float32)
        g = tl.where(in_range, g, 0)
        tl.store(probs + at, dropped.to(probs.dtype.element_ty), mask=exists)
        tl.store(grad + at, g.to(grad.dtype.element_ty), mask=exists)
        if KERNEL > 0:
            away = o[:, None] * (T + KERNEL - 1) * pitch + p[None, :]
            z = tl.where(on & exists, g, 0).to(grad_conv.dtype.element_ty)
            tl.store(grad_conv + away, z, mask=(o < K)[:, None] & inside[None, :])
            of_share += tl.sum(tl.where(exists, g * (convolved - carried), 0), 1)
    return tl.sum(of_share, 0)


@triton.jit
def _weight_backward(
    mixed, grad_conv, partial, band, bands, K, T, S, pitch, top, left, share, flags,
    HEADS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """The part of some bands in the gradients of weight and bias: K x K x k x k numbers, then K.

    gradient of weight[o, c, a, b] = c * sum over (i, j) of Z[o, i, j] * mixed[c, i + a - top, j + b - left]
    gradient of bias[o]            = c * sum over (i, j) of Z[o, i, j]
    """
    M: tl.constexpr = KERNEL * KERNEL
    o = tl.arange(0, CHANNELS)
    end = tl.minimum(pitch * (band + bands) * BAND, pitch * T)
    for first in range(0, M, CHANNELS // HEADS):
        channel, a, b, tap = _taps(first, K, flags, HEADS, KERNEL)
        away = channel * (T + KERNEL - 1) * pitch + (a - top) * pitch + b - left
        of_weight = tl.zeros([CHANNELS, CHANNELS], tl.float32)
        of_bias = tl.zeros([CHANNELS], tl.float32)
        for start in range(pitch * band * BAND, end, PIXELS):
            p = start + tl.arange(0, PIXELS)
            pixels = tl.load(mixed + (away[:, None] + p[None, :]), mask=tap[:, None] & (p < end)[None, :], other=0)
            places = grad_conv + o[:, None] * (T + KERNEL - 1) * pitch + p[None, :]
            z = tl.load(places, mask=(o < K)[:, None] & (p < end)[None, :], other=0)
            of_weight = _product(z, tl.trans(pixels), of_weight)
            of_bias += tl.sum(z.to(tl.float32), 1)
        places = partial + o[:, None] * (K * M) + (channel * M + a * KERNEL + b)[None, :]
        exists = (channel < K) & (a < KERNEL)
        tl.store(places, of_weight * share, mask=(o < K)[:, None] & exists[None, :])
        if first == 0:
            tl.store(partial + K * K * M + o, of_bias * share, mask=o < K)


@triton.jit
def _unmix(
    weight, hidden, previous, logits, grad_conv, grad, grad_previous, partial, b, band, bands, K, T, S, pitch,
    hidden_strides, top, left, shares, flags, HEADS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """From G = ``grad``, the gradient of A_logit, and Z = ``grad_conv``, in some bands of rows:

        gradient of mixed[c, i, j] = c * sum over (o, a, b) of weight[o, c, a, b] * Z[o, i - a + top, j - b + left],
                                     0 where hidden
        gradient of carried        = (1 - c) * G, part of mixed's own where the two are the same (not SEPARATE)
        ``grad_previous``          = a * gradient of mixed + d * gradient of carried
        ``grad``, in place         = b * gradient of mixed + e * gradient of carried: that of the logits

    Where a share is learnt, the bands' part of the gradients of a, b, d and e goes to ``partial``.
    """
    M: tl.constexpr = KERNEL * KERNEL
    of_previous, of_logits, share, carried_previous, carried_logits = shares
    c = tl.arange(0, CHANNELS)
    of_a = tl.zeros([CHANNELS], tl.float32)
    of_b = tl.zeros([CHANNELS], tl.float32)
    of_d = tl.zeros([CHANNELS], tl.float32)
    of_e = tl.zeros([CHANNELS], tl.float32)
    for start in range(0, tl.minimum(pitch * bands * BAND, pitch * (T - band * BAND)), PIXELS):
        p = pitch * band * BAND + start + tl.arange(0, PIXELS)
        i, j = p // pitch, p % pitch
        inside = (start + tl.arange(0, PIXELS) < pitch * bands * BAND) & (i < T)
        exists = (c < K)[:, None] & (inside & (j < S))[None, :]
        at = (c[:, None] * T + i[None, :]) * S + j[None, :]
        of_carried = tl.load(grad + at, mask=exists, other=0).to(tl.float32)
        of_mixed = tl.zeros([CHANNELS, PIXELS], tl.float32)
        if KERNEL > 0:
            for first in range(0, M, CHANNELS // HEADS):
                o, y, x, tap = _taps(first, K, flags, HEADS, KERNEL)
                away = o * (T + KERNEL - 1) * pitch - (y - top) * pitch - x + left
                z = tl.load(grad_conv + (away[:, None] + p[None, :]), mask=tap[:, None] & inside[None, :], other=0)
                places = weight + c[:, None] * M + (o * (K * M) + y * KERNEL + x)[None, :]
                taps = tl.load(places, mask=(c < K)[:, None] & tap[None, :], other=0)
                of_mixed = _product(taps, z, of_mixed)
            of_mixed *= share
            of_carried *= 1 - share
            if (flags & SEPARATE) == 0:
                of_mixed += of_carried
            if (flags & HIDDEN) != 0:
                hide = _hides(hidden, hidden_strides, b, i, j, inside & (j < S))
                of_mixed = tl.where(hide[None, :], 0, of_mixed)
        if (flags & PREVIOUS) != 0:
            total = of_previous * of_mixed + carried_previous * of_carried
            tl.store(grad_previous + at, total.to(grad.dtype.element_ty), mask=exists)
        total = of_logits * of_mixed + carried_logits * of_carried
        tl.store(grad + at, total.to(grad.dtype.element_ty), mask=exists)
        if (flags & LEARNT) != 0:
            scores = tl.load(logits + at, mask=exists, other=0).to(tl.float32)
            of_b += tl.sum(of_mixed * scores, 1)
            of_e += tl.sum(of_carried * scores, 1)
            if (flags & PREVIOUS) != 0:
                before = tl.load(previous + at, mask=exists, other=0).to(tl.float32)
                of_a += tl.sum(of_mixed * before, 1)
                of_d += tl.sum(of_carried * before, 1)
    if (flags & LEARNT) != 0:
        if (flags & SEPARATE) == 0:
            of_d *= 0
            of_e *= 0
        tl.store(partial, tl.sum(of_a, 0))
        tl.store(partial + 1, tl.sum(of_b, 0))
        tl.store(partial + 3, tl.sum(of_d, 0))
        tl.store(partial + 4, tl.sum(of_e, 0))


@triton.jit
def _of_queries(
    k,
    grad,
    grad_q,
    b,
    band,
    B,
    K,
    T,
    S,
    D,
    vectors,
    scale,
    UNIT: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The gradient of a band of queries."""
    i = tl.arange(0, BAND) + band * BAND
    for h in range(K):
        total = tl.zeros([BAND, WIDTH], tl.float32)
        for start in range(0, S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            exists = (i < T)[:, None] & (j < S)[None, :]
            x = tl.load(grad + (h * T + i[:, None]) * S + j[None, :], mask=exists, other=0)
            keys = _vectors(k, b, h, j, S, vectors[3], vectors[4], vectors[5], D, UNIT, WIDTH)
            total = _product(x, keys, total)
        _store_vectors(grad_q, total * scale, b, h, i, T, B, K, D, UNIT, WIDTH)


@triton.jit
def _of_keys(
    q, grad_context, grad, probs, grad_k, grad_v, b, h, block, B, K, T, S, D, vectors, scale, flags,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and of values of a head."""
    j = block * COLUMNS + tl.arange(0, COLUMNS)
    of_keys = tl.zeros([COLUMNS, WIDTH], tl.float32)
    of_values = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for start in range(0, T, BAND):
        i = start + tl.arange(0, BAND)
        exists = (i < T)[:, None] & (j < S)[None, :]
        places = (h * T + i[:, None]) * S + j[None, :]
        p = tl.load(probs + places, mask=exists, other=0)
        of_context = _vectors(grad_context, b, h, i, T, vectors[9], vectors[10], vectors[11], D, UNIT, WIDTH)
        of_values = _product(tl.trans(p), of_context, of_values)
        if (flags & GIVEN) == 0:
            x = tl.load(grad + places, mask=exists, other=0)
            rows = _vectors(q, b, h, i, T, vectors[0], vectors[1], vectors[2], D, UNIT, WIDTH)
            of_keys = _product(tl.trans(x), rows, of_keys)
    _store_vectors(grad_v, of_values, b, h, j, S, B, K, D, UNIT, WIDTH)
    if (flags & GIVEN) == 0:
        _store_vectors(grad_k, of_keys * scale, b, h, j, S, B, K, D, UNIT, WIDTH)


# ---- kernels

_NUMBERS = (
    "B K T S D pitch q_b q_h q_t k_b k_h k_t v_b v_h v_t g_b g_h g_t hidden_b hidden_t hidden_s masked_b masked_t masked_s "
    "top left flags threshold"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def forward_kernel(
    q, k, v, given, previous, weight, bias, learnt, hidden, masked, seed, scratch, a_logit, context, stats, weights,
    B, K, T, S, D, pitch, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, hidden_b, hidden_t, hidden_s, masked_b, masked_t,
    masked_s, top, left, flags, threshold, scale, share_a, share_b, share_c, share_d, share_e, lowest, limit, kept_scale,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Context, A_logit, what the backward pass needs of each row, and the weights where they are wanted.

    STEP 0 does a sentence in one program. Else a program does a band of rows: STEP 1 mixes, STEP 2 does the rest.
    """
    pitch = pitch * 16
    bands = tl.cdiv(T, BAND)
    b = tl.program_id(0).to(tl.int64)
    first, last = 0, bands
    if STEP > 0:
        b, first = b // bands, (b % bands).to(tl.int32)
        last = first + 1
    vectors = (q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t)
    skipped = b * (K * T)
    stats += 2 * skipped
    given, previous = given + skipped * S, previous + skipped * S
    a_logit, weights = a_logit + skipped * S, weights + skipped * S
    shares = _shares(learnt, share_a, share_b, share_c, share_d, share_e, flags)
    mixed = scratch
    if KERNEL > 0:
        mixed = scratch + _first_pixel(T, K, pitch, b, KERNEL)
    if STEP < 2:
        if KERNEL > 0 and first == 0:
            _clear_gaps(scratch, b, K, T, pitch, KERNEL)
        for band in range(first, last):
            _mix(
                q, k, given, previous, hidden, mixed, a_logit, None, b, band, K, T, S, D, pitch, vectors,
                (hidden_b, hidden_t, hidden_s), scale, shares, limit, flags, KERNEL, UNIT, WIDTH, COLUMNS,
            )  # fmt: skip
    if STEP != 1:
        if STEP == 0:
            tl.debug_barrier()  # what follows reads what other threads of this program wrote
        if KERNEL > 0:
            for band in range(first, last):
                _evolve(
                    mixed, a_logit, weight, bias, b, band, K, T, S, pitch, top, left, shares[2], limit, flags,
                    HEADS, KERNEL,
                )  # fmt: skip
            tl.debug_barrier()
        for band in range(first, last):
            _attend(
                a_logit, v, masked, seed, context, weights, stats, b, band, B, K, T, S, D, vectors,
                (masked_b, masked_t, masked_s), lowest, threshold, kept_scale, flags, UNIT, WIDTH, COLUMNS,
            )  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def backward_kernel(
    q, k, v, given, previous, weight, bias, learnt, hidden, masked, seed, scratch, context, stats, inner,
    grad_context, grad_map, grad_weights, grad, grad_q, grad_k, grad_v, grad_previous, partial,
    B, K, T, S, D, pitch, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t, hidden_b, hidden_t, hidden_s,
    masked_b, masked_t, masked_s, top, left, flags, threshold, scale, share_a, share_b, share_c, share_d, share_e,
    lowest, limit, kept_scale,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """All gradients; ``grad`` becomes that of the logits, ``partial`` is to be summed over programs.

    STEP 0 does a sentence in one program. Else a program does a band of rows: STEP 1 mixes, STEP 2 evolves and softens,
    STEP 3 goes back to the logits and queries; or, in STEP 4, a block of keys of a head.
    """
    pitch = pitch * 16
    bands = tl.cdiv(T, BAND)
    b = tl.program_id(0).to(tl.int64)
    partial += b * (K * K * KERNEL * KERNEL + K + 5)
    of_shares = partial + K * K * KERNEL * KERNEL + K
    first, last = 0, bands
    blocks = tl.cdiv(S, COLUMNS)
    first_key, last_key = 0, K * blocks
    if STEP == 4:
        first_key = (b % (K * blocks)).to(tl.int32)
        b, last_key = b // (K * blocks), first_key + 1
    elif STEP > 0:
        b, first = b // bands, (b % bands).to(tl.int32)
        last = first + 1
    vectors = (q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t)
    skipped = b * (K * T)
    stats, inner = stats + 2 * skipped, inner + skipped
    given, previous, grad_previous = given + skipped * S, previous + skipped * S, grad_previous + skipped * S
    grad, grad_map, grad_weights = grad + skipped * S, grad_map + skipped * S, grad_weights + skipped * S
    hidden_strides, masked_strides = (hidden_b, hidden_t, hidden_s), (masked_b, masked_t, masked_s)
    shares = _shares(learnt, share_a, share_b, share_c, share_d, share_e, flags)
    mixed, grad_conv, probs = scratch, scratch, scratch
    if KERNEL > 0:
        size = B * _sentence(T, K, pitch, KERNEL) + LEAD
        mixed = scratch + _first_pixel(T, K, pitch, b, KERNEL)
        grad_conv = mixed + size
        probs = scratch + 2 * size
    logits = probs + (B * K).to(tl.int64) * T * S + skipped * S
    probs += skipped * S

    if STEP < 2:
        if KERNEL > 0 and first == 0:
            _clear_gaps(scratch, b, K, T, pitch, KERNEL)
            _clear_gaps(scratch + size, b, K, T, pitch, KERNEL)
        for band in range(first, last):
            _mix(
                q, k, given, previous, hidden, mixed, probs, logits, b, band, K, T, S, D, pitch, vectors, hidden_strides,
                scale, shares, limit, flags, KERNEL, UNIT, WIDTH, COLUMNS,
            )  # fmt: skip
            _grad_probs(
                v, context, grad_context, grad, inner, b, band, B, K, T, S, D, vectors, flags, UNIT, WIDTH, COLUMNS
            )
    if STEP == 0:
        tl.debug_barrier()  # what follows reads what other threads of this program wrote
    if STEP == 0 or STEP == 2:
        of_c = 0.0
        for band in range(first, last):
            of_c += _soften_backward(
                mixed, probs, weight, bias, masked, seed, stats, inner, grad_map, grad_weights, grad, grad_conv,
                b, band, K, T, S, pitch, masked_strides, top, left, shares[2], lowest, limit, threshold, kept_scale,
                flags, HEADS, KERNEL,
            )  # fmt: skip
        tl.store(of_shares + 2, of_c)
    if STEP == 0:
        tl.debug_barrier()
    if STEP == 0 or STEP == 3:
        if KERNEL > 0:
            _weight_backward(
                mixed, grad_conv, partial, first, last - first, K, T, S, pitch, top, left, shares[2], flags,
                HEADS, KERNEL,
            )  # fmt: skip
        _unmix(
            weight, hidden, previous, logits, grad_conv, grad, grad_previous, of_shares, b, first, last - first,
            K, T, S, pitch, hidden_strides, top, left, shares, flags, HEADS, KERNEL,
        )  # fmt: skip
        tl.debug_barrier()
        if (flags & GIVEN) == 0:
            for band in range(first, last):
                _of_queries(k, grad, grad_q, b, band, B, K, T, S, D, vectors, scale, UNIT, WIDTH, COLUMNS)
    if STEP == 0 or STEP == 4:
        for key in range(first_key, last_key):
            _of_keys(
                q, grad_context, grad, probs, grad_k, grad_v, b, key // blocks, key % blocks, B, K, T, S, D, vectors,
                scale, flags, UNIT, WIDTH, COLUMNS,
            )  # fmt: skip
