"""Attention-augmented ResNet and ViT with evolving maps: against loops, as plain models, their counts and commands."""

import json

import pytest
import torch
import torch.nn.functional as F
from helpers import reference
from torch import nn

pytest.importorskip("transformers")
from transformers import ResNetForImageClassification

from evolving_attention.evolution import Evolution
from examples.images import digits, maps, resnet
from examples.images.resnet import AugmentedConvolution

SIDE = 3


def relative(positions, q, i, j):
    """Equation 3 for two pixels. q: D, scaled."""
    (y, x), (other_y, other_x) = divmod(i, SIDE), divmod(j, SIDE)
    return q @ (positions.rows[other_y - y + SIDE - 1] + positions.columns[other_x - x + SIDE - 1])


def by_loop(layer, x, previous):
    """One picture, channels x 3 x 3, through a layer's weights: F x 3 x 3, and A_logit, K x N x N nested lists."""
    heads, pixels = resnet.HEADS, SIDE**2
    qkv = layer.qkv.weight[:, :, 0, 0] @ x.flatten(1)  # channels x N
    q, k, v = (
        part.view(heads, -1, pixels).transpose(1, 2) for part in qkv.split([layer.keys, layer.keys, layer.values])
    )
    q = q * q.size(-1) ** -0.5
    logits = [
        [
            [q[h, i] @ k[h, j] + relative(layer.relative_positions, q[h, i], i, j) for j in range(pixels)]
            for i in range(pixels)
        ]
        for h in range(heads)
    ]
    evolution = layer.evolution
    numbers = reference.COEFFICIENTS["evolving", previous is not None](evolution.alpha, evolution.beta)
    conv = [] if evolution.conv is None else [(evolution.conv.weight, evolution.conv.bias)]
    maps = reference.evolve(logits, "encoder", conv, numbers, lambda i, j: False, previous)
    weights = torch.stack([torch.stack([torch.stack(row) for row in head]) for head in maps]).softmax(-1)
    attended = (weights @ v).transpose(1, 2).reshape(layer.values, pixels)
    attended = layer.output.weight[:, :, 0, 0] @ attended
    local = F.conv2d(x[None], layer.convolution.weight, padding=1)[0]
    return torch.cat([local, attended.view(-1, SIDE, SIDE)]), maps


@pytest.mark.parametrize(("alpha", "beta"), [(0.4, 0.7), (0.0, 0.0)])
def test_two_layers_equal_loops(alpha, beta, monkeypatch):
    monkeypatch.setattr(resnet, "HEADS", 2)
    torch.manual_seed(1)
    layers = [
        AugmentedConvolution(nn.Conv2d(10, 10, 3), 4, 2, SIDE, SIDE, first=first, alpha=alpha, beta=beta)
        for first in (True, False)
    ]
    x, a_logit, maps = torch.randn(1, 10, SIDE, SIDE, dtype=torch.float64), None, None
    with torch.no_grad():
        for layer in layers:
            expected, maps = by_loop(layer.double(), x[0], maps)
            x, a_logit = layer(x, a_logit)
            torch.testing.assert_close(x[0], expected)
            torch.testing.assert_close(a_logit[0], torch.tensor(maps, dtype=torch.float64))


def test_the_plain_network_is_that_of_transformers():
    torch.manual_seed(1)
    ours = digits.TABLES["systems"]["ResNet"].build().eval()
    plain = ResNetForImageClassification(ours.config).eval()
    plain.load_state_dict(ours.state_dict())
    x, labels = torch.randn(2, 1, 64, 64), torch.tensor([3, 7])
    for name, expected in plain(x, labels).items():
        torch.testing.assert_close(ours(x, labels)[name], expected, rtol=0, atol=0)


def test_the_first_layer_of_ea_vit_has_no_convolution():
    model = digits.TABLES["systems"]["EA-ViT"].build()
    evolutions = [module for module in model.modules() if isinstance(module, Evolution)]
    assert [evolution.conv is None for evolution in evolutions] == [True, False, False, False]


def test_the_chain_of_maps_breaks_where_the_shape_changes():
    """Two stages have maps of 4 x 4 pixels, one of them after pooling; the last has 2 x 2."""
    model = digits.resnet().build()
    layers = [module.evolution for module in model.modules() if isinstance(module, AugmentedConvolution)]
    beginnings = [True, *[False] * 7, True, False]
    assert [not evolution.uses_previous for evolution in layers] == beginnings
    assert [evolution.conv is None for evolution in layers] == beginnings
    model(torch.randn(2, 1, 64, 64), maps=(a_logits := []))
    assert [a_logit.size(2) for a_logit in a_logits] == [16] * 8 + [4] * 2


def test_pooling_leaves_out_what_lies_outside():
    """As TensorFlow's 3 x 3 average of stride 2 with padding SAME, in the authors' code."""
    layer = AugmentedConvolution(nn.Conv2d(1, 16, 3), 8, 8, 4, 2, first=True)
    seen = []
    layer.qkv.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    x = torch.arange(16.0).view(1, 1, 4, 4)
    layer(x, None)
    means = [[x[..., top : top + 3, left : left + 3].mean() for left in (0, 2)] for top in (0, 2)]
    torch.testing.assert_close(seen[0][0, 0], torch.tensor(means))


def test_maps_to_classify_are_the_attention_of_the_centre_pixel():
    torch.manual_seed(1)
    model, seen = digits.resnet(128).build().eval(), []
    layers = [module for module in model.modules() if isinstance(module, AugmentedConvolution)]
    for layer in layers[5:8]:
        layer.observer = lambda call: seen.append(call.weights)
    x = torch.rand(2, 1, 128, 128)
    for actual, weights in zip(maps.centre_maps(model, x), seen, strict=True):
        expected = weights.unflatten(3, (8, 8)).unflatten(2, (8, 8))[:, :, 4, 4]  # B x K x 8 x 8 of all pixels
        torch.testing.assert_close(actual, 64 * expected)


def test_the_densenet_has_twelve_layers_and_two_poolings():
    reader = maps.DenseNet()
    layers = list(reader)
    pools = [number for number, layer in enumerate(layers) if isinstance(layer, nn.AvgPool2d)]
    before = [sum(isinstance(layer, maps.Dense) for layer in layers[:number]) for number in (*pools, len(layers))]
    assert before == [4, 7, 12]
    sides = []
    for pool in pools:
        layers[pool].register_forward_hook(lambda module, inputs, output: sides.append(output.size(3)))
    assert reader(torch.rand(2, 8, 8, 8)).shape == reader(torch.rand(2, 8, 14, 14)).shape == (2, 10)
    assert sides == [4, 2, 7, 4], "of ImageNet's maps the paper makes 7 x 7 and 4 x 4"


@pytest.fixture
def few(monkeypatch):
    """A hundred pictures in place of all."""
    pictures = digits.pictures
    monkeypatch.setattr(digits, "pictures", lambda side: [values[:100] for values in pictures(side)])


@pytest.mark.slow
def test_the_command_reports_each_system(capsys, few, tmp_path):
    digits.main(["--folds", "1", "--epochs", "1", "--out", str(tmp_path / "scores.json")])
    rows = capsys.readouterr().out.splitlines()[2:]
    kept = json.loads((tmp_path / "scores.json").read_text())
    assert [row.split(" | ")[0] for row in rows] == [f"| {system}" for system in digits.TABLES["systems"]]
    assert kept["parameters"]["EA-AA-ResNet"] == 100514
    assert len(kept["scores"]["EA-ViT"]) == 1


@pytest.mark.slow
def test_the_command_of_maps_reports_each_layer(capsys, few, monkeypatch):
    monkeypatch.delitem(maps.SYSTEMS, "AA-ResNet")
    maps.main(["--folds", "1", "--epochs", "1"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert [row.split(" | ")[0] for row in rows] == [f"| EA-AA-ResNet, layer {layer}" for layer in (6, 7, 8)]


def test_a_picture_shows_the_centre_pixels_attention_through_a_chain():
    models = {name: recipe.build().eval() for name, recipe in maps.SYSTEMS.items()}
    panels = maps.draw(models, torch.rand(1, 1, maps.SIDE, maps.SIDE)).axes
    assert [axes.get_title() for axes in panels[:: 1 + len(maps.CHAIN)]] == list(maps.SYSTEMS)
    shown = [axes.images[0].get_array() for axes in panels[1 : 1 + len(maps.CHAIN)]]
    assert all(abs(one.mean() - 1) < 1e-4 and one.shape == (8, 8) for one in shown)
