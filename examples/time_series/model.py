"""EA-DC-Transformer for time series (journal paper, section 3.3, equation 6), and the baselines in the same frame.

A layer concatenates evolving attention, p d values, and a causal dilated convolution, (1 - p) d values.
alpha = beta = 0: DC-Transformer; p = 1 besides: a Transformer (TST); p = 0: dilated convolutions.

Axes: B batch, T time, C channels, d model size, K heads. Masks: True = padded.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from evolving_attention import EvolvingAttention, Geometry

HEADS = 8
FEED_FORWARD = 256


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over the times that are not padded."""

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """x: B x T x d, padded: B x T -> B x T x d, zero where padded."""
        return torch.zeros_like(x).masked_scatter(~padded[..., None], super().forward(x[~padded]))


class Layer(nn.Module):
    """One layer of d values, of which attention gives the share p. ``evolution``: see ``Evolution``."""

    def __init__(self, d: int, p: float, dilation: int, dropout: float, **evolution: Any) -> None:
        super().__init__()
        attended = round(p * d)
        self.attention = None
        if attended:
            self.attention = EvolvingAttention(Geometry.ENCODER_SELF, d, HEADS, dropout, **evolution)
            self.attention.out_proj = nn.Linear(d, attended)
        self.convolution = nn.Conv1d(d, d - attended, 3, dilation=dilation) if attended < d else None
        self.norms = nn.ModuleList([MaskedBatchNorm(d), MaskedBatchNorm(d)])
        self.feed_forward = nn.Sequential(nn.Linear(d, FEED_FORWARD), nn.ReLU(), nn.Linear(FEED_FORWARD, d))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, padded: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x: B x T x d, zero where padded, B x T -> B x T x d, and A_logit, B x K x T x T, or None."""
        parts, a_logit = [], None
        if self.attention is not None:
            attended, a_logit, *_ = self.attention(x, padding=padded, previous=previous)
            parts.append(attended)
        if self.convolution is not None:
            past = F.pad(x.transpose(1, 2), (2 * self.convolution.dilation[0], 0))  # B x d x (before + T)
            parts.append(F.relu(self.convolution(past)).transpose(1, 2))
        x = self.norms[0](x + self.dropout(torch.cat(parts, dim=-1)), padded)
        return self.norms[1](x + self.dropout(self.feed_forward(x)), padded), a_logit


class ResNetBlock(nn.Module):
    """A block of a ResNet (He et al. 2016) over time: two convolutions of width d and window 3, and a way around."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv1d(d, d, 3, padding="same") for _ in range(2))
        self.norms = nn.ModuleList(MaskedBatchNorm(d) for _ in self.convolutions)

    def forward(self, x: Tensor, padded: Tensor, previous: None) -> tuple[Tensor, None]:
        """As ``Layer``'s, without maps."""
        y = x
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = norm(convolution(y.transpose(1, 2)).transpose(1, 2), padded)
            y = F.relu(y + x if norm is self.norms[-1] else y)
        return y, None


class Network(nn.Module):
    """Series, the longest of ``length``, to the outputs of a task: classes, or 1 for regression.

    Args:
        kind: "attention", or a baseline: "ResNet", "GRU" or "LSTM".
        layers: of attention, two to a block. Their dilations are 1, 2, 4, .... Baselines have one for each block.
        options: see ``Layer``.
    """

    def __init__(
        self, channels: int, length: int, outputs: int, kind: str, layers: int, d: int, dropout: float, **options: Any
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(channels, d)
        self.positions = nn.Parameter(torch.randn(length, d) * 0.02)
        self.recurrent = None
        if kind in ("GRU", "LSTM"):
            self.recurrent = getattr(nn, kind)(d, d, layers // 2, batch_first=True, dropout=dropout)
        self.layers = nn.ModuleList([ResNetBlock(d) for _ in range(layers // 2)] if kind == "ResNet" else [])
        if kind == "attention":
            for number in range(layers):
                self.layers.append(Layer(d, dilation=2**number, dropout=dropout, first=number == 0, **options))
        self.head = nn.Linear(length * d, outputs)
        self.restore = nn.Linear(d, channels)

    def represent(self, x: Tensor, padded: Tensor) -> Tensor:
        """x: B x T x C, padded: B x T -> Z, B x T x d, zero where padded."""
        z, a_logit = (self.enter(x) + self.positions).masked_fill(padded[..., None], 0), None
        if self.recurrent is not None:
            return self.recurrent(z)[0].masked_fill(padded[..., None], 0)
        for layer in self.layers:
            z, a_logit = layer(z, padded, a_logit)
        return z

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """x: B x T x C, padded: B x T -> B x outputs, linear in the flattened Z."""
        return self.head(self.represent(x, padded).flatten(1))

    def restoration_loss(self, x: Tensor, padded: Tensor, share: float = 0.15) -> Tensor:
        """The squared error on a share of the values, which the model does not see (equation 8).

        Each value is masked or not by itself. TST, whose share this is, masks stretches of geometric lengths.
        """
        masked = (torch.rand_like(x) < share) & ~padded[..., None]
        restored = self.restore(self.represent(x.masked_fill(masked, 0), padded))
        return ((restored - x)[masked] ** 2).mean() if masked.any() else restored.sum() * 0
