"""Decoding on a GPU: one step of the decoder as a CUDA graph, which a search replays for each word after the first.

A graph's shapes never change, so a search's sizes are rounded up and the caches have a fixed width. The newest position
is the last column; the columns before the first are masked, and look like the outside of the map. Sentences that have
ended, and those that only fill up, stay as rows whose results are dropped. The order of beams is a tensor, so the graph
reorders them.

Axes: N sentences, R = N x beams hypotheses, K heads, D head size, S source length, r = kernel size - 1, V words; W
width: earlier target positions. Masks: True = masked.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from fairseq.models import FairseqDecoder
from fairseq.models.transformer import TransformerDecoderBase
from torch import Tensor, nn

from evolving_attention.cache import Cache
from evolving_attention.private import has_hooks

from . import graphs
from .attention import DecoderAttention, IncrementalState, cache_in, state_of
from .graphs import Graph
from .layers import EADecoderLayer

logger = logging.getLogger(__name__)

#: a search's place in fairseq's incremental state
KEY = "ea_search"
#: More hypotheses keep a GPU busy without a graph.
MOST_ROWS = 64
#: A search begins with room for so many target positions.
LEAST_WIDTH = 16
#: the largest difference of logits, as a share of the largest, between a graph's first step and the decoder's
TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
#: What to do where a search asks for more than a graph gives.
WITHOUT_GRAPHS = "on a GPU set decoder.graphs = False for that"
#: How many steps of a decoder wait for the next search of their sizes.
MOST_IDLE = 16


class Sizes(NamedTuple):
    """The sizes of a step."""

    sentences: int
    beams: int
    source: int
    width: int

    @classmethod
    def above(cls, sentences: int, beams: int, source: int, width: int) -> Sizes:
        """The sizes that hold these: powers of two, of the source multiples of 8."""
        powers = (1 << (max(least, size) - 1).bit_length() for least, size in ((1, sentences), (LEAST_WIDTH, width)))
        return cls(next(powers), beams, -(-source // 8) * 8, next(powers))


def position_table(decoder: FairseqDecoder) -> Tensor | None:
    """The vectors of target positions from the first on, positions x C; None without absolute positions."""
    positions = decoder.embed_positions
    if positions is None:
        return None
    first = decoder.padding_idx + 1
    if hasattr(positions, "num_embeddings"):  # learnt
        return positions.weight.detach()[first:]
    # sinusoidal: as many as the decoder may write
    return positions.get_embedding(first + decoder.max_positions(), positions.embedding_dim, first - 1)[first:]


def embed(decoder: FairseqDecoder, tokens: Tensor, positions: Tensor | None) -> Tensor:
    """The first layer's input before dropout, B x T x C. tokens: B x T; positions: their vectors, if they have any."""
    x = decoder.embed_scale * decoder.embed_tokens(tokens)
    if decoder.quant_noise is not None:  # a linear layer of --quant-noise-pq
        x = decoder.quant_noise(x)
    if decoder.project_in_dim is not None:
        x = decoder.project_in_dim(x)
    if positions is not None:
        x = x + positions
    return x if decoder.layernorm_embedding is None else decoder.layernorm_embedding(x)


def embed_step(decoder: FairseqDecoder, tokens: Tensor, table: Tensor | None, step: Tensor) -> Tensor:
    """``embed`` for one step. tokens: R; table: see ``position_table``; step: of one number -> 1 x R x C."""
    positions = None if table is None else table.index_select(0, step)
    return embed(decoder, tokens[:, None], positions).transpose(0, 1)


def features(decoder: FairseqDecoder, x: Tensor) -> Tensor:
    """The last layer's output, T x B x C, as the output layer reads it, B x T x C."""
    if decoder.layer_norm is not None:
        x = decoder.layer_norm(x)
    x = x.transpose(0, 1)
    return x if decoder.project_out_dim is None else decoder.project_out_dim(x)


class DecoderStep:
    """One recorded step of a decoder, with its static tensors.

    Args:
        decoder: an ``EATransformerDecoder`` in evaluation.
        sizes: of the search, rounded up.
        graph: records the step.
    """

    def __init__(self, decoder: FairseqDecoder, sizes: Sizes, graph: Graph) -> None:
        self.decoder, self.sizes, self.graph = weakref.proxy(decoder), sizes, graph
        self.memory = _memory(decoder)
        weight = decoder.embed_tokens.weight
        rows, self.table = sizes.sentences * sizes.beams, position_table(decoder)
        self.tokens = weight.new_full((rows,), decoder.padding_idx + 1, dtype=torch.long)
        self.position, self.same = weight.new_zeros(1, dtype=torch.long), torch.arange(rows, device=weight.device)
        self.order = self.same.clone()
        self.own = [_empty(layer.self_attn, rows, rows, sizes.width) for layer in decoder.layers]
        self.source = [_empty(layer.encoder_attn, sizes.sentences, rows, sizes.source) for layer in decoder.layers]
        if self.table is not None:
            self.table = self.table.to(weight)
        self.logits = self.weights = torch.empty(0)
        self.is_proven = False
        with graph.aside():
            self._run()  # tries kernels
            self._run()  # compiles those that are taken
        with graph.capture():
            self._run()

    def _run(self) -> None:
        decoder, x = self.decoder, embed_step(self.decoder, self.tokens, self.table, self.position)
        padded = self.tokens[:, None].eq(decoder.padding_idx)  # R x 1
        maps: list[Tensor | None] = [None, None]
        for number, (layer, own, source) in enumerate(zip(decoder.layers, self.own, self.source, strict=True), 1):
            state: IncrementalState = {}
            rows = None if source.rows is None else source.rows.index_select(0, self.order)
            before = {**state_of(replace(source, rows=rows)), "beams": self.sizes.beams, "steps": None}
            layer.encoder_attn._set_input_buffer(state, before)
            layer.self_attn._set_input_buffer(state, {**state_of(own.reorder(self.order)), "steps": None})
            is_last = number == len(decoder.layers)
            x, weights, *maps = layer(
                x,
                encoder_out=x,
                encoder_padding_mask=source.padding,
                incremental_state=state,
                self_attn_padding_mask=padded,
                need_attn=is_last,
                need_head_weights=is_last,
                previous_self_map=maps[0],
                previous_cross_map=maps[1],
                keep_maps=not is_last,
            )
            after = layer.self_attn._get_input_buffer(state)
            keys, values, padding = _tensors(own)
            keys.copy_(after["prev_key"][:, :, 1:])  # the oldest column has made room
            values.copy_(after["prev_value"][:, :, 1:])
            padding.copy_(after["prev_key_padding_mask"][:, 1:])
            if own.rows is not None:
                own.rows.copy_(after["rows"][..., 1:])
            if source.rows is not None:
                source.rows.copy_(layer.encoder_attn._get_input_buffer(state)["rows"])
        self.logits = decoder.output_layer(features(decoder, x))  # R x 1 x V
        self.weights = weights.float().to(x).mean(dim=0)  # K x R x 1 x S -> R x 1 x S


def _empty(attention: DecoderAttention, keys: int, rows: int, columns: int) -> Cache:
    """A cache of zeros: keys and values N or R x K x columns x D, padding R x columns, rows R x K x r x columns."""
    weight, heads, above = attention.out_proj.weight, attention.num_heads, attention.evolution.rows_above
    shape = (keys, heads, columns, attention.head_dim)
    return Cache(
        weight.new_zeros(shape),
        weight.new_zeros(shape),
        weight.new_zeros(rows, columns, dtype=torch.bool),
        weight.new_zeros(rows, heads, above, columns) if above else None,
    )


class Search:
    """The steps of one search, from its second on. It has a ``DecoderStep`` to itself until it ends.

    Args:
        decoder: the search's.
        state: fairseq's, after the first step or later.
        new_graph: makes a graph for another step.
    """

    def __init__(self, decoder: FairseqDecoder, state: IncrementalState, new_graph: Callable[[], Graph]) -> None:
        self.decoder, self.new_graph = decoder, new_graph
        first = decoder.layers[0]
        keys = first.encoder_attn._get_input_buffer(state)["prev_key"]
        self.beams = first.encoder_attn._get_input_buffer(state)["beams"]
        self.source = keys.size(2)
        #: the row of each hypothesis in the step's memory
        self.active = list(range(keys.size(0) * self.beams))
        self.rows = torch.tensor(self.active, device=keys.device)
        done = first.self_attn._get_input_buffer(state)["prev_key"].size(2)
        self.static = _take(decoder, Sizes.above(keys.size(0), self.beams, self.source, done + 1), new_graph)
        self.load(state)

    def load(self, state: IncrementalState) -> None:
        """Begin where the decoder itself is in this state."""
        decoder = self.decoder
        self.done = decoder.layers[0].self_attn._get_input_buffer(state)["prev_key"].size(2)  # positions
        for layer, own, source in zip(decoder.layers, self.static.own, self.static.source, strict=True):
            start = self.static.sizes.width - self.done
            _place(own, cache_in(layer.self_attn._get_input_buffer(state)), start, len(self.active))
            _place(source, cache_in(layer.encoder_attn._get_input_buffer(state)), 0, len(self.active))

    def step(self, tokens: Tensor) -> tuple[Tensor, dict[str, Any]]:
        """The next step, as fairseq's decoder gives it.

        Args:
            tokens: R x positions, as fairseq's ``prev_output_tokens``.

        Raises:
            ValueError: the tokens do not continue those of the step before.
        """
        if tokens.size() != (len(self.active), self.done + 1):
            raise ValueError(
                f"prev_output_tokens: expected {len(self.active)} x {self.done + 1}, found {tuple(tokens.shape)}: an "
                f"incremental_state cannot be continued twice; {WITHOUT_GRAPHS}"
            )
        if self.done == self.static.sizes.width:  # the step would push the first position out
            self._widen()
        static = self.static
        static.tokens.index_copy_(0, self.rows, tokens[:, -1])
        static.position.fill_(self.done)
        static.graph.replay()
        static.order.copy_(static.same)
        self.done += 1
        logits, weights = (x.index_select(0, self.rows) for x in (static.logits, static.weights))
        return logits, {"attn": [weights[:, :, : self.source]], "inner_states": []}

    def reorder(self, numbers: list[int]) -> None:
        """Hypothesis b continues hypothesis numbers[b].

        Raises:
            ValueError: a sentence would have more hypotheses than before, as in no search of fairseq.
        """
        before = [self.active[number] for number in numbers]
        sentences = [row // self.beams for row in before]
        if any(count > self.beams for count in Counter(sentences).values()):
            raise ValueError(f"new_order {numbers}: expected at most {self.beams} of a sentence; {WITHOUT_GRAPHS}")
        # Equal sentences side by side count as one, and need not end together: those that go on take the first rows.
        rows = {sentence: itertools.count(sentence * self.beams) for sentence in sentences}
        active = [next(rows[sentence]) for sentence in sentences]
        order = list(range(len(self.static.same)))
        for row, number in zip(active, before, strict=True):
            order[row] = number
        self.static.order.copy_(torch.tensor(order))
        if active != self.active:
            self.active, self.rows = active, torch.tensor(active, device=self.rows.device)

    def _widen(self) -> None:
        """Go on in a step of twice the width."""
        before = self.static
        sizes = before.sizes._replace(width=2 * before.sizes.width)
        after = self.static = _take(self.decoder, sizes, self.new_graph)
        after.order.copy_(before.order)
        for old, new in zip(before.own, after.own, strict=True):
            _place(new, old, before.sizes.width, len(before.same))
        for old, new in zip(before.source, after.source, strict=True):
            _place(new, old, 0, len(before.same))
        _give(self.decoder, before)

    def __del__(self) -> None:
        if hasattr(self, "static"):
            _give(self.decoder, self.static)


def _tensors(static: Cache) -> tuple[Tensor, Tensor, Tensor]:
    """The keys, values and padding of a graph's cache, which has all of them."""
    assert static.keys is not None and static.values is not None and static.padding is not None
    return static.keys, static.values, static.padding


def _place(static: Cache, given: Cache, start: int, rows: int) -> None:
    """Write the cache of so many hypotheses, its first column at ``start``; the columns beside it are masked.

    Further rows see zeros, of which no softmax makes NaN.
    """
    *places, padding = _tensors(static)
    for place, x in zip(places, (given.keys, given.values), strict=True):
        assert x is not None, "a search has begun"
        stop = start + x.size(2)
        place.zero_()[: x.size(0), :, start:stop] = x
    padding.zero_()
    padding[:rows] = True
    padding[:rows, start:stop] = False if given.padding is None else given.padding
    if static.rows is not None and given.rows is not None:
        static.rows.zero_()
        static.rows[:rows, :, :, start : start + given.rows.size(3)] = given.rows


#: decoder -> recorded steps that no search uses
_IDLE: weakref.WeakKeyDictionary[nn.Module, list[DecoderStep]] = weakref.WeakKeyDictionary()
_LOCK = threading.RLock()  # a search may end while its thread holds it: by the garbage collector


def _take(decoder: FairseqDecoder, sizes: Sizes, new_graph: Callable[[], Graph]) -> DecoderStep:
    """A step of these sizes that no other search uses."""
    memory = _memory(decoder)
    with _LOCK:
        idle = _IDLE.setdefault(decoder, [])
        for step in idle:
            if (step.sizes, step.memory) == (sizes, memory):
                idle.remove(step)
                return step
    return DecoderStep(decoder, sizes, new_graph())


def _give(decoder: FairseqDecoder, step: DecoderStep) -> None:
    """Keep a step for a later search; the one that has waited longest goes."""
    with _LOCK:
        idle = _IDLE.setdefault(decoder, [])
        idle.append(step)
        del idle[:-MOST_IDLE]


def _memory(decoder: FairseqDecoder) -> tuple[int, ...]:
    """The parameters' addresses, from which a graph reads."""
    return tuple(parameter.data_ptr() for parameter in decoder.parameters())


def next_step(
    decoder: FairseqDecoder,
    tokens: Tensor,
    encoder_out: dict[str, list[Tensor]] | None,
    state: IncrementalState | None,
    asks_for_more: bool,
) -> tuple[Tensor, dict[str, Any]] | None:
    """A search's next step by its graph; None where it has none, and the decoder takes the step itself.

    Raises:
        ValueError: the step asks for more than the graph gives, which took the step before.
    """
    if state is None or tokens.size(1) == 1:
        return None
    if asks_for_more:
        if state.get(KEY, {}).get("search") is not None:
            raise ValueError(f"a search's later step has other arguments than its first; {WITHOUT_GRAPHS}")
        return None
    if KEY not in state:
        search, new_graph = None, graphs.for_device(tokens.device)
        if new_graph is not None and _suits(decoder, tokens, state):
            try:
                search = _begin(decoder, tokens, encoder_out, state, new_graph)
            except RuntimeError as error:
                decoder.graphs = False
                logger.warning("decoding without CUDA graphs: %s", error)
        state[KEY] = {"search": search}
    search = state[KEY]["search"]
    return None if search is None else search.step(tokens)


def _begin(
    decoder: FairseqDecoder, tokens: Tensor, encoder_out: Any, state: IncrementalState, new_graph: Callable[[], Graph]
) -> Search:
    """A search that goes on from this state; a graph's first step is compared with the decoder's own.

    Raises:
        RuntimeError: the step cannot be recorded, or gives other numbers.
    """
    search = Search(decoder, state, new_graph)
    if not search.static.is_proven:
        copy = {name: dict(kept) for name, kept in state.items()}
        expected, _ = TransformerDecoderBase.forward(decoder, tokens, encoder_out, copy)
        difference = (search.step(tokens)[0] - expected).abs().max() / expected.abs().max()
        if not difference <= TOLERANCE[expected.dtype]:
            raise RuntimeError(f"a recorded step differs from the decoder's by {difference:.1g} of the largest logit")
        search.static.is_proven = True
        search.load(state)
    return search


def reorder(state: IncrementalState, order: Tensor) -> bool:
    """Whether the search of this state has a graph that followed the order."""
    search = state.get(KEY, {}).get("search")
    if search is not None:
        search.reorder(order.tolist())
    return search is not None


def _suits(decoder: FairseqDecoder, tokens: Tensor, state: IncrementalState) -> bool:
    """Whether a graph may take the steps after the first: whatever it would not repeat is refused."""
    attentions: list[Any] = [
        getattr(layer, name, None) for layer in decoder.layers for name in ("self_attn", "encoder_attn")
    ]
    return (
        decoder.graphs
        and tokens.size(0) <= MOST_ROWS
        and not (decoder.training or torch.is_grad_enabled() or torch.is_autocast_enabled(tokens.device.type))
        and decoder.adaptive_softmax is None
        and all(type(layer) is EADecoderLayer for layer in decoder.layers)
        and all(type(attention) is DecoderAttention for attention in attentions)
        and not any(attention.plain or attention.observer or attention.dropped for attention in attentions)
        and not any(map(has_hooks, decoder.modules()))
        and all("prev_key" in attention._get_input_buffer(state) for attention in attentions)
    )
