"""A kernel as an operation of PyTorch's dispatcher: its inputs, gradients, shapes and FLOPs.

Eager mode calls an ``autograd.Function``, which takes less time than the dispatcher. torch.compile, torch.export and
counters of FLOPs see the same as ``torch.ops.evolving_attention.NAME``.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size; k kernel size.
Masks: True = masked.
"""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from ..call import DIFFERENTIABLE, TENSORS, Call, Result
from ..evolution import Coefficients, Geometry
from ..private import is_batched, is_in_torch_dispatch_mode


class Outputs(NamedTuple):
    """The outputs of an operation; empty where they are not asked for, since a schema has no optional ones."""

    context: Tensor  # B x K x T x D, in memory T x B x K x D, as projections want it
    a_logit: Tensor  # B x K x T x S
    weights: Tensor  # B x K x T x S, before dropout
    kept: Tensor  # B x K x (k - 1) x S, the mixed rows above the next step's
    stats: Tensor  # numbers for the kernel's backward pass


class Gradients(NamedTuple):
    """The inputs of a backward pass, beside the call: gradients, and outputs of the forward pass."""

    of_context: Tensor | None
    of_a_logit: Tensor | None
    of_weights: Tensor | None
    context: Tensor
    stats: Tensor
    weights: Tensor | None
    wanted: list[bool]  # which of the first inputs' gradients


Forward = Callable[[Call], Outputs]
Backward = Callable[[Gradients, Call], list[Tensor]]


class Operation:
    """A kernel's two passes, declared to PyTorch.

    Args:
        name: of the operation; its backward pass is NAME_backward.
        forward: a reduced call -> its outputs.
        backward: gradients and the call -> the gradients of its first fields; empty ones are not needed.
        fakes: both, for tensors without numbers.
        reads_context: whether the backward pass reads the context; else it gets ``stats`` in its place, and the context
            may be changed in place.
    """

    def __init__(
        self,
        name: str,
        forward: Forward,
        backward: Backward,
        fakes: tuple[Forward, Backward],
        reads_context: bool = True,
    ):
        self.forward, self.backward, self._reads_context = forward, backward, reads_context
        outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
        there = _declared(name, lambda *x: self.forward(Call(*x)), (Call,), outputs)
        back = _declared(f"{name}_backward", lambda *x: self.backward(*_parted(x)), (Gradients, Call), list[Tensor])
        there.register_fake(lambda *x: fakes[0](Call(*x)))
        back.register_fake(lambda *x: fakes[1](*_parted(x)))
        there.register_autograd(self._go_back, setup_context=self._keep)
        back.register_autograd(_refuse)
        register_flop_formula(getattr(torch.ops.evolving_attention, name))(_flops)
        register_flop_formula(getattr(torch.ops.evolving_attention, f"{name}_backward"))(_backward_flops)
        self._there, self._back = there, back
        passes = {"forward": self._go, "backward": self._go_back}
        self._eager: type[torch.autograd.Function] = type("Attend", (torch.autograd.Function,), passes)

    def run(self, call: Call) -> Outputs:
        """The outputs of a reduced call."""
        if is_looked_at():
            return Outputs(*self._there(*_spelt(call)))
        return Outputs(*self._eager.apply(*call)) if torch.is_grad_enabled() else self.forward(call)

    def attend(self, call: Call, seed: Tensor | None = None) -> Result:
        """The result of a call that the kernel does not refuse. seed: see ``Call.reduced``."""
        context, a_logit, weights, kept, _ = self.run(call.reduced(seed))
        return Result(
            context,
            a_logit if call.keep_map else None,
            weights if call.need_weights else None,
            kept if kept.numel() else None,
        )

    def _go(self, ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        output = self.forward(Call(*inputs))
        self._keep(ctx, inputs, output)  # as a ``setup_context``, autograd would call it more slowly
        return output

    def _keep(self, ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        x, found = Call(*inputs), Outputs(*output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.kept, found.stats)
        context = found.context if self._reads_context else found.stats
        ctx.save_for_backward(context, found.stats, found.weights if x.need_weights else None, *inputs[:TENSORS])
        ctx.settings = inputs[TENSORS:]

    def _go_back(self, ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in a backward pass that is so with create_graph alone
            _refuse(ctx)
        if any(x is not None and is_batched(x) for x in gradients):
            raise _not_by_kernels("gradients of several outputs at once (is_grads_batched, vectorize)")
        # autograd may give a view whose memory holds its opposite
        of_context, of_a_logit, of_weights = (None if x is None else x.resolve_neg() for x in gradients[:3])
        context, stats, weights, *tensors = ctx.saved_tensors  # to be asked for once: checkpointing computes them anew
        wanted = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        wanted[:2] = (want and tensors[3] is None for want in wanted[:2])
        wanted[2] &= of_context is not None
        of = Gradients(of_context, of_a_logit, of_weights, context, stats, weights, wanted)
        call = Call(*tensors, *ctx.settings)
        found = self._back(*of, *_spelt(call)) if is_looked_at() else self.backward(of, call)
        others = len(Call._fields) - DIFFERENTIABLE
        return *(x if want else None for x, want in zip(found, wanted, strict=True)), *(None,) * others


def new_vectors(like: Tensor, of: Tensor) -> Tensor:
    """New vectors, as wide as some and as many as others, in memory length x B x K x D, as projections take them."""
    batch, heads, length, _ = of.shape
    size = like.size(3)
    # No permuted view: autograd lets nobody change a view of an operation's result in place.
    return like.new_empty_strided((batch, heads, length, size), (heads * size, size, batch * heads * size, 1))


def is_looked_at() -> bool:
    """Whether operations are traced or counted. Else the dispatcher is skipped: it takes longer than the launches."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _parted(arguments: tuple[Any, ...]) -> tuple[Gradients, Call]:
    """The arguments of a backward pass, by name."""
    count = len(Gradients._fields)
    return Gradients(*arguments[:count]), Call(*arguments[count:])


#: types of a call's fields that a schema does not know, and what stands for them there
_SPELT = {Coefficients: list[float], Geometry: str}


def _spelt(call: Call) -> tuple[Any, ...]:
    """A call's fields as the schema has them."""
    spelt = {"coefficients": list(call.coefficients), "geometry": Geometry(call.geometry).value}
    return tuple((call._asdict() | spelt).values())


def _declared(name: str, function: Any, inputs: tuple[type, ...], outputs: Any) -> Any:
    """An operation of a function whose arguments are the fields of named tuples."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fields = [(field, _SPELT.get(of, of)) for each in inputs for field, of in each.__annotations__.items()]
    named = [inspect.Parameter(field, kind, annotation=annotation) for field, annotation in fields]
    function.__signature__ = inspect.Signature(named, return_annotation=outputs)
    return torch.library.custom_op(f"evolving_attention::{name}", function, mutates_args=())


def _refuse(ctx: Any, *gradients: Any) -> None:
    """PyTorch's ``once_differentiable`` refuses too late.

    If autograd needs a part of the graph only, as ``torch.autograd.functional`` does, it leaves terms out there, and
    the rest looks like a result.
    """
    raise _not_by_kernels("a gradient of this gradient (create_graph, torch.autograd.functional)")


def _not_by_kernels(what: str) -> RuntimeError:
    return RuntimeError(
        f"The kernels of evolving attention cannot give {what}; the plain composition can: --ea-plain or plain=True"
    )


def _flops(*shapes: Any, **_: Any) -> int:
    """The plain composition's, 2 x multiply-adds: both products, and the convolution."""
    x: Any = Call(*shapes)
    pixels = x.q[0] * x.q[1] * x.q[2] * x.v[2]
    taps = 0 if x.weight is None else x.weight[1] * x.weight[2] * x.weight[3]
    return 2 * pixels * ((0 if x.given is not None else x.q[3]) + taps + x.v[3])


def _backward_flops(*shapes: Any, **_: Any) -> int:
    """Each product of the forward pass has two in the backward pass."""
    return 2 * _flops(*_parted(shapes)[1])
