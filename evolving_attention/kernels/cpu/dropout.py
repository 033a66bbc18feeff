"""Dropout on the CPU, in float32, by ``dropout.c``: no mask is kept, and all threads draw random bits.

PyTorch's own draws its mask number by number on one thread, and keeps it for the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from ...call import PLAIN
from ..operation import is_looked_at
from . import library
from .structures import Dropout, threshold_of


def knows(x: Tensor) -> bool:
    """Whether this kernel drops numbers of such a tensor. The probability may be any from 0 to 1."""
    return (
        (type(x) in PLAIN or torch.compiler.is_compiling())
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.layout is torch.strided
        and library.is_there()
    )


def drop(x: Tensor, probability: float) -> Tensor:
    """x, of any shape, with each number zero by this probability, to 1/65536, and divided by the share of the others.

    The choice depends on the place in x and on one number from PyTorch's generator for the CPU. Processors with AVX-512
    drop other numbers than those without.
    """
    return _apply(x, threshold_of(probability), torch.randint(2**63 - 1, (), device="cpu"))


def _apply(x: Tensor, threshold: int, seed: Tensor) -> Tensor:
    """In eager mode not by the dispatcher, which takes longer than the dropout of a small tensor."""
    return _operation(x, threshold, seed) if is_looked_at() else _Eager.apply(x, threshold, seed)


def _drop(x: Tensor, threshold: int, seed: Tensor) -> Tensor:
    x = x.contiguous()
    result = torch.empty_like(x)
    problem = Dropout(x.data_ptr(), result.data_ptr(), x.numel(), threshold, int(seed))
    library.call("evolving_attention_dropout", problem)
    return result


def _keep(ctx: Any, inputs: tuple, output: Tensor) -> None:
    _, ctx.threshold, seed = inputs
    ctx.save_for_backward(seed)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
    return _apply(gradient, ctx.threshold, *ctx.saved_tensors), None, None  # dropped weights are dropped again


_operation = torch.library.custom_op("evolving_attention::cpu_dropout", _drop, mutates_args=(), device_types="cpu")
_operation.register_autograd(_backward, setup_context=_keep)


@_operation.register_fake
def _(x: Tensor, threshold: int, seed: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


class _Eager(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threshold: int, seed: Tensor) -> Tensor:
        _keep(ctx, (x, threshold, seed), x)  # as a ``setup_context``, autograd would call it more slowly
        return _drop(x, threshold, seed)

    backward = staticmethod(_backward)
