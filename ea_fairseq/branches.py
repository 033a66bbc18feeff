"""A convolution beside attention: "Predictive Attention Transformer", section 3.5 and appendix B.1.

Axes: S source length, B batch, C channels of the layer. Masks: True = masked.
"""

import math
from typing import Any

import torch
from fairseq.modules.quant_noise import quant_noise
from torch import Tensor, nn

from .attention import EncoderSelfAttention


class TwoBranchSelfAttention(EncoderSelfAttention):
    """Encoder self-attention and a convolution over time side by side: [Attention(x); Conv1d(x)].

    Each reads all of C and gives half of C.

    Self-attention's parameters have their usual names, with half as many outputs, and its output projection leads from
    C / 2 to C / 2. The convolution, ``conv_branch``, has a window of 3 and sees zeros at padded positions, as it does
    before the first position and after the last.

    Args:
        embed_dim: C, a multiple of twice the number of heads.
        num_heads, q_noise, qn_block_size, **kwargs: see ``EncoderSelfAttention``; the noise is for attention's part.
    """

    WINDOW = 3

    def __init__(self, embed_dim: int, num_heads: int, *, q_noise: float = 0.0, qn_block_size: int = 8, **kwargs: Any):
        half = embed_dim // 2
        super().__init__(half, num_heads, q_noise=q_noise, qn_block_size=qn_block_size, **kwargs)
        for name in ("q_proj", "k_proj", "v_proj"):
            projection = nn.Linear(embed_dim, half)
            nn.init.xavier_uniform_(projection.weight, gain=1 / math.sqrt(2))  # as fairseq's attention does
            setattr(self, name, quant_noise(projection, q_noise, qn_block_size))
        self.conv_branch = nn.Conv1d(embed_dim, half, self.WINDOW, padding=self.WINDOW // 2)

    def forward(
        self, query: Tensor, key_padding_mask: Tensor | None = None, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """As ``EncoderSelfAttention``'s: query S x B x C -> output S x B x C, attention's half first."""
        attended, a_logit = super().forward(query, key_padding_mask, *args, **kwargs)  # S x B x C/2
        if key_padding_mask is not None:
            query = query.masked_fill(key_padding_mask.bool().t().unsqueeze(-1), 0)
        convolved = self.conv_branch(query.permute(1, 2, 0)).permute(2, 0, 1)  # S x B x C -> B x C x S -> S x B x C/2
        return torch.cat([attended, convolved], dim=2), a_logit
