"""fairseq's multi-head attention with evolving maps.

Parameters, state-dict keys and options are those of ``fairseq.modules.MultiheadAttention``, with ``evolution.*`` added.
fairseq's own forward calls a fused kernel, which does not return its maps, so the path from projections to context is
that of ``evolving_attention``.

Axes: T target (query) length, S source (key) length, B batch, C channels, K heads, D = C / K. During beam search B
counts hypotheses, and keys and values of the source are kept once for each of N sentences.
Masks: True = masked.
"""

import inspect
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from fairseq.modules import MultiheadAttention
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from evolving_attention import kernels
from evolving_attention.attention import EvolvingHeads
from evolving_attention.cache import Cache
from evolving_attention.call import Call
from evolving_attention.evolution import Geometry

from .recording import is_recorded

#: The entries of an attention in fairseq's incremental state: prev_key, prev_value, prev_key_padding_mask as fairseq's;
#: ``rows``, the last rows of the map (see ``Cache``); ``beams``, how many hypotheses share a sentence's
#: keys; ``steps``, a kernel's prepared steps.
IncrementalState = dict[str, dict[str, Any]]

_OF_FAIRSEQ = inspect.signature(MultiheadAttention).parameters.keys()


class Padding(NamedTuple):
    """The padding of both sides of encoder-decoder attention. fairseq hands on ``key_padding_mask`` as it is."""

    keys: Tensor | None  # B x S
    queries: Tensor | None  # B x T


class EvolvingMultiheadAttention(EvolvingHeads, MultiheadAttention):
    """The common part of the three kinds of attention.

    Args:
        geometry: the kind of attention.
        embed_dim, num_heads, **options: see fairseq's ``MultiheadAttention`` and ``EvolvingHeads``.

    Raises:
        ValueError: for options of fairseq's attention whose maps have other shapes, or no maps at all.
    """

    if TYPE_CHECKING:  # fairseq's attention has no types, and torch.jit.trace reads all that it finds
        num_heads: int
        head_dim: int
        self_attention: bool
        encoder_decoder_attention: bool
        q_proj: nn.Linear
        k_proj: nn.Linear
        v_proj: nn.Linear
        out_proj: nn.Linear
        dropout_module: FairseqDropout
        _get_input_buffer: Callable[[IncrementalState], dict[str, Any]]
        _set_input_buffer: Callable[[IncrementalState, dict[str, Any]], IncrementalState]

    def __init__(self, geometry: Geometry, embed_dim: int, num_heads: int, **options: Any):
        of_fairseq = {name: options.pop(name) for name in _OF_FAIRSEQ & options.keys()}
        for name in ("xformers_att_config", "add_bias_kv", "add_zero_attn"):  # before fairseq asks for xFormers
            if of_fairseq.get(name):
                raise ValueError(f"{name}: evolving attention works without it; leave it out")
        MultiheadAttention.__init__(self, embed_dim, num_heads, **of_fairseq)
        self.dropout_module.module_name = MultiheadAttention.__name__  # for --retain-dropout-modules, as with fairseq's
        EvolvingHeads.__init__(self, geometry, num_heads, self.head_dim, **options)

    def split_heads(self, x: Tensor) -> Tensor:
        """T x B x C -> B x K x T x D"""
        return x.view(x.size(0), x.size(1), self.num_heads, self.head_dim).permute(1, 2, 0, 3)

    def join_heads(self, x: Tensor) -> Tensor:
        """B x K x T x D -> T x B x C, through the output projection"""
        return self.out_proj(x.permute(2, 0, 1, 3).flatten(2))

    @property
    def dropped(self) -> float:
        """The probability that an attention weight is dropped now."""
        dropout = self.dropout_module
        return dropout.p if dropout.training or dropout.apply_during_inference else 0.0


class EncoderSelfAttention(EvolvingMultiheadAttention):
    """Encoder self-attention: takes the map of the layer before, and returns its own for the layer after."""

    def __init__(self, embed_dim: int, num_heads: int, **options: Any):
        super().__init__(Geometry.ENCODER_SELF, embed_dim, num_heads, self_attention=True, **options)

    def forward(
        self,
        query: Tensor,
        key_padding_mask: Tensor | None = None,
        attn_mask: Tensor | None = None,
        previous: Tensor | None = None,
        keep_map: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend.

        Args:
            query: S x B x C; keys and values are made of it too.
            key_padding_mask: B x S, of rows and columns.
            attn_mask: see ``masks.combine``.
            previous: B x K x S x S, A_logit of the layer before.
            keep_map: whether to return A_logit.

        Returns:
            output S x B x C; A_logit, B x K x S x S, or None.
        """
        q, k, v = (self.split_heads(project(query)) for project in (self.q_proj, self.k_proj, self.v_proj))
        call = self.call(
            q,
            k,
            v,
            padding=key_padding_mask,
            query_padding=key_padding_mask,
            attn_mask=attn_mask,
            previous=previous,
            dropout=self.dropped,
            keep_map=keep_map,
        )
        result = self.attend_heads(call)
        return self.join_heads(result.context), result.a_logit


class DecoderAttention(EvolvingMultiheadAttention):
    """Decoder self-attention and encoder-decoder attention, of whole sentences or step by step.

    Step by step, ``incremental_state`` keeps keys and values where fairseq keeps them, and beside them the last rows of
    the map, which belong to one hypothesis each.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        key_padding_mask: Tensor | Padding | None = None,
        incremental_state: IncrementalState | None = None,
        need_weights: bool = True,
        static_kv: bool = False,
        attn_mask: Tensor | None = None,
        before_softmax: bool = False,
        need_head_weights: bool = False,
        previous: Tensor | None = None,
        keep_map: bool = False,
    ) -> tuple[Tensor, Tensor | None] | tuple[Tensor, Tensor | None, Tensor | None]:
        """As fairseq's.

        Args:
            query: T x B x C, T = 1 in step-by-step decoding.
            key: S x B x C; in self-attention query again. The encoder's output may have one column for each
                sentence, S x N x C.
            value: unused; fairseq gives key again.
            key_padding_mask: B x S, or the padding of both sides; in self-attention the queries' padding, B x T,
                which are the new positions only, step by step.
            incremental_state: keeps what earlier steps computed.
            static_kv: unused; the encoder's keys and values never change.
            attn_mask: see ``masks.combine``.
            before_softmax: must be False.
            previous: B x K x T x S, A_logit of the layer before.
            keep_map: whether to return A_logit.

        Returns:
            output T x B x C; weights, if asked for, B x T x S, or K x B x T x S with need_head_weights; with keep_map
            A_logit, B x K x T x S.
        """
        if before_softmax:
            raise ValueError("before_softmax: evolving attention has no logits without its mask; leave it out")
        if not isinstance(key_padding_mask, Padding):
            key_padding_mask = Padding(key_padding_mask, None)
        kept = None if incremental_state is None else self._kept(incremental_state)
        cache = cache_in(kept or {})
        beams = kept.get("beams", 1) if kept else 1
        # .size(0): torch.export takes len() for a number that never changes
        if cache.keys is not None and query.size(1) != (hypotheses := cache.keys.size(0) * beams):
            raise ValueError(f"{query.size(1)} hypotheses came, but incremental_state is of {hypotheses}")
        query_padding = key_padding_mask.queries if self.encoder_decoder_attention else key_padding_mask.keys
        if kept and attn_mask is None and query_padding is None:
            stepped = self._next_step(query, cache, kept, need_weights or need_head_weights)
            if incremental_state is not None and stepped is not None:
                output, weights, cache = stepped
                self._set_input_buffer(incremental_state, {**kept, **state_of(cache)})
                return output, averaged(weights, need_weights, need_head_weights)
        q = self.split_heads(self.q_proj(query))
        if self.self_attention:
            k, v = self.split_heads(self.k_proj(query)), self.split_heads(self.v_proj(query))
            cache = cache.append(k, v, query_padding)
        elif cache.keys is None and key is not None:
            key, beams = _of_sentences(key, key_padding_mask.keys, query.size(1), incremental_state is not None)
            k, v = self.split_heads(self.k_proj(key)), self.split_heads(self.v_proj(key))
            cache = cache.append(k, v, _repeated(key_padding_mask.keys, query.size(1)))
        keys, values, rows = cache.keys, cache.values, cache.rows
        assert keys is not None and values is not None, "the first step has a key"
        if kept is not None and rows is None:
            rows = self.first_rows(q, keys.size(2))
        call = self.call(
            q,
            keys,
            values,
            padding=cache.padding,
            query_padding=query_padding,
            attn_mask=attn_mask,
            previous=previous,
            rows=rows,
            dropout=self.dropped,
            keep_map=keep_map,
            need_weights=need_weights or need_head_weights,
        )
        result = self.attend_heads(call)
        output = self.join_heads(result.context)
        if incremental_state is not None and kept is not None:  # at the end: a step that raises can be tried again
            steps = kept["steps"] if "steps" in kept else self._steps_after(call)
            kept = {**state_of(replace(cache, rows=result.kept)), "beams": beams, "steps": steps}
            self._set_input_buffer(incremental_state, kept)
        weights = averaged(result.weights, need_weights, need_head_weights)
        return (output, weights, result.a_logit) if keep_map else (output, weights)

    def _steps_after(self, call: Call) -> kernels.Steps | None:
        """The kernel's prepared steps, which follow a search's first step; they know no maps of other layers."""
        if self.plain or call.keep_map or call.previous is not None:
            return None
        grow = [self.k_proj, self.v_proj] if self.self_attention else []
        return kernels.steps_after(call, self.evolution, [self.q_proj, *grow], self.out_proj)

    def _next_step(
        self, query: Tensor, cache: Cache, kept: dict[str, Any], need_weights: bool
    ) -> tuple[Tensor, Tensor | None, Cache] | None:
        """Output, weights and new cache of a step by the kernel's prepared steps; else None."""
        steps = kept.get("steps")
        if steps is None or self.observer is not None or self.dropped or torch.is_grad_enabled():
            return None
        if self.self_attention and cache.padding is not None:
            cache = replace(cache, padding=F.pad(cache.padding, (0, 1)))
        return steps.run(query, cache, need_weights) if kernels.sees(query) else None

    def _kept(self, incremental_state: IncrementalState) -> dict[str, Any]:
        """The rows and keys of earlier steps, or nothing.

        Raises:
            ValueError: keys and values were put there from outside, by fairseq's ``prev_self_attn_state`` or
                ``prev_attn_state``, without the rows of the map that the convolution reads.
        """
        kept = dict(self._get_input_buffer(incremental_state))
        if kept and "rows" not in kept and self.evolution.rows_above:
            raise ValueError(
                "incremental_state has keys and values, but no rows of maps, which evolving attention's convolution "
                "reads: fill it by decoding from the first step"
            )
        return kept

    def reorder_incremental_state(
        self, incremental_state: IncrementalState, new_order: Tensor, numbers: list[int] | None = None
    ) -> IncrementalState:
        """Follow beam search: hypothesis b continues hypothesis new_order[b].

        Args:
            numbers: new_order as a list, if it is known. Reading it waits for a GPU.
        """
        kept = dict(self._get_input_buffer(incremental_state))
        if not kept:
            return incremental_state
        for name in ("prev_key_padding_mask", "rows"):
            if kept.get(name) is not None:
                kept[name] = kept[name].index_select(0, new_order)
        order: Tensor | None = new_order
        if self.encoder_decoder_attention:
            numbers = new_order.tolist() if numbers is None else numbers
            beams, count = kept.get("beams", 1), len(kept["prev_key"])
            order, kept["beams"] = _order_of_sentences(numbers, beams, count, new_order.device)
        if order is not None:
            for name in ("prev_key", "prev_value"):  # whose heads lie side by side in memory
                kept[name] = kept[name].transpose(1, 2).index_select(0, order).transpose(1, 2)
        self._set_input_buffer(incremental_state, kept)
        return incremental_state


#: a cache's fields -> fairseq's names
_NAMES = {"keys": "prev_key", "values": "prev_value", "padding": "prev_key_padding_mask", "rows": "rows"}


def state_of(cache: Cache) -> dict[str, Any]:
    """A cache by fairseq's names."""
    return {name: getattr(cache, field) for field, name in _NAMES.items()}


def cache_in(state: dict[str, Any]) -> Cache:
    """The cache in a state by fairseq's names."""
    return Cache(**{field: state.get(name) for field, name in _NAMES.items()})


def averaged(weights: Tensor | None, need_weights: bool, need_head_weights: bool) -> Tensor | None:
    """B x K x T x S -> B x T x S, the mean over heads; or K x B x T x S with need_head_weights; or None."""
    if weights is not None and need_head_weights:
        return weights.transpose(0, 1)
    return weights.mean(dim=1) if weights is not None and need_weights else None


def _of_sentences(source: Tensor, padding: Tensor | None, batch: int, stepping: bool) -> tuple[Tensor, int]:
    """The encoder's output of each of N sentences, and how many hypotheses share one.

    A beam search repeats each sentence for its hypotheses, which lie side by side.

    Args:
        source: S x (B or N) x C, the encoder's output.
        padding: (B or N) x S, or None.
        batch: B.
        stepping: whether this is a search; else every row has its own sentence.
    """
    given = source.size(1)
    if batch % given:
        raise ValueError(f"{batch} hypotheses cannot share the encoder's output of {given} sentences equally")
    if given != batch or not stepping or torch.is_grad_enabled() or batch == 1 or is_recorded():
        return source, batch // given
    differs = (source[:, 1:] != source[:, :-1]).any(dim=2).any(dim=0)
    if padding is not None:
        differs |= (padding[1:] != padding[:-1]).any(dim=1)
    beams = math.gcd(batch, *(differs.nonzero()[:, 0] + 1).tolist())
    return source[:, ::beams], beams


def _repeated(padding: Tensor | None, batch: int) -> Tensor | None:
    """(B or N) x S -> B x S"""
    return None if padding is None else padding.bool().repeat_interleave(batch // padding.size(0), dim=0)


def _order_of_sentences(numbers: list[int], beams: int, count: int, device: torch.device) -> tuple[Tensor | None, int]:
    """The sentence of each group of hypotheses in a new order, None where all ``count`` stay; the groups' size.

    The size is 1 where a group would mix sentences.
    """
    sentences = [hypothesis // beams for hypothesis in numbers]
    firsts = sentences[::beams]
    if sentences != [sentence for sentence in firsts for _ in range(beams)]:
        return torch.tensor(sentences, device=device), 1
    return None if firsts == list(range(count)) else torch.tensor(firsts, device=device), beams
