"""Collect a model's attention maps, and the parts that they are mixed of; scripts/plot_attention.sh draws them.

    with collect(model) as collected:  # any model, training or not
        model(src_tokens, src_lengths, prev_output_tokens)
    collected.layers

Axes: B batch, K heads, T target (query) length, S source (key) length. Masks: True = masked.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import ea_fairseq  # noqa: F401  (registers the architectures; first, for fairseq is less talkative then)

# isort: split
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_artifacts.command import UserError
from ea_tools.maps import KINDS
from evolving_attention.attention import EvolvingHeads, Maps
from evolving_attention.evolution import Evolution, Share, finite, is_always, mix
from evolving_attention.masks import combine, hide_rows, masked_softmax


class Part(NamedTuple):
    """One summand of A_logit: ``share`` times ``map``."""

    share: Share
    map: Tensor  # B x K x T x S


@dataclass(frozen=True)
class LayerMaps:
    """One attention's maps in one call of the model: float32 on the CPU, B x K x T x S but where noted.

    weights = softmax(mask(a_logit)). a_logit is the sum of share times map over the parts, where `masked` is False. The
    rule decides which parts there are: "logits", the layer's own scores of queries and keys; "previous", A_logit of the
    layer before; "convolution", ReLU(Conv(...)).
    """

    kind: str  # a key of KINDS
    layer: int  # from 1
    weights: Tensor  # the map in use: after the softmax, before dropout
    a_logit: Tensor  # evolved logits, before the mask
    parts: dict[str, Part]  # summands of a_logit by name: a number and a map each
    masked: Tensor  # B x 1 x T x S; True where a pixel is no part of the map: padding (rows and columns), the future

    def alone(self, name: str) -> Tensor:
        """The map that the part of this name would give alone: its masked softmax."""
        return masked_softmax(self.parts[name].map, self.masked)


@dataclass
class Collected:
    """The maps of a call, in the order of the layers: encoder 1..N, then decoder and cross of each decoder layer."""

    layers: list[LayerMaps] = field(default_factory=list)


@contextlib.contextmanager
def collect(model: nn.Module) -> Iterator[Collected]:
    """Collect the maps of every attention of a model while this context lasts; the outputs do not change.

    All calls are kept: in a loop over batches, open a new context for each batch.
    """
    collected = Collected()
    with contextlib.ExitStack() as stack:
        for kind, number, layer, attention in attentions(model):
            if isinstance(attention, EvolvingHeads):
                stack.callback(setattr, attention, "observer", attention.observer)
                attention.observer = _observer(collected, kind, number, attention)
            elif attention.self_attention or attention.encoder_decoder_attention:
                hook = _StockHook(collected, kind, number)
                stack.callback(layer.register_forward_pre_hook(hook.before_layer, with_kwargs=True).remove)
                stack.callback(attention.register_forward_hook(hook, with_kwargs=True).remove)
            else:
                raise UserError(f"{KINDS[kind]}, layer {number}: --cross-self-attention mixes two kinds of map")
        yield collected


def attentions(model: nn.Module) -> Iterator[tuple[str, int, nn.Module, nn.Module]]:
    """(kind, layer's number from 1, layer, attention) of each attention, in the order in which they run.

    A language model has no encoder, and a RoBERTa no decoder.
    """
    encoder = getattr(model, "encoder", None)
    encoder = getattr(encoder, "sentence_encoder", encoder)  # within RoBERTa's
    for number, layer in enumerate(getattr(encoder, "layers", []), 1):
        yield "encoder", number, layer, layer.self_attn
    decoder = getattr(model, "decoder", None)
    for number, layer in enumerate(getattr(decoder, "layers", []), 1):
        yield "decoder", number, layer, layer.self_attn
        if layer.encoder_attn is not None:
            yield "cross", number, layer, layer.encoder_attn


def _observer(collected: Collected, kind: str, number: int, attention: EvolvingHeads) -> Callable[[Maps], None]:
    """An observer that adds maps to `collected`."""
    evolution = attention.evolution

    @torch.no_grad()
    def observe(maps: Maps) -> None:
        parts = parts_of(evolution, maps)
        collected.layers.append(
            LayerMaps(
                kind,
                number,
                weights=_cpu(maps.weights),
                a_logit=_cpu(maps.a_logit),
                parts={name: Part(float(part.share), _cpu(part.map)) for name, part in parts.items()},
                masked=_whole(maps.hidden, maps.weights),
            )
        )

    return observe


def parts_of(evolution: Evolution, maps: Maps) -> dict[str, Part]:
    """The summands of A_logit by name: "logits", "previous" and "convolution", those that there are.

    The sum of share times map is A_logit, where nothing is hidden.
    """
    coefficients = evolution.coefficients(maps.previous is not None)
    _, _, c, d, e = coefficients
    convolved = evolution.conv is not None and not is_always(c, 0)
    rest = 1 - c if convolved else 1.0
    parts = {"logits": Part(rest * e, maps.logits)}
    if maps.previous is not None and not is_always(d, 0):
        parts["previous"] = Part(rest * d, maps.previous)
    if convolved:
        mixed = mix(coefficients, maps.logits, maps.hidden, maps.previous)
        parts["convolution"] = Part(c, finite(F.relu(evolution.convolve(mixed, maps.above, maps.hidden))))
    return parts


class _StockHook:
    """Adds the maps of fairseq's own attention, which shows none: made again from its projections, beside its call."""

    def __init__(self, collected: Collected, kind: str, number: int) -> None:
        self._collected, self._kind, self._number = collected, kind, number
        self._padded_rows = None  # B x T

    def before_layer(self, layer: nn.Module, args: tuple, kwargs: dict) -> None:
        bound = inspect.signature(layer.forward).bind(*args, **kwargs).arguments
        self._padded_rows = bound.get("encoder_padding_mask" if self._kind == "encoder" else "self_attn_padding_mask")

    @torch.no_grad()
    def __call__(self, attention: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
        bound = inspect.signature(attention.forward).bind(*args, **kwargs).arguments
        logits, masked = _stock_logits(attention, **bound)
        weights = masked_softmax(logits, masked)
        logits = _cpu(logits)
        self._collected.layers.append(
            LayerMaps(
                self._kind,
                self._number,
                weights=_cpu(weights),
                a_logit=logits,
                parts={"logits": Part(1.0, logits)},
                masked=_whole(hide_rows(masked, self._padded_rows), logits),
            )
        )


def _stock_logits(
    attention: Any,  # fairseq's
    query: Tensor,
    key: Tensor,
    incremental_state: dict | None = None,
    key_padding_mask: Tensor | None = None,
    attn_mask: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor | None]:
    """Scaled dot products B x K x T x S and the softmax's mask (or None), from the arguments of fairseq's attention.

    The weights are read, not called: quantisation noise, if any, would be drawn a second time.
    """

    def heads(x: Tensor, projection: nn.Linear) -> Tensor:  # T x B x C -> B x K x T x D
        x = F.linear(x, projection.weight, projection.bias)
        return x.view(*x.shape[:2], attention.num_heads, attention.head_dim).permute(1, 2, 0, 3)

    q = heads(query, attention.q_proj) * attention.scaling
    if incremental_state is None:
        k = heads(key, attention.k_proj)
    else:  # the call has just put there the keys of all positions so far
        saved = attention._get_input_buffer(incremental_state)
        k, key_padding_mask = saved["prev_key"], saved["prev_key_padding_mask"]
    if len(k) != len(q):  # the beams of a sentence share its keys
        beams = len(q) // len(k)
        k = k.repeat_interleave(beams, dim=0)
        key_padding_mask = None if key_padding_mask is None else key_padding_mask.repeat_interleave(beams, dim=0)
    return q @ k.transpose(2, 3), combine(key_padding_mask, attn_mask)[0]


def _cpu(x: Tensor) -> Tensor:
    return x.detach().float().cpu()


def _whole(hidden: Tensor | None, like: Tensor) -> Tensor:
    """A mask that broadcasts to B x K x T x S, or None for nothing, as B x 1 x T x S on the CPU."""
    batch, _, rows, columns = like.shape
    if hidden is None:
        return torch.zeros(batch, 1, rows, columns, dtype=torch.bool)
    return hidden.detach().cpu().expand(batch, 1, rows, columns)
