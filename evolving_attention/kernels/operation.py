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
from torch.autograd.function import FunctionCtx
from torch.utils.flop_counter import register_flop_formula

from ..call import Call, Result
from ..evolution import is_always
from ..private import is_batched, is_in_torch_dispatch_mode


class Inputs(NamedTuple):
    """The inputs of an operation: those of a :class:`Call`; None in the place of inputs that have no effect."""

    q: Tensor
    k: Tensor
    v: Tensor
    given: Tensor | None
    previous: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    learnt: Tensor | None  # a to e in float32, where any of them is learnt; else they are ``shares``
    hidden: Tensor | None
    masked: Tensor | None
    above: Tensor | None
    seed: Tensor | None  # of dropout, one number, int64; on the device, so that CUDA graphs can be captured
    shares: list[float]
    same: bool  # carried is mixed, before hidden places become zero; d and e are 0 then
    scale: float
    geometry: str
    dropout: float
    keep_map: bool
    need_weights: bool

    maps, kernel_size = Call.maps, Call.kernel_size


#: the first inputs, which are tensors; of these, the first, which may have gradients
TENSORS, DIFFERENTIABLE = 12, 8


class Outputs(NamedTuple):
    """The outputs of an operation; empty where they are not asked for, since a schema has no optional ones."""

    context: Tensor  # B x K x T x D, in memory T x B x K x D, as projections want it
    a_logit: Tensor  # B x K x T x S
    weights: Tensor  # B x K x T x S, before dropout
    kept: Tensor  # B x K x (k - 1) x S, the mixed rows above the next step's
    stats: Tensor  # numbers for the kernel's backward pass


class Gradients(NamedTuple):
    """The inputs of a backward pass, before ``Inputs``: gradients, and outputs of the forward pass."""

    of_context: Tensor | None
    of_a_logit: Tensor | None
    of_weights: Tensor | None
    context: Tensor
    stats: Tensor
    weights: Tensor | None
    wanted: list[bool]  # which of the first inputs' gradients


def parted(arguments: tuple[Any, ...]) -> tuple[Gradients, Inputs]:
    """The arguments of a backward pass, by name."""
    count = len(Gradients._fields)
    return Gradients(*arguments[:count]), Inputs(*arguments[count:])


def inputs_of(call: Call, seed: Tensor | None = None) -> Inputs:
    """The inputs that stand for a call. Tensors without an effect are left out, and so get no gradient.

    Args:
        call: see :class:`Call`.
        seed: of dropout. By default PyTorch's generator for the device draws it, so that a CUDA graph drops other
            weights in each replay, and checkpointed layers the same ones.
    """
    a, b, c, d, e = (share if isinstance(share, Tensor) else float(share) for share in call.coefficients)
    previous = call.previous
    if previous is None:
        a = d = 0.0
    convolved = call.weight is not None and not is_always(c, 0)
    same = convolved and call.coefficients.carries_what_it_reads
    if same:
        d = e = 0.0
    if not convolved:
        a = b = c = 0.0
    if is_always(a, 0) and is_always(d, 0):
        previous = None
    shares, learnt = [a, b, c, d, e], None
    if any(isinstance(share, Tensor) for share in shares):
        numbers = [s.float() if isinstance(s, Tensor) else torch.full((), s, device=call.v.device) for s in shares]
        shares, learnt = [0.0] * 5, torch.stack(numbers)
    if call.dropout == 0:
        seed = None
    elif seed is None:
        seed = torch.randint(2**63 - 1, (), device=call.v.device)
    weight, bias, hidden, above = (x if convolved else None for x in (call.weight, call.bias, call.hidden, call.above))
    return Inputs(
        *(call.q, call.k, call.v, call.given, previous, weight, bias, learnt, hidden, call.masked, above, seed),
        *(shares, same, call.scale, call.geometry.value),
        *(call.dropout, call.keep_map, call.need_weights),
    )


class Operation:
    """A kernel's two passes, declared to PyTorch.

    Args:
        name: of the operation; its backward pass is NAME_backward.
        forward: the fields of :class:`Inputs` -> those of :class:`Outputs`.
        backward: the fields of :class:`Gradients` and :class:`Inputs` -> the gradients of the first inputs; empty ones
            are not needed.
        fakes: both, for tensors without numbers.
        reads_context: whether the backward pass reads the context; else it gets ``stats`` in its place, and the context
            may be changed in place.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., tuple[Tensor, ...]],
        backward: Callable[..., list[Tensor]],
        fakes: tuple[Callable[..., Any], Callable[..., Any]],
        reads_context: bool = True,
    ):
        self.forward, self.backward, self._reads_context = forward, backward, reads_context
        outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
        there = _declared(name, lambda *x: self.forward(*x), (Inputs,), outputs)
        back = _declared(f"{name}_backward", lambda *x: self.backward(*x), (Gradients, Inputs), list[Tensor])
        for operation, fake in zip((there, back), fakes, strict=True):
            operation.register_fake(fake)
        there.register_autograd(self._go_back, setup_context=self._keep)
        back.register_autograd(_refuse)
        register_flop_formula(getattr(torch.ops.evolving_attention, name))(_flops)
        register_flop_formula(getattr(torch.ops.evolving_attention, f"{name}_backward"))(_backward_flops)
        self._there, self._back = there, back
        self._eager = type("Attend", (torch.autograd.Function,), {"forward": self._go, "backward": self._go_back})

    def run(self, inputs: Inputs) -> Outputs:
        """The outputs of the way forward."""
        run = self._there if _is_looked_at() else self._eager.apply if torch.is_grad_enabled() else self.forward
        return Outputs(*run(*inputs))

    def attend(self, call: Call, seed: Tensor | None = None) -> Result:
        """The result of a call that the kernel knows. seed: see ``inputs_of``."""
        context, a_logit, weights, kept, _ = self.run(inputs_of(call, seed))
        return Result(
            context,
            a_logit if call.keep_map else None,
            weights if call.need_weights else None,
            kept if kept.numel() else None,
        )

    def _go(self, ctx: FunctionCtx, *inputs: Any) -> tuple[Tensor, ...]:
        output = self.forward(*inputs)
        self._keep(ctx, inputs, output)  # as a ``setup_context``, autograd would call it more slowly
        return output

    def _keep(self, ctx: FunctionCtx, inputs: tuple, output: tuple[Tensor, ...]) -> None:
        x, found = Inputs(*inputs), Outputs(*output)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(found.kept, found.stats)
        context = found.context if self._reads_context else found.stats
        ctx.save_for_backward(context, found.stats, found.weights if x.need_weights else None, *inputs[:TENSORS])
        ctx.settings = inputs[TENSORS:]

    def _go_back(self, ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # in a backward pass that is so with create_graph alone
            _refuse(ctx)
        if any(x is not None and is_batched(x) for x in gradients):
            raise _not_by_kernels("gradients of several outputs at once (is_grads_batched, vectorize)")
        # autograd may give a view whose memory holds its opposite
        gradients = [None if x is None else x.resolve_neg() for x in gradients[:3]]
        context, stats, weights, *tensors = ctx.saved_tensors  # to be asked for once: checkpointing computes them anew
        wanted = list(ctx.needs_input_grad[:DIFFERENTIABLE])
        wanted[:2] = (want and tensors[3] is None for want in wanted[:2])
        wanted[2] &= gradients[0] is not None
        run = self._back if _is_looked_at() else self.backward
        found = run(*gradients, context, stats, weights, wanted, *tensors, *ctx.settings)
        others = len(Inputs._fields) - DIFFERENTIABLE
        return *(x if want else None for x, want in zip(found, wanted, strict=True)), *(None,) * others


def new_vectors(like: Tensor, of: Tensor) -> Tensor:
    """New vectors, as wide as some and as many as others, in memory length x B x K x D, as projections take them."""
    batch, heads, length, _ = of.shape
    size = like.size(3)
    # No permuted view: autograd lets nobody change a view of an operation's result in place.
    return like.new_empty_strided((batch, heads, length, size), (heads * size, size, batch * heads * size, 1))


def _is_looked_at() -> bool:
    """Whether operations are traced or counted. Else the dispatcher is skipped: it takes longer than the launches."""
    return torch.compiler.is_compiling() or is_in_torch_dispatch_mode()


def _declared(name: str, function: Any, inputs: tuple[type, ...], outputs: Any) -> Any:
    """An operation of a function whose arguments are the fields of named tuples."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    fields = [item for each in inputs for item in each.__annotations__.items()]
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
    x = Inputs(*shapes)
    pixels = x.q[0] * x.q[1] * x.q[2] * x.v[2]
    taps = 0 if x.weight is None else x.weight[1] * x.weight[2] * x.weight[3]
    return 2 * pixels * ((0 if x.given is not None else x.q[3]) + taps + x.v[3])


def _backward_flops(*shapes: Any, **_: Any) -> int:
    """Each product of the forward pass has two in the backward pass."""
    return 2 * _flops(*parted(shapes)[1])
