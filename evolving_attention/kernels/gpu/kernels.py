"""Evolving attention for the GPU: two Triton kernels, one for each direction.

Importing this module needs Triton. Each kernel is a sequence of phases:

    forward   mix       mixed = a * previous + b * logits, zero where hidden; carried = d * previous + e * logits
              evolve    A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried
              attend    softmax, dropout and the product with the values, which never leave the chip
    backward  mix       again, and the gradient of the probabilities
              evolve    again; then the probabilities, and the gradients of A_logit and of Conv(mixed)
              unmix     gradients of the convolution, of the logits and of ``previous``
              vectors   gradients of queries, keys and values

Short maps (``operation.is_short``) take one launch. One program does a sentence, and each phase finds the results of
the one before in the caches. Longer maps take a launch for each phase that reads neighbouring rows: two forward, four
back.

Almost everything about a call is a number at run time, so few variants are compiled: see ``trial.Variant``.

Axes: B batch, K heads (at most 16), T target (query) length, S source (key) length, D head size, k kernel size.
Maps are B x K x T x S, contiguous. Masks: True = masked; bool, read by their strides (0 where they broadcast).

The convolution reads a *framed* map, with zeros around it: a tap is an address plus a number, and no border is tested.
A framed sentence holds K + 1 gaps of k - 1 rows of zeros, and the T rows of a channel between two gaps. In a step of
decoding, a channel's rows of the steps before lie in the gap above it. A row takes ``pitch`` numbers; those from S on
are zero. Pixel (i, j) reads row i + a - top and column j + b - left of the map.
``reach`` gives top and left.

Products take factors of the maps' type and add up in float32. Nothing is added atomically: equal inputs give equal
bits.
"""

import os
from typing import Any, NamedTuple

import triton
import triton.language as tl

#: whether the kernels run in Triton's interpreter, on the CPU: Triton decides so when it is imported
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: rows of a head's tile
BAND = tl.constexpr(16)
#: channels (heads, or heads times taps) of a tile of all heads; products need at least 16
CHANNELS = tl.constexpr(16)
#: pixels of a tile of all heads: in one launch, which needs more registers; in several launches
SENTENCE_PIXELS, PIXELS = tl.constexpr(64), tl.constexpr(128)
#: zeros before a sentence's first gap: the first tap looks at most so far to the left
LEAD = tl.constexpr(16)
#: how products of float32 are made: three products of tensor cores, about as exact as float32 (others: no difference)
PRECISION = tl.constexpr("tf32x3")
#: Rounds of the Philox generator. Seven are the fewest that pass every test of randomness (Salmon et al. 2011,
#: table 2).
ROUNDS = tl.constexpr(7)
#: bits of ``flags``: the inputs and outputs of a call
GIVEN, PREVIOUS, HIDDEN, MASKED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
WEIGHTED, SEPARATE, LEARNT, GRAD_MAP = tl.constexpr(16), tl.constexpr(32), tl.constexpr(64), tl.constexpr(128)
TRIANGULAR, ABOVE, UNHIDDEN = tl.constexpr(256), tl.constexpr(512), tl.constexpr(1024)
FLAGS = (GIVEN, PREVIOUS, HIDDEN, MASKED, WEIGHTED, SEPARATE, LEARNT, GRAD_MAP, TRIANGULAR, ABOVE, UNHIDDEN)


class Call(NamedTuple):
    """The tensors, sizes, strides and numbers that phases read; strides of vectors and D are in units."""

    b: Any  # the sentence
    source: Any  # whose keys and values it reads
    q: Any
    k: Any
    v: Any
    given: Any  # this and the next two begin at the sentence
    previous: Any
    above: Any
    weight: Any
    bias: Any
    seed: Any
    stats: Any
    hidden: Any  # address and strides, as the next
    masked: Any
    B: Any
    K: Any
    T: Any
    S: Any
    D: Any
    before: Any  # columns of ``above``
    pitch: Any
    q_strides: Any
    k_strides: Any
    v_strides: Any
    shares: Any  # a to e
    top: Any
    left: Any
    scale: Any  # of q k^T
    lowest: Any
    limit: Any
    threshold: Any
    kept_scale: Any
    flags: Any


# ---- pieces of kernels


@triton.jit
def _product(a, b, plus):
    """a @ b + plus, added up in float32."""
    if INTERPRETED:  # it would multiply the bits of bfloat16 as integers (Triton's issue 11584)
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, plus, input_precision=PRECISION)


@triton.jit
def _vectors(x, strides, b, h, i, size, D, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Vectors i of a head, rows x WIDTH; zero where there are none."""
    d = tl.arange(0, WIDTH)
    places = x + (b * strides[0] + h * strides[1]) * UNIT + i[:, None].to(tl.int64) * (strides[2] * UNIT) + d[None, :]
    return tl.load(places, mask=(i < size)[:, None] & (d < D * UNIT)[None, :], other=0)


@triton.jit
def _store_vectors(x, values, call, h, i, size, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """Store vectors i of a head. Memory holds size x B x K x D, the layout of projections."""
    d = tl.arange(0, WIDTH)
    width = call.D * UNIT
    places = x + ((i[:, None].to(tl.int64) * call.B + call.b) * call.K + h) * width + d[None, :]
    tl.store(places, values.to(x.dtype.element_ty), mask=(i < size)[:, None] & (d < width)[None, :])


@triton.jit
def _hides(mask, b, i, j, exists):
    """True where a mask hides a pixel that exists."""
    places = mask[0] + b * mask[1] + i.to(tl.int64) * mask[2] + j * mask[3]
    return tl.load(places, mask=exists, other=0).to(tl.int1)


@triton.jit
def _first_pixel(b, K, T, pitch, KERNEL: tl.constexpr):
    """The place of sentence b's channel 0 in framed maps; for b = B, the first gap is beyond their end."""
    sentence = LEAD + (K * (T + KERNEL - 1) + KERNEL - 1).to(tl.int64) * pitch
    return b * sentence + LEAD + (KERNEL - 1) * pitch


@triton.jit
def _fill_gaps(first_pixel, call, KERNEL: tl.constexpr):
    """The gaps of a framed sentence: zeros, or the rows of ``above``, which lie above a channel's own."""
    size = (KERNEL - 1) * call.pitch
    p = tl.arange(0, PIXELS)
    zeros = tl.zeros([PIXELS], tl.float32).to(first_pixel.dtype.element_ty)
    tl.store(first_pixel - size - LEAD + p, zeros, mask=p < LEAD)
    for gap in range(call.K + 1):
        for start in range(0, size, PIXELS):
            at = start + p
            rows = zeros
            if (call.flags & ABOVE) != 0:
                row, column = at // call.pitch, at % call.pitch
                exists = (gap < call.K) & (at < size) & (column < call.before)
                rows = tl.load(call.above + (gap * (KERNEL - 1) + row) * call.before + column, mask=exists, other=0)
            places = first_pixel - size + gap * (call.T + KERNEL - 1) * call.pitch + at
            tl.store(places, rows, mask=at < size)


@triton.jit
def _shares(learnt, a, b, c, d, e, flags):
    """The five numbers: constants, or where any is learnt, all from memory."""
    if (flags & LEARNT) != 0:
        a, b, c = tl.load(learnt), tl.load(learnt + 1), tl.load(learnt + 2)
        d, e = tl.load(learnt + 3), tl.load(learnt + 4)
    if (flags & SEPARATE) == 0:  # carried is mixed itself: one sum serves both
        d, e = d * 0, e * 0
    return a, b, c, d, e


@triton.jit
def _clamped(x, limit):
    """x within +-limit, which is infinite but for float16. NaN stays NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _kept(call, row, quad):
    """Whether pixels survive dropout. ``row`` counts rows of the sentence, ``quad`` groups of four columns."""
    zero = quad * 0 + row * 0
    row = zero + row + call.b.to(tl.int32) * call.K * call.T
    r0, r1, r2, r3 = tl.philox(tl.load(call.seed), zero + quad, row, zero, zero, ROUNDS)
    bits = tl.join(tl.join(r0, r2), tl.join(r1, r3)) >> 16
    return bits.reshape(zero.shape[0], 4 * zero.shape[1]).to(tl.int32) >= call.threshold


@triton.jit
def _taps(first, K, flags, HEADS: tl.constexpr, KERNEL: tl.constexpr):
    """Channels, kernel rows and kernel columns of a product's 16 taps from ``first`` on, and which of them exist."""
    m = tl.arange(0, CHANNELS)
    channel, tap = m % HEADS, first + m // HEADS
    a, b = tap // KERNEL, tap % KERNEL
    exists = (channel < K) & (tap < KERNEL * KERNEL) & (((flags & TRIANGULAR) == 0) | (b <= a))
    return channel, a, b, exists


@triton.jit
def _channel(o, T, pitch, KERNEL: tl.constexpr):
    """The place of a channel in a framed sentence, counted from channel 0."""
    return o * (T + KERNEL - 1) * pitch


@triton.jit
def _pixels(start, end, K, T, S, pitch, TILE: tl.constexpr):
    """A tile of all heads: pixels of a framed channel, their rows and columns, which are inside, which exist in which
    head, and places in a map.
    """
    p = start + tl.arange(0, TILE)
    i, j = p // pitch, p % pitch
    o = tl.arange(0, CHANNELS)
    inside = p < end
    exists = (o < K)[:, None] & (inside & (j < S))[None, :]
    return p, i, j, inside, exists, (o[:, None] * T + i[None, :]) * S + j[None, :]


# ---- phases: of a sentence, or of a band of its rows


@triton.jit
def _mix(
    call, mixed, carried, logits_out, band,
    KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """mixed, and carried where it is not mixed (SEPARATE; no convolution, KERNEL = 0; UNHIDDEN places).

    Also the logits, where a share is learnt and ``logits_out`` is not None.
    """
    of_previous, of_logits, _, carried_previous, carried_logits = call.shares
    T, S = call.T, call.S
    i = tl.arange(0, BAND) + band * BAND
    for h in range(call.K):
        rows = _vectors(call.q, call.q_strides, call.b, h, i, T, call.D, UNIT, WIDTH)
        for start in range(0, call.pitch, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            exists = (i < T)[:, None] & (j < S)[None, :]
            places = (h * T + i[:, None]) * S + j[None, :]
            logits = tl.zeros([BAND, COLUMNS], tl.float32)
            if (call.flags & GIVEN) != 0:
                logits = tl.load(call.given + places, mask=exists, other=0).to(tl.float32)
            else:
                keys = _vectors(call.k, call.k_strides, call.source, h, j, S, call.D, UNIT, WIDTH)
                logits = _product(rows, tl.trans(keys), logits) * call.scale
            logits = _clamped(logits, call.limit)
            before = tl.zeros([BAND, COLUMNS], tl.float32)
            if (call.flags & PREVIOUS) != 0:
                before = tl.load(call.previous + places, mask=exists, other=0).to(tl.float32)
            if KERNEL > 0:
                x = of_previous * before + of_logits * logits
                hide = ~exists
                if (call.flags & HIDDEN) != 0:
                    hide = hide | _hides(call.hidden, call.b, i[:, None], j[None, :], exists)
                    if (call.flags & UNHIDDEN) != 0:
                        tl.store(carried + places, x.to(carried.dtype.element_ty), mask=exists & hide)
                x = tl.where(hide, 0, x)
                pixels = mixed + _channel(h, call.T, call.pitch, KERNEL) + i[:, None] * call.pitch + j[None, :]
                tl.store(pixels, x.to(mixed.dtype.element_ty), mask=(i < T)[:, None] & (j < call.pitch)[None, :])
            if (call.flags & SEPARATE) != 0:
                x = carried_previous * before + carried_logits * logits
                if KERNEL == 0:
                    x = _clamped(x, call.limit)
                tl.store(carried + places, x.to(carried.dtype.element_ty), mask=exists)
            if (call.flags & LEARNT) != 0 and logits_out is not None:
                tl.store(logits_out + places, logits.to(logits_out.dtype.element_ty), mask=exists)


@triton.jit
def _evolve_pixels(
    call, mixed, carried, p, i, j, inside, exists, at, HEADS: tl.constexpr, KERNEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A_logit before it is clamped, carried, ReLU(Conv(mixed)), and whether gradients pass that ReLU."""
    if KERNEL == 0:
        x = tl.load(carried + at, mask=exists, other=0).to(tl.float32)
        return x, x, x, exists
    K, o = call.K, tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS, TILE], tl.float32)
    for first in range(0, KERNEL * KERNEL, CHANNELS // HEADS):
        channel, a, b, tap = _taps(first, call.K, call.flags, HEADS, KERNEL)
        away = _channel(channel, call.T, call.pitch, KERNEL) + (a - call.top) * call.pitch + b - call.left
        pixels = tl.load(mixed + (away[:, None] + p[None, :]), mask=tap[:, None] & inside[None, :], other=0)
        places = call.weight + o[:, None] * (K * KERNEL * KERNEL) + ((channel * KERNEL + a) * KERNEL + b)[None, :]
        taps = tl.load(places, mask=(o < K)[:, None] & tap[None, :], other=0)
        total = _product(taps, pixels, total)
    total += tl.load(call.bias + o, mask=o < K, other=0).to(tl.float32)[:, None]
    on = ~(total <= 0)  # NaN stays NaN: it shows that a loss scale is too high
    convolved = _clamped(tl.where(on, total, 0), call.limit)
    x = tl.zeros([CHANNELS, TILE], tl.float32)
    if (call.flags & SEPARATE) != 0:
        x = tl.load(carried + at, mask=exists, other=0).to(tl.float32)
    else:
        x = tl.load(mixed + _channel(o, call.T, call.pitch, KERNEL)[:, None] + p[None, :], mask=exists, other=0).to(
            tl.float32
        )
        if (call.flags & UNHIDDEN) != 0:  # it is zero where hidden
            hide = _hides(call.hidden, call.b, i, j, inside & (j < call.S))
            x += tl.load(carried + at, mask=exists & hide[None, :], other=0).to(tl.float32)
    share = call.shares[2]
    return share * convolved + (1 - share) * x, x, convolved, on & ~(total > call.limit)


@triton.jit
def _evolve(call, mixed, a_logit, start, end, HEADS: tl.constexpr, KERNEL: tl.constexpr, TILE: tl.constexpr):
    """A_logit, written over carried."""
    for first in range(start, end, TILE):
        p, i, j, inside, exists, at = _pixels(first, end, call.K, call.T, call.S, call.pitch, TILE)
        x, _, _, _ = _evolve_pixels(call, mixed, a_logit, p, i, j, inside, exists, at, HEADS, KERNEL, TILE)
        tl.store(a_logit + at, _clamped(x, call.limit).to(a_logit.dtype.element_ty), mask=exists)


@triton.jit
def _scores(call, a_logit, h, i, j):
    """A_logit under its mask, a head's tile, -inf outside of the map."""
    exists = (i < call.T)[:, None] & (j < call.S)[None, :]
    places = (h * call.T + i[:, None]) * call.S + j[None, :]
    x = tl.load(a_logit + places, mask=exists, other=0).to(tl.float32)
    # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked. Without an
    # ``if``: Triton 3.6 cannot compile one here beside that of dropout.
    has_mask = (call.flags & MASKED) != 0
    x = tl.where(_hides(call.masked, call.b, i[:, None], j[None, :], exists & has_mask), call.lowest, x)
    return tl.where((j < call.S)[None, :], x, float("-inf"))


@triton.jit
def _attend(call, a_logit, context, weights, band, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The context, and of each row its largest score and the sum of exp(score - largest)."""
    i = tl.arange(0, BAND) + band * BAND
    for h in range(call.K):
        row = h * call.T + i
        peak = tl.full([BAND], float("-inf"), tl.float32)
        total = tl.zeros([BAND], tl.float32)
        sums = tl.zeros([BAND, WIDTH], tl.float32)
        for start in range(0, call.S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            x = _scores(call, a_logit, h, i, j)
            higher = tl.maximum(peak, tl.max(x, 1))
            p = tl.exp(x - higher[:, None])
            less = tl.exp(peak - higher)
            total = total * less + tl.sum(p, 1)
            peak = higher
            if call.threshold > 0:
                quad = start // 4 + tl.arange(0, COLUMNS // 4)
                p = tl.where(_kept(call, row[:, None], quad[None, :]), p, 0)
            values = _vectors(call.v, call.v_strides, call.source, h, j, call.S, call.D, UNIT, WIDTH)
            sums = _product(p.to(values.dtype), values, sums * less[:, None])
        _store_vectors(context, sums / total[:, None] * call.kept_scale, call, h, i, call.T, UNIT, WIDTH)
        tl.store(call.stats + 2 * row, peak, mask=i < call.T)
        tl.store(call.stats + 2 * row + 1, total, mask=i < call.T)
        if (call.flags & WEIGHTED) != 0:
            for start in range(0, call.S, COLUMNS):
                j = start + tl.arange(0, COLUMNS)
                x = _scores(call, a_logit, h, i, j)
                places = (h * call.T + i[:, None]) * call.S + j[None, :]
                exists = (i < call.T)[:, None] & (j < call.S)[None, :]
                tl.store(weights + places, tl.exp(x - peak[:, None]) / total[:, None], mask=exists)


@triton.jit
def _grad_probs(
    call, context, grad_context, strides, grad, inner, band,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``grad`` = that of the probabilities after dropout; ``inner`` += the sum over a row of both."""
    i = tl.arange(0, BAND) + band * BAND
    K, T, D = call.K, call.T, call.D
    for h in range(K):
        of_context = _vectors(grad_context, strides, call.b, h, i, T, D, UNIT, WIDTH)
        result = _vectors(context, (K * D, D, call.B * K * D), call.b, h, i, T, D, UNIT, WIDTH)
        total = tl.sum(of_context.to(tl.float32) * result.to(tl.float32), 1)
        if (call.flags & WEIGHTED) != 0:
            total += tl.load(inner + h * T + i, mask=i < T, other=0)
        tl.store(inner + h * T + i, total, mask=i < T)
        for start in range(0, call.S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            values = _vectors(call.v, call.v_strides, call.b, h, j, call.S, D, UNIT, WIDTH)
            x = _product(of_context, tl.trans(values), tl.zeros([BAND, COLUMNS], tl.float32))
            exists = (i < T)[:, None] & (j < call.S)[None, :]
            tl.store(grad + (h * T + i[:, None]) * call.S + j[None, :], x.to(grad.dtype.element_ty), mask=exists)


@triton.jit
def _soften_backward(
    call, mixed, probs, inner, grad_map, grad_weights, grad, grad_conv, of_shares, start, end,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """With P the probabilities before dropout and G the gradient of P:

    ``grad``, in place = P * (G - sum over the row of P * G), 0 where masked, + ``grad_map``: that of A_logit
    ``grad_conv``      = the same where ReLU was active, else 0: times c it is that of Conv(mixed)
    ``probs``          = P after dropout, written over carried
    ``of_shares``      : there, the gradient of c
    """
    of_share = tl.zeros([CHANNELS], tl.float32)
    o = tl.arange(0, CHANNELS)
    for first in range(start, end, TILE):
        p, i, j, inside, exists, at = _pixels(first, end, call.K, call.T, call.S, call.pitch, TILE)
        x, carried, convolved, on = _evolve_pixels(call, mixed, probs, p, i, j, inside, exists, at, HEADS, KERNEL, TILE)
        in_range = ~((x > call.limit) | (x < -call.limit))
        x = _clamped(x, call.limit).to(probs.dtype.element_ty).to(tl.float32)
        hide = ~exists
        if (call.flags & MASKED) != 0:
            hide = hide | _hides(call.masked, call.b, i, j, inside & (j < call.S))[None, :]
            x = tl.where(hide, call.lowest, x)
        row = o[:, None] * call.T + i[None, :]
        x = tl.exp(x - tl.load(call.stats + 2 * row, mask=exists, other=0))
        x /= tl.load(call.stats + 2 * row + 1, mask=exists, other=1)
        g = tl.load(grad + at, mask=exists, other=0).to(tl.float32)
        dropped = x
        if call.threshold > 0:
            quad = first // 4 + tl.arange(0, TILE // 4)  # a pitch is whole quads
            rows = o[:, None] * call.T + (quad * 4 // call.pitch)[None, :]
            keep = _kept(call, rows, (quad % (call.pitch // 4))[None, :])
            g = tl.where(keep, g * call.kept_scale, 0)
            dropped = tl.where(keep, x * call.kept_scale, 0)
        if (call.flags & WEIGHTED) != 0:
            g += tl.load(grad_weights + at, mask=exists, other=0)
        g = tl.where(hide, 0, x * (g - tl.load(inner + row, mask=exists, other=0)))
        if (call.flags & GRAD_MAP) != 0:
            g += tl.load(grad_map + at, mask=exists, other=0).to(tl.float32)
        g = tl.where(in_range, g, 0)
        tl.store(probs + at, dropped.to(probs.dtype.element_ty), mask=exists)
        tl.store(grad + at, g.to(grad.dtype.element_ty), mask=exists)
        if KERNEL > 0:
            z = tl.where(on & exists, g, 0).to(grad_conv.dtype.element_ty)
            places = grad_conv + _channel(o, call.T, call.pitch, KERNEL)[:, None] + p[None, :]
            tl.store(places, z, mask=(o < call.K)[:, None] & inside[None, :])
            of_share += tl.sum(tl.where(exists, g * (convolved - carried), 0), 1)
    tl.store(of_shares + 2, tl.sum(of_share, 0))


@triton.jit
def _weight_backward(
    call, mixed, grad_conv, partial, start, end, HEADS: tl.constexpr, KERNEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """A part of the gradients of weight and bias: K x K x k x k numbers, then K, with Z = ``grad_conv``:

    gradient of weight[o, c, a, b] = c * sum over (i, j) of Z[o, i, j] * mixed[c, i + a - top, j + b - left]
    gradient of bias[o]            = c * sum over (i, j) of Z[o, i, j]
    """
    M: tl.constexpr = KERNEL * KERNEL
    K, share = call.K, call.shares[2]
    o = tl.arange(0, CHANNELS)
    for first in range(0, M, CHANNELS // HEADS):
        channel, a, b, tap = _taps(first, call.K, call.flags, HEADS, KERNEL)
        away = _channel(channel, call.T, call.pitch, KERNEL) + (a - call.top) * call.pitch + b - call.left
        of_weight = tl.zeros([CHANNELS, CHANNELS], tl.float32)
        of_bias = tl.zeros([CHANNELS], tl.float32)
        for pixel in range(start, end, TILE):
            p = pixel + tl.arange(0, TILE)
            pixels = tl.load(mixed + (away[:, None] + p[None, :]), mask=tap[:, None] & (p < end)[None, :], other=0)
            places = grad_conv + _channel(o, call.T, call.pitch, KERNEL)[:, None] + p[None, :]
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
    call, logits, grad_conv, grad, grad_previous, of_shares, start, end,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """With G = ``grad``, the gradient of A_logit, and Z = ``grad_conv``:

    gradient of mixed[c, i, j] = c * sum over (o, a, b) of weight[o, c, a, b] * Z[o, i - a + top, j - b + left],
                                 0 where hidden
    gradient of carried        = (1 - c) * G, part of mixed's own where the two are the same (not SEPARATE)
    ``grad_previous``          = a * gradient of mixed + d * gradient of carried
    ``grad``, in place         = b * gradient of mixed + e * gradient of carried: that of the logits
    ``of_shares``              : there, where a share is learnt, a part of the gradients of a, b, d and e
    """
    M: tl.constexpr = KERNEL * KERNEL
    of_previous, of_logits, share, carried_previous, carried_logits = call.shares
    c = tl.arange(0, CHANNELS)
    of_a = tl.zeros([CHANNELS], tl.float32)
    of_b = tl.zeros([CHANNELS], tl.float32)
    of_d = tl.zeros([CHANNELS], tl.float32)
    of_e = tl.zeros([CHANNELS], tl.float32)
    for pixel in range(start, end, TILE):
        p, i, j, inside, exists, at = _pixels(pixel, end, call.K, call.T, call.S, call.pitch, TILE)
        of_carried = tl.load(grad + at, mask=exists, other=0).to(tl.float32)
        of_mixed = tl.zeros([CHANNELS, TILE], tl.float32)
        if KERNEL > 0:
            for first in range(0, M, CHANNELS // HEADS):
                o, y, x, tap = _taps(first, call.K, call.flags, HEADS, KERNEL)
                away = _channel(o, call.T, call.pitch, KERNEL) - (y - call.top) * call.pitch - x + call.left
                # Beside the map, taps may reach behind the last sentence, where memory holds anything.
                pixels = inside & (j < call.S)
                z = tl.load(grad_conv + (away[:, None] + p[None, :]), mask=tap[:, None] & pixels[None, :], other=0)
                places = call.weight + c[:, None] * M + (o * (call.K * M) + y * KERNEL + x)[None, :]
                taps = tl.load(places, mask=(c < call.K)[:, None] & tap[None, :], other=0)
                of_mixed = _product(taps, z, of_mixed)
            of_mixed *= share
            of_carried *= 1 - share
            if (call.flags & HIDDEN) != 0:
                hide = _hides(call.hidden, call.b, i, j, inside & (j < call.S))
                of_mixed = tl.where(hide[None, :], 0, of_mixed)
            if (call.flags & SEPARATE) == 0:
                of_mixed += of_carried
                of_carried *= 0
        if (call.flags & PREVIOUS) != 0:
            total = of_previous * of_mixed + carried_previous * of_carried
            tl.store(grad_previous + at, total.to(grad.dtype.element_ty), mask=exists)
        total = of_logits * of_mixed + carried_logits * of_carried
        tl.store(grad + at, total.to(grad.dtype.element_ty), mask=exists)
        if (call.flags & LEARNT) != 0:
            scores = tl.load(logits + at, mask=exists, other=0).to(tl.float32)
            of_b += tl.sum(of_mixed * scores, 1)
            of_e += tl.sum(of_carried * scores, 1)
            if (call.flags & PREVIOUS) != 0:
                before = tl.load(call.previous + at, mask=exists, other=0).to(tl.float32)
                of_a += tl.sum(of_mixed * before, 1)
                of_d += tl.sum(of_carried * before, 1)
    tl.store(of_shares, tl.sum(of_a, 0))
    tl.store(of_shares + 1, tl.sum(of_b, 0))
    tl.store(of_shares + 3, tl.sum(of_d, 0))
    tl.store(of_shares + 4, tl.sum(of_e, 0))


@triton.jit
def _of_queries(call, grad, grad_q, band, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of the queries."""
    i = tl.arange(0, BAND) + band * BAND
    for h in range(call.K):
        total = tl.zeros([BAND, WIDTH], tl.float32)
        for start in range(0, call.S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            exists = (i < call.T)[:, None] & (j < call.S)[None, :]
            x = tl.load(grad + (h * call.T + i[:, None]) * call.S + j[None, :], mask=exists, other=0)
            keys = _vectors(call.k, call.k_strides, call.b, h, j, call.S, call.D, UNIT, WIDTH)
            total = _product(x, keys, total)
        _store_vectors(grad_q, total * call.scale, call, h, i, call.T, UNIT, WIDTH)


@triton.jit
def _of_keys(
    call, grad_context, strides, grad, probs, grad_k, grad_v, h, block,
    UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and of values of a head."""
    j = block * COLUMNS + tl.arange(0, COLUMNS)
    of_keys = tl.zeros([COLUMNS, WIDTH], tl.float32)
    of_values = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for start in range(0, call.T, BAND):
        i = start + tl.arange(0, BAND)
        exists = (i < call.T)[:, None] & (j < call.S)[None, :]
        places = (h * call.T + i[:, None]) * call.S + j[None, :]
        p = tl.load(probs + places, mask=exists, other=0)
        of_context = _vectors(grad_context, strides, call.b, h, i, call.T, call.D, UNIT, WIDTH)
        of_values = _product(tl.trans(p), of_context, of_values)
        if (call.flags & GIVEN) == 0:
            x = tl.load(grad + places, mask=exists, other=0)
            rows = _vectors(call.q, call.q_strides, call.b, h, i, call.T, call.D, UNIT, WIDTH)
            of_keys = _product(tl.trans(x), rows, of_keys)
    _store_vectors(grad_v, of_values, call, h, j, call.S, UNIT, WIDTH)
    if (call.flags & GIVEN) == 0:
        _store_vectors(grad_k, of_keys * call.scale, call, h, j, call.S, UNIT, WIDTH)


# ---- kernels

_NUMBERS = (
    "B K T S D beams before pitch hidden_b hidden_t hidden_s masked_b masked_t masked_s top left flags threshold "
    "q_b q_h q_t k_b k_h k_t v_b v_h v_t g_b g_h g_t"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def forward_kernel(
    q, k, v, given, previous, above, weight, bias, learnt, hidden, masked, seed, stats, scratch, a_logit, context,
    weights, B, K, T, S, D, beams, before, pitch, hidden_b, hidden_t, hidden_s, masked_b, masked_t, masked_s, top, left,
    flags, threshold, scale, a, b, c, d, e, lowest, limit, kept_scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Context, A_logit, two numbers of each row for the backward pass, and the weights where they are needed.

    STEP 0 does a sentence in one program. Else a program does a band of rows: STEP 1 mixes, STEP 2 does the rest.
    """
    TILE: tl.constexpr = SENTENCE_PIXELS if STEP == 0 else PIXELS
    first, last, sentence = 0, tl.cdiv(T, BAND), tl.program_id(0).to(tl.int64)
    if STEP > 0:
        first, sentence = (sentence % last).to(tl.int32), sentence // last
        last = first + 1
    at, pitch = sentence * (K * T), pitch * 16
    call = Call(
        sentence, sentence // beams, q, k, v, given + at * S, previous + at * S,
        above + sentence * (K * (KERNEL - 1) * before), weight, bias, seed, stats + 2 * at,
        (hidden, hidden_b, hidden_t, hidden_s), (masked, masked_b, masked_t, masked_s), B, K, T, S, D, before, pitch,
        (q_b, q_h, q_t), (k_b, k_h, k_t), (v_b, v_h, v_t), _shares(learnt, a, b, c, d, e, flags),
        top, left, scale, lowest, limit, threshold, kept_scale, flags,
    )  # fmt: skip
    a_logit, weights, mixed = a_logit + at * S, weights + at * S, scratch
    if KERNEL > 0:
        mixed = scratch + _first_pixel(sentence, K, T, pitch, KERNEL)
    start, end = pitch * first * BAND, tl.minimum(pitch * last * BAND, pitch * T)
    if STEP < 2:
        if KERNEL > 0 and first == 0:
            _fill_gaps(mixed, call, KERNEL)
        for band in range(first, last):
            _mix(call, mixed, a_logit, None, band, KERNEL, UNIT, WIDTH, COLUMNS)
    if STEP == 0:
        tl.debug_barrier()  # the next phase reads results of other threads
    if STEP != 1:
        if KERNEL > 0:
            _evolve(call, mixed, a_logit, start, end, HEADS, KERNEL, TILE)
            tl.debug_barrier()
        for band in range(first, last):
            _attend(call, a_logit, context, weights, band, UNIT, WIDTH, COLUMNS)


@triton.jit(do_not_specialize=_NUMBERS)
def backward_kernel(
    q, k, v, given, previous, above, weight, bias, learnt, hidden, masked, seed, stats, scratch, context, inner,
    grad_context, grad_map, grad_weights, grad, grad_q, grad_k, grad_v, grad_previous, partial,
    B, K, T, S, D, beams, before, pitch, hidden_b, hidden_t, hidden_s, masked_b, masked_t, masked_s, top, left, flags,
    threshold, scale, a, b, c, d, e, lowest, limit, kept_scale, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t,
    g_b, g_h, g_t,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """All gradients; ``grad`` becomes that of the logits, ``partial`` is to be summed over programs.

    STEP 0 does a sentence in one program. Else a program does a band of rows: STEP 1 mixes, STEP 2 evolves and softens,
    STEP 3 goes back to the logits and queries; or, in STEP 4, a block of keys of a head.
    """
    TILE: tl.constexpr = SENTENCE_PIXELS if STEP == 0 else PIXELS
    first, last, sentence = 0, tl.cdiv(T, BAND), tl.program_id(0).to(tl.int64)
    partial += sentence * (K * K * KERNEL * KERNEL + K + 5)
    of_shares = partial + K * K * KERNEL * KERNEL + K
    blocks = tl.cdiv(S, COLUMNS)
    first_key, last_key = 0, K * blocks
    if STEP == 4:
        first_key, sentence = (sentence % last_key).to(tl.int32), sentence // last_key
        last_key = first_key + 1
    elif STEP > 0:
        first, sentence = (sentence % last).to(tl.int32), sentence // last
        last = first + 1
    at, pitch = sentence * (K * T), pitch * 16
    call = Call(
        sentence, sentence // beams, q, k, v, given + at * S, previous + at * S,
        above + sentence * (K * (KERNEL - 1) * before), weight, bias, seed, stats + 2 * at,
        (hidden, hidden_b, hidden_t, hidden_s), (masked, masked_b, masked_t, masked_s), B, K, T, S, D, before, pitch,
        (q_b, q_h, q_t), (k_b, k_h, k_t), (v_b, v_h, v_t), _shares(learnt, a, b, c, d, e, flags),
        top, left, scale, lowest, limit, threshold, kept_scale, flags,
    )  # fmt: skip
    inner, grad, grad_previous, of_context = inner + at, grad + at * S, grad_previous + at * S, (g_b, g_h, g_t)
    mixed, grad_conv, probs = scratch, scratch, scratch + at * S
    if KERNEL > 0:
        size = _first_pixel(B, K, T, pitch, KERNEL) - (KERNEL - 1) * pitch
        mixed = scratch + _first_pixel(sentence, K, T, pitch, KERNEL)
        grad_conv, probs = mixed + size, probs + 2 * size
    logits = probs + (B * K).to(tl.int64) * T * S
    start, end = pitch * first * BAND, tl.minimum(pitch * last * BAND, pitch * T)
    if STEP < 2:
        if KERNEL > 0 and first == 0:
            _fill_gaps(mixed, call, KERNEL)
            _fill_gaps(grad_conv, call, KERNEL)
        for band in range(first, last):
            _mix(call, mixed, probs, logits, band, KERNEL, UNIT, WIDTH, COLUMNS)
            _grad_probs(call, context, grad_context, of_context, grad, inner, band, UNIT, WIDTH, COLUMNS)
    if STEP == 0:
        tl.debug_barrier()  # the next phase reads results of other threads
    if STEP == 0 or STEP == 2:
        _soften_backward(
            call, mixed, probs, inner, grad_map + at * S, grad_weights + at * S, grad, grad_conv, of_shares, start, end,
            HEADS, KERNEL, TILE,
        )  # fmt: skip
    if STEP == 0:
        tl.debug_barrier()
    if STEP == 0 or STEP == 3:
        if KERNEL > 0:
            _weight_backward(call, mixed, grad_conv, partial, start, end, HEADS, KERNEL, TILE)
        _unmix(call, logits, grad_conv, grad, grad_previous, of_shares, start, end, HEADS, KERNEL, TILE)
        tl.debug_barrier()
        if (flags & GIVEN) == 0:
            for band in range(first, last):
                _of_queries(call, grad, grad_q, band, UNIT, WIDTH, COLUMNS)
    if STEP == 0 or STEP == 4:
        for key in range(first_key, last_key):
            _of_keys(
                call, grad_context, of_context, grad, probs, grad_k, grad_v, key // blocks, key % blocks,
                UNIT, WIDTH, COLUMNS,
            )  # fmt: skip
