"""Evolving attention through the GPU kernels: the numbers of ``Evolution``, softmax and dropout one by one, but faster.

Of every layer one map is kept for the backward pass, A_logit, which the next layer needs anyway. Beside it one bit of
every pixel, and two numbers of every row; what else the backward pass needs is computed again.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import functools
import os
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .evolution import Evolution, Geometry

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def unavailable(q: Tensor) -> str | None:
    """Why the kernels cannot run on these tensors, or None if they can.

    Args:
        q: B x K x T x D, the queries.
    """
    if q.dtype not in DTYPES:
        return f"they know float16, bfloat16 and float32, not {q.dtype}"
    if q.size(1) > 16:
        return f"they know at most 16 heads, not {q.size(1)}"
    if not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        return f"they need a GPU, and tensors are on {q.device}"
    return _unavailable_on(q.device)


@functools.cache
def _unavailable_on(device: torch.device) -> str | None:
    """Tries all kernels once on each device: that shows a missing Triton, C compiler or support of the GPU."""
    try:
        from . import gpu_kernels as kernels

        interpreted = kernels.INTERPRETED.value
        if interpreted == (device.type == "cuda"):
            return f"Triton was imported {'for' if interpreted else 'without'} its interpreter"
        one = torch.ones(1, 1, 1, 1, device=device, requires_grad=True)
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            evolution = Evolution(Geometry.ENCODER_SELF, heads=1).to(device)
            evolving_attention(one, one, one, evolution)[0].sum().backward()
    except Exception as error:  # whatever it is, there is a path without kernels
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return None


def evolving_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    evolution: Evolution,
    *,
    hidden: Tensor | None = None,
    masked: Tensor | None = None,
    previous: Tensor | None = None,
    dropout: float = 0.0,
    keep_map: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """dropout(softmax(mask(evolution(q k^T, hidden, previous)))) v

    Args:
        q: B x K x T x D, scaled.
        k, v: B x K x S x D. These three may have any strides.
        evolution: geometry, constants and convolution.
        hidden, masked: bool, broadcast to B x 1 x T x S; what the convolution and what the softmax must not see.
        previous: B x K x T x S, A_logit of the layer before.
        dropout: probability, of the attention weights; its seed comes from the CPU's generator.
        keep_map: whether A_logit is wanted, too.

    Returns:
        context B x K x T x D; A_logit B x K x T x S or None.
    """
    from .gpu_kernels import Dropout, Taps

    skip = previous is not None and evolution.alpha > 0
    conv = evolution.conv
    constants = Constants(
        Taps.of(evolution.geometry, evolution.kernel_size),
        evolution.alpha,
        evolution.beta,
        Dropout.of(dropout),
        keep_map,
    )
    return _Fused.apply(
        q,
        k,
        v,
        previous if skip else None,
        None if conv is None else conv.weight.to(q.dtype).contiguous(),  # under --amp it stays float32
        None if conv is None else conv.bias.to(q.dtype).contiguous(),
        hidden,
        masked,
        constants,
    )


def map_passes(convolved: bool = True, skip: bool = False, passed_on: bool = False) -> tuple[int, int]:
    """How often a map is written or read, forward and backward: what bounds the time at best.

    Times B * K * T * pitch(S) * bytes of a number, this is what has to be moved, if the rows that a convolution reads
    several times, or that a softmax reads twice, come from a cache the second time.

    Forward: mix (reads ``previous``,) writes A_in; evolve reads it, writes A_logit and the probabilities; the product
    with v reads them. Backward: mix, of other factors, writes the gradient of the probabilities; soften_backward reads
    it, A_logit (and the gradient of A_logit from above), writes probabilities, and gradients of ReLU's input and
    of A_in; the product for v reads the first; mix makes A_in again; convolve_backward reads that and both gradients,
    writes that of the logits (and of ``previous``); the products for q and k read it.

    Args:
        convolved: beta > 0.
        skip: the layer has a ``previous``.
        passed_on: the layer above uses this one's A_logit.
    """
    if convolved:
        return 5 + skip, 1 + (5 + passed_on) + 1 + (1 + skip) + (4 + skip) + 2
    return 4 + skip, 1 + (4 + passed_on + skip) + 1 + 2


class Constants(NamedTuple):
    """What is no tensor; see ``evolving_attention`` and ``gpu_kernels``."""

    taps: "kernels.Taps"  # noqa: F821  (imported only where Triton is there)
    alpha: float
    beta: float
    dropout: "kernels.Dropout"  # noqa: F821
    keep_map: bool


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        previous: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        hidden: Tensor | None,
        masked: Tensor | None,
        constants: Constants,
    ) -> tuple[Tensor, Tensor | None]:
        from . import gpu_kernels as kernels

        taps, alpha, beta, dropout, keep_map = constants
        with torch.cuda.device_of(q):
            maps = kernels.mix(q, k, previous, hidden, alpha)
            evolved = kernels.evolve(maps, weight, bias, masked, taps, beta, dropout)
        context = evolved.probs @ v
        ctx.constants = constants
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, previous, weight, hidden, masked, *evolved[:-1])
        return context, evolved.a_logit if keep_map else None

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_context: Tensor | None, grad_map: Tensor | None):
        from . import gpu_kernels as kernels

        q, k, v, previous, weight, hidden, masked, *kept = ctx.saved_tensors
        evolved = kernels.Evolved(*kept, probs=None)
        taps, alpha, beta, dropout, _ = ctx.constants
        skip = previous is not None
        if grad_context is None:
            grad_context = torch.zeros_like(q[..., :1]).expand(*q.shape[:3], v.size(3))
        grad_weight = grad_bias = None
        with torch.cuda.device_of(q):
            grad = kernels.mix(
                grad_context, v, None, None, 0.0
            )  # grad_context v^T, B x K x T x S; then changed in place
            probs, grad_conv, grad_previous = kernels.soften_backward(
                evolved, masked, hidden, grad_map, grad, skip, alpha, beta, dropout
            )
            grad_v = probs.transpose(2, 3) @ grad_context
            del probs
            if weight is not None:
                maps = kernels.mix(q, k, previous, hidden, alpha)
                grad_weight, grad_bias, grad_previous = kernels.convolve_backward(
                    maps, weight, hidden, grad_conv, grad, skip, alpha, taps
                )
        return grad @ k, grad.transpose(2, 3) @ q, grad_v, grad_previous, grad_weight, grad_bias, None, None, None
