"""Promise 7: a loop-by-loop reading of the papers gives the same numbers and the same gradients, in float64."""

import pytest
import torch
from helpers import reference

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from ea_fairseq.branches import TwoBranchSelfAttention
from evolving_attention.evolution import RULES, Geometry
from evolving_attention.scores import SCORES

C, K, T, S = 6, 3, 5, 4
SCORED = [score for score in SCORES if score != "dot"]
SHORT_REACH = {"relative_positions": 2}
#: paddings of the source, and of the target
LEFT, RIGHT = [1, 0, 0, 0], [0, 0, 1, 1]
WHOLE, BEGINS, ENDS = [0, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    "options, padding",
    [
        ({"alpha": 0}, [0, 0, 0, 0]),
        ({"beta": 0}, RIGHT),
        ({"kernel_size": 1}, LEFT),
        ({"learn_mix": True}, LEFT),
        ({"alpha": 1, "beta": 1, "kernel_size": 5}, RIGHT),
        *(({"rule": rule}, RIGHT) for rule in RULES),
        ({"rule": "predictive", "kernel_size": 1, "learn_mix": True}, RIGHT),
        ({"rule": "predictive", "conv_layers": 2, "learn_mix": True}, LEFT),
        ({"rule": "predictive", "conv_layers": 3}, RIGHT),
        ({"rule": "residual", "learn_mix": True}, LEFT),
        ({"conv": "depthwise"}, LEFT),
        ({"conv": "gated"}, RIGHT),
        ({"rule": "predictive", "conv_layers": 2, "conv": "gated"}, RIGHT),
        (SHORT_REACH, LEFT),
        *(({"score": score, **SHORT_REACH}, RIGHT) for score in SCORED),
    ],
    ids=str,
)
def test_encoder_layers(options, padding):
    options = {"alpha": 0.4, "beta": 0.3, **options}
    reference.compare_layers([EncoderSelfAttention(C, K, first=n == 0, **options) for n in range(3)], padding)


@pytest.mark.parametrize(
    "options, padding, source_padding",
    [
        ({"kernel_size": 1}, WHOLE, None),
        ({}, BEGINS, None),
        ({}, ENDS, None),
        ({"beta": 1, "kernel_size": 5}, ENDS, None),
        (SHORT_REACH, ENDS, None),
        *(({"score": score, **SHORT_REACH}, BEGINS, None) for score in SCORED),
        *(({"rule": rule, "alpha": 0.4}, BEGINS, None) for rule in ("evolving", "evolving-from-second", "predictive")),
        ({"alpha": 0.4, "learn_mix": True}, ENDS, None),
        ({"alpha": 0.4, "beta": 0}, ENDS, None),
        ({"conv": "depthwise", "kernel_size": 5}, ENDS, None),
        ({"conv": "gated"}, BEGINS, None),
        ({"kernel_size": 1}, WHOLE, [0, 0, 0, 0]),
        ({}, WHOLE, LEFT),
        ({}, BEGINS, RIGHT),
        ({"beta": 1, "kernel_size": 5}, BEGINS, RIGHT),
        ({"score": "multiplicative"}, WHOLE, LEFT),
        ({"score": "additive"}, WHOLE, RIGHT),
        ({"score": "concatenative", "beta": 0}, WHOLE, [0, 0, 0, 0]),
        ({"alpha": 0.4}, BEGINS, RIGHT),
        ({"conv": "depthwise"}, BEGINS, RIGHT),
        ({"conv": "gated", "kernel_size": 5}, ENDS, LEFT),
        ({"alpha": 0.4, "learn_mix": True, "kernel_size": 5}, ENDS, LEFT),
        ({"alpha": 0.4, "learn_mix": True, "rule": "predictive"}, BEGINS, LEFT),
    ],
    ids=str,
)
def test_a_decoders_attentions(options, padding, source_padding):
    """Self-attention, or encoder-decoder attention. With an alpha, later layers read the map of the layer before."""
    side = {"kdim": 7, "vdim": 7, "encoder_decoder_attention": True} if source_padding else {"self_attention": True}
    geometry = Geometry.ENCODER_DECODER if source_padding else Geometry.DECODER_SELF
    firsts = [True, False, False] if "alpha" in options else [True]
    layers = [DecoderAttention(geometry, C, K, first=first, **{"beta": 0.3, **side, **options}) for first in firsts]
    reference.compare_decoder(layers, padding, source_padding)


def two_branches(module, x, _, kind, padding, __, previous):
    """One sentence, S x C, through both branches: attention by the reference, the convolution tap by tap."""
    attended, a_logit = reference.attention(module, x, x, kind, padding, padding, previous)
    weight, bias = module.conv_branch.weight, module.conv_branch.bias  # C/2 x C x 3
    rows = []
    for i in range(len(x)):
        taps = [(tap, i + tap - 1) for tap in range(3) if 0 <= i + tap - 1 < len(x)]
        rows.append(bias + sum(weight[:, :, tap] @ x[j] for tap, j in taps if not padding[j]))
    return torch.cat([attended, torch.stack(rows)], dim=1), a_logit


@pytest.mark.parametrize(
    "rule, alpha, padding",
    [("evolving", 0, RIGHT), ("evolving", 0.4, LEFT), ("predictive", 0.4, RIGHT)],
)
def test_two_branches(rule, alpha, padding):
    options = {"rule": rule, "alpha": alpha, "beta": 0.3 if alpha else 0}
    layers = [TwoBranchSelfAttention(2 * C, K, first=n == 0, **options) for n in range(2)]
    reference.compare_layers(layers, padding, two_branches)


@pytest.mark.parametrize(
    "kind, rows",
    [
        ("encoder", {-1: [-1, 0, 1], 0: [-1, 0, 1], 1: [-1, 0, 1]}),
        ("decoder", {-2: [-2], -1: [-2, -1], 0: [-2, -1, 0]}),
        ("cross", {-2: [-1, 0, 1], -1: [-1, 0, 1], 0: [-1, 0, 1]}),
    ],
)
def test_the_loops_read_the_figures_neighbours(kind, rows):
    """For k = 3: the columns of each row."""
    offsets = [(di, dj) for di, dj, _, _ in reference.visible_taps(kind, 3)]
    assert offsets == [(di, dj) for di, columns in rows.items() for dj in columns]


def test_removed_taps_have_no_effect_whatever_they_hold(each_way):
    module = DecoderAttention(Geometry.DECODER_SELF, C, K, beta=0.5, kernel_size=3, self_attention=True)
    x = torch.randn(T, 1, C)
    before, _ = module(x, x, x)
    with torch.no_grad():
        module.evolution.conv.weight[:, :, 0, 1:] = float("nan")
        module.evolution.conv.weight[:, :, 1, 2] = float("inf")
    after, _ = module(x, x, x)
    assert torch.equal(before, after)
