"""Dropout on the CPU, in float32, by ``dropout.c``: no mask is kept, and all threads draw random bits.

PyTorch's own draws its mask number by number on one thread, and keeps it for the way back.
"""

from ctypes import byref

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..call import PLAIN
from ..derivatives import readable
from . import library
from .structures import Dropout, seed_of_dropout, threshold_of


def knows(x: Tensor) -> bool:
    """Whether this kernel drops numbers of such a tensor. The probability may be any from 0 to 1."""
    return (
        type(x) in PLAIN
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and x.layout is torch.strided
        and not x.is_neg()  # such a tensor's memory holds its opposite
        and library.library() is not None
    )


def drop(x: Tensor, probability: float) -> Tensor:
    """x, of any shape, with each number zero by this probability, to 1/65536, and divided by the share of the others.

    What is dropped is a function of the place in x and of one number, drawn from PyTorch's generator for the CPU, and
    other numbers on processors with AVX-512 than on those without.
    """
    return _Dropout.apply(x, threshold_of(probability), seed_of_dropout())


class _Dropout(torch.autograd.Function):
    """Its gradient is itself, with the same seed: what was dropped is dropped."""

    @staticmethod
    def forward(ctx: FunctionCtx, x: Tensor, threshold: int, seed: int) -> Tensor:
        ctx.threshold, ctx.seed = threshold, seed
        x = x.contiguous()
        result = torch.empty_like(x)
        problem = Dropout(x.data_ptr(), result.data_ptr(), x.numel(), threshold, seed)
        library.library().evolving_attention_dropout(byref(problem), torch.get_num_threads())
        return result

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _Dropout.apply(*readable(gradient), ctx.threshold, ctx.seed), None, None
