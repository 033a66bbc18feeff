"""Which kernel knows a call: rule, scores, types, device, shapes and masks all count, never a tensor alone.

A kernel that does not know something refuses, and the caller does the work by PyTorch's own operations one by one, the
plain composition, which the kernels are tested against. So a new rule is right at once; a kernel can only make it fast.
"""

from types import ModuleType

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..evolution import Evolution, MapConvolution
from . import cpu, gpu
from .call import PLAIN, Call, Result
from .cpu import dropout as cpu_dropout
from .cpu.dropout import drop
from .cpu.steps import Projections, Steps

__all__ = [
    "Call",
    "Projections",
    "Result",
    "Steps",
    "attend",
    "drop",
    "drops",
    "is_looked_at",
    "kernel_for",
    "known",
    "prepare",
    "untouched",
]


def attend(call: Call) -> Result | None:
    """The result of a call by the first kernel that knows all of it, or None: then it is the plain composition's."""
    kernel = kernel_for(call)
    return None if kernel is None else kernel.attend(call)


def kernel_for(call: Call) -> ModuleType | None:
    """The first kernel that knows all of a call; None where there is none."""
    if is_looked_at() or not _fits(call):
        return None
    return next((kernel for kernel in (cpu, gpu) if kernel.knows(call)), None)


def prepare(call: Call, projections: Projections) -> Steps | None:
    """The steps that follow this one in a search, by a kernel that knows them; None where there is none."""
    may_be = call.step and not is_looked_at() and _fits(call) and cpu.knows(call)
    return Steps(call, projections) if may_be and Steps.knows(call, projections) else None


def drops(x: Tensor, probability: float) -> bool:
    """Whether ``drop`` knows dropout of this tensor by this probability."""
    return 0 < probability <= 1 and not is_looked_at() and cpu_dropout.knows(x)


def known(evolution: nn.Module) -> bool:
    """Whether a kernel may stand for this module: it is an ``Evolution``, nothing more, and nobody listens to it.

    A subclass may compute anything.
    """
    if not untouched(evolution, Evolution):
        return False
    parts = vars(evolution)["_modules"]  # nn.Module's own way to look them up takes longer than the rest of this
    convolutions = [conv for conv in (parts.get("conv"), *parts["stacked"]) if conv is not None]
    return all(untouched(conv, MapConvolution) for conv in convolutions)


def untouched(module: nn.Module, kind: type) -> bool:
    """Whether a module is of this very class, with its class's forward, and without hooks, which no kernel calls."""
    own = vars(module)
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return type(module) is kind and not hooks and "forward" not in own


def is_looked_at() -> bool:
    """Whether operations or modules are being recorded, transformed or counted, which must see them one by one.

    True while torch.jit.trace, torch.compile or torch.export run the model, under torch.func's transformations and
    forward-mode differentiation, under a dispatch mode such as PyTorch's counter of FLOPs, and while a hook of all
    modules is there.
    """
    return (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_current_dispatch_mode() is not None
        or _has_any_global_hook()
    )


def _fits(call: Call) -> bool:
    """Whether the tensors are plain dense ones on one device, of one type, with shapes that agree.

    What does not fit may still be right: weights that stay float32 under automatic mixed precision, for one. The plain
    composition takes what can be taken and raises for what cannot.
    """
    q, k, v, weight, bias = call.q, call.k, call.v, call.weight, call.bias
    dtype, device = v.dtype, v.device
    for x in call.tensors:
        # masks and numbers have types of their own; learnt shares stay float32 under automatic mixed precision
        may_differ = x is call.hidden or x is call.masked or x is call.sources or x.dim() == 0
        if type(x) not in PLAIN or x.layout is not torch.strided or x.device != device:
            return False
        if x.dtype is not dtype and not may_differ:
            return False
    if not q.dim() == v.dim() == 4:
        return False
    maps = batch, heads, _, columns = call.maps
    sentences = batch if call.sources is None else v.size(0)
    return (
        v.shape[:3] == (sentences, heads, columns)
        and (call.given is not None or k.shape == (sentences, heads, columns, q.size(3)))
        and (call.sources is None or _are_numbers(call.sources, batch))
        and (call.given is None or call.given.shape == maps)
        and (call.previous is None or call.previous.shape == maps)
        and (weight is None) == (bias is None)
        and (weight is None or weight.shape == (heads, heads, call.kernel_size, call.kernel_size))
        and (bias is None or bias.shape == (heads,))
        and (call.above is None or _fits_above(call, maps))
        and (call.hidden is None or _is_mask(call.hidden, maps))
        and (call.masked is None or call.masked is call.hidden or _is_mask(call.masked, maps))
        and min(maps) > 0
    )


def _are_numbers(numbers: Tensor, count: int) -> bool:
    return numbers.shape == (count,) and numbers.dtype == torch.int64 and numbers.is_contiguous()


def _fits_above(call: Call, maps: tuple[int, int, int, int]) -> bool:
    batch, heads, rows, columns = call.above.shape
    return (batch, heads, rows) == (*maps[:2], call.kernel_size - 1) and columns <= maps[3]


def _is_mask(mask: Tensor, maps: tuple[int, int, int, int]) -> bool:
    """Whether this is a bool mask that broadcasts to B x 1 x T x S, the same for all heads."""
    return (
        mask.dtype == torch.bool
        and mask.dim() == 4
        and mask.size(1) == 1
        and all(size in (1, whole) for size, whole in zip(mask.shape, maps, strict=True))
    )
