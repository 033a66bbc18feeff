"""Attention-augmented ResNet with evolving maps (ICML 2021, sections 4.1 and A.1) on the ResNet of ``transformers``.

In each block of the last three stages a 3x3 convolution gives F - dv channels; attention over all pixels gives the
other dv. A layer's maps enter the next layer where the shapes agree, from stage to stage too, as in the authors' code.

Axes: B batch, F channels, H x W pixels, N = H W, K heads.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import ResNetConfig, ResNetForImageClassification
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention

from evolving_attention import Geometry
from evolving_attention.attention import EvolvingHeads

HEADS = 8


#: kind of block -> the channels of keys, dk, and of values, dv, as shares of F; how many of keys a head has at least.
#: They are those of Bello et al. (2019), whose numbers section A.1 names, and those of the authors' code. Both give the
#: paper's numbers of parameters.
SHARES = {"bottleneck": (0.2, 0.1, 20), "basic": (0.25, 0.125, 1)}
#: kind of block -> which of its layers are augmented: those with a 3x3 convolution
AUGMENTED = {"bottleneck": (1,), "basic": (0, 1)}
#: Attention sees at most so many pixels in a row: a picture's divided by this. Larger ones are averaged 3 x 3 in steps
#: of two, and the result is enlarged again, as in the authors' code.
REDUCTION = 16


def channels(kind: str, width: int) -> tuple[int, int]:
    """F -> dk, dv, each a multiple of the heads."""
    keys, values, least = SHARES[kind]
    return HEADS * max(least, int(keys * width) // HEADS), HEADS * max(1, int(values * width) // HEADS)


class RelativePositions2d(nn.Module):
    """Relative positions in a picture: q_i^T (e^H_(h(j) - h(i)) + e^W_(w(j) - w(i))); ICML 2021, equation 3.

    Pixels are numbered row by row. All heads of a layer share its two tables.
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
        rows, columns = (distance.expand(*q.shape[:3], keys) for distance in (self.row_distance, self.column_distance))
        return by_row.gather(3, rows) + by_column.gather(3, columns)


class AugmentedConvolution(EvolvingHeads, nn.Module):
    """A 3x3 convolution beside attention over all pixels, in the place of a convolution with F channels.

    Args:
        convolution: the one that it replaces.
        keys, values: their channels, dk and dv.
        side: height and width of the output.
        attended: height and width that attention sees: ``side``, or half of it.
        evolution: see ``Evolution``; ``first`` where the layer before has maps of another shape, or none.
    """

    def __init__(
        self, convolution: nn.Conv2d, keys: int, values: int, side: int, attended: int, **evolution: Any
    ) -> None:
        nn.Module.__init__(self)
        self.keys, self.values = keys, values
        enter, width, stride = convolution.in_channels, convolution.out_channels, convolution.stride[0]
        self.poolings = (stride == 2) + (attended < side)
        self.convolution = nn.Conv2d(enter, width - values, 3, stride=stride, padding=1, bias=False)
        self.qkv = nn.Conv2d(enter, 2 * keys + values, 1, bias=False)
        self.output = nn.Conv2d(values, values, 1, bias=False)
        EvolvingHeads.__init__(self, Geometry.ENCODER_SELF, HEADS, keys // HEADS, **evolution)
        self.relative_positions = RelativePositions2d(attended, attended, keys // HEADS)

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


class EvolvingResNet(ResNetForImageClassification):
    """A ResNet whose last three stages are augmented. alpha = beta = 0: AA-ResNet. Rule predictive: PA-AA-ResNet.

    Args:
        config: of ``transformers``' ResNet.
        side: height and width of the pictures.
        augment: without it, the plain ResNet.
        evolution: see ``Evolution``; by the default rule the first attention has no convolution.
    """

    def __init__(self, config: ResNetConfig, side: int = 224, augment: bool = True, **evolution: Any) -> None:
        super().__init__(config)
        evolution = {"rule": "evolving-from-second", "alpha": 0.5, "beta": 1.0, **evolution}
        before = 0
        for number, stage in list(enumerate(self.resnet.encoder.stages))[-3:] if augment else []:
            of_stage = side // (4 * 2**number)
            attended = min(of_stage, side // REDUCTION)
            for layer in (block.layer[place] for block in stage.layers for place in AUGMENTED[config.layer_type]):
                keys, values = channels(config.layer_type, layer.convolution.out_channels)
                layer.convolution = AugmentedConvolution(
                    layer.convolution, keys, values, of_stage, attended, first=attended != before, **evolution
                )
                before = attended

    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, maps: list[Tensor] | None = None
    ) -> ImageClassifierOutputWithNoAttention:
        """B x channels x side x side to the classes' scores, B x classes, and with labels, B, the cross entropy.

        ``maps``, a list, is given the A_logit of each augmented layer.
        """
        x, a_logit = self.resnet.embedder(pixel_values), None
        for block in (block for stage in self.resnet.encoder.stages for block in stage.layers):
            residual = block.shortcut(x)
            for layer in block.layer:
                if isinstance(layer.convolution, AugmentedConvolution):
                    x, a_logit = layer.convolution(x, a_logit)
                    if maps is not None:
                        maps.append(a_logit)
                else:
                    x = layer.convolution(x)
                x = layer.activation(layer.normalization(x))
            x = block.activation(x + residual)
        logits = self.classifier(self.resnet.pooler(x))
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)
