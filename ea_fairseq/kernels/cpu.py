"""Evolving attention on the CPU, in float32, by ``cpu_kernel.c``: the plain composition's numbers, one pass.

The C file is compiled with the machine's own compiler when it is first needed, in a few seconds, and kept in the
user's cache folder. Where that is not possible, one line is logged and the plain composition does the work.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
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
import threading
from ctypes import POINTER, Structure, byref, c_float, c_int, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from ..evolution import Coefficients, Geometry, reach
from .call import Call, Result

logger = logging.getLogger(__name__)

_SOURCE = Path(__file__).with_name("cpu_kernel.c")
_INCLUDED = Path(__file__).with_name("cpu_vectors.h")
_FLAGS = "-O3 -march=native -ffp-contract=fast -fno-math-errno -fno-trapping-math -fopenmp -fPIC -shared".split()
_COMPILING_TAKES_AT_MOST = 300  # seconds

#: the fields of a call that may have gradients, in the order in which autograd is given them
_DIFFERENTIABLE = ("q", "k", "v", "given", "previous", "weight", "bias")


def knows(call: Call) -> bool:
    """Whether this kernel gives the numbers of this call, whose types and shapes agree: see ``attend`` of this package.

    Step by step, and where hypotheses share keys, it has no backward pass: it refuses where any gradient is wanted.
    """
    c = call.coefficients.c
    by_rows = call.step or call.above is not None
    return (
        call.v.device.type == "cpu"
        and call.v.dtype == torch.float32
        and call.v.size(3) > 0
        and (call.given is not None or call.q.size(3) == call.v.size(3))
        and call.kernel_size % 2 == 1
        and 0 <= call.dropout <= 1
        and all(x.dim() == 0 and x.dtype == torch.float32 for x in call.coefficients if isinstance(x, Tensor))
        # a convolution without a share would still hide what it does not see
        and (call.weight is None or isinstance(c, Tensor) or c != 0)
        and not (by_rows and call.geometry == Geometry.ENCODER_SELF)
        and not ((by_rows or call.sources is not None) and _wants_gradients(call))
        and not any(x.is_neg() for x in call.tensors)  # such a tensor's memory holds its opposite
        and _library() is not None
    )


def attend(call: Call) -> Result:
    """The result of a call that this kernel knows.

    Dropout's random bits are a function of one number, which is drawn from PyTorch's generator for the CPU.
    """
    seed = int(torch.randint(2**63 - 1, (), device="cpu")) if call.dropout > 0 else 0
    if not _wants_gradients(call):
        return _forward(call, seed)
    tensors = [getattr(call, name) for name in _DIFFERENTIABLE]
    context, a_logit, weights = _EvolvingAttention.apply(call, seed, *tensors, *call.coefficients)
    return Result(context, a_logit, weights)


def _wants_gradients(call: Call) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in call.tensors)


def _forward(call: Call, seed: int) -> Result:
    problem = _Problem.of(call, seed)
    batch, heads, _, columns = call.maps
    a_logit = problem.result("a_logit", call.maps) if call.keep_map else None
    weights = problem.result("weights", call.maps) if call.need_weights else None
    kept = None
    if call.step and call.weight is not None:
        kept = problem.result("kept", (batch, heads, call.kernel_size - 1, columns))
    context = problem.vectors_result("context", (*call.maps[:3], call.v.size(3)))
    problem.run("evolving_attention_forward")
    return Result(context, a_logit, weights, kept)


class _EvolvingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, call: Call, seed: int, *inputs: Tensor | float | None) -> tuple[Tensor | None, ...]:
        """``inputs`` are the call's tensors of ``_DIFFERENTIABLE``, then its five coefficients."""
        result = _forward(call, seed)
        # What is kept of the call are its constants; its tensors are autograd's to keep.
        ctx.call = replace(call, **dict.fromkeys((*_DIFFERENTIABLE, "hidden", "masked")))
        ctx.seed = seed
        ctx.constants = [None if isinstance(x, Tensor) else x for x in call.coefficients]
        learnt = [x if isinstance(x, Tensor) else None for x in call.coefficients]
        ctx.save_for_backward(*inputs[: len(_DIFFERENTIABLE)], call.hidden, call.masked, *learnt)
        ctx.set_materialize_grads(False)
        return result.context, result.a_logit, result.weights

    @staticmethod
    @once_differentiable
    def backward(
        ctx: FunctionCtx, d_context: Tensor | None, d_a_logit: Tensor | None, d_weights: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        *tensors, hidden, masked, a, b, c, d, e = ctx.saved_tensors
        values = zip((a, b, c, d, e), ctx.constants, strict=True)
        call = replace(
            ctx.call,
            **dict(zip(_DIFFERENTIABLE, tensors, strict=True)),
            **{"hidden": hidden, "masked": masked},
            coefficients=Coefficients(*(constant if learnt is None else learnt for learnt, constant in values)),
        )
        wanted = dict(zip((*_DIFFERENTIABLE, "a", "b", "c", "d", "e"), ctx.needs_input_grad[2:], strict=True))
        gradients = _gradients(call, ctx.seed, wanted, d_context, d_a_logit, d_weights)
        return None, None, *(gradients.get(name) for name in wanted)


def _gradients(
    call: Call,
    seed: int,
    wanted: dict[str, bool],
    d_context: Tensor | None,
    d_a_logit: Tensor | None,
    d_weights: Tensor | None,
) -> dict[str, Tensor | None]:
    """The gradients of a call by the names of what they are of: the tensors' and a, b, c, d and e."""
    problem = _Problem.of(call, seed)
    problem.read(d_a_logit=d_a_logit, d_weights=d_weights)
    if d_context is not None:
        problem.read_vectors("d_context", d_context)
    gradients = {"v": problem.vectors_result("d_v", call.v.shape)}
    if call.given is None and (wanted["q"] or wanted["k"]):
        gradients["q"] = problem.vectors_result("d_q", call.q.shape)
        gradients["k"] = problem.vectors_result("d_key", call.k.shape)
    for name in ("given", "previous"):
        if wanted[name]:
            gradients[name] = problem.result(f"d_{name}", call.maps)
    # Each sentence has a part of its own in these, summed in order: bits do not depend on the number of threads.
    parts = {}
    if call.weight is not None:
        parts["weight"] = problem.result("d_kernel", (call.maps[0], *call.weight.shape))
        parts["bias"] = problem.result("d_bias", (call.maps[0], *call.bias.shape))
    if any(wanted[name] for name in "abcde"):
        parts["shares"] = problem.result("d_shares", (call.maps[0], 5), torch.float64)
    problem.run("evolving_attention_backward")
    if d_context is None:
        del gradients["v"]
    sums = {name: part.sum(0) for name, part in parts.items()}
    if "shares" in sums:
        gradients |= _gradients_of_coefficients(call, wanted, sums.pop("shares").float())
    return gradients | sums


def _gradients_of_coefficients(call: Call, wanted: dict[str, bool], shares: Tensor) -> dict[str, Tensor]:
    """Those that were used: without a convolution a, b and c are not; a and d belong to the previous map.

    Where what is carried is what is mixed, all that comes of both is in the gradients of a and b.
    """
    unused = set()
    if call.weight is None:
        unused |= set("abc")
    if call.previous is None:
        unused |= set("ad")
    if _carries_mixed(call):
        unused |= set("de")
    return {name: share for name, share in zip("abcde", shares, strict=True) if wanted[name] and name not in unused}


def _carries_mixed(call: Call) -> bool:
    """Whether what is carried is what is mixed, always: then it is zero at hidden places, too, as in evolution.py."""
    return call.weight is not None and call.coefficients.carries_what_it_reads


class _Vectors(Structure):
    _fields_ = [("data", c_void_p), ("sb", c_int64), ("sh", c_int64), ("st", c_int64)]


class _Mask(Structure):
    _fields_ = [("data", c_void_p), ("sb", c_int64), ("st", c_int64), ("ss", c_int64)]


class _Problem(Structure):
    """``Problem`` of cpu_kernel.c: one call, for as long as one C function runs."""

    _fields_ = [
        *((name, c_int64) for name in ("B", "K", "T", "S", "D", "k", "before", "left", "top", "lower", "same")),
        *((name, c_float) for name in ("scale", "a", "b", "c", "d", "e")),
        *(("threshold", c_uint32), ("kept_share", c_float), ("seed", c_uint64)),
        *((name, _Vectors) for name in ("q", "key", "v")),
        *((name, _Mask) for name in ("hidden", "masked")),
        *((name, c_void_p) for name in ("previous", "above", "kernel", "bias", "given", "sources")),
        ("context", _Vectors),
        *((name, c_void_p) for name in ("a_logit", "weights", "kept")),
        ("d_context", _Vectors),
        *((name, c_void_p) for name in ("d_a_logit", "d_weights")),
        *((name, _Vectors) for name in ("d_q", "d_key", "d_v")),
        *((name, c_void_p) for name in ("d_previous", "d_given", "d_kernel", "d_bias", "d_shares")),
    ]

    @classmethod
    def of(cls, call: Call, seed: int) -> "_Problem":
        """Enter what is read. The call's own tensors live as long as it does, copies of them as long as this."""
        problem = cls()
        problem.copies = []
        problem.B, problem.K, problem.T, problem.S = call.maps
        problem.D, problem.k, problem.scale = call.v.size(3), call.kernel_size, call.scale
        problem.left, problem.top, problem.lower = reach(call.geometry, call.kernel_size)
        problem.same = _carries_mixed(call)
        for name, share in zip("abcde", call.coefficients, strict=True):
            setattr(problem, name, float(share))
        if call.previous is None:
            problem.a = problem.d = 0
        problem.threshold = round(call.dropout * 65536)
        problem.kept_share = 1 - problem.threshold / 65536
        problem.seed = seed
        problem.read_vectors("v", call.v)
        if call.given is None:
            problem.read_vectors("q", call.q)
            problem.read_vectors("key", call.k)
        problem.hidden, problem.masked = (_mask(mask, call.maps) for mask in (call.hidden, call.masked))
        problem.read(previous=call.previous, kernel=call.weight, bias=call.bias, given=call.given)
        problem.read(sources=call.sources)
        if call.above is not None and call.weight is not None:
            problem.before = call.above.size(3)
            problem.read(above=call.above)
        return problem

    def read(self, **tensors: Tensor | None) -> None:
        """Enter the addresses of inputs, which are to be contiguous: copied where they are not."""
        for name, x in tensors.items():
            if x is not None:
                setattr(self, name, self._contiguous(x).data_ptr())

    def read_vectors(self, name: str, x: Tensor) -> None:
        """Enter an input B x K x _ x D, of which only the last axis must be contiguous."""
        setattr(self, name, _vectors(x if x.stride(3) == 1 else self._contiguous(x)))

    def _contiguous(self, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
            self.copies.append(x)
        return x

    def result(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a contiguous output of this shape, and enter its address in the field of this name."""
        result = torch.empty(shape, dtype=dtype, device="cpu")
        setattr(self, name, result.data_ptr())
        return result

    def vectors_result(self, name: str, shape: tuple[int, int, int, int]) -> Tensor:
        """Allocate and enter an output B x K x N x D, in memory N x B x K x D, which is where projections want it."""
        batch, heads, length, depth = shape
        result = torch.empty(length, batch, heads, depth, dtype=torch.float32, device="cpu").permute(1, 2, 0, 3)
        setattr(self, name, _vectors(result))
        return result

    def run(self, function: str) -> None:
        """Call a function of the C file, on as many threads as PyTorch uses."""
        if getattr(_library(), function)(byref(self), torch.get_num_threads()):
            raise MemoryError(f"not enough memory for attention maps of {self.K} x {self.T} x {self.S}")


def _vectors(x: Tensor) -> _Vectors:
    return _Vectors(x.data_ptr(), *x.stride()[:3])


def _mask(mask: Tensor | None, maps: tuple[int, int, int, int]) -> _Mask:
    if mask is None:
        return _Mask()
    batch, _, rows, columns = maps
    b, _, t, s = mask.expand(batch, 1, rows, columns).stride()
    return _Mask(mask.data_ptr(), b, t, s)


# ---- the C file, compiled

_loading = threading.Lock()


def _library() -> ctypes.CDLL | None:
    """cpu_kernel.c, compiled; None where that is not possible. Tried once, while other threads wait."""
    with _loading:
        return _load()


@functools.cache
def _load() -> ctypes.CDLL | None:
    """Whatever stops this is named in one line of the log: there is a way without the kernel."""
    try:
        compiler = shlex.split(os.environ.get("CC") or "cc")
        built = _cache() / f"cpu_kernel-{_fingerprint(compiler)}.so"
        library = _open(compiler, built)
        for function in (library.evolving_attention_forward, library.evolving_attention_backward):
            function.argtypes, function.restype = [POINTER(_Problem), c_int], c_int
        return library
    except Exception as error:
        logger.warning("evolving attention takes its slower way on the CPU: %s", _reason(error))
        return None


def _open(compiler: list[str], built: Path) -> ctypes.CDLL:
    """The library, compiled where there is none. One that does not load is compiled again, once."""
    if built.exists():
        try:
            return ctypes.CDLL(str(built))
        except OSError:
            pass
    _compile(compiler, built)
    return ctypes.CDLL(str(built))


def _compile(compiler: list[str], built: Path) -> None:
    """Into a file of another name first: several processes may do this at once."""
    built.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        made = Path(folder) / built.name
        command = [*compiler, *_FLAGS, "-o", str(made), str(_SOURCE), "-lm"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILING_TAKES_AT_MOST)
        made.replace(built)


def _reason(error: Exception) -> str:
    """One line that says what went wrong: the compiler's first error where there is one."""
    said = error.stderr if isinstance(error, subprocess.CalledProcessError) else ""
    lines = (said or str(error) or type(error).__name__).splitlines()
    return next((line for line in lines if "error" in line), lines[-1])


def _cache() -> Path:
    folder = os.environ.get("XDG_CACHE_HOME")
    return (Path(folder) if folder else Path.home() / ".cache") / "ea_fairseq"


def _fingerprint(compiler: list[str]) -> str:
    """Changes with source, compiler and its version, flags, C library and kind of processor.

    Homes are shared by machines of several kinds.
    """
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    processor = next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())
    version = subprocess.run(
        [*compiler, "--version"], check=True, capture_output=True, text=True, timeout=_COMPILING_TAKES_AT_MOST
    ).stdout
    parts = [
        _SOURCE.read_text(),
        _INCLUDED.read_text(),
        *compiler,
        version,
        *_FLAGS,
        "".join(_c_library()),
        platform.machine(),
        processor,
    ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _c_library() -> tuple[str, str]:
    """The C library's name and version, as far as they can be known."""
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "", ""
    except (AttributeError, ValueError, OSError):
        return platform.libc_ver()
