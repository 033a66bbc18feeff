"""Evolving attention as a function: a kernel where one does the call, else PyTorch's operations one by one.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size; k kernel size.
Masks: True = masked.
"""

import torch
from torch import Tensor

from . import kernels
from .call import Call, Result
from .evolution import RULES, Evolution, Geometry, Share, check
from .masks import future
from .plain import compose


def evolving_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    previous: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    rule: str = "evolving",
    alpha: Share = 0.1,
    beta: Share = 0.1,
    geometry: Geometry = Geometry.ENCODER_SELF,
    mask: Tensor | None = None,
    hidden: Tensor | None = None,
    logits: Tensor | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    keep_map: bool = True,
    plain: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention whose map is convolved, and mixed with the map of the layer before (ICML 2021, equation 4).

        logits  = scale * q k^T
        A_logit = the rule's sum of previous, logits and ReLU(Conv(...)): see evolution.py
        output  = dropout(softmax(mask(A_logit))) v

    Args:
        q: B x K x T x D.
        k, v: B x K x S x D.
        previous: B x K x T x S, A_logit of the layer before; in decoders by rules that evolve there.
        weight, bias: of the convolution, K x K x k x k and K, or as another of ``CONVOLUTIONS`` has them; None: no
            convolution.
        rule: a name in ``RULES``.
        alpha, beta: numbers from 0 to 1, or tensors without axes.
        geometry: which neighbours the convolution reads.
        mask: True where a key must not be attended to; broadcasts to B x K x T x S. Decoder self-attention masks the
            future without being asked: its T rows are the last of S.
        hidden: True where the convolution sees zero; broadcasts likewise. Default: ``mask``. In encoders it holds the
            padded rows too.
        logits: B x K x T x S, finite, in the place of scale * q k^T: other scores, or these with a bias.
        scale: of q k^T; default: 1 / sqrt(D).
        dropout: probability that an attention weight is dropped.
        keep_map: whether to return A_logit.
        plain: use no kernel.

    Returns:
        output, B x K x T x D; A_logit before the mask, B x K x T x S, or None without ``keep_map``.

    Raises:
        ValueError: an unknown rule or geometry, a share out of range, a weight without a bias, a previous map in a
            decoder where the rule is for encoders, or maps of another shape.
    """
    geometry = Geometry(geometry)
    check(rule, 1 if weight is None else weight.size(-1), alpha, beta)
    check_maps(RULES[rule].evolves_in(geometry), q, k, previous, logits)
    if geometry == Geometry.DECODER_SELF:
        unseen = future(q.size(2), k.size(2), q.device)[None, None]
        mask = unseen if mask is None else mask | unseen
        hidden = None if hidden is None else hidden | unseen
    if (weight is None) != (bias is None):
        raise ValueError("weight and bias of the convolution: both or neither must be given")
    scale = q.size(-1) ** -0.5 if scale is None else scale
    coefficients = RULES[rule].coefficients(alpha, beta, previous is not None, geometry)
    call = Call(
        q=q,
        k=k,
        v=v,
        given=logits,
        previous=previous,
        weight=weight,
        bias=bias,
        hidden=mask if hidden is None else hidden,
        masked=mask,
        coefficients=coefficients,
        scale=scale,
        geometry=geometry,
        dropout=dropout,
        keep_map=keep_map,
    )
    result = attend(call, plain=plain)
    return result.context, result.a_logit


def check_maps(takes_map: bool, q: Tensor, k: Tensor, previous: Tensor | None, logits: Tensor | None = None) -> None:
    """Raise ValueError unless given maps are B x K x T x S, as q and k say: others might be broadcast.

    Also where a previous one is given and none is taken.
    """
    if previous is not None and not takes_map:
        raise ValueError("previous: a first layer takes no map, nor does a decoder's by this rule; leave it out")
    for name, maps in (("previous", previous), ("logits", logits)):
        if maps is not None and maps.shape != (*q.shape[:3], k.size(2)):
            raise ValueError(f"{name}: must be {(*q.shape[:3], k.size(2))}, not {tuple(maps.shape)}")


def attend(call: Call, evolution: Evolution | None = None, plain: bool = False) -> Result:
    """The result of a call, by the first kernel that does it, or by the plain composition.

    Args:
        call: from queries, keys and values to the context.
        evolution: the module whose convolutions these are. If hooks or a subclass change it, it is called;
            None: the call's weight and bias are all that there is.
        plain: use no kernel.
    """
    weight, bias, v = call.weight, call.bias, call.v
    if weight is not None and bias is not None and weight.dtype != v.dtype and torch.is_autocast_enabled(v.device.type):
        call = call._replace(weight=weight.type_as(v), bias=bias.type_as(v))  # as autocast does for a convolution
    kernel = None if plain or not kernels.stands_for(evolution) else kernels.kernel_for(call)
    if kernel is None:
        return compose(call, evolution)
    if evolution is not None and evolution.stacked:
        call = call._replace(previous=evolution.for_one_convolution(call.hidden, call.previous))
    return kernel.attend(call)
