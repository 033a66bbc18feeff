"""Attention-augmented ResNet with evolving maps (ICML 2021, sections 4.1 and A.1) on the ResNet of ``transformers``.

In each block of the last three stages a 3x3 convolution gives F - dv channels; attention over all pixels gives the
other dv. A layer's maps enter the next layer where the shapes agree, from stage to stage too, as in the authors' code.

Axes: B batch, F channels, H x W pixels, N = H W, K heads.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from evolving_attention import Geometry
from evolving_attention.attention import EvolvingHeads

HEADS = 8


class Shares(NamedTuple):
    """The channels of keys, dk, and of values, dv, as shares of F; each a multiple of the heads."""

    keys: float
    values: float
    least: int = 1  # channels of keys that a head has at least

    def channels(self, width: int) -> tuple[int, int]:
        """F -> dk, dv."""
        keys, values = (int(share * width) // HEADS for share in (self.keys, self.values))
        return HEADS * max(self.least, keys), HEADS * max(1, values)


#: kind of block -> its shares: those of Bello et al. (2019), whose numbers section A.1 names, and those of the authors'
#: code. Both give the paper's numbers of parameters.
SHARES = {"bottleneck": Shares(0.2, 0.1, least=20), "basic": Shares(0.25, 0.125)}
#: kind of block -> which of its layers are augmented: those with a 3x3 convolution
AUGMENTED = {"bottleneck": (1,), "basic": (0, 1)}
#: Attention sees at most so many pixels in a row: a picture's divided by this. Larger ones are averaged 3 x 3 in steps
#: of two, and the result is enlarged again, as in the authors' code.
REDUCTION = 16


class RelativePositions2d(nn.Module):
    """Relative positions in a picture: q_i^T (e^H_(h(j) - h(i)) + e^W_(w(j) - w(i))); ICML 2021, equation 3.

    Pixels are numbered row by row. All heads of a layer share its two tables.

    Args:
        height, width: of the picture.
        size: D.
    """

    def __init__(self, height: int, width: int, size: int):
        super().__init__()
        self.rows = nn.Parameter(torch.randn(2 * height - 1, size) * size**-0.5)
        self.columns = nn.Parameter(torch.randn(2 * width - 1, size) * size**-0.5)
        row, column = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        row, column = row.flatten(), column.flatten()
        self.register_buffer("row_distance", row - row[:, None] + height - 1, persistent=False)  # N x N
        self.register_buffer("column_distance", column - column[:, None] + width - 1, persistent=False)

    def forward(self, q: Tensor, keys: int) -> Tensor:
        """q: B x K x N x D, scaled; keys: N = height * width -> B x K x N x N, to be added to the logits."""
        by_row, by_column = q @ self.rows.T, q @ self.columns.T  # B x K x N x (2 height - 1), (2 width - 1)
        shape = *q.shape[:3], keys
        return by_row.gather(3, self.row_distance.expand(shape)) + by_column.gather(
            3, self.column_distance.expand(shape)
        )


class AugmentedConvolution(EvolvingHeads):
    """A 3x3 convolution beside attention over all pixels, in the place of a convolution with F channels.

    Args:
        convolution: the one that it replaces.
        shares: of keys and values.
        side: height and width of the output.
        attended: height and width that attention sees: ``side``, or half of it.
        evolution: see ``Evolution``; ``first`` where the layer before has maps of another shape, or none.
    """

    def __init__(
        self, convolution: nn.Conv2d, shares: Shares, side: int, attended: int, **evolution: float | str | bool
    ) -> None:
        super().__init__()
        channels, stride = convolution.in_channels, convolution.stride[0]
        self.keys, self.values = shares.channels(convolution.out_channels)
        self.poolings = (stride == 2) + (attended < side)
        self.convolution = nn.Conv2d(
            channels, convolution.out_channels - self.values, 3, stride=stride, padding=1, bias=False
        )
        self.qkv = nn.Conv2d(channels, 2 * self.keys + self.values, 1, bias=False)
        self.output = nn.Conv2d(self.values, self.values, 1, bias=False)
        self.build_heads(Geometry.ENCODER_SELF, HEADS, self.keys // HEADS, **evolution)
        self.relative_positions = RelativePositions2d(attended, attended, self.keys // HEADS)

    def forward(self, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: B x channels x H x W -> B x F x H' x W', and A_logit, B x K x N x N, the next layer's ``previous``."""
        local = self.convolution(x)
        for _ in range(self.poolings):
            x = F.avg_pool2d(x, 3, stride=2, ceil_mode=True)
        qkv = self.qkv(x)
        height, width = qkv.shape[2:]
        parts = qkv.flatten(2).split([self.keys, self.keys, self.values], dim=1)
        q, k, v = (part.unflatten(1, (HEADS, -1)).transpose(2, 3) for part in parts)  # B x K x N x D
        context, a_logit, *_ = self.attend_heads(self.call(q, k, v, previous=previous, keep_map=True))
        attended = self.output(context.transpose(2, 3).reshape(len(x), self.values, height, width))
        if local.shape[2:] != attended.shape[2:]:
            attended = F.interpolate(attended, local.shape[2:], mode="bilinear")
        return torch.cat([local, attended], dim=1), a_logit


class EvolvingResNet(nn.Module):
    """A ResNet whose last three stages are augmented. alpha = beta = 0: AA-ResNet. Rule predictive: PA-AA-ResNet.

    Args:
        config: of ``transformers``' ResNet.
        side: height and width of the pictures.
        alpha, beta, rule, kernel_size, conv_layers: see ``Evolution``; by the default rule the first attention has no
            convolution.
        augment: without it, the plain ResNet.
    """

    def __init__(
        self,
        config: ResNetConfig,
        side: int = 224,
        alpha: float = 0.5,
        beta: float = 1.0,
        rule: str = "evolving-from-second",
        kernel_size: int = 3,
        conv_layers: int = 1,
        augment: bool = True,
    ) -> None:
        super().__init__()
        self.resnet = ResNetForImageClassification(config)
        stages = list(enumerate(self.resnet.resnet.encoder.stages))[-3:] if augment else []
        shares, before = SHARES[config.layer_type], 0
        evolution = {"alpha": alpha, "beta": beta, "rule": rule, "kernel_size": kernel_size, "conv_layers": conv_layers}
        for number, stage in stages:
            of_stage = side // (4 * 2**number)
            attended = min(of_stage, side // REDUCTION)
            layers = (block.layer[place] for block in stage.layers for place in AUGMENTED[config.layer_type])
            for layer in layers:
                layer.convolution = AugmentedConvolution(
                    layer.convolution, shares, of_stage, attended, first=attended != before, **evolution
                )
                before = attended

    def forward(self, pictures: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        """B x channels x side x side to the classes' scores, B x classes.

        ``maps``, a list, is given the A_logit of each augmented layer.
        """
        x, a_logit = self.resnet.resnet.embedder(pictures), None
        for stage in self.resnet.resnet.encoder.stages:
            for block in stage.layers:
                residual = block.shortcut(x)
                for layer in block.layer:
                    if isinstance(layer.convolution, AugmentedConvolution):
                        previous = a_logit if layer.convolution.evolution.uses_previous else None
                        x, a_logit = layer.convolution(x, previous)
                        if maps is not None:
                            maps.append(a_logit)
                    else:
                        x = layer.convolution(x)
                    x = layer.activation(layer.normalization(x))
                x = block.activation(x + residual)
        return self.resnet.classifier(self.resnet.resnet.pooler(x))
