"""Evolving attention through the GPU kernels: the numbers of the plain composition, but faster.

The backward pass gets the inputs, the context and two numbers of every row, and computes the rest again. Each variant
of the kernels is tried against the plain composition before it is trusted: see ``trial``.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import functools
import logging
import os
from types import ModuleType

import torch
from torch import Tensor

from ...evolution import reach
from ..call import Call, Result

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_HEADS, MOST_WIDTH = 16, 128


def knows(call: Call) -> bool:
    """Whether the kernels can do this call, and their variant has passed its trial on this device."""
    v = call.v
    _, heads, rows, columns = call.maps
    if not (
        (v.is_cuda or _interpreted())
        and v.dtype in DTYPES
        and v.size(3) <= MOST_WIDTH
        and (call.given is not None or call.q.size(3) == v.size(3))
        and call.kernel_size % 2 == 1
        and heads * (rows + call.kernel_size) * (columns + call.kernel_size + 16) < 2**31  # a place within a sentence
        and not call.step
        and call.above is None
        and call.q.size(0) == v.size(0)  # no beams that share their keys
        and 0 <= call.dropout <= 1
        and all(share.dtype in DTYPES for share in call.coefficients if isinstance(share, Tensor))
    ):
        return False
    if heads > MOST_HEADS:
        _say_once(f"the kernels know up to {MOST_HEADS} heads, and this attention has {heads}")
        return False
    if _kernels() is None:
        return False
    from . import trial

    return trial.passed(trial.Variant.of(call))


def attend(call: Call, seed: Tensor | None = None) -> Result:
    """The result of a call that ``knows`` knows.

    Args:
        seed: of dropout, one number (int64) on the call's device. By default PyTorch's generator for this device draws
            it, so that a CUDA graph drops other weights in each replay, and checkpointed layers the same ones.
    """
    arguments = arguments_of(call, seed)
    operation = _kernels()
    run = torch.ops.evolving_attention.gpu_forward if operation.looked_at() else operation.Attend.apply
    context, a_logit, _, weights = run(*arguments)
    return Result(context, a_logit if call.keep_map else None, weights if call.need_weights else None)


def arguments_of(call: Call, seed: Tensor | None = None) -> tuple:
    """The arguments of ``operation.forward``, without inputs that have no effect: these get no gradient."""
    a, b, c, d, e = (share if isinstance(share, Tensor) else float(share) for share in call.coefficients)
    previous = call.previous
    if previous is None:
        a = d = 0.0
    convolved = call.weight is not None and not is_zero(c)
    separate = not (convolved and call.coefficients.carries_what_it_reads)
    if not convolved:
        a = b = c = 0.0
    if is_zero(a) and is_zero(d):
        previous = None
    shares, learnt = (a, b, c, d, e), None
    if any(isinstance(share, Tensor) for share in shares):
        numbers = [s.float() if isinstance(s, Tensor) else torch.full((), s, device=call.v.device) for s in shares]
        shares, learnt = (0.0,) * 5, torch.stack(numbers)
    if call.dropout > 0 and seed is None:
        seed = torch.randint(2**63 - 1, (), device=call.v.device)
    left, top, triangular = reach(call.geometry, call.kernel_size)
    return (
        *(call.q, call.k, call.v, call.given, previous),
        *((call.weight, call.bias) if convolved else (None, None)),
        *(learnt, call.hidden if convolved else None, call.masked, seed if call.dropout > 0 else None),
        *(list(shares), separate, call.scale, [left, top, int(triangular)], call.dropout, call.need_weights),
    )


def is_zero(share: float | Tensor) -> bool:
    """Whether a share is always nothing."""
    return not isinstance(share, Tensor) and share == 0


def _interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which runs the kernels on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def summary(error: Exception) -> str:
    """The first and the last line of an error: Triton's compiler gives the place first and the reason last."""
    lines = [line.strip() for line in f"{type(error).__name__}: {error}".splitlines() if line.strip()]
    return lines[0] if len(lines) == 1 else f"{lines[0]} ... {lines[-1]}"


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("evolving attention takes its slower way on the GPU: %s", reason)


@functools.cache
def _kernels() -> ModuleType | None:
    """The module that launches the kernels; None, and a line in the log, where there is no Triton for this machine."""
    try:
        from . import operation

        if _interpreted() == operation.INTERPRETED:
            return operation
        reason = f"Triton was imported {'without' if _interpreted() else 'for'} its interpreter"
    except Exception as error:  # whatever it is, there is a path without kernels
        reason = summary(error)
    _say_once(reason)
    return None
