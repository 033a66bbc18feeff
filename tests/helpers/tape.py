"""A stand-in for a CUDA graph on a CPU: the calls of a capture, repeated with the same tensors in the same memory.

What Python did in between is not repeated: a number that Python drew, a counter or a shape stays as it was.
"""

import contextlib

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from ea_fairseq.step import NoReads


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def memory(x):
    return x.untyped_storage()._cdata


class Tape(NoReads):
    """See ``ea_fairseq.step.Graph``. What a capture refuses, it refuses, too."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs, kwargs = super().__torch_dispatch__(func, types, args, kwargs), kwargs or {}
        given = {memory(x) for x in tensors((args, kwargs))}
        made = [x for x in tensors(outputs) if memory(x) not in given]
        repeats = func._schema.is_mutable or (made and not func._schema.name.split("::")[1].startswith("empty"))
        # what is not repeated is kept all the same, for its memory must stay
        self.calls.append((func if repeats else None, args, kwargs, tensors(outputs)))
        return outputs

    aside = staticmethod(contextlib.nullcontext)

    @contextlib.contextmanager
    def capture(self):
        with self:
            yield

    def record(self, work):
        """For a graph of a search's steps."""
        work()
        with self:
            work()

    @torch.no_grad()
    def replay(self):
        with _disable_current_modes():  # one launch, whatever counts
            for func, args, kwargs, outputs in self.calls:
                if func is not None:
                    for before, now in zip(outputs, tensors(func(*args, **kwargs)), strict=True):
                        if memory(before) != memory(now):
                            before.copy_(now)
