"""Under PyTorch's automatic mixed precision attention gives float32's numbers, to the precision of the smaller type."""

import pytest
import torch
from helpers.models import amplify_, batch
from helpers.models import build as build_model
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from evolving_attention import kernels
from evolving_attention.evolution import Geometry

SIZE, HEADS, LENGTH, BATCH = 16, 4, 6, 2


def autocast():
    return torch.autocast("cpu", dtype=torch.bfloat16)


def encoder(plain):
    """Two layers, the second of which gets the first one's map."""
    layers = [EncoderSelfAttention(SIZE, HEADS, alpha=0.4, beta=0.5, first=n == 0, plain=plain) for n in range(2)]
    modules = torch.nn.ModuleList(layers)

    def run(x):
        x, a_logit = modules[0](x, keep_map=True)
        return modules[1](x, previous=a_logit)[0]

    return modules, run


def decoder(plain):
    module = DecoderAttention(Geometry.DECODER_SELF, SIZE, HEADS, beta=0.5, self_attention=True, plain=plain)
    future = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return module, lambda x: module(x, x, x, attn_mask=future)[0]


def steps(plain):
    module, _ = decoder(plain)

    def run(x):
        state = {}
        return torch.cat([module(row, row, row, incremental_state=state)[0] for row in x.split(1)])

    return module, run


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
@pytest.mark.parametrize("build", [encoder, decoder, steps])
def test_values_and_gradients_are_float32s(build, plain):
    module, run = build(plain)
    amplify_(module, 2)
    x = torch.randn(LENGTH, BATCH, SIZE)
    expected = run(x)
    gradients = torch.autograd.grad(expected.square().sum(), module.parameters(), allow_unused=True)
    with autocast():
        output = run(x)
    assert output.dtype == torch.bfloat16
    assert (output.float() - expected).norm() < 0.02 * expected.norm()
    ours = torch.autograd.grad(output.float().square().sum(), module.parameters(), allow_unused=True)
    for (name, parameter), gradient, other in zip(module.named_parameters(), ours, gradients, strict=True):
        if other is not None:
            assert gradient.dtype == parameter.dtype
            if other.norm() > 0.1:  # those of keys' biases are 0, but for rounding
                assert (gradient - other).norm() < 0.1 * other.norm(), name


@pytest.mark.parametrize("rule", ["evolving", "predictive"])
def test_a_layer_may_be_computed_again_without_it(rule):
    """As by fairseq's --amp --checkpoint-activations, whose backward pass is outside of autocast."""
    source, target = batch([3, 5]), batch([4, 2], eos_first=True)
    gradients = []
    for flags in ([], ["--checkpoint-activations"]):
        torch.manual_seed(1)
        model = build_model("ea_transformer_lite", "--ea-rule", rule, *flags, train=True)
        with autocast():
            logits, _ = model(source, None, target)
        logits.float().square().mean().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, expected in gradients[0].items():
        assert_close(gradients[1][name], expected, rtol=0.1, atol=0.05 * expected.abs().max().item() + 0.01, msg=name)


def test_a_kernel_is_asked_about_convolutions_of_the_queries_type(monkeypatch):
    """Else it would refuse, and leave the call to a slower way."""
    asked = []
    monkeypatch.setattr(kernels, "kernel_for", lambda call: asked.append(call))
    module, x = EncoderSelfAttention(SIZE, HEADS, beta=0.5), torch.randn(LENGTH, BATCH, SIZE)
    with autocast():
        module(x)
    assert {asked[0].q.dtype, asked[0].weight.dtype, asked[0].bias.dtype} == {torch.bfloat16}
