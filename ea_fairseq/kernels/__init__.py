"""Which kernel knows a call: rule, scores, types, device, shapes and masks all count, never a tensor alone.

A kernel that does not know something refuses, and the caller does the work by PyTorch's own operations one by one, the
plain composition, which the kernels are tested against. So a new rule is right at once; a kernel can only make it fast.
"""

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ..evolution import Evolution
from . import cpu, gpu
from .call import Call, Result

__all__ = ["Call", "Result", "attend", "known", "untouched"]


def attend(call: Call) -> Result | None:
    """The result of a call by the first kernel that knows all of it, or None: then it is the plain composition's."""
    if _is_looked_at() or not _fits(call):
        return None
    for kernel in (cpu, gpu):
        if kernel.knows(call):
            return kernel.attend(call)
    return None


def known(evolution: nn.Module) -> bool:
    """Whether a kernel may stand for this module: it is an ``Evolution``, nothing more, and nobody listens to it.

    A subclass may compute anything.
    """
    if not untouched(evolution, Evolution):
        return False
    convolutions = [] if evolution.conv is None else [evolution.conv, *evolution.stacked]
    return all(untouched(conv, nn.Conv2d) for conv in convolutions)


def untouched(module: nn.Module, kind: type) -> bool:
    """Whether a module is of this very class, with its class's forward, and without hooks, which no kernel calls."""
    hooks = (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )
    return type(module) is kind and not any(hooks) and "forward" not in vars(module)


def _is_looked_at() -> bool:
    """Whether operations are being recorded, transformed or counted, which must see them one by one.

    True while torch.jit.trace, torch.compile or torch.export run the model, under torch.func's transformations and
    forward-mode differentiation, and under a dispatch mode such as PyTorch's counter of FLOPs.
    """
    return (
        torch.jit.is_tracing()
        or torch.compiler.is_compiling()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or _get_current_dispatch_mode() is not None
    )


def _fits(call: Call) -> bool:
    """Whether the tensors are plain dense ones on one device, of one type, with shapes that agree.

    What does not fit may still be right: keys that several beams share, weights that stay float32 under automatic
    mixed precision. The plain composition takes what can be taken and raises for what cannot.
    """
    batch, heads, rows, columns = call.maps
    maps = (batch, heads, rows, columns)
    values = [x for x in call.tensors if x is not call.hidden and x is not call.masked]
    if not all(_is_plain(x) and x.device == call.v.device for x in call.tensors):
        return False
    if not all(x.dtype == call.v.dtype for x in values):
        return False
    size = call.kernel_size
    shapes_agree = (
        call.q.dim() == call.v.dim() == 4
        and call.v.shape[:3] == (batch, heads, columns)
        and (call.given is not None or (call.k.shape == (batch, heads, columns, call.q.size(3))))
        and all(x is None or x.shape == maps for x in (call.given, call.previous))
        and (call.weight is None) == (call.bias is None)
        and (call.weight is None or call.weight.shape == (heads, heads, size, size))
        and (call.bias is None or call.bias.shape == (heads,))
        and (call.above is None or _fits_above(call, maps))
        and all(x is None or _is_mask(x, maps) for x in (call.hidden, call.masked))
    )
    return shapes_agree and min(maps) > 0


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


def _is_plain(x: Tensor) -> bool:
    return type(x) in (Tensor, nn.Parameter) and x.layout == torch.strided
