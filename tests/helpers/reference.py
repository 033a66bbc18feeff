"""Section 3 of the paper read loop by loop, in float64 and without any library's attention: slow, and plainly right."""

import math

import torch
from torch.testing import assert_close


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


# mixed = a previous + b logits; carried = d previous + e logits; A_logit = c ReLU(Conv(mixed)) + (1 - c) carried

#: (rule, whether there is a previous map) -> a, b, c, d and e, read from the papers
COEFFICIENTS = {
    ("evolving", False): lambda alpha, beta: (0, 1, beta, 0, 1),
    ("evolving", True): lambda alpha, beta: (alpha, 1 - alpha, beta, alpha, 1 - alpha),
    ("evolving-from-second", False): lambda alpha, beta: (0, 1, 0, 0, 1),
    ("evolving-from-second", True): lambda alpha, beta: (alpha, 1 - alpha, beta, alpha, 1 - alpha),
    ("predictive", False): lambda alpha, beta: (0, 1, 0, 0, 1),
    ("predictive", True): lambda alpha, beta: (1, 0, alpha, 0, 1),
    ("residual", False): lambda alpha, beta: (0, 1, 0, 0, 1),
    ("residual", True): lambda alpha, beta: (0, 1, 0, alpha, 1 - alpha),
    ("realformer", False): lambda alpha, beta: (0, 1, 0, 0, 1),
    ("realformer", True): lambda alpha, beta: (0, 1, 0, 1, 1),
}


def evolve(logits, kind, convolutions, coefficients, hidden, previous=None):
    """One sentence's maps: logits K x T x S (nested lists of scalars), hidden(i, j) -> bool.

    convolutions are (weight, bias), the first to run first; coefficients are a, b, c, d, e.
    """
    heads, rows, columns = len(logits), len(logits[0]), len(logits[0][0])
    a, b, c, d, e = coefficients

    def picture(pixel):
        return [[[pixel(h, i, j) for j in range(columns)] for i in range(rows)] for h in range(heads)]

    def weighted(of_previous, of_logits):
        if previous is None:
            return lambda h, i, j: of_logits * logits[h][i][j]
        return lambda h, i, j: of_previous * previous[h][i][j] + of_logits * logits[h][i][j]

    def convolved(maps, weight, bias):
        def total(output, i, j):
            result = bias[output]
            for di, dj, row, column in visible_taps(kind, weight.size(-1)):
                y, x = i + di, j + dj
                if 0 <= y < rows and 0 <= x < columns and not hidden(y, x):
                    if weight.size(1) == 1:  # depthwise, or one head
                        result = result + weight[output, 0, row, column] * maps[output % heads][y][x]
                    else:
                        for channel in range(heads):
                            result = result + weight[output, channel, row, column] * maps[channel][y][x]
            return result

        def pixel(h, i, j):
            gate = torch.sigmoid(total(heads + h, i, j)) if len(weight) == 2 * heads else 1
            return (total(h, i, j) * gate).clamp(min=0)

        return picture(pixel)

    maps = picture(weighted(a, b))
    for weight, bias in convolutions:
        maps = convolved(maps, weight, bias)
    carried = weighted(d, e)
    if not convolutions:
        return picture(carried)
    return picture(lambda h, i, j: c * maps[h][i][j] + (1 - c) * carried(h, i, j))


def score(module, head, q, k, distance):
    """One logit, of vectors of D numbers: section 2's scores, entry by entry; distance is i - j."""
    size = len(q)

    def product(matrix, vector):
        return [sum(row[n] * vector[n] for n in range(len(vector))) for row in matrix]

    kind, weights = type(module.score).__name__, module.score
    if kind == "NoneType":
        total = (q * k).sum() / math.sqrt(size)
    elif kind == "MultiplicativeScore":
        total = sum(q[n] * weights.weight[head][n][m] * k[m] for n in range(size) for m in range(size))
    else:
        if kind == "AdditiveScore":
            of_keys, of_queries = product(weights.key_weight[head], k), product(weights.query_weight[head], q)
            inside = [a + b for a, b in zip(of_keys, of_queries, strict=True)]
        else:
            inside = product(weights.weight[head], [*k, *q])
        total = sum(weights.vector[head][n] * torch.tanh(inside[n]) for n in range(size))
    if module.relative_positions is not None:
        table = module.relative_positions.weight
        reach = (len(table) - 1) // 2
        row = max(-reach, min(reach, distance)) + reach
        total = total + sum(q[n] / math.sqrt(size) * table[row][n] for n in range(size))
    return total


def attention(module, x, y, kind, query_padding, key_padding, previous=None):
    """One sentence through an attention module's weights: x T x C, y S x C -> output T x C, A_logit as nested lists."""
    heads, depth = module.num_heads, module.head_dim
    query, key, value = module.q_proj(x), module.k_proj(y), module.v_proj(y)
    rows, columns = x.size(0), y.size(0)

    def part(tensor, h, i):
        return tensor[i, h * depth : (h + 1) * depth]

    logits = [
        [[score(module, h, part(query, h, i), part(key, h, j), i - j) for j in range(columns)] for i in range(rows)]
        for h in range(heads)
    ]

    def masked(i, j):
        return bool(key_padding[j]) or (kind == "decoder" and j > i)

    evolution = module.evolution
    rule = evolution.rule if kind == "encoder" else "evolving"  # those for decoders are equation 4 there
    convolutions = [] if evolution.conv is None else [*evolution.stacked, evolution.conv]
    a_logit = evolve(
        logits,
        kind,
        [(conv.weight, conv.bias) for conv in convolutions],
        COEFFICIENTS[rule, previous is not None](
            *(
                share.squeeze() if isinstance(share, torch.Tensor) else share
                for share in (evolution.alpha, evolution.beta)
            )
        ),
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


def randomised(module, std=0.5):
    """The module in float64 with random weights; alpha and beta keep their values."""
    module = module.double()
    for parameter in module.parameters():
        if parameter.dim() > 0:
            torch.nn.init.normal_(parameter, std=std)
    return module


def compare(module, fast, slow, inputs):
    """The same output, and the same gradients of one uneven functional of it, for inputs and all parameters."""
    assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    probe = torch.linspace(-1, 2, fast.numel(), dtype=torch.float64).view(fast.shape)
    leaves = [*inputs, *module.parameters()]
    gradients = [torch.autograd.grad((probe * output).sum(), leaves, allow_unused=True) for output in (fast, slow)]
    for ours, theirs in zip(*gradients, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def in_both_modes(module, run):
    """The output of run() in training, which is that in evaluation, too: nothing is dropped."""
    module.eval()
    evaluated = run()
    module.train()
    output = run()
    assert_close(evaluated, output, rtol=1e-10, atol=1e-10)
    return output


def compare_layers(layers, padding, attention=attention):
    """Encoder layers that hand on their maps, against loops. padding: T numbers, 1 = padded."""
    layers = randomised(torch.nn.ModuleList(layers))
    padding = torch.tensor(padding, dtype=torch.bool)
    x = torch.randn(len(padding), layers[0].q_proj.in_features, dtype=torch.float64, requires_grad=True)

    def run():
        fast, previous = x.unsqueeze(1), None
        for layer in layers:
            fast, previous, _ = layer(fast, padding[None], previous=previous, keep_map=True)
        return fast[~padding, 0]

    slow, previous = x, None
    for layer in layers:
        slow, previous = attention(layer, slow, slow, "encoder", padding, padding, previous)
    compare(layers, in_both_modes(layers, run), slow[~padding], [x])


def compare_decoder(layers, padding, kind="decoder"):
    """A decoder's self-attentions, which may hand on maps, against loops.

    padding: T numbers, 1 = padded. ``kind``: "encoder" in a bidirectional decoder.
    """
    layers, padding = randomised(torch.nn.ModuleList(layers)), torch.tensor(padding, dtype=torch.bool)
    rows = len(padding)
    x = torch.randn(rows, layers[0].embed_dim, dtype=torch.float64, requires_grad=True)
    future = torch.full((rows, rows), -torch.inf).triu(1) if kind == "decoder" else None
    options = {"key_padding_mask": padding[None], "attn_mask": future}
    fast = in_both_modes(layers, lambda: _through(layers, x, None, **options))
    slow, previous = x, None
    for layer in layers:
        slow, previous = attention(layer, slow, slow, kind, padding, padding, previous)
    compare(layers, fast[~padding], slow[~padding], [x])


def compare_cross(layers, source_padding, target_padding, kind="cross"):
    """Encoder-decoder attentions, which may hand on maps, against loops. ``kind``: "encoder" as above.

    source_padding: S numbers, target_padding: T numbers, 1 = padded.
    """
    from ea_fairseq.attention import Padding  # here: tests of the core do without fairseq

    layers = randomised(torch.nn.ModuleList(layers))
    source, target = (torch.tensor(padding, dtype=torch.bool) for padding in (source_padding, target_padding))
    x = torch.randn(len(target), layers[0].embed_dim, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(source), layers[0].kdim, dtype=torch.float64, requires_grad=True)
    masks = Padding(source[None], target[None])
    fast = in_both_modes(layers, lambda: _through(layers, x, y, key_padding_mask=masks))
    slow, previous = x, None
    for layer in layers:
        slow, previous = attention(layer, slow, y, kind, target, source, previous)
    compare(layers, fast[~target], slow[~target], [x, y])


def _through(layers, x, y, **options):
    """One sentence, T x C, through attentions of a decoder; y, S x C, is the source, or None in self-attention."""
    x, previous = x[:, None], None
    for layer in layers:
        source = x if y is None else y[:, None]
        takes = layer.evolution.takes_map
        x, _, previous = layer(x, source, source, previous=previous if takes else None, keep_map=True, **options)
    return x[:, 0]
