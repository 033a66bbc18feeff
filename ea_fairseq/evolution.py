"""How attention maps evolve: equation 4 and figure 3 of "Evolving Attention with Residual Convolutions" (ICML 2021).

    A_input = alpha * A_logit of the previous layer + (1 - alpha) * logits      (where there is a previous map)
    A_logit = beta * ReLU(Conv(A_input)) + (1 - beta) * A_input

Maps in, maps out: nothing here knows of fairseq, of queries, or of the softmax that follows.

Axes: B batch, K heads, T target (query) length, S source (key) length; k kernel size, r = (k - 1) / 2. A map is a
tensor B x K x T x S, a picture with K channels, its rows the queries and its columns the keys. Masks: True = masked.
"""

import enum
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Geometry(enum.Enum):
    """Which neighbours of pixel (i, j) the convolution reads; outside of the map it reads zeros (figure 3)."""

    #: rows i-r..i+r, columns j-r..j+r: both directions are visible
    ENCODER_SELF = "encoder self-attention"
    #: rows i-k+1..i, columns j-k+1..j, without the kernel's strict upper triangle: what lies there is the future
    DECODER_SELF = "decoder self-attention"
    #: rows i-k+1..i, columns j-r..j+r: rows are target positions, so time runs down; every column is visible
    ENCODER_DECODER = "encoder-decoder attention"


@functools.cache
def reach(geometry: Geometry, kernel_size: int) -> tuple[int, int, bool]:
    """How far the convolution reaches to the left and up; whether it lacks its kernel's strict upper triangle."""
    centred, shifted = kernel_size // 2, kernel_size - 1
    left = shifted if geometry == Geometry.DECODER_SELF else centred
    top = centred if geometry == Geometry.ENCODER_SELF else shifted
    return left, top, geometry == Geometry.DECODER_SELF


class Evolution(nn.Module):
    """Evolves the logits of one attention layer.

    Args:
        geometry: the kind of attention.
        heads: K, the convolution's channels, in and out.
        kernel_size: k, odd.
        alpha: weight of the previous layer's map, in [0, 1].
        beta: weight of the convolution, in [0, 1]; at 0 there is no convolution and no parameter.
    """

    def __init__(self, geometry: Geometry, heads: int, kernel_size: int = 3, alpha: float = 0.0, beta: float = 0.1):
        super().__init__()
        self.geometry = geometry
        self.kernel_size = kernel_size
        self.alpha = alpha
        self.beta = beta
        self.conv = nn.Conv2d(heads, heads, kernel_size) if beta > 0 else None

    @property
    def rows_above(self) -> int:
        """Earlier rows that a row needs: what step-by-step decoding has to keep."""
        return self.kernel_size - 1 if self.conv is not None and self.geometry != Geometry.ENCODER_SELF else 0

    def forward(
        self, logits: Tensor, hidden: Tensor | None = None, previous: Tensor | None = None, above: Tensor | None = None
    ) -> Tensor:
        """Evolve a map.

        Args:
            logits: B x K x T x S, scaled dot products.
            hidden: broadcasts to B x K x T x S; True where the convolution must see zero, as it does outside the map
                (padded rows and columns, the future).
            previous: B x K x T x S, A_logit of the layer before; None in the first layer and in decoders.
            above: B x K x rows_above x S, the rows of ``mix`` that come before these, in step-by-step decoding.

        Returns:
            A_logit, B x K x T x S; what it holds at hidden places means nothing.
        """
        mixed = self.mix(logits, hidden, previous)
        if self.conv is None:
            return mixed
        return torch.lerp(mixed, F.relu(self.convolve(mixed, above)), self.beta)

    def mix(self, logits: Tensor, hidden: Tensor | None = None, previous: Tensor | None = None) -> Tensor:
        """A_input: the skip connection, then zeros at hidden places. Arguments and result as in ``forward``."""
        if previous is not None and self.alpha > 0:
            logits = torch.lerp(logits, previous, self.alpha)
        return logits if hidden is None else logits.masked_fill(hidden, 0)

    def convolve(self, maps: Tensor, above: Tensor | None = None) -> Tensor:
        """Conv(A_input), before the ReLU. Arguments and result as in ``forward``, with ``mix``'s result as maps."""
        assert self.conv is not None, "no convolution at beta = 0"
        weight, bias = self.conv.weight, self.conv.bias
        if self.geometry == Geometry.ENCODER_SELF:
            return F.conv2d(maps, weight, bias, padding=self.kernel_size // 2)

        top = self.kernel_size - 1
        if above is not None:
            maps, top = torch.cat([above, maps], dim=2), 0
        if self.geometry == Geometry.DECODER_SELF:
            # tril, not a product with zeros: a removed tap has no effect whatever its weight holds
            return F.conv2d(F.pad(maps, (self.kernel_size - 1, 0, top, 0)), weight.tril(), bias)
        return F.conv2d(F.pad(maps, (0, 0, top, 0)), weight, bias, padding=(0, self.kernel_size // 2))

    def extra_repr(self) -> str:
        return f"{self.geometry.value}, alpha={self.alpha}, beta={self.beta}"
