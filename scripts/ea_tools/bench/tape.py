"""A stand-in for a CUDA graph on a CPU: the calls of a capture, repeated with the same tensors in the same memory.

What Python did in between is not repeated: a number that Python drew, a counter or a shape stays as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ea_fairseq.graphs import NoReads


class Tape(NoReads):
    """See ``ea_fairseq.graphs.Graph``. What a capture refuses, it refuses, too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[..., Any] | None, Sequence[Any], Mapping[str, Any], list[Tensor]]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        outputs, kwargs = super().__torch_dispatch__(func, types, args, kwargs), kwargs or {}
        given = {_memory(x) for x in _tensors((args, kwargs))}
        made = [x for x in _tensors(outputs) if _memory(x) not in given]
        repeats = func._schema.is_mutable or (made and not func._schema.name.split("::")[1].startswith("empty"))
        # what is not repeated is kept all the same, for its memory must stay
        self.calls.append((func if repeats else None, args, kwargs, _tensors(outputs)))
        return outputs

    aside = staticmethod(contextlib.nullcontext)

    def capture(self) -> Tape:
        """The mode itself is the context."""
        return self

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the calls."""
        with _disable_current_modes():  # one launch, whatever counts
            for func, args, kwargs, outputs in self.calls:
                if func is not None:
                    for before, now in zip(outputs, _tensors(func(*args, **kwargs)), strict=True):
                        if _memory(before) != _memory(now):
                            before.copy_(now)


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor)]


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata
