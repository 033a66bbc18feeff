"""The structures of ``kernel.c`` and ``dropout.c``, and how tensors are entered there.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

from ctypes import Structure, c_float, c_int64, c_uint32, c_uint64, c_void_p

import torch
from torch import Tensor

from ...evolution import reach
from ..call import Call


def carries_mixed(call: Call) -> bool:
    """Whether carried always equals mixed: then it is zero at hidden places, too, as in evolution.py."""
    return call.weight is not None and call.coefficients.carries_what_it_reads


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
        ("beams", c_int64),
        ("context", Vectors),
        *((name, c_void_p) for name in ("a_logit", "weights", "kept")),
        ("d_context", Vectors),
        *((name, c_void_p) for name in ("d_a_logit", "d_weights")),
        *((name, Vectors) for name in ("d_q", "d_key", "d_v")),
        *((name, c_void_p) for name in ("d_previous", "d_given", "d_kernel", "d_bias", "d_shares")),
    ]

    @classmethod
    def of(cls, call: Call, seed: int, same: bool) -> "Problem":
        """Enter an input. The call's own tensors live as long as it does, copies of them as long as this."""
        batch, heads, rows, columns = call.maps
        a, b, c, d, e = map(float, call.coefficients)
        if call.previous is None:
            a = d = 0.0
        has_rows_above = call.above is not None and call.weight is not None
        copies: list[Tensor] = []
        problem = cls(
            *(batch, heads, rows, columns, call.v.size(3), call.kernel_size),
            call.above.size(3) if has_rows_above else 0,
            *reach(call.geometry, call.kernel_size),
            same,
            *(call.scale, a, b, c, d, e),
            *(threshold_of(call.dropout), seed),
            vectors(call.q if call.given is None else None, copies),
            vectors(call.k if call.given is None else None, copies),
            vectors(call.v, copies),
            mask_of(call.hidden),
            mask_of(call.masked),
            address(call.previous, copies),
            address(call.above if has_rows_above else None, copies),
            address(call.weight, copies),
            address(call.bias, copies),
            address(call.given, copies),
            batch // call.v.size(0),
        )
        problem.copies = copies
        return problem

    def read(self, **tensors: Tensor | None) -> None:
        """Enter the addresses of more inputs, maps or vectors, as their fields are."""
        for name, x in tensors.items():
            is_vectors = isinstance(getattr(self, name), Vectors)
            setattr(self, name, vectors(x, self.copies) if is_vectors else address(x, self.copies))

    def result(self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
        """Allocate a contiguous output of this shape, and enter its address in the field of this name."""
        result = torch.empty(shape, dtype=dtype, device="cpu")
        setattr(self, name, result.data_ptr())
        return result

    def vectors_result(self, name: str, shape: tuple[int, int, int, int]) -> Tensor:
        """Allocate and enter an output B x K x N x D, in memory N x B x K x D, which is where projections want it."""
        batch, heads, length, depth = shape
        result = torch.empty(length, batch, heads, depth, dtype=torch.float32, device="cpu").permute(1, 2, 0, 3)
        setattr(self, name, vectors(result, []))
        return result


class Projection(Structure):
    """``Projection`` of kernel.c: addresses of a linear layer's weight and bias, None where there is none."""

    _fields_ = [("weight", c_void_p), ("bias", c_void_p)]


class Step(Structure):
    """``Step`` of kernel.c."""

    _fields_ = [
        ("attention", Problem),
        ("input", c_void_p),
        *((name, Projection) for name in ("q", "k", "v", "out")),
        ("output", c_void_p),
    ]


def vectors(x: Tensor | None, copies: list[Tensor]) -> tuple[int | None, int, int, int]:
    """Fields of ``Vectors`` for an input B x K x _ x D, copied where its last axis is not contiguous."""
    if x is None:
        return None, 0, 0, 0
    b, h, t, d = x.stride()
    if d != 1:
        x = x.contiguous()
        copies.append(x)
        b, h, t, _ = x.stride()
    return x.data_ptr(), b, h, t


def mask_of(mask: Tensor | None) -> tuple[int | None, int, int, int]:
    """Fields of ``Mask`` for a mask that broadcasts to B x 1 x T x S: where it does, the stride is 0."""
    if mask is None:
        return None, 0, 0, 0
    b, _, t, s = (0 if size == 1 else stride for size, stride in zip(mask.shape, mask.stride(), strict=True))
    return mask.data_ptr(), b, t, s


def address(x: Tensor | None, copies: list[Tensor]) -> int | None:
    """The address of an input that must be contiguous, of a copy if it is not; None without an input."""
    if x is None:
        return None
    if not x.is_contiguous():
        x = x.contiguous()
        copies.append(x)
    return x.data_ptr()
