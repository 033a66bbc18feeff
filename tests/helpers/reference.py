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
    heads, rows, columns = range(module.num_heads), range(len(x)), range(len(y))
    query, key, value = (
        project(side).unflatten(1, (module.num_heads, -1)).transpose(0, 1)  # K x (T or S) x D
        for project, side in ((module.q_proj, x), (module.k_proj, y), (module.v_proj, y))
    )
    logits = [[[score(module, h, query[h, i], key[h, j], i - j) for j in columns] for i in rows] for h in heads]

    def masked(i, j):
        return bool(key_padding[j]) or (kind == "decoder" and j > i)

    def hidden(i, j):
        return bool(query_padding[i]) or masked(i, j)

    context, a_logit = attend(module.evolution, logits, value, kind, masked, hidden, previous)
    return module.out_proj(context.flatten(1)), a_logit


def attend(evolution, logits, value, kind, masked, hidden, previous=None):
    """One sentence from logits, K x T x S (nested lists), and values, K x S x D: context T x K x D, A_logit as logits.

    masked(i, j), hidden(i, j) -> bool
    """
    rule = evolution.rule
    if kind != "encoder" and rule == "evolving-from-second":  # in decoders it is equation 4
        rule = "evolving"
    convolutions = [] if evolution.conv is None else [*evolution.stacked, evolution.conv]
    shares = (x.squeeze() if isinstance(x, torch.Tensor) else x for x in (evolution.alpha, evolution.beta))
    coefficients = COEFFICIENTS[rule, previous is not None](*shares)
    weights = [(conv.weight, conv.bias) for conv in convolutions]
    a_logit, rows = evolve(logits, kind, weights, coefficients, hidden, previous), []
    for i in range(len(logits[0])):
        seen = [j for j in range(value.size(1)) if not masked(i, j)]
        rows.append([])
        for h in range(len(logits)):
            largest = max((float(a_logit[h][i][j]) for j in seen), default=0)  # else they may be infinite
            exponentials = [torch.exp(a_logit[h][i][j] - largest) for j in seen]
            context = sum(e * value[h, j] for e, j in zip(exponentials, seen, strict=True))
            rows[-1].append(context / sum(exponentials) if seen else value[h, 0] * 0)
    return torch.stack([torch.stack(row) for row in rows]), a_logit


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
            fast, previous = layer(fast, padding[None], previous=previous, keep_map=True)
        return fast[~padding, 0]

    slow, previous = x, None
    for layer in layers:
        slow, previous = attention(layer, slow, slow, "encoder", padding, padding, previous)
    compare(layers, in_both_modes(layers, run), slow[~padding], [x])


def compare_decoder(layers, target_padding, source_padding=None, kind=None):
    """A decoder's attentions of one kind, which may hand on maps, against loops.

    target_padding: T numbers; source_padding: S numbers in encoder-decoder attention; 1 = padded.
    kind: "encoder" in a bidirectional decoder.
    """
    from ea_fairseq.attention import Padding  # here: tests of the core do without fairseq

    layers, crosses = randomised(torch.nn.ModuleList(layers)), source_padding is not None
    kind = kind or ("cross" if crosses else "decoder")
    target = torch.tensor(target_padding, dtype=torch.bool)
    source = torch.tensor(source_padding, dtype=torch.bool) if crosses else target
    x = torch.randn(len(target), layers[0].embed_dim, dtype=torch.float64, requires_grad=True)
    y = torch.randn(len(source), layers[0].kdim, dtype=torch.float64, requires_grad=True) if crosses else None
    masks = {"key_padding_mask": Padding(source[None], target[None]) if crosses else target[None]}
    if kind == "decoder":
        masks["attn_mask"] = torch.full((len(x), len(x)), -torch.inf).triu(1)

    def run():
        fast, previous = x[:, None], None
        for layer in layers:
            keys, previous = y[:, None] if crosses else fast, previous if layer.evolution.takes_map else None
            fast, _, previous = layer(fast, keys, keys, previous=previous, keep_map=True, **masks)
        return fast[:, 0]

    slow, previous = x, None
    for layer in layers:
        slow, previous = attention(layer, slow, y if crosses else slow, kind, target, source, previous)
    compare(layers, in_both_modes(layers, run)[~target], slow[~target], [x, y] if crosses else [x])
