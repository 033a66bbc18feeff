"""One call of an attention, from queries and keys to the context, as data: the question to a kernel, and its answer.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size; k kernel size. Keys and values may
belong to N sentences of B / N neighbouring rows of queries each, as in beam search.
Masks: True = masked.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from .evolution import LOGITS_ONLY, Coefficients, Geometry, is_always

#: The types of tensors whose memory may be read directly; a subclass may hold its numbers elsewhere.
PLAIN = (Tensor, nn.Parameter)


class Call(NamedTuple):
    """Everything that decides the result of one call.

        logits  = given, or scale * q k^T where nothing is given
        A_logit = the sum of evolution.py, with these coefficients and this convolution
        context = dropout(softmax(mask(A_logit))) v

    ``learnt``, ``same`` and ``seed`` are set by ``reduced``, for kernels; the plain composition does not read them.
    """

    q: Tensor  # B x K x T x D; not read where logits are given
    k: Tensor  # N x K x S x D; not read where logits are given
    v: Tensor  # N x K x S x D
    given: Tensor | None = None  # B x K x T x S, logits in the place of scale * q k^T
    previous: Tensor | None = None  # B x K x T x S, A_logit of the layer before
    weight: Tensor | None = None  # K x K x k x k; None: no convolution
    bias: Tensor | None = None  # K
    learnt: Tensor | None = None  # a to e in float32, where any of them is learnt: then ``coefficients`` are not read
    hidden: Tensor | None = None  # broadcasts to B x 1 x T x S; where the convolution must see zero
    masked: Tensor | None = None  # broadcasts to B x 1 x T x S; keys that must not be attended to
    #: B x K x rows_above x (at most S), the convolution's input in the rows before these, in step-by-step decoding
    above: Tensor | None = None
    seed: Tensor | None = None  # of dropout, one number, int64; on the device, so that CUDA graphs can be captured
    coefficients: Coefficients = LOGITS_ONLY  # five constants, or tensors of one number where they are learnt
    same: bool = False  # carried is mixed, before hidden places become zero; d and e are 0 then
    scale: float = 1.0  # of q k^T
    geometry: Geometry = Geometry.ENCODER_SELF
    dropout: float = 0.0  # probability that a weight is dropped; 1 drops all
    keep_map: bool = False  # whether the next layer needs A_logit
    need_weights: bool = False  # whether to return the weights

    @property
    def maps(self) -> tuple[int, int, int, int]:
        """B, K, T, S."""
        return *self.q.shape[:3], self.v.size(2)

    @property
    def kernel_size(self) -> int:
        """k; 0: no convolution."""
        return 0 if self.weight is None else self.weight.size(-1)

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that results depend on, the learnt coefficients included."""
        return [x for x in (*self[:TENSORS], *self.coefficients) if isinstance(x, Tensor)]

    def reduced(self, seed: Tensor | None = None) -> "Call":
        """The same call for a kernel. Tensors without an effect are left out, and so get no gradient.

        Args:
            seed: of dropout. By default PyTorch's generator for the device draws it, so that a CUDA graph drops other
                weights in each replay, and checkpointed layers the same ones.
        """
        a, b, c, d, e = (share if isinstance(share, Tensor) else float(share) for share in self.coefficients)
        previous, learnt = self.previous, None
        if previous is None:
            a = d = 0.0
        convolved = self.weight is not None and not is_always(c, 0)
        same = convolved and self.coefficients.carries_what_it_reads
        if same:
            d = e = 0.0
        if not convolved:
            a = b = c = 0.0
        if is_always(a, 0) and is_always(d, 0):
            previous = None
        shares = Coefficients(a, b, c, d, e)
        if any(isinstance(share, Tensor) for share in shares):
            device = self.v.device
            learnt = torch.stack(
                [s.float() if isinstance(s, Tensor) else torch.full((), s, device=device) for s in shares]
            )
            shares = Coefficients(0.0, 0.0, 0.0, 0.0, 0.0)
        if self.dropout == 0:
            seed = None
        elif seed is None:
            seed = torch.randint(2**63 - 1, (), device=self.v.device)
        call = self._replace(previous=previous, learnt=learnt, seed=seed, coefficients=shares, same=same)
        return call if convolved else call._replace(weight=None, bias=None, hidden=None, above=None)


#: the first fields, which are tensors; of these, the first, which may have gradients
TENSORS, DIFFERENTIABLE = 12, 8


class Result(NamedTuple):
    """The outputs of a call."""

    context: Tensor  # B x K x T x D
    a_logit: Tensor | None = None  # B x K x T x S, evolved logits before the mask, where ``keep_map``
    weights: Tensor | None = None  # B x K x T x S, at least float32, before dropout, where ``need_weights``
    kept: Tensor | None = None  # B x K x rows_above x S, the rows above the next step's, where ``above``


class Kernel(Protocol):
    """Computes the calls that it does not refuse, with the plain composition's numbers."""

    def refuses(self, call: Call) -> str | None:
        """The reason why it does not do a call, whose types and shapes agree; None where it does."""

    def attend(self, call: Call, seed: Tensor | None = None) -> Result:
        """The result of a call that it does not refuse. seed: see ``Call.reduced``."""
