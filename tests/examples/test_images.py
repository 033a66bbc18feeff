"""Attention-augmented ResNet with evolving maps: against loops in float64, and its counts."""

import pytest
import torch
import torch.nn.functional as F
from helpers import reference
from torch import nn

from evolving_attention.scores import RelativePositions2d

pytest.importorskip("transformers")
from transformers import ResNetForImageClassification

from examples.images import digits, resnet
from examples.images.resnet import AugmentedConvolution, EvolvingResNet

SIDE = 3


def relative(positions, q, i, j):
    """Equation 3 for two pixels. q: D, scaled."""
    (y, x), (other_y, other_x) = divmod(i, SIDE), divmod(j, SIDE)
    return q @ (positions.rows[other_y - y + SIDE - 1] + positions.columns[other_x - x + SIDE - 1])


def test_relative_positions_equal_a_loop():
    positions = RelativePositions2d(SIDE, SIDE, 4).double()
    q = torch.randn(1, 2, SIDE**2, 4, dtype=torch.float64)
    expected = [
        [[relative(positions, q[0, head, i], i, j) for j in range(SIDE**2)] for i in range(SIDE**2)]
        for head in range(2)
    ]
    torch.testing.assert_close(positions(q)[0], torch.tensor(expected, dtype=torch.float64))


def by_loop(layer, x, previous):
    """One picture, channels x 3 x 3, through a layer's weights: F x 3 x 3, and A_logit, K x N x N nested lists."""
    heads, pixels = resnet.HEADS, SIDE**2
    qkv = layer.qkv.weight[:, :, 0, 0] @ x.flatten(1)  # channels x N
    q, k, v = (
        part.view(heads, -1, pixels).transpose(1, 2) for part in qkv.split([layer.keys, layer.keys, layer.values])
    )
    q = q * q.size(-1) ** -0.5
    logits = [
        [[q[h, i] @ k[h, j] + relative(layer.positions, q[h, i], i, j) for j in range(pixels)] for i in range(pixels)]
        for h in range(heads)
    ]
    evolution = layer.evolution
    numbers = reference.COEFFICIENTS["evolving", previous is not None](evolution.alpha, evolution.beta)
    conv = [(evolution.conv.weight, evolution.conv.bias)]
    maps = reference.evolve(logits, "encoder", conv, numbers, lambda i, j: False, previous)
    weights = torch.stack([torch.stack([torch.stack(row) for row in head]) for head in maps]).softmax(-1)
    attended = (weights @ v).transpose(1, 2).reshape(layer.values, pixels)
    attended = layer.output.weight[:, :, 0, 0] @ attended
    local = F.conv2d(x[None], layer.convolution.weight, padding=1)[0]
    return torch.cat([local, attended.view(-1, SIDE, SIDE)]), maps


def test_two_layers_equal_loops(monkeypatch):
    monkeypatch.setattr(resnet, "HEADS", 2)
    torch.manual_seed(1)
    layers = [AugmentedConvolution(nn.Conv2d(10, 10, 3), SIDE, 0.4, 0.7, first) for first in (True, False)]
    x, a_logit, maps = torch.randn(1, 10, SIDE, SIDE, dtype=torch.float64), None, None
    with torch.no_grad():
        for layer in layers:
            expected, maps = by_loop(layer.double(), x[0], maps)
            x, a_logit = layer(x, a_logit)
            torch.testing.assert_close(x[0], expected)
            torch.testing.assert_close(a_logit[0], torch.tensor(maps, dtype=torch.float64))


def test_the_plain_network_is_that_of_transformers():
    torch.manual_seed(1)
    ours = EvolvingResNet(digits.small_config(), augment=False).eval()
    plain = ResNetForImageClassification(digits.small_config()).eval()
    plain.load_state_dict(ours.resnet.state_dict())
    x = torch.randn(2, 1, 32, 32)
    torch.testing.assert_close(ours(x), plain(x).logits, rtol=0, atol=0)


def test_the_chain_of_maps_breaks_where_the_shape_changes():
    model = EvolvingResNet(digits.small_config(), 32, alpha=0.5, beta=0.0)
    layers = [module.evolution for module in model.modules() if isinstance(module, AugmentedConvolution)]
    assert [evolution.uses_previous for evolution in layers] == [False, True] * 3
    maps = []
    model(torch.randn(2, 1, 32, 32), maps)
    assert [a_logit.size(2) for a_logit in maps] == [64, 64, 16, 16, 4, 4]


def test_parameters_of_imagenets_models():
    """The README's table."""
    with torch.device("meta"):
        models = [EvolvingResNet(resnet.imagenet_config(50), 224, *shares) for shares in ((0, 0), (0.5, 1.0))]
    plain, evolving = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert evolving - plain == 13 * (resnet.HEADS**2 * 9 + resnet.HEADS)
    assert round(plain / 1e6, 2) == 24.63


@pytest.mark.slow
def test_the_command_prints_a_row_for_each_system(capsys, monkeypatch):
    x, classes = digits.pictures()
    monkeypatch.setattr(digits, "pictures", lambda: (x[:100], classes[:100]))
    monkeypatch.setattr(digits, "SYSTEMS", {"EA-AA-ResNet": digits.SYSTEMS["EA-AA-ResNet"]})
    digits.main(["--folds", "1", "--epochs", "1"])
    (line,) = capsys.readouterr().out.splitlines()[2:]
    assert "EA-AA-ResNet | 168,842" in line
