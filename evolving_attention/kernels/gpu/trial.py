"""Each variant of the GPU's kernels is tried on its device before it is trusted.

A compiler may break a kernel for one type, size or device among many. So a variant first does small problems, values
and gradients, which the plain composition does in float64, too. If a result differs, or the kernel fails, a line is
logged, and the plain composition does this process's calls of this variant from then on.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...call import Call, Result
from ...evolution import Coefficients, Geometry, Share, is_always
from ...plain import compose
from ...private import constant
from ..refusals import summary, untried
from . import operation

logger = logging.getLogger(__name__)

#: How far results may be from float64's, as a share of the largest number in each: several times what rounding does.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: the inputs that have gradients, beside the shares
INPUTS = ("q", "k", "v", "given", "previous", "weight", "bias")
#: rows and columns of the trial's problems: several bands of rows and blocks of columns
SIZE = 35, 70

_verdicts: dict["Variant", bool] = {}


class Variant(NamedTuple):
    """All that decides which machine code does a call; the rest is numbers that the code reads."""

    device: torch.device
    dtype: torch.dtype
    heads: int  # a power of two, as the next
    kernel_size: int  # 0: no convolution
    width: int
    unit: int  # see ``operation.unit_of``

    @classmethod
    def of(cls, call: Call) -> "Variant":
        """The variant that does this call."""
        kernel_size = 0 if is_always(call.coefficients.c, 0) else call.kernel_size
        heads, kernel_size, width = operation.constants_of(call.maps[1], kernel_size, call.v.size(3))
        unit = operation.unit_of(call.q, call.k, call.v, call.given)
        return cls(call.v.device, call.v.dtype, heads, kernel_size, width, unit)


@constant
def passed(variant: tuple) -> bool:
    """Whether a variant has passed its trial, which happens now if there was none.

    A plain tuple, since torch.compile hands a named one on without its values.
    The caller's random numbers and autograd modes do not change. While a CUDA graph is captured, no trial can run.
    """
    variant = Variant(*variant)
    if variant not in _verdicts:
        if _capturing(variant.device):
            untried.append(str(variant))
            return False
        _verdicts[variant] = _decide(variant)
    return _verdicts[variant]


def _capturing(device: torch.device) -> bool:
    """Whether launches are captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _decide(variant: Variant) -> bool:
    """Whether a variant is right, by its trial."""
    try:
        # A new thread has no autocast, inference mode, or hooks on saved tensors.
        with ThreadPoolExecutor(1) as thread:
            fault = thread.submit(find_difference, variant).result()
    except Exception as error:
        fault = summary(error)
    if fault:
        logger.warning("evolving attention falls back to slower PyTorch operations for %s: %s", variant, fault)
    return not fault


def find_difference(variant: Variant) -> str:
    """The first fault of the kernels on small problems, in words; "" if there is none."""
    wrong = (
        f"{name} differs from the plain composition's by {error:.2g} of its largest number"
        for name, error in errors(variant).items()
        if not error <= TOLERANCE[variant.dtype]  # NaN is not
    )
    return next(wrong, "")


@torch.enable_grad()
def errors(variant: Variant) -> dict[str, float]:
    """The distance of the kernels from float64, as a share of the largest number, by the name of each result."""
    learnt = _problem(variant, learnt=True)
    found = _errors(variant, learnt)
    constant = _errors(variant, _problem(variant, learnt=False))
    found |= {f"{name} of constant shares": error for name, error in constant.items()}
    found |= {f"{name} of steps": error for name, error in _errors(variant, _steps(variant), False).items()}
    found["dropout in the backward pass"] = _distance(*_dropped(_moved(learnt, variant.device, variant.dtype)))
    return found


def _errors(variant: Variant, call: Call, gradients: bool = True) -> dict[str, float]:
    ours = _results(_moved(call, variant.device, variant.dtype), operation.operation.attend, gradients)
    truth = _results(_moved(call, torch.device("cpu"), torch.float64), compose, gradients)
    return {name: _distance(ours[name], true) for name, true in truth.items()}


def _distance(ours: Tensor, true: Tensor) -> float:
    return float((ours.cpu().double() - true.cpu()).abs().max() / true.abs().max().clamp(min=1e-6))


def _multiples(step: float, *shape: int, spread: float = 1.0) -> Tensor:
    """Random multiples of a power of two. No type rounds such sums, so ReLU passes the same pixels in each."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread / step).round() * step


def _problem(variant: Variant, learnt: bool) -> Call:
    """A small call in float64: an encoder's with weights, or a decoder's with given logits and learnt shares.

    The decoder carries another sum than it mixes.
    """
    rows, columns = SIZE
    width = variant.width if variant.unit == 8 else max(1, variant.width - 3)
    heads, size = variant.heads, variant.kernel_size
    maps = (2, heads, rows, columns)

    def vectors(length: int, step: float) -> Tensor:
        return _multiples(step, length, 2, heads, width).permute(1, 2, 0, 3)  # the layout of projections

    if learnt:
        masked = hidden = torch.ones(rows, columns, dtype=torch.bool).triu(1)[None, None]
        shares: list[Share] = [torch.tensor(share, dtype=torch.float64) for share in (0.25, 0.5, 0.375, 0.75, 0.5)]
    else:
        masked = torch.zeros(2, 1, 1, columns, dtype=torch.bool)
        masked[0, ..., -2:] = True
        hidden = masked.expand(2, 1, rows, columns).clone()
        hidden[1, :, -1] = True
        shares = [0.25, 0.5, 0.375, 0.25, 0.5]
    return Call(
        q=vectors(rows, 1),
        k=vectors(columns, 1) / 2,
        v=vectors(columns, 1 / 32),
        scale=2.0 ** -(variant.width.bit_length() // 2),
        geometry=Geometry.DECODER_SELF if learnt else Geometry.ENCODER_SELF,
        coefficients=Coefficients(*shares),
        weight=_multiples(1 / 64, heads, heads, size, size, spread=(heads * size * size) ** -0.5) if size else None,
        bias=_multiples(1 / 64, heads).abs() if size else None,  # ReLU must pass some pixels
        given=_multiples(1 / 8, *maps) if learnt else None,
        previous=_multiples(1 / 8, *maps).flip(1),
        hidden=hidden,
        masked=masked,
        keep_map=True,
        need_weights=not learnt,
    )


def _steps(variant: Variant) -> Call:
    """Some steps of a search: rows below those of earlier steps, of two hypotheses that share a sentence's keys."""
    call, size = _problem(variant, learnt=False), variant.kernel_size
    columns = call.k.size(2)
    return call._replace(
        k=call.k[:1],
        v=call.v[:1],
        hidden=call.masked,
        geometry=Geometry.ENCODER_DECODER,
        above=_multiples(1 / 8, 2, variant.heads, size - 1, columns - 1) if size > 1 else None,
    )


def _moved(call: Call, device: torch.device, dtype: torch.dtype) -> Call:
    """A copy of a call whose tensors want gradients."""

    def there(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.to(device) if x.dtype == torch.bool else x.to(device, dtype).detach().requires_grad_()

    return Call(*map(there, call))._replace(coefficients=Coefficients(*map(there, call.coefficients)))


def _results(call: Call, run: Callable[[Call], Result], gradients: bool) -> dict[str, Tensor]:
    """All results of a call, and where wanted, gradients of an uneven sum of them, by name."""
    found = {name: x for name, x in run(call)._asdict().items() if x is not None}
    if gradients:
        loss = sum((x * _multiples(1 / 32, *x.shape).to(x)).sum() for x in found.values())
        inputs = {f"the gradient of {name}": x for name in INPUTS if (x := getattr(call, name)) is not None}
        shares = [share for share in call.coefficients if isinstance(share, Tensor)]
        of_all = torch.autograd.grad(loss, [*inputs.values(), *shares], allow_unused=True)
        found |= {name: x for name, x in zip(inputs, of_all, strict=False) if x is not None}
        of_shares = [x for x in of_all[len(inputs) :] if x is not None]
        if of_shares:  # as one: each alone may be a small sum of large numbers
            found["the gradient of the shares"] = torch.stack(of_shares)
    return {name: x.detach() for name, x in found.items()}


def _dropped(call: Call) -> tuple[Tensor, Tensor]:
    """Two products, B x K x D each, which are equal if the backward pass drops the weights that the forward pass drops.

    The context is linear in the values: its product with any numbers is that of the values with their gradient.
    """
    context = operation.operation.attend(call._replace(dropout=0.5), torch.tensor(11, device=call.v.device)).context
    numbers = _multiples(1 / 32, *context.shape).to(context)
    (gradient,) = torch.autograd.grad(context, call.v, numbers)
    return (call.v.detach() * gradient.double()).sum(2), (context.detach() * numbers.double()).sum(2)
