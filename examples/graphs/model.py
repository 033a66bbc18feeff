"""Graph attention with evolving maps (journal paper, section 3.4): PyTorch Geometric's ``GATConv`` and ``Evolution``.

A map has one number for each edge and head. The layer before hands its map on; the convolution is 1 x 1 over the
heads, since the neighbours of a node have no order.

Axes: N nodes, E edges, K heads, D values a head.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import GATConv
from torch_geometric.utils import add_remaining_self_loops, softmax

from evolving_attention import Evolution, Geometry


class EvolvingGATConv(GATConv):
    """``GATConv`` whose attention logits evolve. Its parameters have the same names, plus ``evolution``.

    Args:
        in_channels: values of a node that comes in.
        out_channels: D.
        heads: K.
        alpha: share of the previous layer's map.
        beta: share of the convolution.
        first: whether this is the first layer, which no map enters.
        kernel_size: 1.
        concat: concatenate the heads' values, else average them.
        dropout: of the attention weights.

    Raises:
        ValueError: another kernel size.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        heads: int,
        *,
        alpha: float = 0.1,
        beta: float = 0.1,
        first: bool = False,
        kernel_size: int = 1,
        concat: bool = True,
        dropout: float = 0.0,
    ) -> None:
        if kernel_size != 1:
            raise ValueError(f"kernel_size {kernel_size}: neighbours in a graph have no order; expected 1")
        super().__init__(in_channels, out_channels, heads, concat=concat, dropout=dropout, add_self_loops=False)
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

    Args:
        in_channels: values of a node.
        hidden: D of all layers but the last.
        classes: D of the last layer, whose heads are averaged.
        layers: two or more.
        heads: K.
        alpha, beta: see ``EvolvingGATConv``.
        dropout: of nodes' values and of attention weights.
    """

    def __init__(
        self,
        in_channels: int,
        hidden: int,
        classes: int,
        layers: int = 3,
        heads: int = 8,
        alpha: float = 0.1,
        beta: float = 0.1,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        self.dropout = dropout
        sizes = [in_channels, *[heads * hidden] * (layers - 1)]
        self.layers = nn.ModuleList(
            EvolvingGATConv(
                *(size, classes if number == layers - 1 else hidden, heads),
                alpha=alpha,
                beta=beta,
                first=number == 0,
                concat=number < layers - 1,
                dropout=dropout,
            )
            for number, size in enumerate(sizes)
        )

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        """N x in_channels and 2 x E to the classes' scores, N x classes. Self-loops are added here, once."""
        edge_index, _ = add_remaining_self_loops(edge_index, num_nodes=len(x))
        a_logit = None
        for number, layer in enumerate(self.layers):
            x = F.dropout(F.elu(x) if number else x, self.dropout, self.training)
            x, a_logit = layer(x, edge_index, a_logit)
        return x


def accuracy(scores: Tensor, labels: Tensor, chosen: Tensor) -> float:
    """The share of the chosen nodes whose class has the highest score. chosen: N, bool."""
    return (scores.argmax(1) == labels)[chosen].float().mean().item()


@torch.no_grad()
def evaluate(model: nn.Module, x: Tensor, edge_index: Tensor) -> Tensor:
    """The classes' scores in evaluation mode, N x classes."""
    model.eval()
    return model(x, edge_index)
