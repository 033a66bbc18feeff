"""Evolution by any five numbers, also by those of no rule, to test kernels with."""

import torch
from torch import nn

from evolving_attention.evolution import Coefficients, Evolution


class AnyShares(Evolution):
    """The sum of evolution.py with any five numbers; parameters, where they are learnt."""

    def __init__(self, geometry, heads, kernel_size, shares, learnt=False):
        super().__init__(geometry, heads, kernel_size)
        numbers = [nn.Parameter(torch.tensor(share)) for share in shares] if learnt else shares
        self.shares = nn.ParameterList(numbers) if learnt else list(numbers)

    def coefficients(self, has_previous):
        return Coefficients(*self.shares)
