"""The choice of a kernel by the call: rule, scores, types, device, shapes and masks all count, never a tensor alone.

A kernel refuses unknown calls, and the plain composition of PyTorch's own operations does the work, which the
kernels are tested against. So a new rule is right without a kernel; a kernel only makes it faster.
"""

import logging

import torch
from torch import Tensor, nn

from ..call import PLAIN, Call, Kernel
from ..evolution import Evolution, Geometry, MapConvolution
from ..private import has_hooks, is_transformed
from . import cpu, gpu
from .cpu.steps import Steps, is_readable

__all__ = ["Steps", "kernel_for", "sees", "stands_for", "steps_after"]

logger = logging.getLogger(__name__)

#: in the order in which they are asked
KERNELS: tuple[Kernel, ...] = (cpu, gpu)


def kernel_for(call: Call) -> Kernel | None:
    """The first kernel that does a call; None where there is none, and the debug log says why."""
    reasons = [reason] if (reason := _misfit(call)) else []
    for kernel in () if reasons else KERNELS:
        if (reason := kernel.refuses(call)) is None:
            return kernel
        reasons.append(reason)
    _refused("; ".join(reasons))
    return None


def _refused(reason: str) -> None:
    """Log why the plain composition takes a call."""
    if not torch.compiler.is_compiling():  # Dynamo takes no loggers
        logger.debug("no kernel does this call: %s", reason)


def steps_after(call: Call, evolution: Evolution, inner: list[nn.Linear], outer: nn.Linear) -> Steps | None:
    """The steps that follow this one in a search, by the CPU's kernel; None where it does not do them.

    Args:
        call: the search's first step.
        evolution: the call's.
        inner, outer: linear layers: see ``Steps``.
    """
    layers, width = (*inner, outer), call.q.size(1) * call.q.size(3)
    alike = (
        call.q.size(2) == 1
        and call.given is None
        and call.dropout == 0
        and not any(isinstance(share, Tensor) for share in call.coefficients)
        and stands_for(evolution)
        and all(_unchanged(layer, nn.Linear) and layer.weight.shape == (width, width) for layer in layers)
        and all(is_readable(x, call.v.dtype, call.v.device) for layer in layers for x in layer.parameters())
    )
    if not alike or kernel_for(call) is not cpu:
        return None
    return Steps(call, [(layer.weight, layer.bias) for layer in inner], (outer.weight, outer.bias))


def stands_for(evolution: Evolution | None) -> bool:
    """Whether a kernel computes what this module does: it is an ``Evolution``, nothing more, without hooks.

    A subclass may compute anything.
    """
    if evolution is None:
        return True
    convolutions = [conv for conv in (evolution.conv, *evolution.stacked) if conv is not None]
    if _unchanged(evolution, Evolution) and all(_unchanged(conv, MapConvolution) for conv in convolutions):
        return True
    _refused("hooks or another class change its Evolution")
    return False


def sees(*tensors: Tensor) -> bool:
    """Whether the numbers in memory are all that there is to these tensors.

    It is not so under torch.jit.trace, torch.func's transformations and forward-mode differentiation, which must see
    PyTorch's operations one by one, nor of a view that negates. torch.compile and torch.export see the kernels.
    """
    if torch.compiler.is_compiling():
        return True
    return not (torch.jit.is_tracing() or is_transformed() or any(x.is_neg() for x in tensors))


def _unchanged(module: nn.Module, kind: type) -> bool:
    """Whether a module is of this very class, with its class's forward, and without hooks, which no kernel calls."""
    return type(module) is kind and not has_hooks(module) and "forward" not in module.__dict__


def _misfit(call: Call) -> str | None:
    """The first reason why no kernel reads a call's tensors; None: plain dense ones of one device and type, that fit.

    The plain composition takes other calls, such as float32 weights under automatic mixed precision, or raises.
    Step by step, and where hypotheses share keys, no kernel has a backward pass.
    """
    tensors = call.tensors
    if not sees(*tensors):
        return "numbers in memory are not all that there is to a tensor"
    q, k, v, weight, bias = call.q, call.k, call.v, call.weight, call.bias
    dtype, device = v.dtype, v.device
    compiling = torch.compiler.is_compiling()  # then tensors are of other types, and stand for plain ones
    if compiling and torch.onnx.is_in_onnx_export():
        return "ONNX knows no kernels"
    for x in tensors:
        if not (type(x) in PLAIN or compiling) or x.layout is not torch.strided or x.device != device:
            return "a tensor is on another device, or no plain dense one"
        # masks have a type of their own; learnt shares stay float32 under automatic mixed precision
        if x.dtype is not dtype and not (x is call.hidden or x is call.masked or x.dim() == 0):
            return "types differ"
    if not all(x.dim() == 0 and x.dtype in gpu.DTYPES for x in call.coefficients if isinstance(x, Tensor)):
        return "a learnt share is no single number in half precision or float32"
    if not q.dim() == v.dim() == 4:
        return "shapes"
    maps = batch, heads, _, columns = call.maps
    sentences = v.size(0)
    shapes = (
        *((k, (sentences, heads, columns, q.size(3))), (call.given, maps), (call.previous, maps)),
        *((weight, (heads, heads, call.kernel_size, call.kernel_size)), (bias, (heads,))),
    )
    fits = (
        min(maps) > 0
        and sentences > 0
        and batch % sentences == 0
        and v.shape[:3] == (sentences, heads, columns)
        and (call.given is not None or q.size(3) == v.size(3))
        and all(x is None or x.shape == shape for x, shape in shapes)
        and (weight is None) == (bias is None)
        and (call.above is None or _fits_above(call.above, call, maps))
    )
    if not fits:
        return "shapes"
    if not all(x is None or _is_mask(x, maps) for x in (call.hidden, call.masked)):
        return "a mask is not bool, or not the same for all heads"
    if isinstance(call.scale, Tensor) or not 0 <= call.dropout <= 1:  # no kernel gives a scale's gradient
        return "scale is a tensor, or dropout no probability"
    searches = call.above is not None or sentences != batch
    if searches and torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return "a search has no backward pass"
    return None


def _fits_above(above: Tensor, call: Call, maps: tuple[int, int, int, int]) -> bool:
    """Whether rows above belong to this map of a decoder."""
    batch, heads, rows, columns = above.shape
    fits = (batch, heads, rows) == (*maps[:2], call.kernel_size - 1) and columns <= maps[3]
    return fits and call.geometry != Geometry.ENCODER_SELF


def _is_mask(mask: Tensor, maps: tuple[int, int, int, int]) -> bool:
    """Whether this is a bool mask that broadcasts to B x 1 x T x S, the same for all heads."""
    return (
        mask.dtype == torch.bool
        and mask.dim() == 4
        and mask.size(1) == 1
        and all(size in (1, whole) for size, whole in zip(mask.shape, maps, strict=True))
    )
