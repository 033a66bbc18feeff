"""Changes to fairseq's modules that torch.jit.trace, torch.compile, torch.export and CUDA graphs need.

While they record, no branch may depend on the data: a padding mask is made whether or not anything is padded, and
positions come from shapes that are known.

Axes: B batch, T length, C channels.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from fairseq import utils
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor


class _Here(threading.local):
    """What a thread does."""

    captures = False


_here = _Here()


@torch.jit.ignore  # torch.jit.trace reads functions that properties call
def _captures() -> bool:
    return _here.captures


def is_recorded() -> bool:
    """Whether this thread records the model."""
    return _captures() or torch.jit.is_tracing() or torch.compiler.is_compiling()


@contextmanager
def capturing() -> Iterator[None]:
    """While this holds, this thread records the model for a CUDA graph, which no other function says."""
    _here.captures = True
    try:
        yield
    finally:
        _here.captures = False


class RecordablePositions(SinusoidalPositionalEmbedding):
    """fairseq's sinusoidal positions; while a model is recorded, by operations that can be."""

    @classmethod
    def instead_of(cls, positions: Any) -> Any:
        """The same positions as this class where they are fairseq's sinusoidal ones; any others as they are."""
        if type(positions) is not SinusoidalPositionalEmbedding:
            return positions
        return cls(positions.embedding_dim, positions.padding_idx, init_size=positions.weights.size(0))

    def forward(
        self,
        input: Tensor,
        incremental_state: Any = None,
        timestep: Tensor | None = None,
        positions: Any = None,
    ) -> Tensor:
        """As fairseq's. input: B x T, token ids; result: B x T x C, or B x 1 x C in step-by-step decoding.

        For a sentence longer than the table fairseq stores a longer table in the module. A second thread may replace
        it before it is read. Here such a sentence gets a separate table.
        """
        weights, needed = self.weights, self.padding_idx + 1 + input.size(1)
        if not is_recorded():
            if timestep is not None or needed <= weights.size(0):
                return super().forward(input, incremental_state, timestep, positions)
            weights = self.get_embedding(needed, self.embedding_dim, self.padding_idx).to(weights)
        if incremental_state is not None:
            return weights[self.padding_idx + input.size(1)].expand(input.size(0), 1, -1)
        return weights[utils.make_positions(input, self.padding_idx)].detach()
