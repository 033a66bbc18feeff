"""Promise 4: with alpha = beta = 0 the model is fairseq's own Transformer, keys and outputs."""

import pytest
import torch
from fairseq.modules import MultiheadAttention
from helpers.models import amplify_, batch, build
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from evolving_attention.evolution import Geometry

pytestmark = pytest.mark.usefixtures("each_way")

OFF = ["--ea-alpha", 0, "--ea-beta", 0]


@pytest.mark.parametrize("flags", [[], ["--encoder-normalize-before", "--decoder-normalize-before"]])
@pytest.mark.parametrize("left_pad", [True, False])
def test_model_equals_fairseqs(flags, left_pad):
    stock = amplify_(build("transformer", *flags))
    ours = build("ea_transformer_base", *OFF, *flags)
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    source, tokens = batch([7, 4, 1], left_pad=left_pad), batch([5, 2, 6], eos_first=True)

    for model in (ours, stock):
        model.train()  # dropout is 0; in this mode fairseq takes the kernel that it trains with
    encoded, expected = ours.encoder(source), stock.encoder(source)
    real = source.ne(1).t()
    assert_close(encoded["encoder_out"][0][real], expected["encoder_out"][0][real], rtol=1e-5, atol=1e-5)
    ours_logits, stock_logits = ours(source, None, tokens)[0], stock(source, None, tokens)[0]
    real = tokens.ne(1)
    assert_close(ours_logits[real], stock_logits[real], rtol=1e-5, atol=1e-5)

    for logits in (ours_logits, stock_logits):
        logits[real].pow(2).mean().backward()
    for (name, a), b in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("geometry", list(Geometry))
@torch.no_grad()
def test_attention_that_evolves_nothing_equals_fairseqs(geometry):
    """The module itself, where the model above puts fairseq's in its place."""
    flags = {"encoder_decoder_attention": True} if geometry == Geometry.ENCODER_DECODER else {"self_attention": True}
    if geometry == Geometry.ENCODER_SELF:
        ours = EncoderSelfAttention(12, 3, beta=0)
    else:
        ours = DecoderAttention(geometry, 12, 3, beta=0, **flags)
    stock = MultiheadAttention(12, 3, **flags)
    stock.load_state_dict(ours.state_dict())
    x = torch.randn(5, 2, 12)
    y = torch.randn(4, 2, 12) if geometry == Geometry.ENCODER_DECODER else x
    padding = torch.zeros(2, y.size(0), dtype=torch.bool)
    padding[1, -1] = True
    future = torch.full((5, 5), -torch.inf).triu(1) if geometry == Geometry.DECODER_SELF else None
    if geometry == Geometry.ENCODER_SELF:
        output, _, weights = ours(x, padding, need_weights=True)
        weights = weights.mean(dim=1)
    else:
        output, weights = ours(x, y, y, key_padding_mask=padding, attn_mask=future)
    expected, expected_weights = stock(x, y, y, key_padding_mask=padding, attn_mask=future)
    real = torch.ones(5, 2, dtype=torch.bool)
    if geometry == Geometry.ENCODER_SELF:
        real = ~padding.t()  # padded rows are zero in ours, and of no use in either
    assert_close(output[real], expected[real], rtol=1e-5, atol=1e-6)
    assert_close(weights.transpose(0, 1)[real], expected_weights.transpose(0, 1)[real], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "flags", [["--decoder-embed-dim", 24, "--decoder-attention-heads", 2], ["--no-cross-attention"]]
)
@torch.no_grad()
def test_attentions_of_ours_are_as_large_as_fairseqs(flags):
    """A decoder may have other sizes than the encoder. Scores that start as dot products make every attention ours."""
    stock = amplify_(build("transformer", *flags))
    ours = build("ea_transformer_base", *OFF, "--ea-score", "multiplicative", *flags)
    assert {key for key in ours.state_dict() if ".score." not in key} == stock.state_dict().keys()
    torch.nn.Module.load_state_dict(ours, stock.state_dict(), strict=False)
    source, tokens = batch([7, 4, 1]), batch([5, 2, 6], eos_first=True)
    outputs = [model(source, None, tokens)[0][tokens.ne(1)] for model in (ours, stock)]
    assert_close(*outputs, rtol=1e-5, atol=1e-5)
