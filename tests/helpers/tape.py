"""A stand-in for a CUDA graph where there is no GPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: operations after which the host reads numbers of the device, which ends the capture of a graph
READS = set("_local_scalar_dense item nonzero is_nonzero equal masked_select _unique2 unique_dim".split())


class HostRead(RuntimeError):
    """What is recorded reads numbers of the device, or has shapes that depend on them."""


class NoReads(TorchDispatchMode):
    """Refuses what a capture refuses."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.split("::")[1]
        by_mask = name.startswith("index") and any(x.dtype == torch.bool for x in tensors(args[1:2]))
        if name in READS or by_mask:
            raise HostRead(f"{func} is called while calls are recorded")
        return func(*args, **(kwargs or {}))


class Tape(NoReads):
    """Calls of PyTorch's operations, repeated with the same tensors in the same memory.

    What Python did in between is not repeated: a number that it drew, a shape, a branch stay as they were.
    """

    def __init__(self):
        super().__init__()
        self.calls = []  # operation, arguments, outputs in memory of their own

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        outputs = super().__torch_dispatch__(func, types, args, kwargs)
        known = {memory(x) for x in tensors((args, kwargs))}
        self.calls.append((func, args, kwargs or {}, [x for x in tensors(outputs) if memory(x) not in known]))
        return outputs

    def record(self, work):
        work()
        with self:
            work()

    @torch.no_grad()
    def replay(self):
        for func, args, kwargs, outputs in self.calls:
            if not outputs and not func._schema.is_mutable:
                continue  # a view of memory that is there
            again = func(*args, **kwargs)
            for old, new in zip(outputs, [x for x in tensors(again) if outputs], strict=False):
                if "empty" not in func._schema.name:
                    old.copy_(new)


def tensors(tree):
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def memory(x):
    return x.untyped_storage()._cdata
