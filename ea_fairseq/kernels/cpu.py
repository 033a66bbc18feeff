"""Evolving attention on the CPU, in float32, by ``cpu_kernel.c``: the plain composition's numbers, one pass.

The C file is compiled with the machine's own compiler when it is first needed, in a second or two, and kept in the
user's cache folder. Where there is no compiler, one line is logged and the plain composition does the work.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head dimension. Masks: True = masked.
"""

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import subprocess
import tempfile
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .evolution import Evolution, reach

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_kernel.c")
_FLAGS = "-O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared".split()


def runs(q: Tensor) -> bool:
    """Whether queries are of a device and type that this is for, and the kernel could be compiled."""
    return q.device.type == "cpu" and q.dtype == torch.float32 and _library() is not None


def evolving_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    evolution: Evolution,
    *,
    scale: float = 1.0,
    hidden: Tensor | None = None,
    masked: Tensor | None = None,
    previous: Tensor | None = None,
    dropout: float = 0.0,
    keep_map: bool = False,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """From queries, keys and values to the context, with maps that evolve; differentiable.

    Args:
        q: B x K x T x D.
        k, v: B x K x S x D.
        evolution: its geometry, alpha, beta and convolution.
        scale: of q k^T.
        hidden: broadcasts to B x 1 x T x S; where the convolution must see zero.
        masked: broadcasts to B x 1 x T x S; keys that must not be attended to.
        previous: B x K x T x S, A_logit of the layer before.
        dropout: probability that a weight is dropped.
        keep_map: whether A_logit is wanted, for the layer after.
        need_weights: whether the weights are wanted.

    Returns:
        context B x K x T x D; A_logit or None; attention weights before dropout or None. Maps are B x K x T x S.
    """
    noise = None
    if dropout > 0:
        noise = q.new_empty(q.size(0), q.size(1), q.size(2), k.size(2)).bernoulli_(1 - dropout).div_(1 - dropout)
    weight, bias = (None, None) if evolution.conv is None else (evolution.conv.weight, evolution.conv.bias)
    return _EvolvingAttention.apply(
        q, k, v, previous, weight, bias, evolution, scale, hidden, masked, noise, keep_map, need_weights
    )


def evolving_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    evolution: Evolution,
    *,
    scale: float = 1.0,
    hidden: Tensor | None = None,
    masked: Tensor | None = None,
    above: Tensor | None = None,
    need_weights: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """A few rows of a decoder's maps, without gradients: the forward pass of step-by-step decoding.

    Args:
        q, k, v, evolution, scale, hidden, masked, need_weights: as in ``evolving_attention``.
        above: B x K x rows_above x (at most S), A_input of the rows before these; None: outside of the map.

    Returns:
        context B x K x T x D; what is above the next step's rows, B x K x rows_above x S; attention weights or None.
    """
    conv = evolution.conv
    weight, bias = (None, None) if conv is None else (conv.weight, conv.bias)
    problem = _Problem.of(evolution, q, k, v, None, weight, bias, scale, hidden=hidden, masked=masked, above=above)
    kept = problem.give("kept", (*problem.maps[:2], evolution.rows_above, problem.maps[3]))
    weights = problem.give("weights", problem.maps) if need_weights else None
    context = problem.vectors("context", q)
    problem.run("evolving_attention_forward")
    return context, kept, weights


class _EvolvingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, previous, weight, bias, evolution, scale, hidden, masked, noise, keep_map, need_weights):
        masks = {"hidden": hidden, "masked": masked, "noise": noise}
        problem = _Problem.of(evolution, q, k, v, previous, weight, bias, scale, **masks)
        a_logit = problem.give("a_logit", problem.maps) if keep_map else None
        weights = problem.give("weights", problem.maps) if need_weights else None
        context = problem.vectors("context", q)
        problem.run("evolving_attention_forward")
        ctx.evolution, ctx.scale = evolution, scale
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, previous, weight, bias, hidden, masked, noise)
        return context, a_logit, weights

    @staticmethod
    @once_differentiable
    def backward(ctx, d_context, d_a_logit, d_weights):
        q, k, v, previous, weight, bias, hidden, masked, noise = ctx.saved_tensors
        masks = {"hidden": hidden, "masked": masked, "noise": noise}
        problem = _Problem.of(ctx.evolution, q, k, v, previous, weight, bias, ctx.scale, **masks)
        problem.read(d_a_logit=d_a_logit, d_weights=d_weights)
        if d_context is not None:
            problem.see("d_context", d_context)
        d_q, d_k, d_v = (problem.vectors(name, x) for name, x in (("d_q", q), ("d_key", k), ("d_v", v)))
        d_previous = None if previous is None else problem.give("d_previous", problem.maps)
        d_weight = d_bias = None
        if weight is not None:
            d_weight = problem.give("d_kernel", (q.size(0), *weight.shape))
            d_bias = problem.give("d_bias", (q.size(0), *bias.shape))
        problem.run("evolving_attention_backward")
        if d_context is None:
            d_v = None
        if weight is not None:
            # A part for each sentence, in order: the sum does not depend on the number of threads.
            d_weight, d_bias = d_weight.sum(0), d_bias.sum(0)
        return d_q, d_k, d_v, d_previous, d_weight, d_bias, *[None] * 7


class _Vectors(Structure):
    _fields_ = [("data", c_void_p), ("sb", c_int64), ("sh", c_int64), ("st", c_int64)]


class _Mask(Structure):
    _fields_ = [("data", c_void_p), ("sb", c_int64), ("st", c_int64), ("ss", c_int64)]


class _Problem(Structure):
    """``Problem`` of cpu_kernel.c."""

    _fields_ = [
        *((name, c_int64) for name in ("B", "K", "T", "S", "D", "k", "before", "left", "top", "lower")),
        *((name, c_float) for name in ("scale", "alpha", "beta")),
        *((name, _Vectors) for name in ("q", "key", "v")),
        *((name, _Mask) for name in ("hidden", "masked")),
        *((name, c_void_p) for name in ("previous", "above", "kernel", "bias", "noise")),
        ("context", _Vectors),
        *((name, c_void_p) for name in ("a_logit", "weights", "kept")),
        ("d_context", _Vectors),
        *((name, c_void_p) for name in ("d_a_logit", "d_weights")),
        *((name, _Vectors) for name in ("d_q", "d_key", "d_v")),
        *((name, c_void_p) for name in ("d_previous", "d_kernel", "d_bias")),
    ]

    @classmethod
    def of(
        cls, evolution, q, k, v, previous, weight, bias, scale, *, hidden, masked, noise=None, above=None
    ) -> "_Problem":
        """What is read. Whoever calls keeps these tensors for as long as this is used."""
        copies = []
        q, k, v = (_with_contiguous_vectors(x, copies) for x in (q, k, v))
        tensors = (_contiguous(x, copies) for x in (previous, above, weight, bias, noise))
        maps = (*q.shape[:3], k.size(2))
        problem = cls(
            *(*maps, q.size(3), evolution.kernel_size, 0 if above is None else above.size(3)),
            *reach(evolution.geometry, evolution.kernel_size),
            *(scale, evolution.alpha if previous is not None else 0, evolution.beta),
            *(_vectors(q), _vectors(k), _vectors(v), _mask(hidden, maps), _mask(masked, maps)),
            *(None if x is None else x.data_ptr() for x in tensors),
        )
        problem.tensors, problem.maps = copies, maps
        return problem

    def see(self, name, x):
        """One more of the inputs that are vectors, B x K x _ x D."""
        setattr(self, name, _vectors(_with_contiguous_vectors(x, self.tensors)))

    def read(self, **maps):
        """More of the inputs that are maps, or None."""
        for name, x in maps.items():
            if x is not None:
                setattr(self, name, _contiguous(x, self.tensors).data_ptr())

    def give(self, name, shape):
        """A contiguous result."""
        result = torch.empty(shape, dtype=torch.float32)
        setattr(self, name, result.data_ptr())
        return result

    def vectors(self, name, like):
        """A result B x K x N x D that lies in memory as N x B x K x D, where projections want it."""
        batch, heads, length, depth = like.shape
        result = torch.empty(length, batch, heads, depth, dtype=torch.float32).permute(1, 2, 0, 3)
        setattr(self, name, _vectors(result))
        return result

    def run(self, function):
        if getattr(_library(), function)(byref(self), torch.get_num_threads()):
            raise MemoryError(f"not enough memory for attention maps of {self.K} x {self.T} x {self.S}")


def _vectors(x: Tensor) -> _Vectors:
    return _Vectors(x.data_ptr(), *x.stride()[:3])


def _mask(mask: Tensor | None, maps) -> _Mask:
    if mask is None:
        return _Mask()
    batch, _, rows, columns = maps
    b, _, t, s = mask.expand(batch, 1, rows, columns).stride()
    return _Mask(mask.data_ptr(), b, t, s)


def _with_contiguous_vectors(x: Tensor, copies: list) -> Tensor:
    return x if x.stride(3) == 1 else _contiguous(x, copies)


def _contiguous(x: Tensor | None, copies: list) -> Tensor | None:
    """The tensor, or a contiguous copy, which is added to those that must live on."""
    if x is None or x.is_contiguous():
        return x
    copies.append(x.contiguous())
    return copies[-1]


@functools.cache
def _library():
    """cpu_kernel.c, compiled; None, and a line in the log, where that is not possible."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    built = _cache() / f"cpu_kernel-{_fingerprint(compiler)}.so"
    try:
        if not built.exists():
            _compile(compiler, built)
        library = ctypes.CDLL(str(built))
    except (OSError, subprocess.SubprocessError) as error:
        lines = (getattr(error, "stderr", None) or str(error)).splitlines()
        reason = next((line for line in lines if "error" in line), lines[-1])
        logger.warning("evolving attention takes its slower way on the CPU: %s", reason)
        return None
    for function in (library.evolving_attention_forward, library.evolving_attention_backward):
        function.argtypes, function.restype = [POINTER(_Problem), c_int], c_int
    return library


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ea_fairseq"


def _fingerprint(compiler) -> str:
    """Changes with source, compiler, flags and kind of processor."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    parts = [_SOURCE.read_text(), *compiler, *_FLAGS, platform.machine(), processor]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _compile(compiler, built):
    """Into a file of another name first: several processes may do this at once."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        command = [*compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
        made.replace(built)
