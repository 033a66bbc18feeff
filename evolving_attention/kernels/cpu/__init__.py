"""Evolving attention on the CPU, in float32, by ``kernel.c``: the plain composition's numbers, in one pass.

The plain composition does the work if the C file cannot be compiled (library.py).

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size. Masks: True = masked.
"""

import torch
from torch import Tensor

from ...call import DIFFERENTIABLE, Call
from ..operation import Gradients, Operation, Outputs, new_vectors
from . import library
from .structures import Problem


def refuses(call: Call) -> str | None:
    """Why this kernel does not do a call whose types and shapes agree: see ``Kernel``."""
    v = call.v
    if v.device.type != "cpu" or v.dtype != torch.float32 or v.size(3) == 0:
        return "CPU kernel: computes float32 on the CPU, and no empty heads"
    return None if library.is_there() else "CPU kernel: kernel.c could not be compiled"


def new_outputs(x: Call) -> Outputs:
    """The outputs of a call, without numbers."""
    batch, heads, _, columns = maps = x.maps
    return Outputs(
        context=new_vectors(x.v, x.q),
        a_logit=x.v.new_empty(maps if x.keep_map else 0),
        weights=x.v.new_empty(maps if x.need_weights else 0),
        kept=x.v.new_empty(0 if x.above is None else (batch, heads, x.kernel_size - 1, columns)),
        stats=x.v.new_empty(0),
    )


def forward(x: Call) -> Outputs:
    """The outputs of a reduced call."""
    outputs, problem = new_outputs(x), Problem.of(x)
    problem.enter(context=outputs.context, a_logit=outputs.a_logit, weights=outputs.weights, kept=outputs.kept)
    problem.run("evolving_attention_forward")
    return outputs


def backward(of: Gradients, x: Call) -> list[Tensor]:
    """The gradients of the call's first fields."""
    problem, wanted, batch = Problem.of(x), of.wanted, x.q.size(0)
    found = {"v": new_vectors(x.v, x.v)}
    if wanted[0] or wanted[1]:
        found["q"], found["k"] = new_vectors(x.q, x.q), new_vectors(x.k, x.k)
    problem.enter(d_a_logit=of.of_a_logit, d_weights=of.of_weights, d_context=of.of_context)
    problem.enter(d_q=found.get("q"), d_key=found.get("k"), d_v=found["v"])
    for name, want in (("given", wanted[3]), ("previous", wanted[4])):
        if want:
            found[name] = problem.result(f"d_{name}", x.maps)
    # Each sentence has a separate part of these, summed in order: bits do not depend on the number of threads.
    parts = {}
    if x.weight is not None:
        parts["weight"] = problem.result("d_kernel", (batch, *x.weight.shape))
        parts["bias"] = problem.result("d_bias", (batch, x.maps[1]))
    if wanted[7]:
        parts["learnt"] = problem.result("d_shares", (batch, 5), torch.float64)
    problem.run("evolving_attention_backward")
    found |= {name: part.sum(0).float() for name, part in parts.items()}
    names = Call._fields[:DIFFERENTIABLE]
    return [found[name] if want else of.context.new_empty(0) for name, want in zip(names, wanted, strict=True)]


def _fake_backward(of: Gradients, x: Call) -> list[Tensor]:
    vectors = [new_vectors(y, y) for y in (x.q, x.k, x.v)]
    optional = (x.given, x.previous, x.weight, x.bias, x.learnt)
    others = [x.v.new_empty(0 if y is None else y.shape) for y in optional]
    return [y if want else x.v.new_empty(0) for y, want in zip([*vectors, *others], of.wanted, strict=True)]


attend = Operation("cpu", forward, backward, (new_outputs, _fake_backward), reads_context=False).attend
