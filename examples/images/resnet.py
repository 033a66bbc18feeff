"""Attention-augmented ResNet with evolving maps (ICML 2021, sections 4.1 and A.1) on the ResNet of ``transformers``.

In each block of the last three stages the 3x3 convolution gives F - dv channels; attention over all pixels gives the
other dv. A layer's maps enter the next layer of the same shape.

Axes: B batch, F channels, H x W pixels, N = H W, K heads.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification

from evolving_attention import Geometry
from evolving_attention.attention import EvolvingHeads

HEADS = 8
#: v: the share of the channels that attention gives. Keys have k = 2 v of them (section A.1).
SHARE = 0.2
#: Larger pictures are averaged 2 x 2 before attention, whose result is enlarged again, as in the authors' code.
LONGEST_SIDE = 14


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
        side: height and width of the output.
        alpha, beta: see ``Evolution``.
        first: whether no layer of this shape comes before.
    """

    def __init__(self, convolution: nn.Conv2d, side: int, alpha: float, beta: float, first: bool) -> None:
        super().__init__()
        channels, stride = convolution.in_channels, convolution.stride[0]
        self.values = HEADS * max(1, round(SHARE * convolution.out_channels / HEADS))
        self.keys = 2 * self.values
        self.pool = stride * (2 if side > LONGEST_SIDE else 1)
        self.convolution = nn.Conv2d(
            channels, convolution.out_channels - self.values, 3, stride=stride, padding=1, bias=False
        )
        self.qkv = nn.Conv2d(channels, 2 * self.keys + self.values, 1, bias=False)
        self.output = nn.Conv2d(self.values, self.values, 1, bias=False)
        attended = side * stride // self.pool
        self.build_heads(Geometry.ENCODER_SELF, HEADS, self.keys // HEADS, alpha=alpha, beta=beta, first=first)
        self.relative_positions = RelativePositions2d(attended, attended, self.keys // HEADS)

    def forward(self, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor]:
        """x: B x channels x H x W -> B x F x H' x W', and A_logit, B x K x N x N, the next layer's ``previous``."""
        local = self.convolution(x)
        qkv = self.qkv(F.avg_pool2d(x, self.pool))
        height, width = qkv.shape[2:]
        parts = qkv.flatten(2).split([self.keys, self.keys, self.values], dim=1)
        q, k, v = (part.unflatten(1, (HEADS, -1)).transpose(2, 3) for part in parts)  # B x K x N x D
        context, a_logit, *_ = self.attend_heads(self.call(q, k, v, previous=previous, keep_map=True))
        attended = self.output(context.transpose(2, 3).reshape(len(x), self.values, height, width))
        if local.shape[2:] != attended.shape[2:]:
            attended = F.interpolate(attended, local.shape[2:], mode="bilinear")
        return torch.cat([local, attended], dim=1), a_logit


class EvolvingResNet(nn.Module):
    """A ResNet whose last three stages are augmented. alpha = beta = 0: AA-ResNet.

    Args:
        config: of ``transformers``' ResNet.
        side: height and width of the pictures.
        alpha, beta: see ``Evolution``.
        augment: without it, the plain ResNet.
    """

    def __init__(
        self, config: ResNetConfig, side: int = 224, alpha: float = 0.5, beta: float = 1.0, augment: bool = True
    ) -> None:
        super().__init__()
        self.resnet = ResNetForImageClassification(config)
        last = list(enumerate(self.resnet.resnet.encoder.stages))[-3:]
        for number, stage in last if augment else []:
            for place, block in enumerate(stage.layers):
                layer = block.layer[1]  # the 3x3 convolution of a bottleneck, the second one of a basic block
                layer.convolution = AugmentedConvolution(
                    layer.convolution, side // (4 * 2**number), alpha, beta, first=place == 0
                )

    def forward(self, pictures: Tensor, maps: list[Tensor] | None = None) -> Tensor:
        """B x channels x side x side to the classes' scores, B x classes.

        ``maps``, a list, is given the A_logit of each augmented layer.
        """
        x = self.resnet.resnet.embedder(pictures)
        for stage in self.resnet.resnet.encoder.stages:
            a_logit = None
            for block in stage.layers:
                x, a_logit = _block(block, x, a_logit)
                if maps is not None and a_logit is not None:
                    maps.append(a_logit)
        return self.resnet.classifier(self.resnet.resnet.pooler(x))


def _block(block: nn.Module, x: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """A residual block of ``transformers``; A_logit is None where the block has no attention."""
    residual, a_logit = block.shortcut(x), None
    for layer in block.layer:
        if isinstance(layer.convolution, AugmentedConvolution):
            x, a_logit = layer.convolution(x, previous)
        else:
            x = layer.convolution(x)
        x = layer.activation(layer.normalization(x))
    return block.activation(x + residual), a_logit
