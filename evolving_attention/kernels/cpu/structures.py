"""The structures of ``kernel.c`` and ``dropout.c``, and how tensors are entered there.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

from ctypes import Structure, c_float, c_int64, c_uint32, c_uint64, c_void_p

import torch
from torch import Tensor

from ...call import Call
from ...evolution import Geometry, reach
from . import library


def threshold_of(probability: float) -> int:
    """The threshold of dropout: a number is dropped where its 16 random bits are below it."""
    return round(probability * 65536)


class Dropout(Structure):
    """``Dropout`` of dropout.c."""

    _fields_ = [
        *(("x", c_void_p), ("y", c_void_p), ("count", c_int64)),
        *(("threshold", c_uint32), ("seed", c_uint64)),
    ]


class Vectors(Structure):
    """``Vectors`` of kernel.c: where they begin, and strides in numbers."""

    _fields_ = [("data", c_void_p), ("sb", c_int64), ("sh", c_int64), ("st", c_int64)]


class Mask(Structure):
    """``Mask`` of kernel.c: likewise."""

    _fields_ = [("data", c_void_p), ("sb", c_int64), ("st", c_int64), ("ss", c_int64)]


class Problem(Structure):
    """``Problem`` of kernel.c: one call, for as long as one C function runs."""

    _fields_ = [
        *((name, c_int64) for name in ("B", "K", "T", "S", "D", "k", "before", "left", "top", "lower", "same")),
        *((name, c_float) for name in ("scale", "a", "b", "c", "d", "e")),
        *(("threshold", c_uint32), ("seed", c_uint64)),
        *((name, Vectors) for name in ("q", "key", "v")),
        *((name, Mask) for name in ("hidden", "masked")),
        *((name, c_void_p) for name in ("previous", "above", "kernel", "bias", "given")),
        *(("beams", c_int64), ("context", Vectors)),
        *((name, c_void_p) for name in ("a_logit", "weights", "kept")),
        ("d_context", Vectors),
        *((name, c_void_p) for name in ("d_a_logit", "d_weights")),
        *((name, Vectors) for name in ("d_q", "d_key", "d_v")),
        *((name, c_void_p) for name in ("d_previous", "d_given", "d_kernel", "d_bias", "d_shares")),
    ]

    @classmethod
    def of(cls, x: Call) -> "Problem":
        """Enter all inputs, which must live as long as this."""
        copies: list[Tensor] = []
        before = 0 if x.above is None else x.above.size(3)
        reaches = reach(Geometry(x.geometry), x.kernel_size)
        shares = x.coefficients if x.learnt is None else x.learnt.tolist()
        seed = 0 if x.seed is None else int(x.seed)
        sizes = (*x.maps, x.v.size(3), x.kernel_size, before, *reaches, x.same)
        q, k = (None, None) if x.given is not None else (x.q, x.k)
        problem = cls(
            *(*sizes, x.scale, *shares, threshold_of(x.dropout), seed),
            *(vectors(y, copies) for y in (q, k, x.v)),
            *(mask(x.hidden), mask(x.masked)),
            *(address(y, copies) for y in (x.previous, x.above, x.weight, x.bias, x.given)),
            x.q.size(0) // x.v.size(0),
        )
        problem.copies = copies
        return problem

    def enter(self, **tensors: Tensor | None) -> None:
        """Enter more inputs, or outputs, by the names of their fields; empty ones are not wanted."""
        for name, x in tensors.items():
            if x is not None and x.numel():
                enter = vectors if isinstance(getattr(self, name), Vectors) else address
                setattr(self, name, enter(x, self.copies))

    def run(self, function: str) -> None:
        """Call a C function.

        Raises:
            MemoryError: it had too little memory.
        """
        if library.call(function, self):
            raise MemoryError(f"not enough memory for attention maps of {self.K} x {self.T} x {self.S}")

    def result(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a contiguous output of this shape, and enter its address in the field of this name."""
        result = torch.empty(shape, dtype=dtype, device="cpu")
        setattr(self, name, result.data_ptr())
        return result


def vectors(x: Tensor | None, copies: list[Tensor]) -> tuple[int | None, int, int, int]:
    """Fields of ``Vectors`` for an input B x K x _ x D, copied where its last axis is not contiguous."""
    if x is None:
        return None, 0, 0, 0
    if x.stride(3) != 1:
        x = x.contiguous()
        copies.append(x)
    b, h, t, _ = x.stride()
    return x.data_ptr(), b, h, t


def address(x: Tensor | None, copies: list[Tensor]) -> int | None:
    """The address of an input, or of a copy if it is not contiguous; None without an input."""
    if x is None:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
        copies.append(x)
    return x.data_ptr()


def mask(x: Tensor | None) -> tuple[int | None, int, int, int]:
    """Fields of ``Mask`` for a mask that broadcasts to B x 1 x T x S: where it does, the stride is 0."""
    if x is None:
        return None, 0, 0, 0
    b, _, t, s = (0 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), b, t, s
