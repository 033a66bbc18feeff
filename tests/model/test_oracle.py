"""Promise 7: a loop-by-loop reading of the paper gives the same numbers and the same gradients."""

import pytest
import torch
from helpers import reference

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from evolving_attention.evolution import Geometry

C, K, T, S = 6, 3, 5, 4


@pytest.mark.parametrize(
    "alpha, beta, k, padding",
    [
        (0, 0.3, 3, [0, 0, 0, 0, 0]),
        (0.4, 0, 3, [0, 0, 0, 1, 1]),
        (0.4, 0.3, 1, [1, 0, 0, 0, 0]),
        (0.4, 0.3, 3, [0, 0, 0, 1, 1]),
        (0.4, 0.3, 3, [1, 0, 0, 0, 0]),
        (1, 1, 5, [0, 0, 0, 1, 1]),
    ],
)
def test_two_encoder_layers(alpha, beta, k, padding):
    layers = [EncoderSelfAttention(C, K, alpha=alpha, beta=beta, kernel_size=k) for _ in range(2)]
    reference.compare_layers(layers, padding)


@pytest.mark.parametrize(
    "beta, k, padding",
    [(0.3, 1, [0, 0, 0, 0, 0]), (0.3, 3, [1, 1, 0, 0, 0]), (0.3, 3, [0, 0, 0, 0, 1]), (1, 5, [0, 0, 0, 0, 1])],
)
def test_decoder_self_attention(beta, k, padding):
    module = DecoderAttention(Geometry.DECODER_SELF, C, K, beta=beta, kernel_size=k, self_attention=True)
    reference.compare_decoder(module, padding)


@pytest.mark.parametrize(
    "beta, k, source_padding, target_padding",
    [
        (0.3, 1, [0, 0, 0, 0], [0, 0, 0, 0, 0]),
        (0.3, 3, [1, 0, 0, 0], [0, 0, 0, 0, 0]),
        (0.3, 3, [0, 0, 1, 1], [1, 1, 0, 0, 0]),
        (1, 5, [0, 0, 1, 1], [1, 1, 0, 0, 0]),
    ],
)
def test_encoder_decoder_attention(beta, k, source_padding, target_padding):
    options = {"kdim": 7, "vdim": 7, "encoder_decoder_attention": True}
    module = DecoderAttention(Geometry.ENCODER_DECODER, C, K, beta=beta, kernel_size=k, **options)
    reference.compare_cross(module, source_padding, target_padding)


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
