"""Evolving attention through the GPU kernels: the numbers of the plain composition, but faster.

Of every layer one map is kept for the backward pass, A_logit, which the next layer needs anyway. Beside it 16 bits of
every place (i, j), one for each head, and two numbers of every row; what else the backward pass needs is computed
again.

These kernels were written without a GPU, and a compiler may make wrong code of them. So each variant is tried at its
first use on a device, against the plain composition: see ``gpu_trial``.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import functools
import logging
import os
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ...evolution import Share
from ..call import Call, Result
from ..derivatives import readable, refuse_second_derivatives

if TYPE_CHECKING:
    from . import kernels as gpu_kernels

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_HEADS = 16


def knows(call: Call) -> bool:
    """Whether the kernels can do this call, and have been seen to do the like of it right on its device."""
    maps = call.v
    learnt = [share for share in call.coefficients if isinstance(share, Tensor)]
    if not (
        (maps.is_cuda or _interpreted())
        and maps.dtype in DTYPES
        and all(share.dtype in DTYPES for share in learnt)
        and call.maps[1] <= MOST_HEADS
        and min(call.maps[2:]) > 1  # of a size of 1 Triton makes other code, which no trial has seen
        and call.kernel_size % 2 == 1
        and not call.step
        and call.above is None
        and call.sources is None
        and 0 <= call.dropout <= 1
        and not any(tensor.is_neg() for tensor in call.tensors)  # the memory of such a tensor holds its opposite
    ):
        return False
    capturing = _capturing(maps.device)
    if capturing and call.dropout > 0:
        return False  # every replay would drop the same: the seed is a number, drawn when the graph is made
    if _kernels() is None:
        return False
    from . import trial as gpu_trial

    return gpu_trial.passed(call, may_try=not capturing)


def attend(call: Call) -> Result:
    """The result of a call that ``knows`` knows. The seed of dropout comes from the CPU's generator."""
    kernels = _kernels()
    tensors, settings = taken(call, kernels.Dropout.of(call.dropout))
    context, a_logit, weights = _Fused.apply(settings, *tensors)
    return Result(context, a_logit, weights)


def _capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is being made of what is launched."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which runs the kernels on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def summary(error: Exception) -> str:
    """The first and the last line of an error: Triton's compiler begins with a place, and ends with what is wrong."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


@functools.cache
def _kernels() -> ModuleType | None:
    """The kernels; None, and a line in the log, where there is no Triton for this machine."""
    reason = None
    try:
        from . import kernels as gpu_kernels

        if gpu_kernels.INTERPRETED.value != _interpreted():
            reason = f"Triton was imported {'without' if _interpreted() else 'for'} its interpreter"
    except Exception as error:  # whatever it is, there is a path without kernels
        reason = summary(error)
    if reason is None:
        return gpu_kernels
    logger.warning("evolving attention takes its slower way on the GPU: %s", reason)
    return None


class Tensors(NamedTuple):
    """What gradients may be wanted of, and the masks; shapes as in ``Call``. Also holds the gradients themselves."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    given: Tensor | None = None
    previous: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    a: Share | None = None
    b: Share | None = None
    c: Share | None = None
    d: Share | None = None
    e: Share | None = None
    hidden: Tensor | None = None
    masked: Tensor | None = None


class Settings(NamedTuple):
    """What the kernels are told of a call beside its tensors."""

    scale: float
    taps: "gpu_kernels.Taps"
    dropout: "gpu_kernels.Dropout"
    convolved: bool  # there is a convolution
    separate: bool  # carried is not mixed: the convolution is added to something else than what it reads
    keep_map: bool  # A_logit is wanted
    need_weights: bool  # the weights are wanted

    def shares(self, tensors: Tensors) -> "gpu_kernels.Shares":
        """The five numbers as the kernels take them."""
        return _kernels().Shares(*tensors[7:12], convolved=self.convolved, separate=self.separate)


def taken(call: Call, dropout: "gpu_kernels.Dropout") -> tuple[Tensors, Settings]:
    """A call as the kernels take it: what has no effect on it is left out, and so gets no gradient."""
    kernels = _kernels()
    shares = kernels.Shares.of(call.coefficients, call.previous is not None, call.weight is not None)
    convolution = (call.weight.contiguous(), call.bias.contiguous()) if shares.convolved else (None, None)
    tensors = Tensors(
        *((call.q, call.k) if call.given is None else (None, None)),
        *(call.v, call.given, call.previous if shares.use_previous else None),
        *convolution,
        *shares[:5],
        *(call.hidden if shares.convolved else None, call.masked),
    )
    taps = kernels.Taps.of(call.geometry, call.kernel_size)
    options = (shares.convolved, shares.separate, call.keep_map, call.need_weights)
    return tensors, Settings(call.scale, taps, dropout, *options)


def forward(tensors: Tensors, settings: Settings) -> tuple[Tensor, "gpu_kernels.Evolved"]:
    """Context, B x K x T x D, and what the kernels leave."""
    shares = settings.shares(tensors)
    with torch.cuda.device_of(tensors.v):
        mixed, carried = _mix(
            tensors, settings, shares[:2] if shares.convolved else None, shares[3:5] if shares.separate else None
        )
        evolved = _kernels().evolve(
            *(mixed, carried, tensors.weight, tensors.bias, tensors.masked, settings.taps, shares),
            *(settings.dropout, settings.need_weights),
        )
    return evolved.probs @ tensors.v, evolved


def backward(
    tensors: Tensors,
    settings: Settings,
    evolved: "gpu_kernels.Evolved",
    grad_context: Tensor | None,
    grad_map: Tensor | None,
    grad_weights: Tensor | None,
) -> Tensors:
    """Gradients of all that there is, of the type of what they are of, or in float32; None for masks and constants.

    Of ``evolved``, ``probs`` and ``weights`` are not read.
    """
    kernels, shares = _kernels(), settings.shares(tensors)
    q, k, v, given, previous, weight, bias, *_, hidden, masked = tensors
    if grad_context is None:
        grad_context = v.new_zeros(()).expand(*evolved.a_logit.shape[:3], v.size(3))
    with torch.cuda.device_of(v):
        # That of the probabilities, B x K x T x S; it becomes that of A_logit and then of the logits, in place.
        grad = kernels.product(grad_context, v)
        probs, grad_conv = kernels.soften_backward(evolved, masked, grad_map, grad_weights, grad, settings.dropout)
        grad_v = probs.transpose(2, 3) @ grad_context
        del probs
        all_logits = (0.0, 1.0) if shares.learns and given is None else None
        mixed, logits = _mix(tensors, settings, shares[:2] if shares.convolved else None, all_logits)
        of_mix = kernels.mix_backward(
            *(mixed, previous, given if logits is None else logits, weight, bias, hidden, grad_conv, grad),
            *(settings.taps, shares),
        )
    of_shares = [None] * 5
    if of_mix.shares is not None:
        pairs = zip(of_mix.shares, shares[:5], strict=True)
        of_shares = [number if isinstance(share, Tensor) else None for number, share in pairs]
    of_logits = (None, None, grad_v, grad)
    if given is None:
        grad_q = _scaled_product(grad, k, settings.scale)
        grad_k = _scaled_product(grad.transpose(2, 3), q, settings.scale)
        of_logits = (grad_q, grad_k, grad_v, None)
    return Tensors(*of_logits, of_mix.previous, of_mix.weight, of_mix.bias, *of_shares)


def _mix(
    tensors: Tensors,
    settings: Settings,
    of_mixed: tuple[Share, Share] | None,
    of_carried: tuple[Share, Share] | None,
) -> tuple[Tensor | None, Tensor | None]:
    """mixed and carried, B x K x T x S, those that are asked for by shares of the map before and of the logits."""
    q, k, v, given, previous = tensors[:5]
    q, k = (q, k) if given is None else (given, v)  # of these, only the sizes are read then
    return _kernels().mix(q, k, given, previous, tensors.hidden, settings.scale, of_mixed, of_carried)


def _scaled_product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    """scale * a b for a B x K x T x S and b B x K x S x D, in one launch."""
    nothing = a.new_empty(()).expand(1, 1, 1)
    product = torch.baddbmm(nothing, a.flatten(0, 1), b.flatten(0, 1), beta=0, alpha=scale)
    return product.unflatten(0, a.shape[:2])


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, settings: Settings, *tensors: Share | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        tensors = Tensors(*tensors)
        # Where autocast is on and the tensors are float32, the product of probabilities and values would be of another
        # type than they are.
        with torch.autocast(tensors.v.device.type, enabled=False):
            context, evolved = forward(tensors, settings)
        ctx.settings = settings
        ctx.constants = [None if isinstance(value, Tensor) else value for value in tensors]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(value if isinstance(value, Tensor) else None for value in tensors), *evolved[:-2])
        return context, evolved.a_logit if settings.keep_map else None, evolved.weights

    @staticmethod
    def backward(ctx: FunctionCtx, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_second_derivatives()
        saved, count = ctx.saved_tensors, len(ctx.constants)
        pairs = zip(saved[:count], ctx.constants, strict=True)
        tensors = Tensors(*(constant if value is None else value for value, constant in pairs))
        # What was kept may have been moved away and back (torch.autograd.graph.save_on_cpu), and be laid out anew.
        a_logit, *others = saved[count:]
        evolved = _kernels().Evolved(_kernels().padded(a_logit), *others, probs=None, weights=None)
        gradients = backward(tensors, ctx.settings, evolved, *readable(*grads))
        return None, *(
            None if gradient is None else gradient.to(value.dtype).view_as(value)
            for gradient, value in zip(gradients, tensors, strict=True)
        )
