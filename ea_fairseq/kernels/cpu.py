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
    rows_above = call.kernel_size - 1 if call.step and call.weight is not None else 0
    return _results(problem, call.maps, call.v.size(3), call.keep_map, call.need_weights, rows_above)


def _results(
    problem: "_Problem",
    maps: tuple[int, int, int, int],
    size: int,
    keep_map: bool = False,
    need_weights: bool = False,
    rows_above: int = 0,
) -> Result:
    """Run the forward pass: the context and, of the rest, what is wanted."""
    batch, heads, rows, columns = maps
    a_logit = problem.result("a_logit", maps) if keep_map else None
    weights = problem.result("weights", maps) if need_weights else None
    kept = problem.result("kept", (batch, heads, rows_above, columns)) if rows_above else None
    context = problem.vectors_result("context", (batch, heads, rows, size))
    problem.run("evolving_attention_forward")
    return Result(context, a_logit, weights, kept)


class Steps:
    """The steps of a search after its first: calls of which only what ``attend`` takes changes.

    What a call holds beside it is looked at once, for nobody changes a model while a search's state lives. This is kept
    in that state, and never changed itself.
    """

    def __init__(self, call: Call):
        self._problem = bytes(_Problem.of(call, 0))
        self._weights = (call.weight, call.bias)  # whose addresses are in the problem
        _, self._heads, _, self._size = call.q.shape
        self._rows_above = 0 if call.weight is None else call.kernel_size - 1

    @staticmethod
    def knows(call: Call) -> bool:
        """Whether steps like this one, which the kernel knows, can be prepared: most can."""
        contiguous = call.weight is None or (call.weight.is_contiguous() and call.bias.is_contiguous())
        constant = not any(isinstance(share, Tensor) for share in call.coefficients)
        return call.q.size(2) == 1 and call.given is None and call.dropout == 0 and constant and contiguous

    def __deepcopy__(self, memo: dict[int, object]) -> "Steps":
        return self

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Addresses mean nothing in another process: what is read there is None."""
        return type(None), ()

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sources: Tensor | None,
        masked: Tensor | None,
        above: Tensor | None,
        need_weights: bool,
    ) -> Result | None:
        """The result of a step, or None where it is not like the one before.

        Args:
            q: B x K x 1 x D.
            others: as in ``Call``; what is masked is hidden too.
        """
        batch, heads, rows, size = q.shape
        sentences, _, columns, _ = v.shape
        if (
            (heads, rows, size) != (self._heads, 1, self._size)
            or not all(_is_plain(x) for x in (q, k, v, above) if x is not None)
            or not k.shape == v.shape == (sentences, heads, columns, size)
            or (sources is None and sentences != batch)
            or (masked is not None and masked.shape != (batch, 1, 1, columns))
            or (above is None) != (self._rows_above == 0)
            or (above is not None and above.shape[:3] != (batch, heads, self._rows_above))
        ):
            return None
        problem, copies = _Problem.from_buffer_copy(self._problem), []
        problem.B, problem.S = batch, columns
        problem.q, problem.key, problem.v = _vectors(q, copies), _vectors(k, copies), _vectors(v, copies)
        problem.sources = _address(sources, copies)
        problem.hidden = problem.masked = _mask(masked)
        if above is not None:
            problem.above, problem.before = _address(above, copies), above.size(3)
        problem.copies = copies
        maps = (batch, heads, 1, columns)
        return _results(problem, maps, size, need_weights=need_weights, rows_above=self._rows_above)


def _is_plain(x: Tensor) -> bool:
    return type(x) is Tensor and x.dtype is torch.float32 and x.is_cpu and not x.is_neg()


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
    problem.read(d_a_logit=d_a_logit, d_weights=d_weights, d_context=d_context)
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
        batch, heads, rows, columns = call.maps
        a, b, c, d, e = map(float, call.coefficients)
        if call.previous is None:
            a = d = 0.0
        has_rows_above = call.above is not None and call.weight is not None
        threshold = round(call.dropout * 65536)
        copies: list[Tensor] = []
        problem = cls(
            *(batch, heads, rows, columns, call.v.size(3), call.kernel_size),
            call.above.size(3) if has_rows_above else 0,
            *reach(call.geometry, call.kernel_size),
            _carries_mixed(call),
            *(call.scale, a, b, c, d, e),
            *(threshold, 1 - threshold / 65536, seed),
            _vectors(call.q if call.given is None else None, copies),
            _vectors(call.k if call.given is None else None, copies),
            _vectors(call.v, copies),
            _mask(call.hidden),
            _mask(call.masked),
            _address(call.previous, copies),
            _address(call.above if has_rows_above else None, copies),
            _address(call.weight, copies),
            _address(call.bias, copies),
            _address(call.given, copies),
            _address(call.sources, copies),
        )
        problem.copies = copies
        return problem

    def read(self, **tensors: Tensor | None) -> None:
        """Enter the addresses of more inputs, maps or vectors, as their fields are."""
        for name, x in tensors.items():
            is_vectors = isinstance(getattr(self, name), _Vectors)
            setattr(self, name, _vectors(x, self.copies) if is_vectors else _address(x, self.copies))

    def result(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a contiguous output of this shape, and enter its address in the field of this name."""
        result = torch.empty(shape, dtype=dtype, device="cpu")
        setattr(self, name, result.data_ptr())
        return result

    def vectors_result(self, name: str, shape: tuple[int, int, int, int]) -> Tensor:
        """Allocate and enter an output B x K x N x D, in memory N x B x K x D, which is where projections want it."""
        batch, heads, length, depth = shape
        result = torch.empty(length, batch, heads, depth, dtype=torch.float32, device="cpu").permute(1, 2, 0, 3)
        setattr(self, name, _vectors(result, []))
        return result

    def run(self, function: str) -> None:
        """Call a function of the C file, on as many threads as PyTorch uses."""
        if getattr(_library(), function)(byref(self), torch.get_num_threads()):
            raise MemoryError(f"not enough memory for attention maps of {self.K} x {self.T} x {self.S}")


def _vectors(x: Tensor | None, copies: list[Tensor]) -> tuple[int | None, int, int, int]:
    """Fields of ``_Vectors`` for an input B x K x _ x D, copied where its last axis is not contiguous."""
    if x is None:
        return None, 0, 0, 0
    b, h, t, d = x.stride()
    if d != 1:
        x = x.contiguous()
        copies.append(x)
        b, h, t, _ = x.stride()
    return x.data_ptr(), b, h, t


def _mask(mask: Tensor | None) -> tuple[int | None, int, int, int]:
    """Fields of ``_Mask`` for a mask that broadcasts to B x 1 x T x S: where it does, the stride is 0."""
    if mask is None:
        return None, 0, 0, 0
    b, _, t, s = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask.data_ptr(), b, t, s


def _address(x: Tensor | None, copies: list[Tensor]) -> int | None:
    """Where an input begins that must be contiguous, copied where it is not; None where there is none."""
    if x is None:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
        copies.append(x)
    return x.data_ptr()


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
