"""Each variant of the GPU's kernels is tried on its device before it is trusted.

A compiler may break a kernel for one type, size or device among many. So a variant first does small problems, values
and gradients, which the plain composition does in float64, too. If a result differs, or the kernel fails, a line is
logged, and the plain composition does the calls of this variant from then on. The user's cache folder keeps the
verdict.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import functools
import hashlib
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...evolution import Coefficients, Geometry
from ...functional import compose
from .. import gpu
from ..call import Call
from ..operation import is_zero
from . import operation

logger = logging.getLogger(__name__)

#: How far results may be from float64's, as a share of the largest number in each: several times what rounding does.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 4e-2}
#: the inputs that have gradients, beside the shares
INPUTS = ("q", "k", "v", "given", "previous", "weight", "bias")
#: the trial's dropout and its seed
DROPPED, SEED = 0.5, 11
#: rows and columns of the trial's problem, of short maps (True) and long ones: more than one band and block
SIZES = {True: (35, 60), False: (67, 70)}

_verdicts: dict["Variant", bool] = {}
_lock = threading.Lock()


class Variant(NamedTuple):
    """All that decides which machine code does a call; the rest is numbers that the code reads."""

    device: torch.device
    dtype: torch.dtype
    heads: int  # a power of two, as the next
    kernel_size: int  # 0: no convolution
    width: int
    unit: int  # see ``operation.unit_of``
    short: bool
    gradients: bool  # whether to try them too, which compiles the backward kernel

    @classmethod
    def of(cls, call: Call) -> "Variant":
        """The variant that does this call."""
        _, heads, rows, columns = call.maps
        convolved = call.weight is not None and not is_zero(call.coefficients.c)
        # With dropout always: a layer that is computed again for its gradients must drop the same as before.
        gradients = call.dropout > 0 or (torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors))
        heads, kernel_size, width = operation.constants_of(heads, call.kernel_size * convolved, call.v.size(3))
        short = operation.is_short(rows, columns)
        unit = operation.unit_of(call.q, call.k, call.v, call.given)
        return cls(call.v.device, call.v.dtype, heads, kernel_size, width, unit, short, gradients)

    def __str__(self) -> str:
        """For the log."""
        convolution = f"a convolution of size {self.kernel_size}" if self.kernel_size else "no convolution"
        return (
            f"up to {self.heads} heads of up to {self.width} numbers, {convolution}, "
            f"{'short' if self.short else 'long'} maps, {str(self.dtype).removeprefix('torch.')} on {self.device}"
        )


@torch.compiler.assume_constant_result
def passed(variant: Variant) -> bool:
    """Whether a variant has passed its trial, which happens now if there was none.

    The caller's random numbers and autograd modes do not change. If memory is short, no other trial follows in this
    process. While a CUDA graph is captured, no trial can run.
    """
    verdict = _verdicts.get(variant)
    if verdict is None and not _capturing(variant.device):
        with _lock:
            verdict = _verdicts.get(variant)
            if verdict is None:
                verdict = _verdicts[variant] = _decide(variant)
    return bool(verdict)


def _capturing(device: torch.device) -> bool:
    """Whether launches are captured in a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _decide(variant: Variant) -> bool:
    """Whether a variant is right, by an earlier process or a trial."""
    path = _path(variant)
    if path is not None and path.exists():
        reason = path.read_text()
    else:
        try:
            # A new thread has no autocast, inference mode, or hooks on saved tensors.
            with ThreadPoolExecutor(1) as thread:
                reason = thread.submit(find_difference, variant).result()
        except Exception as error:  # any error leaves the path without kernels
            reason = gpu.summary(error)
            # drivers and cuBLAS have words of their own for it
            if isinstance(error, torch.OutOfMemoryError) or "out of memory" in reason or "ALLOC_FAILED" in reason:
                path = None  # a later process may have more
            else:
                _check_device(variant, error)
        _remember(path, reason)
    if reason:
        logger.warning("evolving attention takes its slower way for %s: %s", variant, reason)
    return not reason


def _path(variant: Variant) -> Path | None:
    """The file of a variant's verdict; its name changes with device, driver, libraries and source."""
    if variant.device.type != "cuda":
        return None
    driver = Path("/proc/driver/nvidia/version")
    parts = [
        *(torch.cuda.get_device_name(variant.device), torch.cuda.get_device_capability(variant.device)),
        *(driver.read_text() if driver.exists() else "", torch.__version__, torch.version.cuda, triton.__version__),
        *(_source(), *variant[1:]),
    ]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "evolving_attention" / "gpu"
    return folder / hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


@functools.cache
def _source() -> str:
    return "".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py")))


def _remember(path: Path | None, reason: str) -> None:
    """Keep a verdict; a folder that cannot be written is no reason to stop."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(reason)
        unfinished.replace(path)
    except OSError as error:
        logger.info("the verdict on the GPU's kernels is not kept in %s: %s", path.parent, error)


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


def find_difference(variant: Variant) -> str:
    """The faults of the kernels on small problems, in words; "" if there are none."""
    wrong = (
        f"{name} differs from the plain composition's by {error:.2g} of its largest number"
        for name, error in errors(variant).items()
        if not error <= TOLERANCE[variant.dtype]  # NaN is not
    )
    return next(wrong, "")


def errors(variant: Variant) -> dict[str, float]:
    """The distance of the kernels from float64, as a share of the largest number, by the name of each result.

    Two problems use everything that a call may have. A third gives float32 numbers of many bits, of which a product in
    TF32 drops some. It compares values alone: gradients jump where rounding changes a ReLU.
    """
    found = _errors_of(variant, _problem(variant)) | _errors_of(variant, _problem(variant, learnt=True))
    if variant.dtype == torch.float32:
        fine = _errors_of(variant._replace(gradients=False), _problem(variant, fine=2.0**-12))
        found |= {f"{name}, of numbers with many bits,": error for name, error in fine.items()}
    return found


def _multiples(step: float, *shape: int, spread: float = 1.0) -> Tensor:
    """Random multiples of a power of two. No type rounds such sums, so ReLU passes the same pixels in each."""
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * spread / step).round() * step


def _problem(variant: Variant, learnt: bool = False, fine: float = 1.0) -> Call:
    """A small call in float64: an encoder's with dropout and weights, or a decoder's with given logits, learnt shares.

    The decoder carries another sum than it mixes.
    """
    rows, columns = SIZES[variant.short]
    width = variant.width if variant.unit == 8 else max(1, variant.width - 3)
    heads, size = variant.heads, variant.kernel_size
    maps = (2, heads, rows, columns)

    def vectors(length: int, step: float) -> Tensor:
        return _multiples(step * fine, length, 2, heads, width).permute(1, 2, 0, 3)  # the layout of projections

    if learnt:
        masked = hidden = torch.ones(rows, columns, dtype=torch.bool).triu(1)[None, None]
        shares = [torch.tensor(share, dtype=torch.float64) for share in (0.25, 0.5, 0.375, 0.75, 0.5)]
    else:
        masked = torch.zeros(2, 1, 1, columns, dtype=torch.bool)
        masked[0, ..., -2:] = True
        hidden = masked.expand(2, 1, rows, columns).clone()
        hidden[1, :, -1] = True
        shares = [0.25, 0.5, 0.375, 0.25, 0.5]
    return Call(
        **{"q": vectors(rows, 1), "k": vectors(columns, 1) / 2, "v": vectors(columns, 1 / 32)},
        scale=2.0 ** -(variant.width.bit_length() // 2),
        geometry=Geometry.DECODER_SELF if learnt else Geometry.ENCODER_SELF,
        kernel_size=max(1, size),
        coefficients=Coefficients(*shares),
        weight=_multiples(fine / 64, heads, heads, size, size, spread=(heads * size * size) ** -0.5) if size else None,
        bias=_multiples(fine / 64, heads).abs() if size else None,  # ReLU must pass some pixels
        given=_multiples(1 / 8, *maps) if learnt else None,
        previous=_multiples(fine / 8, *maps).flip(1),
        **{"hidden": hidden, "masked": masked, "keep_map": True, "need_weights": not learnt},
        dropout=DROPPED if variant.gradients and not learnt else 0.0,
    )


def _errors_of(variant: Variant, call: Call) -> dict[str, float]:
    with torch.enable_grad():
        kept = _kept(variant, call) / (1 - DROPPED) if call.dropout > 0 else None
        ours = _results(variant, _moved(call, variant.device, variant.dtype), _by_kernels)
        truth = _results(
            *(variant, _moved(call, torch.device("cpu"), torch.float64)),
            lambda call: _by_plain_composition(call, kept),
        )
    return {
        name: float((ours[name].cpu().double() - true).abs().max() / true.abs().max().clamp(min=1e-6))
        for name, true in truth.items()
    }


def _moved(call: Call, device: torch.device, dtype: torch.dtype) -> Call:
    """A copy of a call whose tensors want gradients."""

    def there(x: Tensor) -> Tensor:
        return x.to(device, dtype).detach().requires_grad_()

    tensors = {name: there(x) for name in INPUTS if (x := getattr(call, name)) is not None}
    tensors |= {"hidden": call.hidden.to(device), "masked": call.masked.to(device)}
    shares = [there(share) if isinstance(share, Tensor) else share for share in call.coefficients]
    return replace(call, coefficients=Coefficients(*shares), **tensors)


def _results(variant: Variant, call: Call, run: Callable[[Call], tuple[Tensor | None, ...]]) -> dict[str, Tensor]:
    """All results of a call, and gradients of an uneven sum of them, by name."""
    found = {
        name: x for name, x in zip(("the context", "A_logit", "the weights"), run(call), strict=True) if x is not None
    }
    if not variant.gradients:
        return {name: x.detach() for name, x in found.items()}
    loss = sum((x * _multiples(1 / 32, *x.shape).to(x)).sum() for x in found.values())
    inputs = {f"the gradient of {name}": x for name in INPUTS if (x := getattr(call, name)) is not None}
    shares = [share for share in call.coefficients if isinstance(share, Tensor)]
    gradients = torch.autograd.grad(loss, [*inputs.values(), *shares], allow_unused=True)
    found |= {name: x for name, x in zip(inputs, gradients, strict=False) if x is not None}
    of_shares = [x for x in gradients[len(inputs) :] if x is not None]
    if of_shares:  # as one: each alone may be a small sum of large numbers
        found["the gradient of the shares"] = torch.stack(of_shares)
    return {name: x.detach() for name, x in found.items()}


def _by_kernels(call: Call) -> tuple[Tensor | None, ...]:
    return gpu.attend(call, torch.tensor(SEED, device=call.v.device))[:3]


def _kept(variant: Variant, call: Call) -> Tensor:
    """The weights that dropout keeps, B x K x T x S: contexts of unit vectors as values, as many columns as fit."""
    call = replace(_moved(call, variant.device, variant.dtype), masked=None)
    width, columns = call.v.shape[3], call.v.size(2)
    pieces = []
    for start in range(0, columns, width):
        v = torch.zeros_like(call.v)
        v[..., start : start + width, :] = torch.eye(width, device=v.device)[: columns - start]
        pieces.append(_by_kernels(replace(call, v=v))[0].detach().cpu().double())
    kept = torch.cat(pieces, 3)[..., :columns] != 0
    share = kept.double().mean().item()
    if abs(share - (1 - DROPPED)) > 0.2:
        raise ValueError(f"dropout of {DROPPED} keeps {share:.2f}")
    return kept


def _by_plain_composition(call: Call, kept: Tensor | None) -> tuple[Tensor | None, ...]:
    """All results; dropout multiplies by ``kept``."""
    found = compose(replace(call, dropout=0.0, need_weights=True))
    context = found.context if kept is None else (found.weights * kept) @ call.v
    return context, found.a_logit, found.weights if call.need_weights else None
