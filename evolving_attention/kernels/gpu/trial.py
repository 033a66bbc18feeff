"""Each variant of the GPU's kernels is tried on its device before it is trusted.

A compiler may make something wrong of a kernel, for one type, size or device among many. So at its first use a variant
does a small problem, values and gradients, and the result is compared with the plain composition in float64. Where it
differs, or fails, one line is logged, and calls of this variant are the plain composition's from then on.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size, k kernel size.
Masks: True = masked.
"""

import logging
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from ...evolution import Coefficients, Evolution, Geometry
from .. import gpu
from ..call import Call
from . import kernels as gpu_kernels

logger = logging.getLogger(__name__)

#: How far results may be from float64's, as a share of the largest number in each: several times what rounding does.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: The same for float32 where the user lets PyTorch round the factors of its products: the context is one.
ROUNDED_TOLERANCE = 1e-2
#: a to e where they have a share in the trial: like the numbers of ``make_problem``, of few bits
SHARES = (0.5, 0.25, 0.375, 0.75, 0.5)
#: what is dropped in the trial where anything is; any seed will do
DROPPED, SEED = 0.5, 11

_verdicts: dict["Variant", bool] = {}
_lock = threading.Lock()


class Variant(NamedTuple):
    """All that decides which machine code does a call, but for the alignment of sizes and addresses."""

    device: torch.device
    dtype: torch.dtype
    geometry: Geometry
    kernel_size: int
    heads: int
    rows: int  # T of the trial; it stands for all T that get the same blocks
    columns: int  # S of the trial
    width: int  # D of queries and keys
    value_width: int  # D of values
    kinds: tuple[int, ...]  # of the five shares
    learnt: torch.dtype | None  # the type of shares that are learnt
    settings: tuple[bool, bool, bool, bool]  # convolved, separate, keep_map, need_weights
    given: bool
    previous: bool
    hidden: bool
    masked: bool
    dropped: bool
    gradients: bool  # whether they may be wanted: else they are not tried, which would compile them

    @classmethod
    def of(cls, call: Call) -> "Variant":
        """The variant that does this call."""
        _, heads, length, columns = call.maps
        tensors, settings = gpu.taken(call, gpu_kernels.Dropout(0, 0, 1.0))
        shares = tensors[7:12]
        most_rows, most_columns = gpu_kernels.largest_blocks(call.v)
        return cls(
            *(call.v.device, call.v.dtype, call.geometry, call.kernel_size, heads),
            *(_like(length, most_rows), _like(columns, most_columns)),
            *(call.q.size(3) if call.given is None else 0, call.v.size(3)),
            tuple(gpu_kernels.kind(share) for share in shares),
            next((share.dtype for share in shares if isinstance(share, Tensor)), None),
            settings[3:],
            *(tensor is not None for tensor in (tensors.given, tensors.previous, tensors.hidden, tensors.masked)),
            call.dropout > 0,
            # With dropout always: a layer that is computed again for its gradients must drop the same as before.
            call.dropout > 0 or (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in call.tensors)),
        )

    def __str__(self) -> str:
        """For the log: what it is, but not all of it."""
        kind = "with a convolution" if self.settings[0] else "without a convolution"
        return (
            f"{self.geometry.value}, {kind}, k = {self.kernel_size}, {self.heads} heads, "
            f"{str(self.dtype).removeprefix('torch.')} on {self.device}"
        )


def passed(call: Call, may_try: bool) -> bool:
    """Whether the variant that does this call has been seen to be right; it is tried now if it was not before.

    Neither the random numbers nor the mode of autograd of whoever calls change. Where memory is short, nothing is said
    about the variant, and only this call is the plain composition's; with dropout, all later ones are, too.

    Args:
        may_try: False while a CUDA graph is captured.
    """
    variant = Variant.of(call)
    verdict = _verdicts.get(variant)
    if verdict is None and may_try:
        with _lock:
            verdict = _verdicts.get(variant)
            if verdict is None:
                verdict = _try(variant)
                if verdict is None and variant.dropped:
                    logger.warning("evolving attention takes its slower way for %s: memory was short", variant)
                    verdict = False
                if verdict is not None:
                    _verdicts[variant] = verdict
    return bool(verdict)


def _try(variant: Variant) -> bool | None:
    """Whether a variant is right; None if memory was short.

    Raises:
        RuntimeError: the trial has broken the device for this process.
    """
    try:
        # In a thread of its own there are no autocast, inference mode, or hooks on saved tensors of whoever calls.
        with ThreadPoolExecutor(1) as thread:
            reason = thread.submit(find_difference, variant).result()
    except Exception as error:  # whatever it is, there is a path without kernels
        reason = gpu.summary(error)
        # drivers and cuBLAS have words of their own for it
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason or "ALLOC_FAILED" in reason:
            return None
        _check_device(variant, error)
    if reason is not None:
        logger.warning("evolving attention takes its slower way for %s: %s", variant, reason)
    return reason is None


def _check_device(variant: Variant, error: Exception) -> None:
    """Raise where nothing runs any more on the device, as after an illegal address."""
    if variant.device.type != "cuda":
        return
    try:
        torch.cuda.synchronize(variant.device)
    except RuntimeError as lost:
        raise RuntimeError(
            f"a kernel of evolving attention broke the device when it was tried for {variant} ({error}); start again "
            "with --ea-plain"
        ) from lost


def find_difference(variant: Variant) -> str | None:
    """What the kernels do wrong on a small problem, in words; None if they do it right."""
    return next(
        (
            f"{name} differs from the plain composition's by {error:.2g} of its largest number"
            for name, error in errors(variant).items()
            if not error <= tolerance(variant)  # NaN is not
        ),
        None,
    )


def tolerance(variant: Variant) -> float:
    """The largest error that passes."""
    if variant.dtype == torch.float32 and not _multiplies_in_full():
        return ROUNDED_TOLERANCE
    return TOLERANCE[variant.dtype]


def _multiplies_in_full() -> bool:
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # as it is where the precision was set by PyTorch's newer names for it
        return torch.backends.cuda.matmul.fp32_precision == "ieee"


def errors(variant: Variant) -> dict[str, float]:
    """By the name of each result, how far the kernels are from float64, as a share of its largest number.

    Float32 is tried with numbers of many bits, too, of which a product in TF32 would leave some out. Of these values
    only: where ReLU changes, they do not jump, as gradients do.
    """
    found = _errors_of(variant, make_problem(variant))
    if variant.dtype == torch.float32:
        fine = _errors_of(variant._replace(gradients=False), make_problem(variant, fine=2.0**-12))
        found |= {f"{name}, of numbers with many bits,": error for name, error in fine.items()}
    return found


def _errors_of(variant: Variant, problem: "Problem") -> dict[str, float]:
    ours, kept = _by_kernels(variant, problem)
    if variant.dropped:
        share = kept.double().mean().item()
        if abs(share - (1 - DROPPED)) > 0.2:
            raise ValueError(f"dropout of {DROPPED} keeps {share:.2f}")
    truth = _by_plain_composition(variant, problem, kept / (1 - DROPPED) if variant.dropped else None)
    return {
        name: float((ours[name] - true).abs().max() / true.abs().max().clamp(min=1e-6)) for name, true in truth.items()
    }


class Problem(NamedTuple):
    """Random numbers, in float64, but all of them are numbers of the variant's type."""

    tensors: gpu.Tensors
    scale: float
    grads: tuple[Tensor | None, ...]  # of context, A_logit and weights


def make_problem(variant: Variant, fine: float = 1.0) -> Problem:
    """A small problem that needs all that the variant does; ``fine``: what steps between numbers are multiplied by.

    What the convolution is made of are multiples of a power of two, of so few bits that no type rounds any of it. So
    ReLU lets the same pixels through in every type, and results differ only by the rounding that comes after.
    """
    generator = torch.Generator().manual_seed(1)
    batch, heads, rows, columns, size = 2, variant.heads, variant.rows, variant.columns, variant.kernel_size

    def multiples(step: float, *shape: int, spread: float = 1.0) -> Tensor:
        step *= fine
        return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread / step).round() * step

    def vectors(length: int, width: int, step: float = 1 / 32) -> Tensor:
        return multiples(step, length, batch, heads, width).permute(1, 2, 0, 3)  # as projections leave them

    maps = (batch, heads, rows, columns)
    convolved, _, keep_map, need_weights = variant.settings
    shares = [number if kind else 0.0 for number, kind in zip(SHARES, variant.kinds, strict=True)]
    for index, kind in enumerate(variant.kinds):
        if kind == gpu_kernels.LEARNT.value:
            shares[index] = torch.tensor(shares[index], dtype=torch.float64)
    masked = torch.zeros(batch, 1, rows, columns, dtype=torch.bool)
    masked[0, ..., -2:] = True
    hidden = masked.clone()
    hidden[1, :, -1] = True
    given = multiples(1 / 8, *maps) if variant.given else None
    tensors = gpu.Tensors(
        *((vectors(rows, variant.width, 1), vectors(columns, variant.width, 1)) if given is None else (None, None)),
        vectors(columns, variant.value_width),
        given,
        multiples(1 / 8, *maps) if variant.previous else None,
        multiples(1 / 64, heads, heads, size, size, spread=(heads * size * size) ** -0.5) if convolved else None,
        multiples(1 / 64, heads).abs() if convolved else None,  # ReLU must not be off everywhere
        *shares,
        hidden if variant.hidden else None,
        masked if variant.masked else None,
    )
    grads = (
        vectors(rows, variant.value_width),
        multiples(1 / 32, *maps) if keep_map else None,
        multiples(1 / 32, *maps) if need_weights else None,
    )
    scale = 2.0 ** -round(math.log2(max(1, variant.width)) / 2)  # about 1 / sqrt(D)
    return Problem(tensors, scale, grads)


def _by_kernels(variant: Variant, problem: Problem) -> tuple[dict[str, Tensor], Tensor]:
    """All results in float64 on the CPU; which weights were kept by dropout, B x K x T x S."""

    def there(value: Tensor | float | None, dtype: torch.dtype = variant.dtype) -> Tensor | float | None:
        if not isinstance(value, Tensor):
            return value
        return value.to(variant.device, dtype if value.is_floating_point() else None)

    taps = gpu_kernels.Taps.of(variant.geometry, variant.kernel_size)
    dropout = gpu_kernels.Dropout.of(DROPPED, SEED) if variant.dropped else gpu_kernels.Dropout.of(0.0)
    settings = gpu.Settings(problem.scale, taps, dropout, *variant.settings)
    *values, a, b, c, d, e, hidden, masked = problem.tensors
    shares = (there(share, variant.learnt) for share in (a, b, c, d, e))
    tensors = gpu.Tensors(*map(there, values), *shares, there(hidden), there(masked))
    with torch.no_grad():
        context, evolved = gpu.forward(tensors, settings)
        results = {"the context": context, "A_logit": evolved.a_logit if settings.keep_map else None}
        results["the weights"] = evolved.weights
        if variant.gradients:
            grad_context, grad_map, grad_weights = problem.grads
            grads = there(grad_context), there(grad_map), there(grad_weights, torch.float32)
            gradients = gpu.backward(tensors, settings, evolved, *grads)
            results |= _named(gradients)
    kept = evolved.probs.cpu() != 0
    return {name: result.cpu().double() for name, result in results.items() if result is not None}, kept


def _by_plain_composition(variant: Variant, problem: Problem, noise: Tensor | None) -> dict[str, Tensor]:
    """All results in float64 on the CPU, by PyTorch's operations one by one.

    Args:
        noise: B x K x T x S, what dropout multiplies by.
    """
    values = [x.requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in problem.tensors]
    tensors = gpu.Tensors(*values)
    logits = tensors.given
    if logits is None:
        logits = problem.scale * tensors.q @ tensors.k.transpose(2, 3)
    a_logit = _evolution(variant, tensors)(logits, tensors.hidden, tensors.previous)
    scores = a_logit if tensors.masked is None else a_logit.masked_fill(tensors.masked, torch.finfo(variant.dtype).min)
    weights = scores.softmax(-1)
    context = (weights if noise is None else weights * noise) @ tensors.v
    results = {"the context": context, "A_logit": a_logit, "the weights": weights}
    wanted = [result for result, grad in zip(results.values(), problem.grads, strict=True) if grad is not None]
    results = {name: result.detach() for name, result in results.items() if any(result is one for one in wanted)}
    if variant.gradients:
        inputs = {name: x for name, x in tensors._asdict().items() if isinstance(x, Tensor) and x.requires_grad}
        grads = [grad for grad in problem.grads if grad is not None]
        gradients = torch.autograd.grad(wanted, list(inputs.values()), grads)
        results |= _named(gpu.Tensors(**{"q": None, "k": None, "v": None, **dict(zip(inputs, gradients, strict=True))}))
    return results


def _evolution(variant: Variant, tensors: gpu.Tensors) -> Evolution:
    """The plain composition's module with this problem's convolution and shares."""
    convolved, separate, *_ = variant.settings
    with torch.device("meta"):  # no random numbers are drawn for weights that are replaced
        share = 0.1 if convolved else 0.0
        evolution = Evolution(variant.geometry, variant.heads, variant.kernel_size, alpha=share, beta=share)
    if convolved:
        del evolution.conv.weight, evolution.conv.bias
        evolution.conv.weight, evolution.conv.bias = tensors.weight, tensors.bias
    a, b, c, d, e = tensors[7:12]
    coefficients = Coefficients(a, b, c, d, e) if separate else Coefficients(a, b, c, a, b)
    evolution.coefficients = lambda has_previous: coefficients
    return evolution


def _named(gradients: gpu.Tensors) -> dict[str, Tensor]:
    """Gradients by name; those of the shares as one, for each alone may be a small sum of large numbers."""
    there = {name: gradient for name, gradient in gradients._asdict().items() if gradient is not None}
    shares = [there.pop(name) for name in "abcde" if name in there]
    named = {f"the gradient of {name}": gradient for name, gradient in there.items()}
    if shares:
        named["the gradient of a to e"] = torch.stack(shares)
    return named


def _like(size: int, most: int) -> int:
    """A size that stands for all sizes that get the same block, a power of two from 16 to ``most``; above, several."""
    block = gpu_kernels.block(size, most)
    return block + 5 if block == most else block - 5
