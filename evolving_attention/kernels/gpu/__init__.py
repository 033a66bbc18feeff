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

from ...call import Call, Result
from ..refusals import summary

logger = logging.getLogger(__name__)

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_HEADS, MOST_WIDTH = 16, 128


def refuses(call: Call) -> str | None:
    """Why the kernels do not do a call whose types and shapes agree; for one, their variant failed its trial."""
    v = call.v
    _, heads, rows, columns = call.maps
    if not (v.is_cuda or _interpreted()) or v.dtype not in DTYPES or v.size(3) > MOST_WIDTH:
        return f"GPU kernel: computes float16, bfloat16 and float32 on GPUs, and heads of at most {MOST_WIDTH} numbers"
    if heads * (rows + call.kernel_size) * (columns + call.kernel_size) >= 2**31:  # a place within a sentence
        return "GPU kernel: the maps have too many numbers"
    if heads > MOST_HEADS:
        reason = f"the kernels know up to {MOST_HEADS} heads, and this attention has {heads}"
        _say_once(reason)
        return reason
    if _kernels() is None:
        return "GPU kernel: Triton does not work here"
    from . import trial

    variant = trial.Variant.of(call)
    # Dynamo cannot tell yet whether vectors begin at multiples of 8.
    units = {variant.unit, 1} if torch.compiler.is_dynamo_compiling() else {variant.unit}
    if not all(trial.passed(tuple(variant._replace(unit=unit))) for unit in units):
        return f"GPU kernel: {variant} has not passed its trial"
    return None


def attend(call: Call, seed: Tensor | None = None) -> Result:
    """The result of a call that is not refused. seed: see ``Call.reduced``."""
    from .operation import operation

    return operation.attend(call, seed)


def _interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which runs the kernels on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("evolving attention falls back to slower PyTorch operations on the GPU: %s", reason)


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
