"""Promise 7: a loop-by-loop reading of the paper gives the same numbers and the same gradients."""

import pytest
import torch
from helpers import reference
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention, Padding
from evolving_attention.evolution import Geometry

C, K, T, S = 6, 3, 5, 4


def randomised(module):
    module = module.double()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return module


def gradients(module, output, inputs):
    """Gradients of one fixed, uneven functional of the output with regard to inputs and all parameters."""
    probe = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view(output.shape)
    return torch.autograd.grad((probe * output).sum(), [*inputs, *module.parameters()])


def compare(module, fast, slow, inputs):
    assert_close(fast, slow, rtol=1e-10, atol=1e-10)
    for ours, theirs in zip(gradients(module, fast, inputs), gradients(module, slow, inputs), strict=True):
        assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("padding", [[0, 0, 0, 0, 0], [1, 0, 0, 0, 0], [0, 0, 0, 1, 1]])
@pytest.mark.parametrize("alpha, beta, k", [(0, 0.3, 3), (0.4, 0, 3), (0.4, 0.3, 1), (0.4, 0.3, 3), (1, 1, 5)])
def test_two_encoder_layers(alpha, beta, k, padding):
    layers = torch.nn.ModuleList(
        randomised(EncoderSelfAttention(C, K, alpha=alpha, beta=beta, kernel_size=k)) for _ in range(2)
    )
    x = torch.randn(T, C, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor(padding, dtype=torch.bool)
    real = ~padding

    fast, previous = x.unsqueeze(1), None
    for layer in layers:
        fast, previous, _ = layer(fast, padding[None], previous=previous, keep_map=True)
    slow, previous = x, None
    for layer in layers:
        slow, previous = reference.attention(layer, slow, slow, "encoder", padding, padding, previous)
    compare(layers, fast[real, 0], slow[real], [x])


@pytest.mark.parametrize("padding", [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]])
@pytest.mark.parametrize("beta, k", [(0.3, 1), (0.3, 3), (1, 5)])
def test_decoder_self_attention(beta, k, padding):
    module = randomised(DecoderAttention(Geometry.DECODER_SELF, C, K, beta=beta, kernel_size=k, self_attention=True))
    x = torch.randn(T, C, dtype=torch.float64, requires_grad=True)
    padding = torch.tensor(padding, dtype=torch.bool)
    future = torch.full((T, T), -torch.inf).triu(1)
    fast, _ = module(x[:, None], x[:, None], x[:, None], key_padding_mask=padding[None], attn_mask=future)
    slow, _ = reference.attention(module, x, x, "decoder", padding, padding)
    compare(module, fast[~padding, 0], slow[~padding], [x])


@pytest.mark.parametrize("source_padding", [[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 1, 1]])
@pytest.mark.parametrize("target_padding", [[0, 0, 0, 0, 0], [1, 1, 0, 0, 0]])
@pytest.mark.parametrize("beta, k", [(0.3, 1), (0.3, 3), (1, 5)])
def test_encoder_decoder_attention(beta, k, source_padding, target_padding):
    module = randomised(
        DecoderAttention(
            Geometry.ENCODER_DECODER, C, K, beta=beta, kernel_size=k, kdim=7, vdim=7, encoder_decoder_attention=True
        )
    )
    x = torch.randn(T, C, dtype=torch.float64, requires_grad=True)
    y = torch.randn(S, 7, dtype=torch.float64, requires_grad=True)
    source_padding = torch.tensor(source_padding, dtype=torch.bool)
    target_padding = torch.tensor(target_padding, dtype=torch.bool)
    padding = Padding(source_padding[None], target_padding[None])
    fast, _ = module(x[:, None], y[:, None], y[:, None], key_padding_mask=padding)
    slow, _ = reference.attention(module, x, y, "cross", target_padding, source_padding)
    real = ~target_padding
    compare(module, fast[real, 0], slow[real], [x, y])


@pytest.mark.parametrize(
    "kind, rows",
    [
        ("encoder", {-1: [-1, 0, 1], 0: [-1, 0, 1], 1: [-1, 0, 1]}),
        ("decoder", {-2: [-2], -1: [-2, -1], 0: [-2, -1, 0]}),
        ("cross", {-2: [-1, 0, 1], -1: [-1, 0, 1], 0: [-1, 0, 1]}),
    ],
)
def test_receptive_field(kind, rows):
    """What the loops read for k = 3, against the figure: the columns of each row."""
    offsets = [(di, dj) for di, dj, _, _ in reference.visible_taps(kind, 3)]
    assert offsets == [(di, dj) for di, columns in rows.items() for dj in columns]


def test_removed_taps_have_no_effect_whatever_they_hold():
    module = DecoderAttention(Geometry.DECODER_SELF, C, K, beta=0.5, kernel_size=3, self_attention=True)
    x = torch.randn(T, 1, C)
    before, _ = module(x, x, x)
    with torch.no_grad():
        module.evolution.conv.weight[:, :, 0, 1:] = float("nan")
        module.evolution.conv.weight[:, :, 1, 2] = float("inf")
    after, _ = module(x, x, x)
    assert torch.equal(before, after)
