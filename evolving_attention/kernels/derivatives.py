"""Inputs and refusals of the kernels' backward passes: they give first derivatives, of one output at a time."""

import torch
from torch import Tensor


def refuse_second_derivatives() -> None:
    """To be called at the beginning of a backward pass that autograd cannot look into.

    PyTorch's ``once_differentiable`` refuses too late: where autograd needs a part of the graph only, as under
    ``torch.autograd.functional`` or ``grad`` with inputs, it leaves the terms out, and the rest looks like a result.

    Raises:
        RuntimeError: this backward pass is to be differentiated itself.
    """
    if torch.is_grad_enabled():  # in a backward pass that is so with create_graph alone
        raise _not_by_kernels("a gradient of this gradient (create_graph, torch.autograd.functional)")


def readable(*gradients: Tensor | None) -> list[Tensor | None]:
    """Gradients that a backward pass was given, with their numbers in memory.

    Autograd may give a view whose memory holds its opposite.

    Raises:
        RuntimeError: the gradients are of several outputs at once.
    """
    if any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients):
        raise _not_by_kernels("gradients of several outputs at once (is_grads_batched, vectorize)")
    return [None if x is None else x.resolve_neg() for x in gradients]


def _not_by_kernels(what: str) -> RuntimeError:
    return RuntimeError(f"The kernels of evolving attention cannot give {what}; a model built with --ea-plain can.")
