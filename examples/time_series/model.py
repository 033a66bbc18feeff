"""EA-DC-Transformer for time series (journal paper, section 3.3, equation 6), and the baselines in the same frame.

A layer concatenates evolving attention, p d values, and a causal dilated convolution, (1 - p) d values.
alpha = beta = 0: DC-Transformer; p = 1 besides: a Transformer (TST); p = 0: dilated convolutions.

Axes: B batch, T time, C channels, d model size, K heads. Masks: True = padded.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from evolving_attention import Evolution, Geometry, evolving_attention

HEADS = 8
FEED_FORWARD = 256


class MaskedBatchNorm(nn.BatchNorm1d):
    """Batch normalisation over the times that are not padded."""

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """x: B x T x d, padded: B x T -> B x T x d, zero where padded."""
        result = torch.zeros_like(x)
        result[~padded] = super().forward(x[~padded])
        return result


class Layer(nn.Module):
    """One layer. dilation: of the convolution with window 3; first: whether no layer before hands on a map.

    The other arguments are ``Network``'s.
    """

    def __init__(
        self,
        d: int,
        p: float,
        dilation: int,
        alpha: float,
        beta: float,
        first: bool,
        dropout: float,
        kernel_size: int = 3,
    ) -> None:
        super().__init__()
        attended = round(p * d)
        self.dilation, self.dropout = dilation, dropout
        self.qkv = nn.Linear(d, 3 * d) if attended else None
        self.output = nn.Linear(d, attended) if attended else None
        evolution = Evolution(Geometry.ENCODER_SELF, HEADS, kernel_size, alpha, beta, first=first)
        self.evolution = evolution if attended else None
        convolution = nn.Conv1d(d, d - attended, 3, dilation=dilation) if attended < d else None
        self.convolution = None if convolution is None else weight_norm(convolution)
        self.norms = nn.ModuleList([MaskedBatchNorm(d), MaskedBatchNorm(d)])
        self.feed_forward = nn.Sequential(nn.Linear(d, FEED_FORWARD), nn.GELU(), nn.Linear(FEED_FORWARD, d))

    def forward(self, x: Tensor, padded: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """x: B x T x d, padded: B x T -> B x T x d, and A_logit, B x K x T x T."""
        parts, a_logit = [], None
        if self.qkv is not None:
            attended, a_logit = self._attend(x, padded, previous)
            parts.append(attended)
        if self.convolution is not None:
            past = F.pad(x.transpose(1, 2), (2 * self.dilation, 0))
            parts.append(F.relu(self.convolution(past)).transpose(1, 2))
        drop = nn.functional.dropout
        x = self.norms[0](x + drop(torch.cat(parts, dim=-1), self.dropout, self.training), padded)
        return self.norms[1](x + drop(self.feed_forward(x), self.dropout, self.training), padded), a_logit

    def drop_weight_norm(self) -> None:
        """Make the convolution a plain one: one with normalised weights cannot be pickled."""
        if self.convolution is not None:
            old = self.convolution
            self.convolution = nn.Conv1d(old.in_channels, old.out_channels, 3, dilation=old.dilation)
            self.convolution.load_state_dict({"weight": old.weight.detach(), "bias": old.bias.detach()})

    def _attend(self, x: Tensor, padded: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=2))
        evolution, conv = self.evolution, self.evolution.conv
        attended, a_logit = evolving_attention(
            *(q, k, v, previous if evolution.uses_previous else None),
            *(None, None) if conv is None else (conv.weight, conv.bias),
            alpha=evolution.alpha,
            beta=evolution.beta,
            mask=padded[:, None, None],
            hidden=padded[:, None, None] | padded[:, None, :, None],
            dropout=self.dropout if self.training else 0.0,
        )
        return self.output(attended.transpose(1, 2).flatten(2)), a_logit


class Network(nn.Module):
    """Series to the outputs of a task.

    Args:
        channels: C.
        length: the longest series.
        outputs: classes, or 1 for regression.
        layers: with dilations 1, 2, 4, ...; 0: a GRU of two layers.
        d, p, alpha, beta, dropout: see the head of this file.
        kernel_size: of the convolution of maps.
    """

    def __init__(
        self,
        channels: int,
        length: int,
        outputs: int,
        layers: int = 4,
        d: int = 64,
        p: float = 0.25,
        alpha: float = 0.5,
        beta: float = 0.5,
        dropout: float = 0.1,
        kernel_size: int = 3,
    ) -> None:
        super().__init__()
        self.enter = nn.Linear(channels, d)
        self.positions = nn.Parameter(torch.randn(length, d) * 0.02)
        self.layers = nn.ModuleList(
            Layer(d, p, 2**number, alpha, beta, number == 0, dropout, kernel_size) for number in range(layers)
        )
        self.gru = None if layers else nn.GRU(d, d, 2, batch_first=True, dropout=dropout)
        self.head = nn.Linear(length * d, outputs)
        self.restore = nn.Linear(d, channels)

    def represent(self, x: Tensor, padded: Tensor) -> Tensor:
        """x: B x T x C, padded: B x T -> Z, B x T x d, zero where padded."""
        z, a_logit = (self.enter(x) + self.positions).masked_fill(padded[..., None], 0), None
        if self.gru is not None:
            return self.gru(z)[0].masked_fill(padded[..., None], 0)
        for layer in self.layers:
            z, a_logit = layer(z, padded, a_logit)
        return z

    def forward(self, x: Tensor, padded: Tensor) -> Tensor:
        """x: B x T x C, padded: B x T -> B x outputs, linear in the flattened Z."""
        return self.head(self.represent(x, padded).flatten(1))

    def restoration_loss(self, x: Tensor, padded: Tensor, share: float = 0.15) -> Tensor:
        """The squared error on a share of the values, which the model does not see (equation 8)."""
        masked = (torch.rand_like(x) < share) & ~padded[..., None]
        restored = self.restore(self.represent(x.masked_fill(masked, 0), padded))
        return ((restored - x)[masked] ** 2).mean() if masked.any() else restored.sum() * 0
