"""A convolution may be changed as any module of PyTorch may: then the plain composition calls it."""

import pytest
import torch
from fairseq.modules.quantization.scalar import quantize_model_
from torch.nn.utils import weight_norm
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from evolving_attention.evolution import Geometry


@pytest.fixture(params=list(Geometry), ids=lambda geometry: geometry.name)
def attention(request):
    """A function that makes the same attention of a kind at every call."""

    def make():
        torch.manual_seed(1)
        if request.param == Geometry.ENCODER_SELF:
            return EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5)
        own = {"self_attention": request.param == Geometry.DECODER_SELF}
        return DecoderAttention(request.param, 8, 2, beta=0.5, encoder_decoder_attention=not any(own.values()), **own)

    return make


def output(module):
    x = torch.linspace(-2, 2, 5 * 2 * 8).sin().view(5, 2, 8)
    return module(x)[0] if isinstance(module, EncoderSelfAttention) else module(x, x, x)[0]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_weight_normalisation_takes_effect(attention):
    module, doubled = attention(), attention()
    weight_norm(module.evolution.conv)
    assert_close(output(module), output(doubled))
    module.evolution.conv.weight_g.mul_(2)
    doubled.evolution.conv.weight.mul_(2)
    assert_close(output(module), output(doubled))


@torch.no_grad()
def test_a_forward_hook_takes_effect(attention):
    module, without = attention(), attention()
    module.evolution.conv.register_forward_hook(lambda conv, inputs, result: 0 * result)
    for parameter in without.evolution.conv.parameters():
        parameter.zero_()
    assert_close(output(module), output(without))
    assert not torch.allclose(output(module), output(attention()), atol=1e-4)


def test_quantisation_noise_takes_effect(attention, monkeypatch):
    """fairseq's --quant-noise-scalar, which needs a GPU. Without noise, training gives the same numbers."""
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    module, rounded, before = attention(), attention(), output(attention())
    quantize_model_(module, p=0, bits=8)
    quantize_model_(rounded, p=1, bits=8)
    assert_close(output(module), before, rtol=1e-3, atol=1e-3)
    assert not torch.allclose(output(rounded), before, atol=1e-4)
    output(rounded).square().sum().backward()
    assert rounded.evolution.conv.weight.grad.abs().max() > 0
