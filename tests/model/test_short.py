"""Promise 5: sentences shorter than the kernel work, and nothing is ever NaN, in any precision."""

import copy
import itertools

import pytest
import torch
from helpers.models import batch
from helpers.promises import MODELS, lively, outputs

from evolving_attention import Evolution, EvolvingAttention, Geometry

HALF = [torch.float16, torch.bfloat16]


#: every model in one kind of half precision, the other one after it; three in float32, too
CASES = [*zip(MODELS, itertools.cycle(HALF)), *((name, torch.float32) for name in ("kernel 1", "kernel 5", "RoBERTa"))]


@pytest.mark.parametrize("name, dtype", CASES, ids=str)
def test_short_sentences_have_finite_scores_and_gradients(name, dtype):
    model = lively(name, dtype=dtype, train=True)
    for source, target in (([1], [1]), ([1, 2, 7], [2, 1, 3])):
        scores = outputs(model, batch(source, left_pad=True), batch(target, eos_first=True))
        assert scores.dtype == dtype and scores.isfinite().all()
        scores.float().pow(2).mean().backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), key


@pytest.mark.parametrize("name, dtype", [("kernel 1", torch.float16), ("kernel 5", torch.bfloat16)], ids=str)
@torch.no_grad()
def test_half_precision_gives_float32s_numbers(name, dtype):
    """At once and step by step. The error is some 2 eps; without evolution half of the numbers would be wrong."""
    model = lively(name)
    half = copy.deepcopy(model).to(dtype)
    source, tokens = batch([6, 4, 1], left_pad=True), batch([7, 7, 7], eos_first=True)
    expected, whole = outputs(model, source, tokens), outputs(half, source, tokens)
    encoded, state = half.encoder(source), {}
    steps = [half.decoder(tokens[:, :n], encoder_out=encoded, incremental_state=state)[0] for n in range(1, 8)]
    for ours in (whole, torch.cat(steps, dim=1)):
        assert (ours.float() - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@torch.no_grad()
def test_weights_are_float32_at_least(dtype):
    module, x = EvolvingAttention(Geometry.ENCODER_SELF, 8, 2).to(dtype), torch.randn(2, 5, 8).to(dtype)
    assert module(x, need_weights=True).weights.dtype == torch.float32


@torch.no_grad()
def test_sums_of_several_convolutions_stay_finite_in_float16():
    """Infinities less infinities would be NaN in the next convolution."""
    evolution = Evolution(Geometry.ENCODER_SELF, 2, rule="predictive", conv_layers=2, alpha=0.5).half()
    for parameter in evolution.parameters():
        parameter.fill_(10)
    evolution.conv.weight[:, 1] = -10
    logits, previous = (torch.full((1, 2, 4, 4), number).half() for number in (-60_000, 60_000))
    assert evolution(logits, None, previous).isfinite().all()
