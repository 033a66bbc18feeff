"""Multi-head attention whose maps evolve, in the place of fairseq's.

Parameters, state-dict keys and calling convention are those of ``fairseq.modules.MultiheadAttention``, with
``evolution.conv.{weight,bias}`` added. fairseq's own forward leaves for a fused kernel that never shows its maps, so
the path from projections to context is written out here.

Axes: T target (query) length, S source (key) length, B batch, C channels, K heads, D = C / K. During beam search B
counts beams, while keys and values of the encoder may be kept once per sentence: N sentences, B = N x beams.
Masks: True = masked.
"""

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from torch import Tensor, nn

from . import cpu, gpu
from .evolution import Evolution, Geometry

logger = logging.getLogger(__name__)

IncrementalState = dict[str, dict[str, Tensor | None]]


class Maps(NamedTuple):
    """What an observer of an attention module is shown at each call; all B x K x T x S but where noted."""

    logits: Tensor  # scaled dot products
    hidden: Tensor | None  # broadcasts; True where the convolution sees zero
    previous: Tensor | None  # A_logit of the layer before; None in the first layer and in decoders
    above: Tensor | None  # B x K x rows_above x S, A_input of the rows before these, step by step
    a_logit: Tensor  # evolved logits, before the mask
    weights: Tensor  # after mask and softmax, before dropout


class EvolvingAttention(MultiheadAttention):
    """What the three kinds of attention share.

    Set ``observer`` to be shown the :class:`Maps` of every call; it must not change them.

    Args:
        geometry, alpha, beta, kernel_size: see :class:`Evolution`.
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
        plain: bool = False,
        **kwargs,
    ):
        super().__init__(embed_dim, num_heads, **kwargs)
        if self.use_xformers or self.bias_k is not None or self.add_zero_attn:
            raise ValueError("evolving attention works without xFormers, add_bias_kv and add_zero_attn")
        self.evolution = Evolution(geometry, num_heads, kernel_size, alpha, beta)
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
        masked: Tensor | None,
        padded_rows: Tensor | None,
        previous: Tensor | None = None,
        state: IncrementalState | None = None,
        need_weights: bool = True,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """From queries, keys and values to the output.

        Args:
            q: B x K x T x D.
            k, v: N x K x S x D.
            masked: broadcasts to B x 1 x T x S; keys that must not be attended to.
            padded_rows: B x T; queries that are padding.
            previous: B x K x T x S, A_logit of the layer before.
            state: keeps what later steps need, in step-by-step decoding.

        Returns:
            output T x B x C; A_logit, B x K x T x S, or None where no layer would use it (alpha = 0); attention weights
            B x K x T x S, at least float32, before dropout, or None where they are not needed.
        """
        hidden = masked  # from the convolution, padded rows are too
        if padded_rows is not None:
            rows = padded_rows[:, None, :, None]
            hidden = rows if masked is None else masked | rows
        maps = {"hidden": hidden, "masked": masked}
        if state is not None:
            context, a_logit, weights = self._step(q, k, v, **maps, state=state, need_weights=need_weights)
        else:
            context, a_logit, weights = self._evolve(q, k, v, **maps, previous=previous, need_weights=need_weights)
        batch, _, length, _ = context.shape
        context = context.permute(2, 0, 1, 3).reshape(length, batch, self.embed_dim)
        return self.out_proj(context), a_logit if self.evolution.alpha > 0 else None, weights

    def _evolve(self, q, k, v, hidden, masked, previous, need_weights):
        """Whole maps at once, by the device's kernels or the plain composition: context, A_logit, weights."""
        maps = {"hidden": hidden, "masked": masked, "previous": previous}
        options = {"dropout": self.dropout_module.p if self.training else 0.0, "keep_map": self.evolution.alpha > 0}
        if self.observer is not None:
            self._show(q, k, v, **maps)
        if self.plain or k.size(0) != q.size(0):
            return self._compose(q, k, v, **maps)[:3]
        if cpu.runs(q):
            options |= {"scale": self.scaling, "need_weights": need_weights}
            return cpu.evolving_attention(q, k, v, self.evolution, **maps, **options)
        if not need_weights and _runs_on_gpu(q):
            return *gpu.evolving_attention(q * self.scaling, k, v, self.evolution, **maps, **options), None
        return self._compose(q, k, v, **maps)[:3]

    def _step(self, q, k, v, hidden, masked, state, need_weights):
        """The next rows of a decoder's maps: context, None, weights. Keeps what is above the rows after."""
        above = self._rows_above(q, k, state)
        maps = {"hidden": hidden, "masked": masked, "above": above}
        if self.observer is not None:
            self._show(q, k, v, **maps)
        differentiable = torch.is_grad_enabled() and q.requires_grad  # the kernel for steps has no backward pass
        if not self.plain and not differentiable and k.size(0) == q.size(0) and cpu.runs(q):
            options = {"scale": self.scaling, "need_weights": need_weights}
            context, kept, weights = cpu.evolving_step(q, k, v, self.evolution, **maps, **options)
        else:
            context, _, weights, kept = self._compose(q, k, v, **maps)
        self._keep_rows(kept, state)
        return context, None, weights

    def _compose(self, q, k, v, hidden, masked, previous=None, above=None):
        """The plain composition: context B x K x T x D; A_logit, weights and the rows above the next ones, maps all."""
        logits = _per_sentence(torch.matmul, q * self.scaling, k.transpose(2, 3))  # B x K x T x S
        mixed = self.evolution.mix(logits, hidden, previous)
        kept = None
        if above is not None:
            above = _as_wide(above, mixed)
            kept = torch.cat([above, mixed], dim=2)[:, :, -above.size(2) :]
        a_logit = self.evolution(mixed, above=above)
        weights = _weights(a_logit, masked)
        context = _per_sentence(torch.matmul, self.dropout_module(weights.type_as(v)), v)
        return context, a_logit, weights, kept

    @torch.no_grad()
    def _show(self, q, k, v, hidden, masked, previous=None, above=None):
        """Show the observer the maps, computed once more, so that being observed changes nothing."""
        logits = _per_sentence(torch.matmul, q * self.scaling, k.transpose(2, 3))
        above = None if above is None else _as_wide(above, logits)
        a_logit = self.evolution(logits, hidden, previous, above)
        self.observer(Maps(logits, hidden, previous, above, a_logit, _weights(a_logit, masked)))

    def _rows_above(self, q: Tensor, k: Tensor, state: IncrementalState | None) -> Tensor | None:
        """A_input of earlier steps' rows, B x K x rows_above x (the keys that there were): decoders have some."""
        return None

    def _keep_rows(self, rows: Tensor | None, state: IncrementalState | None) -> None:
        """Keep the rows that are above the next step's."""


class EncoderSelfAttention(EvolvingAttention):
    """Encoder self-attention: takes the map of the layer before, gives its own to the layer after.

    fairseq's layer has no argument for maps. They travel beside its call: set ``previous_map`` before, and
    ``take_map`` after.
    """

    def __init__(self, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(Geometry.ENCODER_SELF, embed_dim, num_heads, self_attention=True, **kwargs)
        self.previous_map: Tensor | None = None  # B x K x S x S, A_logit of the layer before

    def take_map(self) -> Tensor | None:
        """A_logit of the last call, B x K x S x S, handed out once; None where no layer would use it (alpha = 0)."""
        evolved, self.previous_map = self.previous_map, None
        return evolved

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's.

        Args:
            query: S x B x C; keys and values are made of it too.
            key_padding_mask: B x S.
            attn_mask: S x S, anything but zero = masked.

        Returns:
            output S x B x C; weights, if asked for, as ``averaged`` gives them.
        """
        q = self.split_heads(self.q_proj(query))
        k = self.split_heads(self.k_proj(query))
        v = self.split_heads(self.v_proj(query))
        padded = None if key_padding_mask is None else key_padding_mask.bool()
        masked = combine(padded, attn_mask)
        wanted = need_weights or need_head_weights
        output, self.previous_map, weights = self.attend(
            q, k, v, masked, padded, self.previous_map, need_weights=wanted
        )
        return output, averaged(weights, need_weights, need_head_weights)


class DecoderAttention(EvolvingAttention):
    """Decoder self-attention and encoder-decoder attention, at once or step by step.

    Step by step, ``incremental_state`` keeps keys and values where fairseq keeps them, and under a key of its own the
    last rows of the map, which belong to one beam each.
    """

    ROWS = "evolution_rows"
    PROJECTION = "projection"

    def __init__(self, geometry: Geometry, embed_dim: int, num_heads: int, **kwargs):
        super().__init__(geometry, embed_dim, num_heads, **kwargs)
        self.query_padding_mask: Tensor | None = None  # B x T, set by the layer: its padded rows are outside of the map

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's.

        Args:
            query: T x B x C, T = 1 in step-by-step decoding.
            key, value: S x B x C; the same as query in self-attention.
            key_padding_mask: B x S; of the new positions only, in self-attention step by step.
            incremental_state: keeps what earlier steps computed.
            static_kv: unused; the encoder's keys and values never change.
            attn_mask: T x S, anything but zero = masked.

        Returns:
            output T x B x C; weights, if asked for, as ``averaged`` gives them.
        """
        q, k, v = self._project(query, key, incremental_state)
        k, v, key_padding_mask = self._keys_and_values(k, v, key_padding_mask, incremental_state)
        if key_padding_mask is not None and key_padding_mask.size(0) != q.size(0):
            key_padding_mask = key_padding_mask.repeat_interleave(q.size(0) // key_padding_mask.size(0), dim=0)
        masked = combine(key_padding_mask, attn_mask)
        wanted = need_weights or need_head_weights
        output, _, weights = self.attend(
            q, k, v, masked, self.query_padding_mask, state=incremental_state, need_weights=wanted
        )
        return output, averaged(weights, need_weights, need_head_weights)

    def _project(
        self, query: Tensor, key: Tensor | None, state: IncrementalState | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """New queries B x K x T x D; new keys and values, or None where the state has them all."""
        if self.encoder_decoder_attention:
            q = self.split_heads(self.q_proj(query))
            if "prev_key" in self._get_input_buffer(state):
                return q, None, None
            if state is not None and self.beam_size > 1 and key.size(1) == query.size(1):
                key = key[:, :: self.beam_size]  # the beams of a sentence look at the same source: once is enough
            return q, self.split_heads(self.k_proj(key)), self.split_heads(self.v_proj(key))
        if state is None or torch.is_grad_enabled() or type(self.q_proj) is not nn.Linear:
            projections = (project(query) for project in (self.q_proj, self.k_proj, self.v_proj))
        else:
            # For a token at a time, one product is faster than three. The weights cannot change while a state lives.
            saved = self.get_incremental_state(state, self.PROJECTION)
            if saved is None:
                parts = (self.q_proj, self.k_proj, self.v_proj)
                bias = None if self.q_proj.bias is None else torch.cat([part.bias for part in parts])
                saved = {"weight": torch.cat([part.weight for part in parts]), "bias": bias}
                self.set_incremental_state(state, self.PROJECTION, saved)
            projections = F.linear(query, saved["weight"], saved["bias"]).chunk(3, dim=-1)
        return tuple(self.split_heads(x) for x in projections)

    def _keys_and_values(
        self, k: Tensor | None, v: Tensor | None, padding: Tensor | None, state: IncrementalState | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values N x K x S x D of all positions so far, from the new ones; their padding mask, N x S."""
        saved = self._get_input_buffer(state)
        if k is None:
            return saved["prev_key"], saved["prev_value"], saved["prev_key_padding_mask"]
        if padding is not None:
            padding = padding.bool()[:: padding.size(0) // k.size(0)]  # of sentences, like keys that beams share
        if state is not None:
            if "prev_key" in saved:
                padding = _append_padding(saved["prev_key_padding_mask"], padding, saved["prev_key"], k)
                k = torch.cat([saved["prev_key"], k], dim=2)
                v = torch.cat([saved["prev_value"], v], dim=2)
            self._set_input_buffer(state, {"prev_key": k, "prev_value": v, "prev_key_padding_mask": padding})
        return k, v, padding

    def _rows_above(self, q: Tensor, k: Tensor, state: IncrementalState | None) -> Tensor | None:
        if state is None or self.evolution.rows_above == 0:
            return None
        saved = self.get_incremental_state(state, self.ROWS)
        if saved is None:
            return q.new_zeros(q.size(0), q.size(1), self.evolution.rows_above, k.size(2))
        return saved["rows"]

    def _keep_rows(self, rows: Tensor | None, state: IncrementalState | None) -> None:
        if state is not None and self.evolution.rows_above > 0:
            self.set_incremental_state(state, self.ROWS, {"rows": rows})

    def reorder_incremental_state(self, incremental_state: IncrementalState, new_order: Tensor) -> IncrementalState:
        """Follow beam search: beam b continues what was beam new_order[b]."""
        # fairseq moves keys and values, and may leave the encoder's where they are: beams share them. Rows move always.
        incremental_state = super().reorder_incremental_state(incremental_state, new_order)
        saved = self.get_incremental_state(incremental_state, self.ROWS)
        if saved is not None:
            self.set_incremental_state(incremental_state, self.ROWS, {"rows": saved["rows"].index_select(0, new_order)})
        return incremental_state


def combine(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> Tensor | None:
    """What the softmax must not see: B x S and T x S, each optional, -> bool that broadcasts to B x K x T x S."""
    masked = None if key_padding_mask is None else key_padding_mask.bool()[:, None, None, :]
    if attn_mask is None:
        return masked
    attn_mask = attn_mask.bool()[None, None]
    return attn_mask if masked is None else masked | attn_mask


def _runs_on_gpu(q: Tensor) -> bool:
    """Whether the GPU's kernels can take these queries; where a GPU has none, a line in the log says why."""
    reason = gpu.unavailable(q)
    if reason is not None and q.is_cuda:
        _log_once(f"evolving attention takes its slower way on the GPU: {reason}")
    return reason is None


@functools.cache
def _log_once(message: str) -> None:
    logger.warning(message)


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


def _per_sentence(matmul, x: Tensor, shared: Tensor) -> Tensor:
    """matmul(x, shared) for x of B = N x beams and shared of N: B x K x T x _ times N x K x _ x _."""
    batch, heads, length, width = x.shape
    sentences = shared.size(0)
    if batch == sentences:
        return matmul(x, shared)
    x = x.reshape(sentences, -1, heads, length, width).transpose(1, 2)  # N x K x beams x T x _
    product = matmul(x.reshape(sentences, heads, -1, width), shared).view(sentences, heads, -1, length, shared.size(3))
    return product.transpose(1, 2).reshape(batch, heads, length, shared.size(3))


def _as_wide(above: Tensor, rows: Tensor) -> Tensor:
    """Rows above, B x K x _ x (at most S), as wide as these: columns that are new lie in the future of earlier rows."""
    return F.pad(above, (0, rows.size(3) - above.size(3)))


def _append_padding(before: Tensor | None, now: Tensor | None, old_keys: Tensor, new_keys: Tensor) -> Tensor | None:
    """Padding mask of all positions, B x S, from that of the earlier and that of the new ones; None = no padding."""
    if before is None and now is None:
        return None
    batch, device = old_keys.size(0), old_keys.device
    if before is None:
        before = torch.zeros(batch, old_keys.size(2), dtype=torch.bool, device=device)
    if now is None:
        now = torch.zeros(batch, new_keys.size(2), dtype=torch.bool, device=device)
    return torch.cat([before, now], dim=1)
