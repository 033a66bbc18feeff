"""Graph attention with evolving maps (journal paper, section 3.4): PyTorch Geometric's ``GATConv`` and ``Evolution``.

A map has one number for each edge and head. The layer before hands its map on; the convolution is 1 x 1 over the
heads, since the neighbours of a node have no order.

Axes: N nodes, E edges, K heads, D values a head.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from torch_geometric.utils import add_remaining_self_loops, softmax

from evolving_attention import Evolution, Geometry

LAYERS, HEADS, HIDDEN = 3, 8, 8  # HIDDEN: values of a head
DROPOUT = 0.5  # of nodes' values and of attention weights


class EvolvingGATConv(GATConv):
    """``GATConv`` whose attention logits evolve. Its parameters have the same names, plus ``evolution``.

    Args:
        in_channels, out_channels, heads, options: of ``GATConv``.
        alpha, beta, first: see ``Evolution``.
    """

    def __init__(
        self, in_channels: int, out_channels: int, heads: int, alpha: float, beta: float, first: bool, **options: Any
    ) -> None:
        super().__init__(in_channels, out_channels, heads, add_self_loops=False, **options)
        self.evolution = Evolution(Geometry.ENCODER_SELF, heads, 1, alpha, beta, first=first)

    def forward(self, x: Tensor, edge_index: Tensor, previous: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One layer.

        Args:
            x: N x in_channels.
            edge_index: 2 x E, source and target of each edge, self-loops included.
            previous: 1 x K x 1 x E, A_logit of the layer before.

        Returns:
            N x (K * D), or N x D without ``concat``; and A_logit, 1 x K x 1 x E.
        """
        source, target = edge_index
        x = self.lin(x).view(-1, self.heads, self.out_channels)  # N x K x D
        of_source, of_target = (x * self.att_src).sum(-1), (x * self.att_dst).sum(-1)  # N x K each
        logits = F.leaky_relu(of_source[source] + of_target[target], self.negative_slope)  # E x K
        a_logit = self.evolution(logits.T[None, :, None], None, previous)
        weights = softmax(a_logit[0, :, 0].T, target, num_nodes=len(x))
        weights = F.dropout(weights, self.dropout, self.training)
        out = self.propagate(edge_index, x=(x, x), alpha=weights, size=None)  # N x K x D
        return (out.flatten(1) if self.concat else out.mean(1)) + self.bias, a_logit


class EvolvingGAT(nn.Module):
    """Layers of ``EvolvingGATConv`` between which the maps are handed on. alpha = beta = 0: a plain GAT.

    The last layer's heads, which give a value for each class, are averaged.
    """

    def __init__(self, in_channels: int, classes: int, alpha: float, beta: float) -> None:
        super().__init__()
        self.layers, last = nn.ModuleList(), LAYERS - 1
        for number in range(LAYERS):
            enter, leave = HEADS * HIDDEN if number else in_channels, HIDDEN if number < last else classes
            options = {"concat": number < last, "dropout": DROPOUT}
            self.layers.append(EvolvingGATConv(enter, leave, HEADS, alpha, beta, first=number == 0, **options))

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """N x in_channels and 2 x E to the classes' scores, N x classes. Self-loops are added here, once."""
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=len(x))
        a_logit = None
        for number, layer in enumerate(self.layers):
            x = F.dropout(F.elu(x) if number else x, DROPOUT, self.training)
            x, a_logit = layer(x, edge_index, a_logit)
        return x
