"""EA-DC-Transformer: against loops in float64, DC-Transformer as its limit, padding, causality, aeon's checks."""

import pytest
import torch
import torch.nn.functional as F
from helpers import reference

pytest.importorskip("aeon")
from aeon.testing.estimator_checking import parametrize_with_checks

from examples.time_series import model
from examples.time_series.estimators import EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor
from examples.time_series.model import Layer, Network


@parametrize_with_checks([EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor])
def test_aeons_checks(check):
    check()


def by_loop(attention, x, padded, previous):
    """One series, T x d: the output, T x p d, and the maps, nested lists."""
    q, k, v = (
        project(x).unflatten(1, (attention.num_heads, -1)).transpose(0, 1)
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    logits = q @ k.transpose(1, 2) * q.size(-1) ** -0.5
    size = len(x)
    picture = [[[one[i, j] for j in range(size)] for i in range(size)] for one in logits]
    evolution = attention.evolution
    numbers = reference.COEFFICIENTS["evolving", previous is not None](evolution.alpha, evolution.beta)
    conv = [(evolution.conv.weight, evolution.conv.bias)]
    maps = reference.evolve(picture, "encoder", conv, numbers, lambda i, j: bool(padded[i] or padded[j]), previous)
    weights = torch.stack([torch.stack([torch.stack(row) for row in head]) for head in maps])
    weights = weights.masked_fill(padded, float("-inf")).softmax(-1)
    return attention.out_proj((weights @ v).transpose(0, 1).flatten(1)), maps


def test_two_layers_of_attention_equal_loops(monkeypatch):
    monkeypatch.setattr(model, "HEADS", 2)
    torch.manual_seed(1)
    layers = [Layer(8, 0.25, 1, 0.0, alpha=0.4, beta=0.6, first=first).double() for first in (True, False)]
    x, padded = torch.randn(1, 5, 8, dtype=torch.float64), torch.tensor([[False] * 4 + [True]])
    a_logit, maps = None, None
    for layer in layers:
        expected, maps = by_loop(layer.attention, x[0], padded[0], maps)
        actual, a_logit, *_ = layer.attention(x, padding=padded, previous=a_logit)
        torch.testing.assert_close(actual[0, :4], expected[:4])
        x, _ = layer(x, padded, None)


def test_the_convolution_is_causal_and_dilated():
    layer = Layer(8, 0.0, 4, 0.0).double().eval()
    x = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)
    layer(x, torch.zeros(1, 12, dtype=torch.bool), None)[0][0, 8].sum().backward()
    assert x.grad[0].abs().sum(1).nonzero().flatten().tolist() == [0, 4, 8]


@pytest.mark.parametrize(
    "kind", [{"p": 1.0}, {"p": 0.25}, {"p": 0.0}, {"p": 1.0, "layers": 0}], ids=["tst", "dc", "conv", "gru"]
)
def test_padding_changes_nothing(kind):
    torch.manual_seed(1)
    network = Network(3, 9, 2, d=16, dropout=0.0, **{"layers": 2, **kind}).double().eval()
    x, padded = torch.randn(2, 9, 3, dtype=torch.float64), torch.zeros(2, 9, dtype=torch.bool)
    padded[0, 6:] = True
    changed = x.masked_fill(padded[..., None], 7.0)
    torch.testing.assert_close(network(changed, padded), network(x, padded))
    torch.testing.assert_close(network(x[:1], padded[:1]), network(x, padded)[:1])


def test_without_evolution_the_attention_is_plain():
    torch.manual_seed(1)
    attention = Layer(16, 0.25, 1, 0.0, alpha=0.0, beta=0.0).double().attention
    x, padded = torch.randn(2, 6, 16, dtype=torch.float64), torch.zeros(2, 6, dtype=torch.bool)
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (project(x).unflatten(2, (model.HEADS, -1)).transpose(1, 2) for project in projections)
    expected = attention.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, padding=padded, previous=torch.randn(2, 8, 6, 6)).output, expected)
    assert attention.evolution.conv is None


def test_only_masked_values_count_in_pre_training(monkeypatch):
    network, x = Network(2, 4, 2, layers=1, d=8, p=0.5, dropout=0.0), torch.randn(3, 4, 2)
    padded = torch.zeros(3, 4, dtype=torch.bool)
    torch.nn.init.zeros_(network.restore.weight)
    torch.nn.init.zeros_(network.restore.bias)
    monkeypatch.setattr(torch, "rand_like", lambda like: torch.arange(24.0).view(3, 4, 2) / 24)
    expected = x.flatten()[:4].square().mean()  # 0.15 * 24 = 3.6: the first four
    torch.testing.assert_close(network.restoration_loss(x, padded), expected)
