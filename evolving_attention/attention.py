"""Multi-head attention whose maps evolve.

A module keeps nothing of a call, so several threads may use one model. The previous map and the cache of step-by-step
decoding are arguments; A_logit and the new cache are return values.

Axes: B batch, T target (query) length, S source (key) length, C channels, K heads, D = C / K.
Masks: True = masked.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from . import masks
from .cache import Cache
from .call import Call, Result
from .evolution import Evolution, Geometry
from .functional import attend, check_maps
from .kernels import sees
from .plain import compose, logits_and_rows_above
from .scores import SCORES, RelativePositions, dot_products


class Maps(NamedTuple):
    """The maps of one call, which an observer is shown; all B x K x T x S but where noted."""

    logits: Tensor  # the layer's own scores: scaled dot products, or others
    hidden: Tensor | None  # broadcasts; True where the convolution sees zero
    previous: Tensor | None  # A_logit of the layer before; None in the first layer
    above: Tensor | None  # B x K x rows_above x S, the convolution's input in the rows before these, step by step
    a_logit: Tensor  # evolved logits, before the mask
    weights: Tensor  # after mask and softmax, before dropout


class EvolvingHeads:
    """From the heads' queries, keys and values to their context: the part that all attention modules here share.

    It holds ``evolution`` and, where they are asked for, ``score`` and ``relative_positions``. Set ``observer`` to be
    shown the :class:`Maps` of every call; it must not change them.

    It stands before a kind of ``nn.Module`` among a class's bases. That class calls both constructors, the module's
    first. Optimizers' states go by the order of parameters: projections come before these.

    Args:
        geometry: the kind of attention.
        heads: K.
        size: D.
        score: a name in ``SCORES``, how logits are computed.
        relative_positions: distances up to this one have logits of their own added; 0: none have, as in
            encoder-decoder attention.
        plain: use no kernel, as an oracle for the kernels and for second derivatives.
        evolution: see :class:`Evolution`.
    """

    def __init__(
        self,
        geometry: Geometry,
        heads: int,
        size: int,
        *,
        score: str = "dot",
        relative_positions: int = 0,
        plain: bool = False,
        **evolution: Any,
    ) -> None:
        self.evolution = Evolution(geometry, heads, **evolution)
        geometry = self.evolution.geometry
        if score not in SCORES:
            raise ValueError(f"score {score!r}: must be one of {', '.join(SCORES)}")
        if relative_positions < 0 or (relative_positions and geometry == Geometry.ENCODER_DECODER):
            expected = "must be 0 or more, and 0 in encoder-decoder attention"
            raise ValueError(f"relative_positions {relative_positions}: {expected}")
        build_score = SCORES[score]
        self.score = None if build_score is None else build_score(heads, size)
        self.relative_positions = RelativePositions(relative_positions, size) if relative_positions else None
        self.plain = plain
        self.observer: Callable[[Maps], None] | None = None

    def call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        padding: Tensor | None = None,
        query_padding: Tensor | None = None,
        attn_mask: Tensor | None = None,
        previous: Tensor | None = None,
        rows: Tensor | None = None,
        dropout: float = 0.0,
        keep_map: bool = False,
        need_weights: bool = False,
    ) -> Call:
        """A call of this attention, for ``attend_heads``.

        Args:
            q: B x K x T x D.
            k, v: B x K x S x D; or N x K x S x D, where B / N neighbours share a sentence's keys, as in beam search.
            padding: B x S.
            query_padding: B x T, rows that lie outside of the map.
            attn_mask: see ``masks.combine``.
            previous: B x K x T x S, A_logit of the layer before.
            rows: B x K x rows_above x (at most S), the mixed rows above these, step by step.
            dropout: probability that a weight is dropped.
            keep_map, need_weights: see :class:`Call`.
        """
        evolution, heads = self.evolution, q.size(1)
        masked, added = masks.combine(padding, attn_mask, heads)
        previous = previous if evolution.uses_previous else None
        if previous is not None and previous.dtype != q.dtype:
            previous = previous.to(q.dtype)  # a layer may be computed again outside of the autocast that made the map
        if added is not None and _is_nothing(added):
            added = None
        weight, bias = (None, None) if evolution.conv is None else (evolution.conv.weight, evolution.conv.bias)
        return Call(
            q=q,
            k=k,
            v=v,
            given=self._logits(q, k, added),
            previous=previous,
            weight=weight,
            bias=bias,
            hidden=masks.hide_rows(masked, query_padding),
            masked=masked,
            above=rows,
            coefficients=evolution.coefficients(previous is not None),
            scale=q.size(3) ** -0.5,
            geometry=evolution.geometry,
            dropout=dropout,
            keep_map=keep_map,
            need_weights=need_weights,
        )

    def attend_heads(self, call: Call) -> Result:
        """The context of each head, and the other results that the call asks for."""
        if self.observer is not None:
            self.observer(self._maps(call))
        return attend(call, self.evolution, self.plain)

    @torch.no_grad()
    def _maps(self, call: Call) -> Maps:
        """The maps, computed once more by the plain composition, so that being observed changes nothing."""
        logits, above = logits_and_rows_above(call)
        whole = compose(call._replace(dropout=0.0, keep_map=True, need_weights=True), self.evolution)
        assert whole.a_logit is not None and whole.weights is not None, "they were asked for"
        return Maps(logits, call.hidden, call.previous, above, whole.a_logit, whole.weights)

    def _logits(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor | None:
        """Logits that are more than scaled dot products, B x K x T x S, or None: then they are for the kernel."""
        if self.score is None and self.relative_positions is None and bias is None:
            return None
        scale = q.size(3) ** -0.5
        # repeat_interleave, which ONNX's exporter gets wrong on this axis
        k = k[:, None].expand(-1, q.size(0) // k.size(0), -1, -1, -1).flatten(0, 1)
        logits = dot_products(q, k, scale) if self.score is None else self.score(q, k)
        if self.relative_positions is not None:
            logits = logits + self.relative_positions(q * scale, k.size(2))
        return logits if bias is None else logits + bias.type_as(logits)

    def first_rows(self, q: Tensor, columns: int) -> Tensor | None:
        """Zeros above the first step's row, B x K x rows_above x columns; None where no convolution reads them."""
        above = self.evolution.rows_above
        return q.new_zeros(*q.shape[:2], above, columns) if above else None


def _is_nothing(added: Tensor) -> bool:
    """Whether a summand of the logits is all zeros, as in a float mask that only hides: kernels are faster without it.

    False where numbers cannot be read, or only after waiting for a GPU.
    """
    unread = added.device.type != "cpu" or added.requires_grad or torch.compiler.is_compiling() or not sees(added)
    return not unread and not added.any()


class Attended(NamedTuple):
    """The results of :class:`EvolvingAttention`."""

    output: Tensor  # B x T x C
    a_logit: Tensor | None = None  # B x K x T x S, input of the next layer; None without keep_map
    weights: Tensor | None = None  # B x K x T x S, at least float32, before dropout; None where they are not wanted
    cache: Cache | None = None  # for the next step; None where none was given


class EvolvingAttention(EvolvingHeads, nn.Module):
    """Multi-head attention for a model of your own.

    An encoder's layer takes the map of the layer before, and gives its own::

        output, a_logit, *_ = attention(x, padding=padding, previous=a_logit)

    A decoder decodes step by step with a cache::

        output, _, _, cache = attention(x, cache=cache)     # starting with Cache()

    Args:
        geometry: the kind of attention. Decoder self-attention masks the future without being asked.
        embed_dim: C.
        num_heads: K.
        dropout: of attention weights, in training.
        bias: whether the four projections have one.
        kernel_size, alpha, beta, rule, first, conv_layers, learn_mix, conv: see :class:`Evolution`.
        score, relative_positions, plain: see ``EvolvingHeads``.
    """

    def __init__(
        self,
        geometry: Geometry,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        *,
        kernel_size: int = 3,
        alpha: float = 0.1,
        beta: float = 0.1,
        rule: str = "evolving",
        first: bool | None = None,
        conv_layers: int = 1,
        learn_mix: bool = False,
        conv: str = "dense",
        score: str = "dot",
        relative_positions: int = 0,
        plain: bool = False,
    ):
        nn.Module.__init__(self)
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"num_heads {num_heads} does not divide embed_dim {embed_dim}")
        self.num_heads, self.dropout = num_heads, dropout
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(embed_dim, embed_dim, bias) for _ in range(4))
        EvolvingHeads.__init__(
            self,
            geometry,
            num_heads,
            embed_dim // num_heads,
            score=score,
            relative_positions=relative_positions,
            plain=plain,
            kernel_size=kernel_size,
            alpha=alpha,
            beta=beta,
            rule=rule,
            first=first,
            conv_layers=conv_layers,
            learn_mix=learn_mix,
            conv=conv,
        )

    def forward(
        self,
        query: Tensor,
        source: Tensor | None = None,
        padding: Tensor | None = None,
        query_padding: Tensor | None = None,
        attn_mask: Tensor | None = None,
        previous: Tensor | None = None,
        cache: Cache | None = None,
        keep_map: bool = True,
        need_weights: bool = False,
    ) -> Attended:
        """Attend.

        Args:
            query: B x T x C; with a cache the new positions.
            source: B x S x C, the encoder's output, in encoder-decoder attention; with a cache the first step reads it.
            padding: of the keys; B x S, and in self-attention of the query's positions, B x T.
            query_padding: B x T, in encoder-decoder attention. In self-attention it is ``padding``.
            attn_mask: more that is masked or added to the logits: see ``masks.combine``.
            previous: B x K x T x S, A_logit of the layer before.
            cache: of the earlier steps.
            keep_map: whether to return A_logit.
            need_weights: whether to return the weights.

        Raises:
            ValueError: an encoder's attention with a cache, encoder-decoder attention without a source, another
                attention with one, a previous map of another shape, or one in a first layer.
        """
        geometry, stepping = self.evolution.geometry, cache is not None
        if stepping and geometry == Geometry.ENCODER_SELF:
            raise ValueError("cache: an encoder reads its whole sentence at once; leave it out")
        q = self._heads(self.q_proj(query))
        cache = cache or Cache()
        if geometry == Geometry.ENCODER_DECODER and source is None and cache.keys is None:
            raise ValueError("source: encoder-decoder attention needs the encoder's output")
        if geometry != Geometry.ENCODER_DECODER:
            if source is not None:
                raise ValueError("source: only encoder-decoder attention reads another sequence; leave it out")
            source, query_padding = query, padding
        if geometry != Geometry.ENCODER_DECODER or cache.keys is None:
            cache = cache.append(self._heads(self.k_proj(source)), self._heads(self.v_proj(source)), padding)
        keys, values = cache.keys, cache.values
        assert keys is not None and values is not None, "a cache has both or neither"
        check_maps(self.evolution.takes_map, q, keys, previous)
        length = keys.size(2)
        if geometry == Geometry.DECODER_SELF:
            future = masks.future(q.size(2), length, q.device)
            if attn_mask is not None:
                is_added = attn_mask.is_floating_point()
                future = attn_mask.masked_fill(future, -torch.inf) if is_added else attn_mask.bool() | future
            attn_mask = future
        rows = cache.rows
        if stepping and rows is None:
            rows = self.first_rows(q, length)
        call = self.call(
            q,
            keys,
            values,
            padding=cache.padding,
            query_padding=query_padding,
            attn_mask=attn_mask,
            previous=previous,
            rows=rows,
            dropout=self.dropout if self.training else 0.0,
            keep_map=keep_map,
            need_weights=need_weights,
        )
        result = self.attend_heads(call)
        output = self.out_proj(result.context.transpose(1, 2).flatten(2))
        return Attended(output, result.a_logit, result.weights, replace(cache, rows=result.kept) if stepping else None)

    def _heads(self, x: Tensor) -> Tensor:
        """B x T x C -> B x K x T x D"""
        return x.unflatten(2, (self.num_heads, -1)).transpose(1, 2)
