"""Promise 1: decoding step by step equals teacher forcing, for every beam, whatever beam search does to the beams."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from helpers.promises import check_steps
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention
from evolving_attention.evolution import Geometry

pytestmark = pytest.mark.usefixtures("each_way")


@pytest.mark.parametrize(
    "k, pre_norm, beam_size_known", [(1, False, True), (3, False, False), (3, True, True), (5, False, True)]
)
@torch.no_grad()
def test_equals_teacher_forcing_while_beams_move(k, pre_norm, beam_size_known):
    flags = ["--ea-kernel-size", k]
    if pre_norm:
        flags += ["--encoder-normalize-before", "--decoder-normalize-before"]
    check_while_beams_move(flags, beam_size_known)


@pytest.mark.parametrize("flags", [["--ea-decoder-beta", 0], ["--ea-cross-beta", 0], ["--ea-learn-mix"]])
@torch.no_grad()
def test_where_one_kind_of_attention_does_not_evolve_or_shares_are_learnt(flags):
    check_while_beams_move(flags)


def check_while_beams_move(flags, beam_size_known=False):
    """Three sentences with two beams each; every step reorders beams within sentences, steps 3 and 5 drop one."""
    model = amplify_(build("ea_transformer_base", "--ea-beta", 0.5, *flags))
    if beam_size_known:  # keys and values of the source are then kept per sentence
        model.decoder.set_beam_size(2)
    check_steps(model, batch([6, 4, 3], left_pad=True), dropped=(3, 5))


@torch.no_grad()
def test_one_step_after_another_in_a_model_that_was_used_with_another_beam():
    """A beam size left over from an earlier search must not reach teacher forcing (as in --eval-bleu)."""
    model = amplify_(build())
    source, tokens = batch([5, 4]), batch([4, 3], eos_first=True)
    before = model(source, None, tokens)[0]
    model.decoder.set_beam_size(2)
    assert torch.equal(model(source, None, tokens)[0], before)


@pytest.mark.parametrize("padded_step", [0, 2])
@torch.no_grad()
def test_padding_within_the_prefix(padded_step):
    """Beams that beam search ignores may hold padding: it is masked step by step as it is all at once.

    On the attention alone, for fairseq counts positions in another way step by step.
    """
    length, channels, heads = 6, 12, 3
    module = DecoderAttention(Geometry.DECODER_SELF, channels, heads, beta=0.5, self_attention=True).eval()
    x = 3 * torch.randn(length, 2, channels)
    padding = torch.zeros(2, length, dtype=torch.bool)
    padding[1, padded_step] = True
    future = torch.full((length, length), -torch.inf).triu(1)
    expected, _ = module(x, x, x, key_padding_mask=padding, attn_mask=future)

    state = {}
    for step in range(length):
        now = x[step : step + 1]
        mask = padding[:, step : step + 1]
        mask = mask if mask.any() else None  # as fairseq's decoder does it
        output, _ = module(now, now, now, key_padding_mask=mask, incremental_state=state)
        assert output.isfinite().all()
        real = ~padding[:, step]
        assert_close(output[0][real], expected[step][real], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_attention_weights_equal_those_of_teacher_forcing():
    model = amplify_(build("ea_transformer_base", "--ea-beta", 0.5))
    encoder_out = model.encoder(batch([5, 3]))
    tokens = batch([5, 5], eos_first=True)
    whole = model.decoder(tokens, encoder_out=encoder_out)[1]["attn"][0]
    state = {}
    for end in range(1, 6):
        _, extra = model.decoder(tokens[:, :end], encoder_out=encoder_out, incremental_state=state)
        assert_close(extra["attn"][0][:, -1], whole[:, end - 1], rtol=1e-5, atol=1e-6)


def test_gradients_flow_through_steps():
    model = amplify_(build())
    source, tokens = batch([4, 3]), batch([3, 3], eos_first=True)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def gradients(state):
        encoder_out = model.encoder(source)
        if state is None:
            output = model.decoder(tokens, encoder_out=encoder_out)[0]
        else:
            steps = (tokens[:, : i + 1] for i in range(3))
            output = torch.cat(
                [model.decoder(step, encoder_out=encoder_out, incremental_state=state)[0] for step in steps], dim=1
            )
        return torch.autograd.grad(output.square().sum(), parameters)

    for name, ours, expected in zip(names, gradients({}), gradients(None), strict=True):
        assert_close(ours, expected, rtol=1e-3, atol=1e-3, msg=name)
