"""Evolving attention through the GPU kernels: the numbers of the plain composition, but faster.

The backward pass gets the inputs, the context and two numbers of every row, and computes the rest again. Each variant
of the kernels is tried against the plain composition before it is trusted: see ``trial``.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ...cache import Cache
from ...call import Call, Result
from ..operation import Inputs
from ..refusals import summary

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
        and heads * (rows + call.kernel_size) * (columns + call.kernel_size) < 2**31  # a place within a sentence
    ):
        return False
    if heads > MOST_HEADS:
        _say_once(f"the kernels know up to {MOST_HEADS} heads, and this attention has {heads}")
        return False
    if _kernels() is None:
        return False
    from . import trial

    variant = trial.Variant.of(call)
    if torch.compiler.is_dynamo_compiling() and not trial.passed(tuple(variant._replace(unit=1))):
        return False  # it cannot tell yet whether vectors begin at multiples of 8
    return trial.passed(tuple(variant))


def attend(call: Call, seed: Tensor | None = None) -> Result:
    """The result of a call that ``knows`` knows. seed: see ``operation.inputs_of``."""
    return _kernels().operation.attend(call, seed)


def prepare(first: Inputs) -> Callable[[Tensor, Cache, bool], Result]:
    """The steps of a search after its first: see ``Steps``."""
    run, convolved = _kernels().operation.run, first.weight is not None
    first = first._replace(q=None, k=None, v=None, hidden=None, masked=None, above=None)  # not to keep them in memory

    def step(q: Tensor, cache: Cache, need_weights: bool) -> Result:
        masked = None if cache.padding is None else cache.padding[:, None, None, :]
        hidden, above = (masked, cache.rows) if convolved else (None, None)
        changed = {"q": q[:, :, None], "k": cache.keys, "v": cache.values, "hidden": hidden, "masked": masked}
        found = run(first._replace(**changed, above=above, need_weights=need_weights))
        context = found.context.permute(2, 0, 1, 3).flatten(2)
        return Result(context, None, found.weights if need_weights else None, None if above is None else found.kept)

    return step


def _interpreted() -> bool:
    """Whether Triton's interpreter is asked for, which runs the kernels on the CPU: slowly, for tests."""
    return os.environ.get("TRITON_INTERPRET") == "1"


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
