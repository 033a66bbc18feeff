"""What step-by-step decoding keeps of keys and values: of the target's positions so far, and of the source.

A beam search copies and reorders hypotheses in every step. fairseq copies all keys and values with them, twice: once to
reorder them, once to append a position. Here a step writes its position into memory that has room for more, and the
hypotheses of a sentence share the source's keys and values.

Axes: T new positions, B batch, which counts hypotheses during beam search, N sentences, S source length, C channels,
K heads, D = C / K.
"""

import threading

import torch
from torch import Tensor

_taking = threading.Lock()  # of all rooms: it is held for a moment


class Room:
    """Keys and values of all positions so far, in memory with room for more.

    A state of decoding may be copied and continued twice, from the same room, by two threads at once, too. Then the
    second to append finds that its place is taken, and moves to a room of its own.

    Args:
        vectors: room x B x 2 x K x D, keys and values.
        used: how many positions are written or reserved, by whichever state of the search.
    """

    __slots__ = ("used", "vectors")
    SPARE = 16  # positions at least that a new room has left

    def __init__(self, vectors: Tensor, used: int):
        self.vectors = vectors
        self.used = used

    @classmethod
    def holding(cls, keys: Tensor, values: Tensor) -> "Room":
        """A room that holds these, B x K x S x D, and is full."""
        return cls(torch.stack([x.permute(2, 0, 1, 3) for x in (keys, values)], dim=2), keys.size(2))

    def append(self, length: int, new: Tensor) -> "Room":
        """The room that holds the first ``length`` positions of this one, and then ``new``, T x B x 2 x K x D."""
        room = self.reserve(length, new.size(0), new.dtype)
        room.vectors[length : length + new.size(0)] = new
        return room

    def reserve(self, length: int, count: int, dtype: torch.dtype) -> "Room":
        """The room that holds the first ``length`` positions of this one, and then ``count`` that are to be written."""
        past = length + count
        dtype = torch.promote_types(self.vectors.dtype, dtype)  # mixed precision may begin in the middle, or end
        with _taking:
            is_free = self._is_free(length, past, dtype)
            if is_free:
                self.used = past
        return self if is_free else self._copy(length, past, dtype)

    def _is_free(self, length: int, past: int, dtype: torch.dtype) -> bool:
        frozen = self.vectors.is_inference() and not torch.is_inference_mode_enabled()
        return self.used == length and past <= self.vectors.size(0) and dtype == self.vectors.dtype and not frozen

    def _copy(self, length: int, past: int, dtype: torch.dtype, order: Tensor | None = None) -> "Room":
        _, batch, *rest = self.vectors.shape
        batch = batch if order is None else order.numel()
        twice = past + max(self.SPARE, length)
        room = Room(self.vectors.new_empty(twice, batch, *rest, dtype=dtype), past)
        if order is None:
            room.vectors[:length] = self.vectors[:length]
        else:
            torch.index_select(self.vectors[:length], 1, order, out=room.vectors[:length])
        return room

    def reordered(self, length: int, order: Tensor) -> "Room":
        """Another room, in which hypothesis b continues what was hypothesis order[b]."""
        return self._copy(length, length, self.vectors.dtype, order)

    def keys_and_values(self, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``length`` positions, B x K x length x D: views of this room."""
        _, batch, _, heads, size = self.vectors.shape
        shape, stride = (batch, heads, length, size), (2 * heads * size, size, 2 * batch * heads * size, 1)
        return self.vectors.as_strided(shape, stride), self.vectors.as_strided(shape, stride, heads * size)


def shared_sources(source: Tensor, padding: Tensor | None, batch: int) -> tuple[Tensor, Tensor | None]:
    """Which of the sentences that a beam search repeats are the same, neighbour by neighbour.

    Args:
        source: S x (B or N) x C, the encoder's output.
        padding: (B or N) x S, or None.
        batch: B.

    Returns:
        the places of the N sentences that differ, in the batch of ``source``.
        For each of B hypotheses the number of its sentence among these; None where every one has its own.
    """
    given = source.size(1)
    if given != batch:
        if batch % given:
            raise ValueError(f"{batch} hypotheses cannot share the encoder's output of {given} sentences equally")
        every = torch.arange(given, device=source.device)
        return every, every.repeat_interleave(batch // given)
    differs = (source[:, 1:] != source[:, :-1]).any(dim=2).any(dim=0)
    if padding is not None:
        differs |= (padding[1:] != padding[:-1]).any(dim=1)
    begins = torch.cat([differs.new_ones(1), differs])
    first = begins.nonzero()[:, 0]
    return first, None if first.numel() == batch else begins.cumsum(0) - 1
