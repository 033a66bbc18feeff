"""Evolving attention for the GPU: one Triton kernel, a launch of it for each phase.

Importing this module needs Triton. A program of a phase does a part of a head, or of all heads of a sentence:

    forward   MIX       head: mixed = a * previous + b * logits, zero where hidden; carried = d * previous + e * logits
              EVOLVE    all: A_logit = c * ReLU(Conv(mixed)) + (1 - c) * carried
              ATTEND    head: softmax, dropout and the product with the values, which never leave the chip
    backward  UNATTEND  head: MIX again, and the gradient of the probabilities
              SOFTEN    all: EVOLVE again; then the probabilities, and the gradients of A_logit and of Conv(mixed)
              UNMIX     all: gradients of the convolution, of the logits and of ``previous``
              VECTORS   head: gradients of queries, keys and values

Without a convolution there is no EVOLVE. Almost everything about a call is a number at run time, so few variants are
compiled: see ``trial.Variant``.

Axes: B batch, K heads (at most 16), T target (query) length, S source (key) length, D head size, k kernel size.
Maps are B x K x T x S, contiguous. Masks: True = masked; bool, read by their strides (0 where they broadcast).

Products take factors of the maps' type and add up in float32. Nothing is added atomically: equal inputs give equal
bits.
"""

import os
from collections import namedtuple

import triton
import triton.language as tl

#: whether the kernel runs in Triton's interpreter, on the CPU: Triton decides so when it is imported
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
#: rows of a head's tile
BAND = tl.constexpr(16)
#: channels (heads, or heads times taps) of a tile of all heads; products need at least 16
CHANNELS = tl.constexpr(16)
#: pixels of a tile of all heads
PIXELS = tl.constexpr(64)
#: how products of float32 are made: three products of tensor cores, about as exact as float32 (others: no difference)
PRECISION = tl.constexpr("tf32x3")
#: Rounds of the Philox generator. Seven are the fewest that pass every test of randomness (Salmon et al. 2011,
#: table 2).
ROUNDS = tl.constexpr(7)
#: the phases: first those of a head, then, from EVOLVE on, those of all heads
MIX, ATTEND, UNATTEND, VECTORS = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
EVOLVE, SOFTEN, UNMIX = tl.constexpr(4), tl.constexpr(5), tl.constexpr(6)
#: bits of ``flags``: the inputs and outputs of a call
GIVEN, PREVIOUS, HIDDEN, MASKED = tl.constexpr(1), tl.constexpr(2), tl.constexpr(4), tl.constexpr(8)
WEIGHTED, SEPARATE, LEARNT, GRAD_MAP = tl.constexpr(16), tl.constexpr(32), tl.constexpr(64), tl.constexpr(128)
TRIANGULAR, ABOVE, UNHIDDEN = tl.constexpr(256), tl.constexpr(512), tl.constexpr(1024)


#: The arguments of phases: tensors, masks (address and strides), sizes, strides of vectors, numbers. Maps and rows
#: begin at sentence ``b``, which reads keys and values of sentence ``source``. Strides of vectors and D are in units.
#:
#: ``stats``: each row's largest score, and its sum of exp(score - largest). ``evolved``: carried where it is not mixed,
#: then A_logit; in the backward pass P after dropout. ``logits``: in the backward pass, where a share is learnt.
#: ``grad_conv``: of Conv(mixed), without c. ``grad``: of P after dropout, then of A_logit, then of the logits.
#: Pixel (i, j) reads row i + a - top and column j + b - left. ``before``: the columns of ``above``. ``shares``: a to e.
Call = namedtuple(
    "Call",
    "b source q k v given previous above weight bias seed hidden masked stats mixed evolved logits grad_conv grad "
    "B K T S D before q_strides k_strides v_strides shares top left scale lowest limit threshold kept_scale flags",
)


# ---- pieces of phases


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
def _shares(learnt, a, b, c, d, e, flags):
    """The five numbers: constants, or where any is learnt, all from memory. d = e = 0 where carried is mixed itself."""
    if (flags & LEARNT) != 0:
        a, b, c = tl.load(learnt), tl.load(learnt + 1), tl.load(learnt + 2)
        d, e = tl.load(learnt + 3), tl.load(learnt + 4)
    return a, b, c, d, e


@triton.jit
def _clamped(x, limit):
    """x within +-limit, which is infinite but for float16. NaN stays NaN."""
    return tl.where(x > limit, limit, tl.where(x < -limit, -limit, x))


@triton.jit
def _survives(call, row, quad):
    """Whether pixels survive dropout. ``row`` counts rows of the sentence, ``quad`` groups of four columns."""
    zero = quad * 0 + row * 0
    row = zero + row + call.b.to(tl.int32) * call.K * call.T
    r0, r1, r2, r3 = tl.philox(tl.load(call.seed), zero + quad, row, zero, zero, ROUNDS)
    bits = tl.join(tl.join(r0, r2), tl.join(r1, r3)) >> 16
    return bits.reshape(zero.shape[0], 4 * zero.shape[1]).to(tl.int32) >= call.threshold


@triton.jit
def _tile(call, h, i, j):
    """A head's tile: True where pixels exist, and their places in a map."""
    return (i < call.T)[:, None] & (j < call.S)[None, :], (h * call.T + i[:, None]) * call.S + j[None, :]


@triton.jit
def _pixels(call, tile):
    """A tile of all heads: its pixels' rows and columns, which exist, in which head, and places in a map."""
    pitch = tl.cdiv(call.S, 4) * 4  # one draw of dropout's generator serves four columns
    p = tile * PIXELS + tl.arange(0, PIXELS)
    i, j = p // pitch, p % pitch
    o = tl.arange(0, CHANNELS)
    inside = (i < call.T) & (j < call.S)
    return (
        i,
        j,
        inside,
        (o < call.K)[:, None] & inside[None, :],
        (o[:, None] * call.T + i[None, :]) * call.S + j[None, :],
    )


@triton.jit
def _taps(first, K, flags, HEADS: tl.constexpr, KERNEL: tl.constexpr):
    """Channels, kernel rows and kernel columns of a product's 16 taps from ``first`` on, and which of them exist."""
    m = tl.arange(0, CHANNELS)
    channel, tap = m % HEADS, first + m // HEADS
    a, b = tap // KERNEL, tap % KERNEL
    exists = (channel < K) & (tap < KERNEL * KERNEL) & (((flags & TRIANGULAR) == 0) | (b <= a))
    return channel, a, b, exists


@triton.jit
def _neighbours(call, maps, channel, down, right, tap, i, j, inside):
    """Pixels so far down and right of a tile's, CHANNELS x PIXELS, zero outside of the map; and rows and columns."""
    row, column = i[None, :] + down[:, None], j[None, :] + right[:, None]
    exists = (row >= 0) & (row < call.T) & (column >= 0) & (column < call.S) & tap[:, None] & inside[None, :]
    x = tl.load(maps + ((channel[:, None] * call.T + row) * call.S + column), mask=exists, other=0)
    return x, row, column


@triton.jit
def _evolve_pixels(call, i, j, inside, exists, at, HEADS: tl.constexpr, KERNEL: tl.constexpr):
    """A_logit before it is clamped, carried, ReLU(Conv(mixed)), and whether gradients pass that ReLU."""
    if KERNEL == 0:
        x = tl.load(call.evolved + at, mask=exists, other=0).to(tl.float32)
        return x, x, x, exists
    K, o = call.K, tl.arange(0, CHANNELS)
    total = tl.zeros([CHANNELS, PIXELS], tl.float32)
    for first in range(0, KERNEL * KERNEL, CHANNELS // HEADS):
        channel, a, b, tap = _taps(first, K, call.flags, HEADS, KERNEL)
        pixels, row, column = _neighbours(call, call.mixed, channel, a - call.top, b - call.left, tap, i, j, inside)
        if (call.flags & ABOVE) != 0:
            earlier = (row < 0) & (column >= 0) & (column < call.before) & tap[:, None] & inside[None, :]
            places = call.above + (channel[:, None] * (KERNEL - 1) + row + KERNEL - 1) * call.before + column
            pixels = tl.where(earlier, tl.load(places, mask=earlier, other=0), pixels)
        places = call.weight + o[:, None] * (K * KERNEL * KERNEL) + ((channel * KERNEL + a) * KERNEL + b)[None, :]
        taps = tl.load(places, mask=(o < K)[:, None] & tap[None, :], other=0)
        total = _product(taps, pixels, total)
    total += tl.load(call.bias + o, mask=o < K, other=0).to(tl.float32)[:, None]
    on = ~(total <= 0)  # NaN stays NaN: it shows that a loss scale is too high
    convolved = _clamped(tl.where(on, total, 0), call.limit)
    hide = _hides(call.hidden, call.b, i, j, inside & ((call.flags & UNHIDDEN) != 0))
    apart = exists & (((call.flags & SEPARATE) != 0) | hide[None, :])
    x = tl.load(call.mixed + at, mask=exists & ~apart, other=0)
    x = tl.where(apart, tl.load(call.evolved + at, mask=apart, other=0), x).to(tl.float32)
    share = call.shares[2]
    return share * convolved + (1 - share) * x, x, convolved, on & ~(total > call.limit)


@triton.jit
def _scores(call, h, i, j):
    """A_logit under its mask, a head's tile, -inf outside of the map."""
    exists, places = _tile(call, h, i, j)
    x = tl.load(call.evolved + places, mask=exists, other=0).to(tl.float32)
    # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked. Without an
    # ``if``: Triton 3.6 cannot compile one here beside that of dropout.
    has_mask = (call.flags & MASKED) != 0
    x = tl.where(_hides(call.masked, call.b, i[:, None], j[None, :], exists & has_mask), call.lowest, x)
    return tl.where((j < call.S)[None, :], x, float("-inf"))


# ---- phases


@triton.jit
def _mix(
    call, kept, h, i, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """mixed, and carried where it is not mixed (SEPARATE; no convolution, KERNEL = 0; UNHIDDEN places).

    Also, in the backward pass, the logits where a share is learnt; in steps, the last rows: K x (k - 1) x S.
    """
    of_previous, of_logits, _, carried_previous, carried_logits = call.shares
    T, S, BELOW = call.T, call.S, KERNEL - 1
    length = tl.where((call.flags & GIVEN) != 0, 0, T)  # there are no queries then
    rows = _vectors(call.q, call.q_strides, call.b, h, i, length, call.D, UNIT, WIDTH)
    for start in range(0, S, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        exists, places = _tile(call, h, i, j)
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
            hide = _hides(call.hidden, call.b, i[:, None], j[None, :], exists & ((call.flags & HIDDEN) != 0))
            if (call.flags & UNHIDDEN) != 0:
                tl.store(call.evolved + places, x.to(call.evolved.dtype.element_ty), mask=exists & hide)
            pixels = tl.where(hide, 0, x).to(call.mixed.dtype.element_ty)
            tl.store(call.mixed + places, pixels, mask=exists)
            if (call.flags & ABOVE) != 0:
                last = (h * BELOW + i[:, None] - T + BELOW) * S + j[None, :]
                tl.store(kept + last, pixels, mask=exists & (i[:, None] >= T - BELOW))
        if (call.flags & SEPARATE) != 0:
            x = carried_previous * before + carried_logits * logits
            if KERNEL == 0:
                x = _clamped(x, call.limit)
            tl.store(call.evolved + places, x.to(call.evolved.dtype.element_ty), mask=exists)
        if (call.flags & LEARNT) != 0 and BACK:
            tl.store(call.logits + places, logits.to(call.logits.dtype.element_ty), mask=exists)


@triton.jit
def _keep_rows(call, kept, h, KERNEL: tl.constexpr, COLUMNS: tl.constexpr):
    """The rows above these that are above the next step's, too."""
    for row in range(call.T, KERNEL - 1):
        for start in range(0, call.S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            x = tl.load(call.above + (h * (KERNEL - 1) + row) * call.before + j, mask=j < call.before, other=0)
            tl.store(kept + (h * (KERNEL - 1) + row - call.T) * call.S + j, x, mask=j < call.S)


@triton.jit
def _evolve(call, first, last, HEADS: tl.constexpr, KERNEL: tl.constexpr):
    """A_logit, written over carried."""
    for tile in range(first, last):
        i, j, inside, exists, at = _pixels(call, tile)
        x, _, _, _ = _evolve_pixels(call, i, j, inside, exists, at, HEADS, KERNEL)
        tl.store(call.evolved + at, _clamped(x, call.limit).to(call.evolved.dtype.element_ty), mask=exists)


@triton.jit
def _attend(call, context, weights, h, i, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The context, the weights where they are needed, and ``stats``."""
    row = h * call.T + i
    peak = tl.full([BAND], float("-inf"), tl.float32)
    total = tl.zeros([BAND], tl.float32)
    sums = tl.zeros([BAND, WIDTH], tl.float32)
    for start in range(0, call.S, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        x = _scores(call, h, i, j)
        higher = tl.maximum(peak, tl.max(x, 1))
        p = tl.exp(x - higher[:, None])
        less = tl.exp(peak - higher)
        total = total * less + tl.sum(p, 1)
        peak = higher
        if call.threshold > 0:
            quad = start // 4 + tl.arange(0, COLUMNS // 4)
            p = tl.where(_survives(call, row[:, None], quad[None, :]), p, 0)
        values = _vectors(call.v, call.v_strides, call.source, h, j, call.S, call.D, UNIT, WIDTH)
        sums = _product(p.to(values.dtype), values, sums * less[:, None])
    _store_vectors(context, sums / total[:, None] * call.kept_scale, call, h, i, call.T, UNIT, WIDTH)
    tl.store(call.stats + 2 * row, peak, mask=i < call.T)
    tl.store(call.stats + 2 * row + 1, total, mask=i < call.T)
    if (call.flags & WEIGHTED) != 0:
        for start in range(0, call.S, COLUMNS):
            j = start + tl.arange(0, COLUMNS)
            exists, places = _tile(call, h, i, j)
            tl.store(weights + places, tl.exp(_scores(call, h, i, j) - peak[:, None]) / total[:, None], mask=exists)


@triton.jit
def _grad_probs(
    call, context, grad_context, strides, inner, h, i, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """``grad`` = that of the probabilities after dropout; ``inner`` += the sum over a row of both."""
    K, T, D = call.K, call.T, call.D
    of_context = _vectors(grad_context, strides, call.b, h, i, T, D, UNIT, WIDTH)
    result = _vectors(context, (K * D, D, call.B * K * D), call.b, h, i, T, D, UNIT, WIDTH)
    total = tl.sum(of_context.to(tl.float32) * result.to(tl.float32), 1)
    row = h * T + i
    total += tl.load(inner + row, mask=(i < T) & ((call.flags & WEIGHTED) != 0), other=0)
    tl.store(inner + row, total, mask=i < T)
    for start in range(0, call.S, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        values = _vectors(call.v, call.v_strides, call.b, h, j, call.S, D, UNIT, WIDTH)
        x = _product(of_context, tl.trans(values), tl.zeros([BAND, COLUMNS], tl.float32))
        exists, places = _tile(call, h, i, j)
        tl.store(call.grad + places, x.to(call.grad.dtype.element_ty), mask=exists)


@triton.jit
def _soften_backward(
    call, inner, grad_map, grad_weights, of_shares, first, last, HEADS: tl.constexpr, KERNEL: tl.constexpr,
):  # fmt: skip
    """With P the probabilities before dropout and G the gradient of P:

    ``grad``, in place = P * (G - sum over the row of P * G), 0 where masked, + ``grad_map``: that of A_logit
    ``grad_conv``      = the same where ReLU was active, else 0: times c it is that of Conv(mixed)
    ``evolved``        = P after dropout, written over carried
    ``of_shares``      : there, the gradient of c
    """
    of_share = tl.zeros([CHANNELS], tl.float32)
    o = tl.arange(0, CHANNELS)
    for tile in range(first, last):
        i, j, inside, exists, at = _pixels(call, tile)
        x, carried, convolved, on = _evolve_pixels(call, i, j, inside, exists, at, HEADS, KERNEL)
        in_range = ~((x > call.limit) | (x < -call.limit))
        x = _clamped(x, call.limit).to(call.evolved.dtype.element_ty).to(tl.float32)
        hide = ~exists
        if (call.flags & MASKED) != 0:
            hide = hide | _hides(call.masked, call.b, i, j, inside)[None, :]
            x = tl.where(hide, call.lowest, x)
        row = o[:, None] * call.T + i[None, :]
        x = tl.exp(x - tl.load(call.stats + 2 * row, mask=exists, other=0))
        x /= tl.load(call.stats + 2 * row + 1, mask=exists, other=1)
        g = tl.load(call.grad + at, mask=exists, other=0).to(tl.float32)
        dropped = x
        if call.threshold > 0:
            quads = tl.cdiv(call.S, 4)
            quad = tile * (PIXELS // 4) + tl.arange(0, PIXELS // 4)
            keep = _survives(call, o[:, None] * call.T + (quad // quads)[None, :], (quad % quads)[None, :])
            g = tl.where(keep, g * call.kept_scale, 0)
            dropped = tl.where(keep, x * call.kept_scale, 0)
        if (call.flags & WEIGHTED) != 0:
            g += tl.load(grad_weights + at, mask=exists, other=0)
        g = tl.where(hide, 0, x * (g - tl.load(inner + row, mask=exists, other=0)))
        if (call.flags & GRAD_MAP) != 0:
            g += tl.load(grad_map + at, mask=exists, other=0).to(tl.float32)
        g = tl.where(in_range, g, 0)
        tl.store(call.evolved + at, dropped.to(call.evolved.dtype.element_ty), mask=exists)
        tl.store(call.grad + at, g.to(call.grad.dtype.element_ty), mask=exists)
        if KERNEL > 0:
            tl.store(call.grad_conv + at, tl.where(on, g, 0).to(call.grad_conv.dtype.element_ty), mask=exists)
            of_share += tl.sum(tl.where(exists, g * (convolved - carried), 0), 1)
    tl.store(of_shares + 2, tl.sum(of_share, 0))


@triton.jit
def _weight_backward(call, partial, first_tile, last_tile, HEADS: tl.constexpr, KERNEL: tl.constexpr):
    """A part of the gradients of weight and bias: K x K x k x k numbers, then K, with Z = ``grad_conv``:

    gradient of weight[o, c, a, b] = c * sum over (i, j) of Z[o, i, j] * mixed[c, i + a - top, j + b - left]
    gradient of bias[o]            = c * sum over (i, j) of Z[o, i, j]
    """
    M: tl.constexpr = KERNEL * KERNEL
    K, share = call.K, call.shares[2]
    o = tl.arange(0, CHANNELS)
    for first in range(0, M, CHANNELS // HEADS):
        channel, a, b, tap = _taps(first, K, call.flags, HEADS, KERNEL)
        of_weight = tl.zeros([CHANNELS, CHANNELS], tl.float32)
        of_bias = tl.zeros([CHANNELS], tl.float32)
        for tile in range(first_tile, last_tile):
            i, j, inside, exists, at = _pixels(call, tile)
            pixels, _, _ = _neighbours(call, call.mixed, channel, a - call.top, b - call.left, tap, i, j, inside)
            z = tl.load(call.grad_conv + at, mask=exists, other=0)
            of_weight = _product(z, tl.trans(pixels), of_weight)
            of_bias += tl.sum(z.to(tl.float32), 1)
        places = partial + o[:, None] * (K * M) + (channel * M + a * KERNEL + b)[None, :]
        exists = (channel < K) & (a < KERNEL)
        tl.store(places, of_weight * share, mask=(o < K)[:, None] & exists[None, :])
        if first == 0:
            tl.store(partial + K * K * M + o, of_bias * share, mask=o < K)


@triton.jit
def _unmix(call, grad_previous, of_shares, first_tile, last_tile, HEADS: tl.constexpr, KERNEL: tl.constexpr):
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
    for tile in range(first_tile, last_tile):
        i, j, inside, exists, at = _pixels(call, tile)
        of_carried = tl.load(call.grad + at, mask=exists, other=0).to(tl.float32)
        of_mixed = tl.zeros([CHANNELS, PIXELS], tl.float32)
        if KERNEL > 0:
            for first in range(0, M, CHANNELS // HEADS):
                o, y, x, tap = _taps(first, call.K, call.flags, HEADS, KERNEL)
                z, _, _ = _neighbours(call, call.grad_conv, o, call.top - y, call.left - x, tap, i, j, inside)
                places = call.weight + c[:, None] * M + (o * (call.K * M) + y * KERNEL + x)[None, :]
                taps = tl.load(places, mask=(c < call.K)[:, None] & tap[None, :], other=0)
                of_mixed = _product(taps, z, of_mixed)
            of_carried *= 1 - share
            hide = _hides(call.hidden, call.b, i, j, inside & ((call.flags & HIDDEN) != 0))
            of_mixed = tl.where(hide[None, :], 0, of_mixed * share)
            if (call.flags & SEPARATE) == 0:
                of_mixed += of_carried
                of_carried *= 0
        if (call.flags & PREVIOUS) != 0:
            total = of_previous * of_mixed + carried_previous * of_carried
            tl.store(grad_previous + at, total.to(grad_previous.dtype.element_ty), mask=exists)
        total = of_logits * of_mixed + carried_logits * of_carried
        tl.store(call.grad + at, total.to(call.grad.dtype.element_ty), mask=exists)
        if (call.flags & LEARNT) != 0:
            scores = tl.load(call.logits + at, mask=exists, other=0).to(tl.float32)
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
def _of_queries(call, grad_q, h, i, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """The gradient of a band of queries of a head."""
    total = tl.zeros([BAND, WIDTH], tl.float32)
    for start in range(0, call.S, COLUMNS):
        j = start + tl.arange(0, COLUMNS)
        exists, places = _tile(call, h, i, j)
        x = tl.load(call.grad + places, mask=exists, other=0)
        keys = _vectors(call.k, call.k_strides, call.b, h, j, call.S, call.D, UNIT, WIDTH)
        total = _product(x, keys, total)
    _store_vectors(grad_q, total * call.scale, call, h, i, call.T, UNIT, WIDTH)


@triton.jit
def _of_keys(
    call, grad_context, strides, grad_k, grad_v, h, j, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of a block of keys and of values of a head."""
    of_keys = tl.zeros([COLUMNS, WIDTH], tl.float32)
    of_values = tl.zeros([COLUMNS, WIDTH], tl.float32)
    for start in range(0, call.T, BAND):
        i = start + tl.arange(0, BAND)
        exists, places = _tile(call, h, i, j)
        p = tl.load(call.evolved + places, mask=exists, other=0)
        of_context = _vectors(grad_context, strides, call.b, h, i, call.T, call.D, UNIT, WIDTH)
        of_values = _product(tl.trans(p), of_context, of_values)
        if (call.flags & GIVEN) == 0:
            x = tl.load(call.grad + places, mask=exists, other=0)
            rows = _vectors(call.q, call.q_strides, call.b, h, i, call.T, call.D, UNIT, WIDTH)
            of_keys = _product(tl.trans(x), rows, of_keys)
    _store_vectors(grad_v, of_values, call, h, j, call.S, UNIT, WIDTH)
    if (call.flags & GIVEN) == 0:
        _store_vectors(grad_k, of_keys * call.scale, call, h, j, call.S, UNIT, WIDTH)


# ---- the kernel

_NUMBERS = (
    "B K T S D beams before parts tiles hidden_b hidden_t hidden_s masked_b masked_t masked_s top left flags threshold "
    "q_b q_h q_t k_b k_h k_t v_b v_h v_t g_b g_h g_t"
).split()


@triton.jit(do_not_specialize=_NUMBERS)
def attention_kernel(
    q, k, v, given, previous, above, weight, bias, learnt, hidden, masked, seed, stats, mixed, evolved, context,
    weights, kept, logits, grad_conv, grad, inner, of_context, of_map, of_weights, of_q, of_k, of_v, of_previous,
    partial,
    B, K, T, S, D, beams, before, parts, tiles, hidden_b, hidden_t, hidden_s, masked_b, masked_t, masked_s, top, left,
    flags, threshold, q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, g_b, g_h, g_t,
    scale, a, b, c, d, e, lowest, limit, kept_scale,
    HEADS: tl.constexpr, KERNEL: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """A phase, done by ``parts`` programs of a head: a band of rows each; in VECTORS, blocks of keys follow the bands.

    EVOLVE, SOFTEN and UNMIX have as many of a sentence: so many tiles of pixels each. ``partial`` is to be summed over
    programs.
    """
    part, sentence = tl.program_id(0) % parts, (tl.program_id(0) // parts).to(tl.int64)
    h = 0
    if STEP < EVOLVE:
        h, sentence = (sentence % K).to(tl.int32), sentence // K
    first, last = part * tiles, (part + 1) * tiles
    rows = sentence * (K * T)
    at = rows * S
    call = Call(
        sentence, sentence // beams, q, k, v, given + at, previous + at, above + sentence * (K * (KERNEL - 1) * before),
        weight, bias, seed, (hidden, hidden_b, hidden_t, hidden_s), (masked, masked_b, masked_t, masked_s),
        stats + 2 * rows, mixed + at, evolved + at, logits + at, grad_conv + at, grad + at, B, K, T, S, D, before,
        (q_b, q_h, q_t), (k_b, k_h, k_t), (v_b, v_h, v_t), _shares(learnt, a, b, c, d, e, flags),
        top, left, scale, lowest, limit, threshold, kept_scale, flags,
    )  # fmt: skip
    i = part * BAND + tl.arange(0, BAND)
    partial += tl.program_id(0).to(tl.int64) * (K * K * KERNEL * KERNEL + K + 5)
    of_shares = partial + K * K * KERNEL * KERNEL + K
    if STEP == MIX:
        kept += sentence * (K * (KERNEL - 1)) * S
        _mix(call, kept, h, i, KERNEL, UNIT, WIDTH, COLUMNS, False)
        if (flags & ABOVE) != 0 and part == 0:
            _keep_rows(call, kept, h, KERNEL, COLUMNS)
    if STEP == EVOLVE:
        _evolve(call, first, last, HEADS, KERNEL)
    if STEP == ATTEND:
        _attend(call, context, weights + at, h, i, UNIT, WIDTH, COLUMNS)
    if STEP == UNATTEND:
        _mix(call, kept, h, i, KERNEL, UNIT, WIDTH, COLUMNS, True)
        _grad_probs(call, context, of_context, (g_b, g_h, g_t), inner + rows, h, i, UNIT, WIDTH, COLUMNS)
    if STEP == SOFTEN:
        _soften_backward(
            call, inner + rows, of_map + at, of_weights + at, of_shares, first, last, HEADS, KERNEL
        )  # fmt: skip
    if STEP == UNMIX:
        if KERNEL > 0:
            _weight_backward(call, partial, first, last, HEADS, KERNEL)
        _unmix(call, of_previous + at, of_shares, first, last, HEADS, KERNEL)
    if STEP == VECTORS:
        block = part - (parts - tl.cdiv(S, COLUMNS))
        if block < 0:
            _of_queries(call, of_q, h, i, UNIT, WIDTH, COLUMNS)
        else:
            j = block * COLUMNS + tl.arange(0, COLUMNS)
            _of_keys(call, of_context, (g_b, g_h, g_t), of_k, of_v, h, j, UNIT, WIDTH, COLUMNS)
