"""Multi-head attention whose maps evolve, in the place of fairseq's.

Parameters, state-dict keys and calling convention are those of ``fairseq.modules.MultiheadAttention``, with
``evolution.*`` added. fairseq's own forward leaves for a fused kernel that never shows its maps, so the path from
projections to context is written out here.

What belongs to one call travels with it, in an ``AttentionCall`` or in the incremental state. Nothing of a call is kept
in a module, so that several threads may use one model.

Axes: T target (query) length, S source (key) length, B batch, C channels, K heads, D = C / K. During beam search B
counts hypotheses, and keys and values of the source are kept once for each of N sentences.
Masks: True = masked.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from . import kernels
from .caches import Room, shared_sources
from .evolution import Evolution, Geometry
from .kernels import Call, Result
from .scores import SCORES, RelativePositions, dot_products

IncrementalState = dict[str, dict[str, Tensor | None]]

#: In a float mask, what is at most this is masked: fairseq writes -1e4, -1e8 or -inf. Anything else is added.
MASKED_FROM = -9e3


@dataclass(eq=False)
class AttentionCall:
    """What one call of an attention takes and gives beside fairseq's arguments.

    It takes the place of ``key_padding_mask``, which fairseq's layers hand on as it is. Every call has one of its own.
    """

    key_padding: Tensor | None = None  # B x S
    query_padding: Tensor | None = None  # B x T; rows that are outside of the map
    attn_mask: Tensor | None = None  # T x S, as the attention's own argument
    previous: Tensor | None = None  # B x K x T x S, A_logit of the layer before
    sources: Tensor | None = None  # B, which row of keys and values each row of queries looks at; None: its own
    keep_map: bool = False  # whether A_logit is wanted
    a_logit: Tensor | None = None  # B x K x T x S, this layer's A_logit: put here by the attention, where it is wanted

    @classmethod
    def of(cls, key_padding_mask: "Tensor | AttentionCall | None") -> "AttentionCall":
        """The call that stands in the place of a padding mask, or a new one with this mask."""
        return key_padding_mask if isinstance(key_padding_mask, cls) else cls(key_padding_mask)


class Maps(NamedTuple):
    """What an observer of an attention module is shown at each call; all B x K x T x S but where noted."""

    logits: Tensor  # the layer's own scores: scaled dot products, or others
    hidden: Tensor | None  # broadcasts; True where the convolution sees zero
    previous: Tensor | None  # A_logit of the layer before; None in the first layer and in decoders
    above: Tensor | None  # B x K x rows_above x S, what the convolution read of the rows before these, step by step
    a_logit: Tensor  # evolved logits, before the mask
    weights: Tensor  # after mask and softmax, before dropout


class EvolvingAttention(MultiheadAttention):
    """What the three kinds of attention share.

    Set ``observer`` to be shown the :class:`Maps` of every call; it must not change them.

    Args:
        geometry, alpha, beta, kernel_size, rule, first, conv_layers, learn_mix: see :class:`Evolution`.
        score: a name in ``SCORES``, how logits are computed.
        relative_positions: distances up to this one have logits of their own added; 0: none have.
        plain: always use the plain composition of PyTorch's operations, which the kernels are tested against.
        embed_dim, num_heads, **kwargs: see fairseq's ``MultiheadAttention``.

    Raises:
        ValueError: for options of fairseq's attention whose maps have other shapes, or no maps at all.
    """

    def __init__(
        self,
        geometry: Geometry,
        embed_dim: int,
        num_heads: int,
        *,
        alpha: float = 0.0,
        beta: float = 0.1,
        kernel_size: int = 3,
        rule: str = "evolving",
        first: bool = False,
        conv_layers: int = 1,
        learn_mix: bool = False,
        score: str = "dot",
        relative_positions: int = 0,
        plain: bool = False,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, **kwargs)
        if self.use_xformers or self.bias_k is not None or self.add_zero_attn:
            raise ValueError("evolving attention works without xFormers, add_bias_kv and add_zero_attn")
        options = {"rule": rule, "first": first, "conv_layers": conv_layers, "learn_mix": learn_mix}
        self.evolution = Evolution(geometry, num_heads, kernel_size, alpha, beta, **options)
        build_score = SCORES[score]
        self.score = None if build_score is None else build_score(num_heads, self.head_dim)
        self.relative_positions = RelativePositions(relative_positions, self.head_dim) if relative_positions else None
        self.plain = plain
        self.observer: Callable[[Maps], None] | None = None

    def split_heads(self, x: Tensor) -> Tensor:
        """T x B x C -> B x K x T x D"""
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: AttentionCall,
        state: IncrementalState | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """From queries, keys and values to the output.

        Args:
            q: B x K x T x D.
            k, v: N x K x S x D.
            own: its key_padding is B x S, of all keys; a_logit is put into it where it asks for the map.
            state: keeps what later steps need, in step-by-step decoding.

        Returns:
            output T x B x C; attention weights B x K x T x S, at least float32, before dropout, or None where they are
            not needed.
        """
        call = self._call(q, k, v, own, state, need_weights)
        if self.observer is not None:
            self._show(call)
        result = self._by_kernel(call)
        if result is None:
            result = self._compose(call)
        if call.above is not None:
            self.set_incremental_state(state, self.ROWS, {"rows": result.kept})
        own.a_logit = result.a_logit
        batch, _, length, _ = result.context.shape
        context = result.context.permute(2, 0, 1, 3).reshape(length, batch, self.embed_dim)
        return self.out_proj(context), result.weights

    def _call(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: AttentionCall,
        state: IncrementalState | None,
        need_weights: bool,
    ) -> Call:
        """The call as data, for the kernels and the plain composition alike."""
        evolution, dropout = self.evolution, self.dropout_module
        masked = combine(own.key_padding, own.attn_mask)
        hidden = masked  # from the convolution, padded rows are too
        if own.query_padding is not None:
            rows = own.query_padding.bool()[:, None, :, None]
            hidden = rows if masked is None else masked | rows
        previous = own.previous if evolution.uses_previous else None
        weight, conv_bias = (None, None) if evolution.conv is None else (evolution.conv.weight, evolution.conv.bias)
        if weight is not None and weight.dtype != q.dtype and torch.is_autocast_enabled(q.device.type):
            weight, conv_bias = weight.to(q.dtype), conv_bias.to(q.dtype)  # as autocast does for a convolution
        return Call(
            *(q, k, v, self.scaling, evolution.geometry, evolution.kernel_size),
            coefficients=evolution.coefficients(previous is not None),
            weight=weight,
            bias=conv_bias,
            given=self._given(q, _rows(k, own.sources), own.attn_mask),
            sources=own.sources,
            hidden=hidden,
            masked=masked,
            previous=previous,
            above=self._rows_above(q, k, state),
            step=state is not None,
            dropout=dropout.p if dropout.training or dropout.apply_during_inference else 0.0,
            keep_map=own.keep_map,
            need_weights=need_weights,
        )

    def _given(self, q: Tensor, k: Tensor, attn_mask: Tensor | None) -> Tensor | None:
        """Logits that are more than scaled dot products, B x K x T x S, or None: then they are for the kernel."""
        bias = additive(attn_mask)
        if self.score is None and self.relative_positions is None and bias is None:
            return None
        logits = dot_products(q, k, self.scaling) if self.score is None else self.score(q, k)
        if self.relative_positions is not None:
            logits = logits + self.relative_positions(q * self.scaling, k.size(2))
        return logits if bias is None else logits + bias

    def _by_kernel(self, call: Call) -> Result | None:
        """The result by the device's kernels, or None where none knows this call."""
        if (
            self.plain
            or not kernels.known(self.evolution)
            or not kernels.untouched(self.dropout_module, FairseqDropout)
        ):
            return None
        if self.evolution.stacked:
            coefficients, previous = self.evolution.for_one_convolution(call.hidden, call.previous)
            call = replace(call, coefficients=coefficients, previous=previous)
        return kernels.attend(call)

    def _compose(self, call: Call) -> Result:
        """The result by the plain composition: PyTorch's operations one by one."""
        logits, above = self._logits_and_rows_above(call)
        a_logit = self.evolution(logits, call.hidden, call.previous, above)
        kept = None
        if above is not None:
            mixed = self.evolution.mix(logits, call.hidden, call.previous)
            kept = torch.cat([above, mixed], dim=2)[:, :, -above.size(2) :]
        weights = _weights(a_logit, call.masked)
        context = torch.matmul(self.dropout_module(weights.type_as(call.v)), _rows(call.v, call.sources))
        return Result(context, a_logit if call.keep_map else None, weights if call.need_weights else None, kept)

    def _logits_and_rows_above(self, call: Call) -> tuple[Tensor, Tensor | None]:
        """B x K x T x S; B x K x rows_above x S or None, as wide as the logits."""
        logits = call.given
        if logits is None:
            logits = dot_products(call.q, _rows(call.k, call.sources), call.scale)
        if call.above is None:
            return logits, None
        # Columns that are new lie in the future of earlier rows.
        return logits, F.pad(call.above, (0, logits.size(3) - call.above.size(3)))

    @torch.no_grad()
    def _show(self, call: Call) -> None:
        """Show the observer the maps, computed once more, so that being observed changes nothing."""
        logits, above = self._logits_and_rows_above(call)
        a_logit = self.evolution(logits, call.hidden, call.previous, above)
        self.observer(Maps(logits, call.hidden, call.previous, above, a_logit, _weights(a_logit, call.masked)))

    #: under this key the incremental state keeps what is above the next step's rows
    ROWS = "evolution_rows"

    def _rows_above(self, q: Tensor, k: Tensor, state: IncrementalState | None) -> Tensor | None:
        """What the convolution read of earlier steps' rows, B x K x rows_above x (keys that there were), or None."""
        if state is None or self.evolution.rows_above == 0:
            return None
        saved = self.get_incremental_state(state, self.ROWS)
        if saved is None:
            return q.new_zeros(q.size(0), q.size(1), self.evolution.rows_above, k.size(2))
        return saved["rows"]


class EncoderSelfAttention(EvolvingAttention):
    """Encoder self-attention: takes the map of the layer before, gives its own to the layer after."""

    def __init__(self, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(Geometry.ENCODER_SELF, embed_dim, num_heads, self_attention=True, **kwargs)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | AttentionCall | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's.

        Args:
            query: S x B x C; keys and values are made of it too.
            key_padding_mask: B x S, or a call with maps: previous, keep_map and then a_logit.
            attn_mask: S x S; see ``combine`` and ``additive``.

        Returns:
            output S x B x C; weights, if asked for, as ``averaged`` gives them.
        """
        own = AttentionCall.of(key_padding_mask)
        q = self.split_heads(self.q_proj(query))
        k = self.split_heads(self.k_proj(query))
        v = self.split_heads(self.v_proj(query))
        padding = own.key_padding
        complete = replace(own, query_padding=padding, attn_mask=attn_mask if attn_mask is not None else own.attn_mask)
        output, weights = self.attend(q, k, v, complete, need_weights=need_weights or need_head_weights)
        own.a_logit = complete.a_logit
        return output, averaged(weights, need_weights, need_head_weights)


class DecoderAttention(EvolvingAttention):
    """Decoder self-attention and encoder-decoder attention, at once or step by step.

    Step by step, ``incremental_state`` keeps keys and values where fairseq keeps them, and under a key of its own the
    last rows of the map, which belong to one beam each.
    """

    PROJECTION = "projection"

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | AttentionCall | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's.

        Args:
            query: T x B x C, T = 1 in step-by-step decoding.
            key, value: S x B x C; the same as query in self-attention. Of the encoder's output, one for each sentence
                will do, S x N x C.
            key_padding_mask: B x S, or a call with query_padding too; in self-attention the queries' padding, B x T,
                which are the new positions only, step by step.
            incremental_state: keeps what earlier steps computed.
            static_kv: unused; the encoder's keys and values never change.
            attn_mask: T x S; see ``combine`` and ``additive``.

        Returns:
            output T x B x C; weights, if asked for, as ``averaged`` gives them.
        """
        own = AttentionCall.of(key_padding_mask)
        sources = None
        if self.encoder_decoder_attention:
            q, query_padding = self.split_heads(self.q_proj(query)), own.query_padding
            k, v, padding, sources = self._source(key, own.key_padding, query.size(1), incremental_state)
        else:
            query_padding = own.key_padding
            q, k, v, padding = self._positions(query, query_padding, incremental_state)
        complete = AttentionCall(padding, query_padding, attn_mask, sources=sources)
        output, weights = self.attend(
            q, k, v, complete, incremental_state, need_weights=need_weights or need_head_weights
        )
        return output, averaged(weights, need_weights, need_head_weights)

    def _source(
        self, key: Tensor | None, padding: Tensor | None, batch: int, state: IncrementalState | None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values of the source, N x K x S x D, its padding, B x S, and which of the N each of B looks at."""
        saved = self._get_input_buffer(state)
        if saved:
            return saved["prev_key"], saved["prev_value"], saved["prev_key_padding_mask"], saved["sources"]
        sources, padding = None, None if padding is None else padding.bool()
        if key.size(1) != batch or (state is not None and _may_reuse()):
            first, sources = shared_sources(key, padding, batch)
            if sources is not None:
                key = key.index_select(1, first)
                padding = None if padding is None else padding.index_select(0, first).index_select(0, sources)
        k, v = self.split_heads(self.k_proj(key)), self.split_heads(self.v_proj(key))
        if state is not None:
            kept = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding, "sources": sources}
            self._set_input_buffer(state, kept)
        return k, v, padding, sources

    def _positions(
        self, query: Tensor, padding: Tensor | None, state: IncrementalState | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries of the new positions, B x K x T x D; keys and values of all so far, B x K x S x D; padding, B x S."""
        padding = None if padding is None else padding.bool()
        saved = self._get_input_buffer(state)
        if saved:
            padding = _append_padding(saved["prev_key_padding_mask"], padding, saved["prev_key"], query.size(0))
        room = None
        if state is not None and _may_reuse():
            q, new = self._project(query, state)
            length = saved["prev_key"].size(2) if saved else 0
            room = (saved.get("room") or self._room_for(saved, new)).append(length, new)
            k, v = room.keys_and_values(length + new.size(0))
        else:
            q, k, v = (self.split_heads(part(query)) for part in (self.q_proj, self.k_proj, self.v_proj))
            if saved:
                k, v = torch.cat([saved["prev_key"], k], dim=2), torch.cat([saved["prev_value"], v], dim=2)
        if state is not None:
            kept = {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding, "room": room}
            self._set_input_buffer(state, kept)
        return q, k, v, padding

    @staticmethod
    def _room_for(saved: dict[str, Tensor | None], new: Tensor) -> Room:
        """A room with what is saved, for new keys and values, T x B x 2 x K x D."""
        return Room.holding(saved["prev_key"], saved["prev_value"]) if saved else Room(new[:0], 0)

    def _project(self, query: Tensor, state: IncrementalState) -> tuple[Tensor, Tensor]:
        """Queries, B x K x T x D, keys and values, T x B x 2 x K x D, of new positions.

        For a token at a time, one product is faster than three. The weights cannot change while a state lives.
        """
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if all(kernels.untouched(part, nn.Linear) for part in parts):
            saved = self.get_incremental_state(state, self.PROJECTION)
            if saved is None:
                bias = None if self.q_proj.bias is None else torch.cat([part.bias for part in parts])
                saved = {"weight": torch.cat([part.weight for part in parts]), "bias": bias}
                self.set_incremental_state(state, self.PROJECTION, saved)
            projected = F.linear(query, saved["weight"], saved["bias"])
        else:
            projected = torch.cat([part(query) for part in parts], dim=2)
        q, new = projected.split((self.embed_dim, 2 * self.embed_dim), dim=2)
        return self.split_heads(q), new.view(*new.shape[:2], 2, self.num_heads, self.head_dim)

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Follow beam search: hypothesis b continues what was hypothesis new_order[b]."""
        saved = self._get_input_buffer(incremental_state)
        if saved:
            padding = saved["prev_key_padding_mask"]
            padding = None if padding is None else padding.index_select(0, new_order)
            reorder = self._reordered_source if self.encoder_decoder_attention else self._reordered_positions
            self._set_input_buffer(incremental_state, reorder(saved, new_order) | {"prev_key_padding_mask": padding})
        rows = self.get_incremental_state(incremental_state, self.ROWS)
        if rows is not None:
            self.set_incremental_state(incremental_state, self.ROWS, {"rows": rows["rows"].index_select(0, new_order)})
        return incremental_state

    @staticmethod
    def _reordered_source(saved: dict[str, Tensor | None], new_order: Tensor) -> dict[str, Tensor | None]:
        """Keys and values of the source stay where they are."""
        sources = saved["sources"]
        return saved | {"sources": new_order if sources is None else sources.index_select(0, new_order)}

    @staticmethod
    def _reordered_positions(saved: dict[str, Tensor | None], new_order: Tensor) -> dict[str, Tensor | None]:
        room = saved["room"]
        if room is None:
            moved = {name: saved[name].index_select(0, new_order) for name in ("prev_key", "prev_value")}
            return saved | moved
        length = saved["prev_key"].size(2)
        room = room.reordered(length, new_order)
        k, v = room.keys_and_values(length)
        return saved | {"prev_key": k, "prev_value": v, "room": room}


def _may_reuse() -> bool:
    """Whether memory may be written twice, and what is equal be computed once: not where gradients or records need all."""
    return not torch.is_grad_enabled() and not kernels.is_looked_at()


def _rows(shared: Tensor, sources: Tensor | None) -> Tensor:
    """Of what N sentences have, N x ..., what each of B hypotheses looks at, B x ..."""
    return shared if sources is None else shared.index_select(0, sources)


def combine(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """What the softmax must not see: bool that broadcasts to B x K x T x S, or None.

    Args:
        key_padding_mask: B x S; anything but zero = masked.
        attn_mask: T x S. Of floats, what is at most ``MASKED_FROM`` is masked, and ``additive`` gives the rest; of any
            other type, anything but zero is masked.
    """
    masked = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
    if attn_mask is None:
        return masked
    if attn_mask.dim() != 2:
        raise ValueError(f"attn_mask must be T x S, and has the shape {tuple(attn_mask.shape)}")
    attn_mask = (attn_mask <= MASKED_FROM if attn_mask.is_floating_point() else attn_mask.bool())[None, None]
    return attn_mask if masked is None else masked | attn_mask


def additive(attn_mask: Tensor | None) -> Tensor | None:
    """What a mask of floats adds to the logits, T x S; None for masks of another type, which add nothing."""
    if attn_mask is None or not attn_mask.is_floating_point():
        return None
    return attn_mask.masked_fill(attn_mask <= MASKED_FROM, 0)


def _weights(a_logit: Tensor, masked: Tensor | None) -> Tensor:
    """Mask and softmax, at least in float32: B x K x T x S."""
    if masked is not None:
        # The lowest number, not -inf: the same zeros after the softmax, and no NaN in a row that is all masked.
        a_logit = a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    return F.softmax(a_logit, dim=-1, dtype=torch.promote_types(a_logit.dtype, torch.float32))


def averaged(weights: Tensor, need_weights: bool, need_head_weights: bool) -> Tensor | None:
    """B x K x T x S -> B x T x S, the mean over heads; or K x B x T x S with need_head_weights; or None."""
    if need_head_weights:
        return weights.transpose(0, 1)
    return weights.mean(dim=1) if need_weights else None


def _append_padding(before: Tensor | None, now: Tensor | None, old_keys: Tensor, new: int) -> Tensor | None:
    """Padding mask of all positions, B x S, from that of the earlier and that of the ``new`` ones; None = no padding."""
    if before is None and now is None:
        return None
    batch, device = old_keys.size(0), old_keys.device
    if before is None:
        before = torch.zeros(batch, old_keys.size(2), dtype=torch.bool, device=device)
    if now is None:
        now = torch.zeros(batch, new, dtype=torch.bool, device=device)
    return torch.cat([before, now], dim=1)
