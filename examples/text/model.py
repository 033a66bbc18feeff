"""The draft's classifiers of text, trained from nothing (Predictive Attention Transformer, section 4.1.1, appendix B).

Three blocks of 256 values: attention, a convolution over time or both, then two feed-forward layers. A block reads the
outputs of all blocks before it, as in DenseNet.

Axes: B batch, T words, C values of a block. Masks: True = padded.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from evolving_attention import EvolvingAttention, Geometry

BLOCKS, WIDTH, HEADS, WINDOW = 3, 256, 8, 3


class System(NamedTuple):
    """The parts of a block that mix words."""

    evolution: dict[str, float | str] | None  # of attention, see ``Evolution``; None: no attention
    convolution: bool


def systems(alpha: float = 0.1, conv_layers: int = 1) -> dict[str, System]:
    """The draft's systems, with its alpha for SST and convolutions of PA, and evolving ones by shares of our choice."""
    plain: dict[str, float | str] = {"alpha": 0.0, "beta": 0.0}
    predictive: dict[str, float | str] = {"rule": "predictive", "alpha": alpha, "conv_layers": conv_layers}
    evolving: dict[str, float | str] = {"alpha": alpha, "beta": 0.1}
    return {
        "CNN": System(None, convolution=True),
        "Transformer": System(plain, convolution=False),
        "PA-Transformer": System(predictive, convolution=False),
        "EA-Transformer": System(evolving, convolution=False),
        "Res-Transformer": System({"rule": "residual", "alpha": alpha}, convolution=False),
        "Conv-Transformer": System(plain, convolution=True),
        "PA-Conv-Transformer": System(predictive, convolution=True),
        "EA-Conv-Transformer": System(evolving, convolution=True),
    }


SYSTEMS = systems()


class Block(nn.Module):
    """The block of this number, from 0, for sentences of at most ``longest`` words.

    Attention or a convolution alone gives C values, and has an output projection. Both together give C / 2 each,
    attention with half of the heads, and have none: by that reading the draft's parameters are 2.58 M.
    """

    def __init__(self, system: System, longest: int, number: int, width: int) -> None:
        super().__init__()
        both = system.evolution is not None and system.convolution
        part, heads = (width // 2, HEADS // 2) if both else (width, HEADS)
        self.enter = nn.Linear((number + 1) * width, width) if number else nn.Identity()
        self.attention = None
        if system.evolution is not None:
            options = {"relative_positions": longest - 1, "first": number == 0, **system.evolution}
            self.attention = EvolvingAttention(Geometry.ENCODER_SELF, part, heads, **options)
            if both:
                for name in ("q_proj", "k_proj", "v_proj"):
                    setattr(self.attention, name, nn.Linear(width, part))
                self.attention.out_proj = nn.Identity()
        self.convolution = nn.Conv1d(width, part, WINDOW, padding="same") if system.convolution else None
        self.output = nn.Linear(width, width) if self.attention is None else nn.Identity()
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.dropout = nn.Dropout(0.2)

    def forward(self, outputs: list[Tensor], padded: Tensor, previous: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """outputs: of the blocks before, B x T x C each; padded: B x T -> B x T x C, and A_logit or None."""
        x, parts, a_logit = self.enter(torch.cat(outputs, dim=2)), [], None
        if self.attention is not None:
            attended, a_logit, *_ = self.attention(x, padding=padded, previous=previous)
            parts.append(attended)
        if self.convolution is not None:
            seen = x.masked_fill(padded[..., None], 0).transpose(1, 2)  # B x C x T
            parts.append(self.convolution(seen).transpose(1, 2))
        x = self.norms[0](x + self.dropout(self.output(torch.cat(parts, dim=2))))
        return self.norms[1](x + self.dropout(self.feed_forward(x))), a_logit


class Classifier(nn.Module):
    """Words to a number of classes.

    Args:
        words: the vectors of words; word 0 is padding.
        fields: sentences in a row, whose words get a vector each (appendix B.2.1).
    """

    def __init__(
        self, system: System, words: nn.Embedding, classes: int, fields: int, longest: int, blocks: int, width: int
    ) -> None:
        super().__init__()
        self.words, self.enter = words, nn.Linear(words.embedding_dim, width)
        self.fields = nn.Embedding(fields, width) if fields > 1 else None
        self.blocks = nn.ModuleList(Block(system, longest, number, width) for number in range(blocks))
        self.classes = nn.Linear(width, classes)
        self.dropout = nn.Dropout(0.4)

    def forward(self, words: Tensor, fields: Tensor) -> Tensor:
        """words and fields: B x T numbers -> B x classes; a sentence is the mean of its words."""
        padded, a_logit = words == 0, None
        x = self.enter(self.dropout(self.words(words)))
        outputs = [x if self.fields is None else x + self.fields(fields)]
        for block in self.blocks:
            x, a_logit = block(outputs, padded, a_logit)
            outputs.append(x)
        kept = (~padded)[..., None].type_as(x)
        return self.classes((x * kept).sum(1) / kept.sum(1))
