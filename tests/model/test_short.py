"""Promise 5: sentences shorter than the kernel work, and nothing is ever NaN, in any precision.

Nor are half precision's numbers further from float32's than its rounding leads.
"""

import copy

import pytest
import torch
from helpers.models import amplify_, batch, build

from ea_fairseq.attention import EncoderSelfAttention
from evolving_attention.evolution import Evolution, Geometry

pytestmark = pytest.mark.usefixtures("each_way")


@pytest.mark.parametrize(
    "dtype, k, source, target, left_pad",
    [
        (torch.float32, 3, [1], [1], False),
        (torch.float32, 5, [1, 2], [2, 1], True),
        (torch.float16, 1, [1, 9], [1, 7], False),
        (torch.float16, 3, [2], [1], False),
        (torch.float16, 5, [1, 9], [1, 7], True),
        (torch.bfloat16, 3, [1, 2], [2, 1], True),
        (torch.bfloat16, 5, [1], [1], False),
    ],
)
def test_short_sentences(dtype, k, source, target, left_pad):
    model = amplify_(build("ea_transformer_base", "--ea-kernel-size", k, dtype=dtype, train=True))
    source = batch(source, left_pad=left_pad)
    target = batch(target, left_pad=left_pad, eos_first=True)
    logits = model(source, None, target)[0]
    assert logits.dtype == dtype
    assert logits.isfinite().all()
    logits.float().pow(2).mean().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@torch.no_grad()
def test_step_by_step_from_nothing(dtype):
    model = amplify_(build("ea_transformer_base", "--ea-kernel-size", 5, dtype=dtype))
    encoder_out = model.encoder(batch([1, 2]))
    tokens, state = torch.full((2, 1), 2), {}
    for _ in range(6):
        logits = model.decoder(tokens, encoder_out=encoder_out, incremental_state=state)[0][:, -1]
        assert logits.isfinite().all()
        tokens = torch.cat([tokens, logits.argmax(-1, keepdim=True)], dim=1)


@pytest.mark.parametrize("dtype, k", [(torch.float16, 1), (torch.float16, 3), (torch.bfloat16, 3), (torch.bfloat16, 5)])
@torch.no_grad()
def test_half_precision_gives_float32s_numbers(dtype, k):
    """At once and step by step. It is some 2 eps off; without evolution it would be half of the numbers off."""
    model = amplify_(build("ea_transformer_base", "--ea-kernel-size", k, "--ea-beta", 0.5))
    half = copy.deepcopy(model).to(dtype)
    source, tokens = batch([6, 4, 1], left_pad=True), batch([7, 7, 7], eos_first=True)
    expected, whole = model(source, None, tokens)[0], half(source, None, tokens)[0]
    encoded, state = half.encoder(source), {}
    steps = [half.decoder(tokens[:, :n], encoder_out=encoded, incremental_state=state)[0] for n in range(1, 8)]
    for ours in (whole, torch.cat(steps, dim=1)):
        assert (ours.float() - expected).norm() < 8 * torch.finfo(dtype).eps * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@torch.no_grad()
def test_weights_are_float32_at_least(dtype):
    module, x = EncoderSelfAttention(8, 2, beta=0.5).to(dtype).eval(), torch.randn(5, 2, 8).to(dtype)
    assert module(x, need_weights=True)[2].dtype == torch.float32


@pytest.mark.parametrize("conv_layers", [1, 2])
@torch.no_grad()
def test_sums_beyond_float16_stay_finite(conv_layers):
    """Every sum is kept within half of the range: infinities less infinities would be NaN in the next layer."""
    options = {"rule": "predictive", "conv_layers": conv_layers, "alpha": 0.5}
    evolution = Evolution(Geometry.ENCODER_SELF, 2, 3, **options).half()
    for parameter in evolution.parameters():
        parameter.fill_(10)
    logits, previous = (torch.full((1, 2, 4, 4), number).half() for number in (-60_000, 60_000))
    a_logit = evolution(logits, None, previous)
    assert a_logit.isfinite().all() and a_logit.abs().max() <= torch.finfo(torch.float16).max / 2
    a_logit = Evolution(Geometry.ENCODER_SELF, 2, rule="realformer").half()(-logits, None, previous)
    assert a_logit.isfinite().all()
