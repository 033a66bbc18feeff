"""Names of PyTorch without a public form; each stands here alone, to be looked at with a new version."""

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode  # whether something watches each operation

__all__ = ["constant", "has_hooks", "is_batched", "is_in_torch_dispatch_mode", "is_transformed"]

Function = TypeVar("Function", bound=Callable)


def constant(function: Function) -> Function:
    """As torch.compiler.assume_constant_result, without its import of the compiler, which takes a second or two."""
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_transformed() -> bool:
    """Whether a transformation of torch.func, or forward-mode differentiation, is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


def is_batched(x: Tensor) -> bool:
    """Whether a gradient stands for several, as with is_grads_batched."""
    return torch._C._functorch.is_legacy_batchedtensor(x)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own, forward or backward."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(hooks)
