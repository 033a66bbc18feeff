"""Graph attention with evolving maps: against a loop in float64, and against GATConv."""

import json

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("torch_geometric")
from torch_geometric.nn import GATConv
from torch_geometric.utils import add_remaining_self_loops

from examples.graphs import classify
from examples.graphs.model import EvolvingGAT, EvolvingGATConv


@pytest.fixture
def graph():
    """Values 7 x 5 and edges of a graph with loops at every node."""
    torch.manual_seed(1)
    edges = torch.randint(7, (2, 20)).unique(dim=1)
    return torch.randn(7, 5, dtype=torch.float64), add_remaining_self_loops(edges, num_nodes=7)[0]


def by_loop(layer, x, edges, previous):
    """Equation 4 edge by edge. previous: E x K or None."""
    heads, size = layer.heads, layer.out_channels
    values = (x @ layer.lin.weight.T).view(-1, heads, size)
    alpha, beta = layer.evolution.alpha if previous is not None else 0, layer.evolution.beta
    weight, bias = layer.evolution.conv.weight[:, :, 0, 0], layer.evolution.conv.bias
    maps = torch.empty(edges.size(1), heads, dtype=x.dtype)
    for number, (source, target) in enumerate(edges.T.tolist()):
        score = (values[source] * layer.att_src[0]).sum(-1) + (values[target] * layer.att_dst[0]).sum(-1)
        logits = F.leaky_relu(score, 0.2)
        mixed = logits if previous is None else alpha * previous[number] + (1 - alpha) * logits
        maps[number] = beta * F.relu(weight @ mixed + bias) + (1 - beta) * mixed
    out = torch.zeros_like(values)
    for node in range(len(x)):
        into = (edges[1] == node).nonzero()[:, 0]
        shares = maps[into].softmax(0)
        for share, edge in zip(shares, into, strict=True):
            out[node] += share[:, None] * values[edges[0, edge]]
    return out.flatten(1) + layer.bias, maps


def test_two_layers_equal_a_loop(graph):
    x, edges = graph
    first = EvolvingGATConv(5, 3, 4, alpha=0.3, beta=0.4, first=True).double()
    second = EvolvingGATConv(12, 3, 4, alpha=0.3, beta=0.4, first=False).double()
    out, a_logit = first(x, edges)
    expected, maps = by_loop(first, x, edges, None)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(a_logit[0, :, 0].T, maps)
    expected, maps = by_loop(second, out, edges, maps)
    out, a_logit = second(out, edges, a_logit)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(a_logit[0, :, 0].T, maps)


def test_without_evolution_it_is_GATConv(graph):
    x, edges = graph
    ours = EvolvingGATConv(5, 3, 4, alpha=0, beta=0, first=True).double()
    plain = GATConv(5, 3, 4).double()
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x, edges)[0], plain(x, edges), rtol=0, atol=1e-14)


def test_the_network_hands_maps_on(graph):
    """With alpha = 1 and beta = 0 all layers have the first one's map."""
    network = EvolvingGAT(5, 2, alpha=1.0, beta=0.0).double().eval()
    network(*graph)[:, 0].sum().backward()
    assert network.layers[0].att_src.grad.abs().max() > 0
    assert all(layer.att_src.grad.abs().max() == 0 for layer in network.layers[1:])


@pytest.mark.slow
def test_the_command_classifies_the_karate_club(capsys, tmp_path):
    classify.main(["karate", "--seeds", "1", "--epochs", "60", "--out", str(tmp_path / "scores.json")])
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(classify.SYSTEMS)
    scores = json.loads((tmp_path / "scores.json").read_text())["scores"]
    assert min(score for (score,) in scores.values()) > 50
