"""The plain composition: a call by PyTorch's operations one by one, which every kernel is tested against.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .call import Call, Result
from .evolution import Convolve, Evolution, convolve, evolve, finite, mix
from .masks import masked_softmax


def compose(call: Call, evolution: Evolution | None = None) -> Result:
    """The result of a call.

    Args:
        call: from queries, keys and values to the context.
        evolution: the module whose convolutions these are, which is called; None: the call's weight and bias are all.
    """
    logits, above = logits_and_rows_above(call)
    hidden, previous = call.hidden, call.previous
    if evolution is None:
        a_logit = evolve(call.coefficients, logits, hidden, previous, above, _convolution(call))
    else:
        a_logit = evolution(logits, hidden, previous, above)
    kept = None
    if above is not None:
        mixed = mix(call.coefficients, logits, hidden, previous)
        kept = torch.cat([above, mixed], dim=2)[:, :, -above.size(2) :]
    weights = masked_softmax(a_logit, call.masked)
    dropped = F.dropout(weights.type_as(call.v), call.dropout) if call.dropout else weights.type_as(call.v)
    context = _product(dropped, call.v)
    return Result(context, a_logit if call.keep_map else None, weights if call.need_weights else None, kept)


def _convolution(call: Call) -> Convolve | None:
    """A call's convolution, where it has one."""
    weight, bias = call.weight, call.bias
    if weight is None:
        return None
    return lambda mixed, above, hidden: convolve(call.geometry, mixed, above, weight, bias)


def logits_and_rows_above(call: Call) -> tuple[Tensor, Tensor | None]:
    """A call's logits, B x K x T x S, and the mixed rows above them, as wide as they are, or None."""
    logits = finite(_product(call.q * call.scale, call.k.transpose(2, 3)) if call.given is None else call.given)
    if call.above is None:
        return logits, None
    return logits, F.pad(call.above, (0, logits.size(3) - call.above.size(3)))  # new columns were the future then


def _product(x: Tensor, by: Tensor) -> Tensor:
    """B x K x T x D times N x K x D x S, where B / N neighbours share a sentence: B x K x T x S."""
    sentences, (batch, _, rows, _) = by.size(0), x.shape
    if sentences == batch:
        return torch.matmul(x, by)
    x = x.unflatten(0, (sentences, -1)).transpose(1, 2)  # N x K x (B / N) x T x D
    product = torch.matmul(x.flatten(2, 3), by).unflatten(2, (-1, rows))
    return product.transpose(1, 2).flatten(0, 1)
