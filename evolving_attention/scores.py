"""Scores: from queries and keys to logits, where that is more than a scaled dot product.

    dot             q^T k / sqrt(D)                 Vaswani et al. 2017
    multiplicative  q^T W k                         the journal paper's equation 11
    additive        w^T tanh(U k + V q)             the same
    concatenative   w^T tanh(U [k; q])              the same; additive, but for how it is parameterised
    relative        + q^T e_(i-j) / sqrt(D)         Shaw et al. 2018; the journal paper's equation 2

Equation 11 also multiplies the sums inside of tanh by Q, which gives no vector. Its additive and concatenative scores
are built here as Luong et al. 2015 define them. Each head has its own W, U, V and w. All heads of a layer share one
table of the e.

Axes: B batch, K heads, T target (query) length, S source (key) length, D head size.
"""

import functools

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

#: The most numbers that additive and concatenative scores hold in one piece of B x K x rows x S x D, or one row of
#: queries where that is more. Training keeps no piece: each is computed once more in the backward pass.
PIECE = 2**22


def dot_products(q: Tensor, k: Tensor, scale: float = 1.0) -> Tensor:
    """B x K x T x D, B x K x S x D -> scaled dot products, B x K x T x S."""
    return torch.matmul(q * scale, k.transpose(2, 3))


class MultiplicativeScore(nn.Module):
    """q^T W k. W starts as the identity / sqrt(D), so that a model starts with scaled dot products.

    Args:
        heads: K.
        size: D.
    """

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(size).div(size**0.5).repeat(heads, 1, 1))  # K x D x D

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """q: B x K x T x D, unscaled; k: B x K x S x D -> B x K x T x S."""
        return dot_products(torch.einsum("bktd,kde->bkte", q, self.weight), k)


class AdditiveScore(nn.Module):
    """w^T tanh(U k + V q), by parameters of these names: ``key_weight`` U, ``query_weight`` V, ``vector`` w.

    Args:
        heads: K.
        size: D.
    """

    def __init__(self, heads: int, size: int):
        super().__init__()
        self.key_weight = nn.Parameter(_xavier(heads, size, size))
        self.query_weight = nn.Parameter(_xavier(heads, size, size))
        self.vector = nn.Parameter(_xavier(heads, 1, size).squeeze(1))  # K x D

    def weights(self) -> tuple[Tensor, Tensor]:
        """U and V, K x D x D."""
        return self.key_weight, self.query_weight

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        """q: B x K x T x D, unscaled; k: B x K x S x D -> B x K x T x S."""
        of_keys, of_queries = self.weights()
        queries = torch.einsum("bktd,ked->bkte", q, of_queries)
        keys = torch.einsum("bksd,ked->bkse", k, of_keys)
        return _in_pieces(queries, keys, self.vector)


class ConcatenativeScore(AdditiveScore):
    """w^T tanh(U [k; q]): the additive score with both weights in one, ``weight`` U, first the key's.

    Args:
        heads: K.
        size: D.
    """

    def __init__(self, heads: int, size: int):
        nn.Module.__init__(self)
        self.weight = nn.Parameter(_xavier(heads, size, 2 * size))
        self.vector = nn.Parameter(_xavier(heads, 1, size).squeeze(1))  # K x D

    def weights(self) -> tuple[Tensor, Tensor]:
        """As the additive score's."""
        size = self.weight.size(1)
        return self.weight[:, :, :size], self.weight[:, :, size:]


#: what --ea-score may be, and the modules that compute it; none: scaled dot products, which the kernels compute too
SCORES: dict[str, type[nn.Module] | None] = {
    "dot": None,
    "multiplicative": MultiplicativeScore,
    "additive": AdditiveScore,
    "concatenative": ConcatenativeScore,
}


class RelativePositions(nn.Module):
    """The summand of a pair of positions in its logit: q_i . e_(i-j), for distances clipped to [-reach, reach].

    Args:
        reach: the greatest distance that differs from smaller ones.
        size: D.

    ``weight``, (2 reach + 1) x D, holds e of -reach first. It starts at zero: a model starts as the one without.
    """

    def __init__(self, reach: int, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2 * reach + 1, size))

    def forward(self, q: Tensor, keys: int) -> Tensor:
        """The summand of the logits.

        Args:
            q: B x K x T x D, scaled; the last T of the sequence's positions, which step by step are the new ones.
            keys: S, all positions of the sequence so far.

        Returns:
            B x K x T x S.
        """
        reach = self.weight.size(0) // 2
        rows = torch.arange(keys - q.size(2), keys, device=q.device)
        columns = torch.arange(keys, device=q.device)
        distances = (rows[:, None] - columns).clamp(-reach, reach) + reach  # T x S, which row of the table
        by_distance = torch.matmul(q, self.weight.t())  # B x K x T x (2 reach + 1)
        return by_distance.gather(3, distances.expand(*q.shape[:2], -1, -1))


def _xavier(heads: int, rows: int, columns: int) -> Tensor:
    """A matrix per head, initialised separately: K x rows x columns."""
    weight = torch.empty(heads, rows, columns)
    for matrix in weight:
        nn.init.xavier_uniform_(matrix)
    return weight


def _in_pieces(queries: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
    """B x K x rows x D, B x K x S x D -> B x K x rows x S, a piece of the rows after the other."""
    rows = max(1, PIECE // max(1, keys.numel()))
    if rows >= queries.size(2):
        return _tanh_scores(queries, keys, vector)
    pieces = queries.split(rows, dim=2)
    if not torch.is_grad_enabled():
        return torch.cat([_tanh_scores(piece, keys, vector) for piece in pieces], dim=2)
    again = functools.partial(checkpoint, _tanh_scores, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(piece, keys, vector) for piece in pieces], dim=2)


def _tanh_scores(queries: Tensor, keys: Tensor, vector: Tensor) -> Tensor:
    hidden = torch.tanh(queries.unsqueeze(3) + keys.unsqueeze(2))  # B x K x rows x S x D
    return torch.matmul(hidden, vector[:, None, :, None]).squeeze(-1)
