"""Section 3 of the paper read loop by loop, in float64 and without any library's attention: slow, and plainly right."""

import math

import torch


def visible_taps(kind, k):
    """(row offset, column offset, kernel row, kernel column) of every tap that pixel (i, j) reads."""
    r = k // 2
    for a in range(k):
        for b in range(k):
            if kind == "encoder":
                yield a - r, b - r, a, b
            elif kind == "decoder":
                if b <= a:
                    yield a - (k - 1), b - (k - 1), a, b
            else:
                yield a - (k - 1), b - r, a, b


def evolve(logits, kind, weight, bias, alpha, beta, hidden, previous=None):
    """Equation 4 for one sentence: logits K x T x S (nested lists of scalars), hidden(i, j) -> bool."""
    heads, rows, columns = len(logits), len(logits[0]), len(logits[0][0])
    zero = torch.zeros((), dtype=torch.float64)

    def a_input(h, i, j):
        if not (0 <= i < rows and 0 <= j < columns) or hidden(i, j):
            return zero
        if previous is None:
            return logits[h][i][j]
        return alpha * previous[h][i][j] + (1 - alpha) * logits[h][i][j]

    def a_logit(h, i, j):
        if beta == 0:
            return a_input(h, i, j)
        total = bias[h]
        for di, dj, a, b in visible_taps(kind, weight.size(-1)):
            for channel in range(heads):
                total = total + weight[h, channel, a, b] * a_input(channel, i + di, j + dj)
        return beta * total.clamp(min=0) + (1 - beta) * a_input(h, i, j)

    return [[[a_logit(h, i, j) for j in range(columns)] for i in range(rows)] for h in range(heads)]


def attention(module, x, y, kind, query_padding, key_padding, previous=None):
    """One sentence through an attention module's weights: x T x C, y S x C -> output T x C, A_logit as nested lists."""
    heads, depth = module.num_heads, module.head_dim
    query, key, value = module.q_proj(x), module.k_proj(y), module.v_proj(y)
    rows, columns = x.size(0), y.size(0)

    def part(tensor, h, i):
        return tensor[i, h * depth : (h + 1) * depth]

    logits = [
        [[(part(query, h, i) * part(key, h, j)).sum() / math.sqrt(depth) for j in range(columns)] for i in range(rows)]
        for h in range(heads)
    ]

    def masked(i, j):
        return bool(key_padding[j]) or (kind == "decoder" and j > i)

    evolution = module.evolution
    weight = bias = None
    if evolution.conv is not None:
        weight, bias = evolution.conv.weight, evolution.conv.bias
    a_logit = evolve(
        logits,
        kind,
        weight,
        bias,
        evolution.alpha,
        evolution.beta,
        lambda i, j: bool(query_padding[i]) or masked(i, j),
        previous,
    )
    output = []
    for i in range(rows):
        seen = [j for j in range(columns) if not masked(i, j)]
        context = []
        for h in range(heads):
            exponentials = [torch.exp(a_logit[h][i][j]) for j in seen]
            context.append(sum(e * part(value, h, j) for e, j in zip(exponentials, seen, strict=True)))
            context[-1] = context[-1] / sum(exponentials) if seen else value[0, :depth] * 0
        output.append(module.out_proj(torch.cat(context)))
    return torch.stack(output), a_logit
