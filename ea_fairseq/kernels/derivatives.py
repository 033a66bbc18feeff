"""What the kernels' backward passes refuse: they give first derivatives, of one output at a time."""

import torch
from torch import Tensor


def refuse_other_derivatives(*gradients: Tensor | None) -> None:
    """To be called at the beginning of a backward pass that autograd cannot look into.

    PyTorch's ``once_differentiable`` refuses too late: where autograd needs a part of the graph only, as under
    ``torch.autograd.functional`` or ``grad`` with inputs, it leaves the terms out, and the rest looks like a result.

    Args:
        gradients: what the backward pass was given.

    Raises:
        RuntimeError: this backward pass is to be differentiated itself, or is for several outputs at once.
    """
    if torch.is_grad_enabled():  # in a backward pass that is so with create_graph alone
        what = "a gradient of this gradient (create_graph, torch.autograd.functional)"
    elif any(x is not None and torch._C._functorch.is_legacy_batchedtensor(x) for x in gradients):
        what = "gradients of several outputs at once (is_grads_batched, vectorize)"
    else:
        return
    raise RuntimeError(f"The kernels of evolving attention cannot give {what}; a model built with --ea-plain can.")
