"""Promise 4: with alpha = beta = 0 a model is fairseq's own, keys, outputs and gradients."""

import inspect

import pytest
import torch
from fairseq.modules import MultiheadAttention
from helpers.models import amplify_, batch, build
from helpers.promises import has, outputs
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from evolving_attention.evolution import Geometry

OFF = ["--ea-alpha", 0, "--ea-beta", 0]
PRE_NORM = ["--encoder-normalize-before", "--decoder-normalize-before"]
DROPOUT = ["--dropout", 0.1, "--attention-dropout", 0.1, "--activation-dropout", 0.1]
NOISE = ["--quant-noise-pq", 1e-9]  # too little to change a weight; it adds a linear layer
ARCHES = "transformer transformer_lm transformer_lm_gpt roberta roberta_prenorm bart_base mbart_base".split()


@pytest.mark.parametrize(
    "arch, flags", [("transformer", PRE_NORM), ("transformer", NOISE), *((arch, []) for arch in ARCHES)]
)
def test_without_evolution_a_model_is_fairseqs(arch, flags):
    """In training, with dropout 0: in evaluation fairseq's encoder has a fused kernel."""
    stock = amplify_(build(arch, *flags, train=True), 20 if "bart" in arch else 4)
    ours = build("ea_transformer_base" if arch == "transformer" else f"ea_{arch}", *OFF, *flags, train=True)
    assert list(ours.state_dict()) == list(stock.state_dict())
    assert inspect.signature(ours.forward) == inspect.signature(stock.forward), "torch.export reads the names"
    ours.load_state_dict(stock.state_dict())
    for left_pad in (True, False):
        source, target = batch([7, 4, 1], left_pad=left_pad), batch([5, 2, 6], eos_first=True)
        real = target.ne(1) if has(stock, "decoder") else source.ne(1)
        scores, expected = (outputs(model, source, target)[real] for model in (ours, stock))
        assert_close(scores, expected, rtol=1e-5, atol=1e-5)
        scores.pow(2).mean().backward()
        expected.pow(2).mean().backward()
    for (name, parameter), other in zip(ours.named_parameters(), stock.parameters(), strict=True):
        assert_close(parameter.grad, other.grad, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("geometry", list(Geometry), ids=lambda geometry: geometry.name)
@torch.no_grad()
def test_an_attention_that_evolves_nothing_equals_fairseqs(geometry, each_way):
    """The module itself, because a model has fairseq's in its place. Masks of floats are added, under autocast, too."""
    encoder, cross = (geometry == kind for kind in (Geometry.ENCODER_SELF, Geometry.ENCODER_DECODER))
    kind = {"encoder_decoder_attention" if cross else "self_attention": True}
    ours = EncoderSelfAttention(12, 3, beta=0) if encoder else DecoderAttention(geometry, 12, 3, beta=0, **kind)
    stock = MultiheadAttention(12, 3, **kind)
    stock.load_state_dict(ours.state_dict())
    x, seen = torch.randn(5, 2, 12), []
    ours.observer = seen.append
    y = torch.randn(4, 2, 12) if cross else x
    padding, future = torch.zeros(2, len(y), dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool).triu(1)
    padding[1, -1] = True
    real = ~padding.t() if encoder else torch.ones(5, 2, dtype=torch.bool)  # padded rows mean nothing
    biases = [torch.randn(5, 5).masked_fill(future, lowest) for lowest in (-torch.inf, -1e8, -1e4)]

    def attend(mask):
        """The output, T x B x C, and the weights, B x T x S."""
        if not encoder:
            return ours(x, y, y, key_padding_mask=padding, attn_mask=mask)
        output, _ = ours(x, padding, mask)
        return output, seen[-1].weights.mean(dim=1)

    for mask in [None] if cross else [None, *biases] if encoder else biases:
        expected, expected_weights = stock(x, y, y, key_padding_mask=padding, attn_mask=mask)
        output, weights = attend(mask)
        assert_close(output[real], expected[real], rtol=1e-5, atol=1e-6)
        assert_close(weights.transpose(0, 1)[real], expected_weights.transpose(0, 1)[real], rtol=1e-5, atol=1e-6)
        with torch.autocast("cpu", torch.bfloat16):
            assert_close(attend(mask)[0].float()[real], expected[real], rtol=0.05, atol=0.05)


@pytest.mark.parametrize(
    "flags",
    [["--decoder-embed-dim", 24, "--decoder-attention-heads", 2], ["--no-cross-attention"], PRE_NORM, DROPOUT],
    ids=["another width", "no cross-attention", "pre-norm", "dropout"],
)
@torch.no_grad()
def test_our_layers_equal_fairseqs(flags):
    """Scores and relative positions that start without effect make all attention ours. --ea-plain: the same dropout."""
    stock = amplify_(build("transformer", *flags, train=True))
    for norm in (module for module in stock.modules() if isinstance(module, torch.nn.LayerNorm)):
        norm.bias.normal_()  # so that no norm can stand in for another
    scores = ["--ea-score", "multiplicative", "--ea-relative-positions", 2]
    ours = build("ea_transformer_base", *OFF, *scores, "--ea-plain", *flags, train=True)
    new = [key for key in ours.state_dict() if ".score." in key or ".relative_positions." in key]
    assert ours.state_dict().keys() - new == stock.state_dict().keys()
    torch.nn.Module.load_state_dict(ours, stock.state_dict(), strict=False)
    source, target = batch([7, 4, 1]), batch([5, 2, 6], eos_first=True)
    scores = []
    for model in (ours, stock):
        torch.manual_seed(0)
        scores.append(outputs(model, source, target)[target.ne(1)])
    assert_close(*scores, rtol=1e-5, atol=1e-5)
