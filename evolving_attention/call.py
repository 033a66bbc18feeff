"""The question to a kernel: one call of an attention, from queries and keys to the context, as data.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size; k kernel size. Keys and values may
belong to N sentences of B / N neighbouring rows of queries each, as in beam search.
Masks: True = masked.
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn

from .evolution import Coefficients, Geometry

#: The types of tensors whose memory may be read directly; a subclass may hold its numbers elsewhere.
PLAIN = (Tensor, nn.Parameter)


@dataclass(eq=False, slots=True)
class Call:
    """Everything that decides the result of one call.

        logits  = given, or scale * q k^T where nothing is given
        A_logit = the sum of evolution.py, with these coefficients and this convolution
        context = dropout(softmax(mask(A_logit))) v

    A kernel refuses unknown calls. A call is never changed: use ``replace``.
    """

    q: Tensor  # B x K x T x D; not read where logits are given
    k: Tensor  # N x K x S x D; not read where logits are given
    v: Tensor  # N x K x S x D
    scale: float  # of q k^T
    geometry: Geometry
    coefficients: Coefficients  # five constants, or tensors of one number where they are learnt
    weight: Tensor | None = None  # K x K x k x k; None: no convolution
    bias: Tensor | None = None  # K
    given: Tensor | None = None  # B x K x T x S, logits in the place of scale * q k^T
    hidden: Tensor | None = None  # broadcasts to B x 1 x T x S; where the convolution must see zero
    masked: Tensor | None = None  # broadcasts to B x 1 x T x S; keys that must not be attended to
    previous: Tensor | None = None  # B x K x T x S, A_logit of the layer before
    #: B x K x rows_above x (at most S), the convolution's input in the rows before these, in step-by-step decoding
    above: Tensor | None = None
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
        values = [
            *(self.q, self.k, self.v, self.given, self.previous, self.above, self.weight, self.bias),
            *(self.hidden, self.masked, *self.coefficients),
        ]
        return [value for value in values if isinstance(value, Tensor)]


class Result(NamedTuple):
    """The outputs of a call."""

    context: Tensor  # B x K x T x D
    a_logit: Tensor | None = None  # B x K x T x S, evolved logits before the mask, where ``keep_map``
    weights: Tensor | None = None  # B x K x T x S, at least float32, before dropout, where ``need_weights``
    kept: Tensor | None = None  # B x K x rows_above x S, the rows above the next step's, where ``above``
