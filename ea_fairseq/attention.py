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
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from evolving_attention import kernels
from evolving_attention.evolution import Evolution, Geometry
from evolving_attention.kernels import Call, Result
from evolving_attention.masks import additive, append_padding, combine, masked_softmax
from evolving_attention.scores import SCORES, RelativePositions, dot_products

from .caches import Room, shared_sources

IncrementalState = dict[str, dict[str, Tensor | None]]

#: What one attention keeps from step to step of a search: fairseq's prev_key, prev_value and prev_key_padding_mask, and
#:     rows        B x K x rows_above x S, what the convolution read of the rows before the next step's
#:     steps       a kernel's prepared steps
#:     room        in self-attention, where keys and values lie
#:     projection  in self-attention, weight and bias of three projections in one
#:     sources     in encoder-decoder attention, B, which row of keys and values each hypothesis looks at
Kept = dict[str, Any]


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
        **kwargs: Any,
    ):
        super().__init__(embed_dim, num_heads, **kwargs)
        if self.use_xformers or self.bias_k is not None or self.add_zero_attn:
            raise ValueError("evolving attention works without xFormers, add_bias_kv and add_zero_attn")
        self.dropout_module.module_name = MultiheadAttention.__name__  # for --retain-dropout-modules, as with fairseq's
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
        kept: Kept | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None]:
        """From queries, keys and values to the output.

        Args:
            q: B x K x T x D.
            k, v: B x K x S x D, or N x K x S x D where the call has sources.
            own: its key_padding is B x S, of all keys; a_logit is put into it where it asks for the map.
            kept: in step-by-step decoding, of the steps before; what the next step needs is put there.

        Returns:
            output T x B x C; attention weights B x K x T x S, at least float32, before dropout, or None where they are
            not needed.
        """
        call = self._call(q, k, v, own, kept, need_weights)
        if self.observer is not None:
            self._show(call)
        result = self._by_kernel(call)
        if kept is not None and "steps" not in kept:
            kept["steps"] = None if result is None else self._prepare_steps(call)
        if result is None:
            result = self._compose(call)
        if kept is not None:
            kept["rows"] = result.kept
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
        kept: Kept | None,
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
        if previous is not None and previous.dtype != q.dtype:
            # fairseq's --checkpoint-activations computes a layer again outside of autocast, from a map made inside.
            previous = previous.to(q.dtype)
        weight, conv_bias = (None, None) if evolution.conv is None else (evolution.conv.weight, evolution.conv.bias)
        if weight is not None and weight.dtype != q.dtype and torch.is_autocast_enabled(q.device.type):
            weight, conv_bias = weight.to(q.dtype), conv_bias.to(q.dtype)  # as autocast does for a convolution
        return Call(
            *(q, k, v, self.scaling, evolution.geometry, evolution.kernel_size),
            coefficients=evolution.coefficients(previous is not None),
            weight=weight,
            bias=conv_bias,
            given=self._given(q, k, own),
            sources=own.sources,
            hidden=hidden,
            masked=masked,
            previous=previous,
            above=self._rows_above(q, k, kept),
            step=kept is not None,
            dropout=dropout.p if dropout.training or dropout.apply_during_inference else 0.0,
            keep_map=own.keep_map,
            need_weights=need_weights,
        )

    def _prepare_steps(self, call: Call) -> kernels.Steps | None:
        """The steps that follow this one; None where there are none, or where something listens to a projection."""
        parts = (self.q_proj, self.k_proj, self.v_proj, self.out_proj)
        if not all(kernels.untouched(part, nn.Linear) for part in parts):
            return None
        q, k, v, out = ((part.weight, part.bias) for part in parts)
        if self.encoder_decoder_attention:
            k = v = None
        return kernels.prepare(call, kernels.Projections(q, k, v, out))

    def _given(self, q: Tensor, k: Tensor, own: AttentionCall) -> Tensor | None:
        """Logits that are more than scaled dot products, B x K x T x S, or None: then they are for the kernel."""
        bias = additive(own.attn_mask)
        if self.score is None and self.relative_positions is None and bias is None:
            return None
        k = _rows(k, own.sources)
        logits = dot_products(q, k, self.scaling) if self.score is None else self.score(q, k)
        if self.relative_positions is not None:
            logits = logits + self.relative_positions(q * self.scaling, k.size(2))
        return logits if bias is None else logits + bias.type_as(logits)

    def _by_kernel(self, call: Call) -> Result | None:
        """The result by the device's kernels, or None where none knows this call."""
        if (
            self.plain
            or not kernels.known(self.evolution)
            or not kernels.untouched(self.dropout_module, FairseqDropout)
        ):
            return None
        if self.evolution.stacked:
            if kernels.kernel_for(call) is None:  # then the convolutions before the last would have been for nothing
                return None
            call = replace(call, previous=self.evolution.for_one_convolution(call.hidden, call.previous))
        return kernels.attend(call)

    def _compose(self, call: Call) -> Result:
        """The result by the plain composition: PyTorch's operations one by one."""
        logits, above = self._logits_and_rows_above(call)
        a_logit = self.evolution(logits, call.hidden, call.previous, above)
        kept = None
        if above is not None:
            mixed = self.evolution.mix(logits, call.hidden, call.previous)
            kept = torch.cat([above, mixed], dim=2)[:, :, -above.size(2) :]
        weights = masked_softmax(a_logit, call.masked)
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
        self.observer(Maps(logits, call.hidden, call.previous, above, a_logit, masked_softmax(a_logit, call.masked)))

    def _rows_above(self, q: Tensor, k: Tensor, kept: Kept | None) -> Tensor | None:
        """What the convolution read of earlier steps' rows, B x K x rows_above x (keys that there were), or None."""
        if kept is None or self.evolution.rows_above == 0:
            return None
        rows = kept.get("rows")
        return q.new_zeros(q.size(0), q.size(1), self.evolution.rows_above, k.size(2)) if rows is None else rows


class EncoderSelfAttention(EvolvingAttention):
    """Encoder self-attention: takes the map of the layer before, gives its own to the layer after."""

    def __init__(self, embed_dim: int, num_heads: int, **kwargs: Any):
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
            attn_mask: S x S; see ``masks.combine`` and ``masks.additive``.

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

    Step by step, ``incremental_state`` keeps keys and values where fairseq keeps them, and beside them the last rows of
    the map, which belong to one hypothesis each. Nobody may change a model while a state of it lives.
    """

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
            attn_mask: T x S; see ``masks.combine`` and ``masks.additive``.

        Returns:
            output T x B x C; weights, if asked for, as ``averaged`` gives them.
        """
        own = AttentionCall.of(key_padding_mask)
        kept = None if incremental_state is None else self._kept(incremental_state)
        reuses = kept is not None and _may_reuse()
        if kept and not reuses:
            kept["steps"] = None
        stepped = self._next_step(query, own, kept, attn_mask, need_weights or need_head_weights)
        if stepped is not None:
            self._set_input_buffer(incremental_state, kept)
            output, weights = stepped
            return output, averaged(weights, need_weights, need_head_weights)
        sources = None
        if self.encoder_decoder_attention:
            q, query_padding = self.split_heads(self.q_proj(query)), own.query_padding
            k, v, padding, sources = self._source(key, own.key_padding, query.size(1), kept, reuses)
        else:
            query_padding = own.key_padding
            q, k, v, padding = self._positions(query, query_padding, kept, reuses)
        complete = AttentionCall(padding, query_padding, attn_mask, sources=sources)
        output, weights = self.attend(q, k, v, complete, kept, need_weights=need_weights or need_head_weights)
        if kept is not None:
            kept |= {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding}
            self._set_input_buffer(incremental_state, kept)
        return output, averaged(weights, need_weights, need_head_weights)

    def _kept(self, incremental_state: IncrementalState) -> Kept:
        """What earlier steps kept, which may be nothing.

        Raises:
            ValueError: keys and values were put there from outside, by fairseq's ``prev_self_attn_state`` or
                ``prev_attn_state``, without the rows of the map that the convolution reads.
        """
        kept = dict(self._get_input_buffer(incremental_state))
        if not kept or "rows" in kept:
            return kept
        if self.evolution.rows_above:
            raise ValueError(
                "keys and values alone are no state of evolving attention, whose convolution reads rows of earlier "
                "steps' maps, too: let the steps before fill incremental_state"
            )
        return {"prev_key_padding_mask": None, "rows": None, "sources": None, **kept}

    def _next_step(
        self, query: Tensor, own: AttentionCall, kept: Kept | None, attn_mask: Tensor | None, need_weights: bool
    ) -> tuple[Tensor, Tensor | None] | None:
        """Output, 1 x B x C, and weights, B x K x 1 x S, of a step like the one before it; None where it is not so.

        It takes a fraction of a call's time, projections included.
        """
        steps = kept.get("steps") if kept else None
        query_padding = own.query_padding if self.encoder_decoder_attention else own.key_padding
        if (
            steps is None
            or attn_mask is not None
            or query_padding is not None
            or self.plain
            or self.dropout_module.training
        ):
            return None
        k, v, padding = kept["prev_key"], kept["prev_value"], kept["prev_key_padding_mask"]
        sources, room = kept.get("sources"), kept.get("room")
        if self.self_attention:
            if room is None:
                return None
            padding, length = append_padding(padding, None, k, 1), k.size(2)
            room = room.reserve(length, 1, query.dtype)
            k, v = room.keys_and_values(length + 1)
        masked = None if padding is None else padding[:, None, None, :]
        result = steps.run(query, k, v, sources, masked, kept["rows"], need_weights)
        if result is None:
            return None
        if self.observer is not None:
            call = AttentionCall(padding, sources=sources)
            self._show(self._call(self.split_heads(self.q_proj(query)), k, v, call, kept, need_weights))
        output, weights, rows = result
        kept |= {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding, "rows": rows, "room": room}
        return output, weights

    def _source(
        self, key: Tensor | None, padding: Tensor | None, batch: int, kept: Kept | None, reuses: bool
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Keys and values of the source, N x K x S x D, its padding, B x S, and which of the N each of B looks at."""
        if kept:
            return kept["prev_key"], kept["prev_value"], kept["prev_key_padding_mask"], kept["sources"]
        sources, padding = None, None if padding is None else padding.bool()
        if reuses or key.size(1) != batch:
            first, sources = shared_sources(key, padding, batch)
            if sources is not None:
                key = key.index_select(1, first)
                padding = None if padding is None else padding.index_select(0, first).index_select(0, sources)
        if kept is not None:
            kept["sources"] = sources
        return self.split_heads(self.k_proj(key)), self.split_heads(self.v_proj(key)), padding, sources

    def _positions(
        self, query: Tensor, padding: Tensor | None, kept: Kept | None, reuses: bool
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Queries of the new positions, B x K x T x D; keys and values of all so far, B x K x S x D; padding, B x S."""
        padding = None if padding is None else padding.bool()
        if kept:
            padding = append_padding(kept["prev_key_padding_mask"], padding, kept["prev_key"], query.size(0))
        if reuses:
            q, new = self._project(query, kept)
            length = kept["prev_key"].size(2) if "prev_key" in kept else 0
            room = kept.get("room")
            if room is None:
                room = Room.holding(kept["prev_key"], kept["prev_value"]) if length else Room(new[:0], 0)
            kept["room"] = room = room.append(length, new)
            return q, *room.keys_and_values(length + new.size(0)), padding
        q, k, v = (self.split_heads(part(query)) for part in (self.q_proj, self.k_proj, self.v_proj))
        if kept:
            k, v = torch.cat([kept["prev_key"], k], dim=2), torch.cat([kept["prev_value"], v], dim=2)
            kept["room"] = None
        return q, k, v, padding

    def _project(self, query: Tensor, kept: Kept) -> tuple[Tensor, Tensor]:
        """Queries, B x K x T x D, keys and values, T x B x 2 x K x D, of new positions.

        For a token at a time, one product is faster than three.
        """
        if "projection" not in kept:
            kept["projection"] = self._joined_projections()
        if kept["projection"] is None:
            projected = torch.cat([part(query) for part in (self.q_proj, self.k_proj, self.v_proj)], dim=2)
        else:
            projected = F.linear(query, *kept["projection"]).contiguous()  # as it is already
        length, batch, channels = query.shape
        rest = (self.num_heads, self.head_dim)
        # One view each, for a search makes them for every token: as if by view, select and permute.
        q = projected.as_strided((batch, rest[0], length, rest[1]), (3 * channels, rest[1], 3 * batch * channels, 1))
        return q, projected.as_strided(
            (length, batch, 2, *rest), (3 * batch * channels, 3 * channels, channels, rest[1], 1), channels
        )

    def _joined_projections(self) -> tuple[Tensor, Tensor | None] | None:
        """Weight and bias of queries', keys' and values' projections one under the other; None where hooks listen.

        On a CPU they serve the first step only, and are not worth a copy.
        """
        parts = (self.q_proj, self.k_proj, self.v_proj)
        if not all(kernels.untouched(part, nn.Linear) for part in parts) or self.q_proj.weight.is_cpu:
            return None
        bias = None if self.q_proj.bias is None else torch.cat([part.bias for part in parts])
        return torch.cat([part.weight for part in parts]), bias

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Follow beam search: hypothesis b continues what was hypothesis new_order[b]."""
        kept = dict(self._get_input_buffer(incremental_state))
        if kept:
            for name in ("prev_key_padding_mask", "rows"):
                kept[name] = None if kept[name] is None else kept[name].index_select(0, new_order)
            if self.encoder_decoder_attention:  # keys and values of the source stay where they are
                sources = kept["sources"]
                if sources is None:
                    sources = torch.arange(kept["prev_key"].size(0), device=new_order.device)
                kept["sources"] = sources.index_select(0, new_order)
            elif kept.get("room") is None:
                kept |= {name: kept[name].index_select(0, new_order) for name in ("prev_key", "prev_value")}
            else:
                length = kept["prev_key"].size(2)
                kept["room"] = room = kept["room"].reordered(length, new_order)
                kept["prev_key"], kept["prev_value"] = room.keys_and_values(length)
            self._set_input_buffer(incremental_state, kept)
        return incremental_state


def _may_reuse() -> bool:
    """Whether steps may write into memory that they share, and compute once what is equal for several hypotheses.

    Not while gradients are wanted or operations are recorded: both need every tensor as it was.
    """
    return not torch.is_grad_enabled() and not kernels.is_looked_at()


def _rows(shared: Tensor, sources: Tensor | None) -> Tensor:
    """Of what N sentences have, N x ..., what each of B hypotheses looks at, B x ..."""
    return shared if sources is None else shared.index_select(0, sources)


def averaged(weights: Tensor, need_weights: bool, need_head_weights: bool) -> Tensor | None:
    """B x K x T x S -> B x T x S, the mean over heads; or K x B x T x S with need_head_weights; or None."""
    if need_head_weights:
        return weights.transpose(0, 1)
    return weights.mean(dim=1) if need_weights else None
