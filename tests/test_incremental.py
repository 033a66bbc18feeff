"""Promise 1: decoding step by step equals teacher forcing, for every beam, whatever beam search does to the beams."""

import pytest
import torch
from conftest import amplify_, batch, build
from torch.testing import assert_close


def teacher_forced(model, tokens, encoder_out):
    return model.decoder(tokens, encoder_out=encoder_out)[0][:, -1]


@pytest.mark.parametrize("beam_size_known", [False, True])
@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("k", [1, 3, 5])
@torch.no_grad()
def test_equals_teacher_forcing_while_beams_move(k, pre_norm, beam_size_known):
    """Three sentences with two beams each; every step reorders beams within sentences, steps 3 and 5 drop one."""
    flags = ["--ea-kernel-size", k, "--ea-beta", 0.5]
    if pre_norm:
        flags += ["--encoder-normalize-before", "--decoder-normalize-before"]
    model = amplify_(build("ea_transformer_base", *flags))
    beams = 2
    if beam_size_known:  # keys and values of the source are then kept per sentence
        model.decoder.set_beam_size(beams)
    source = batch([6, 4, 3], left_pad=True)
    encoder_out = model.encoder(source)
    order = torch.arange(3).repeat_interleave(beams)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
    generator = torch.Generator().manual_seed(k)

    sentences = 3
    tokens = torch.full((sentences * beams, 1), 2)
    state = {}
    for step in range(8):
        ours = model.decoder(tokens, encoder_out=encoder_out, incremental_state=state)[0][:, -1]
        assert_close(ours, teacher_forced(model, tokens, encoder_out), rtol=1e-5, atol=1e-5)

        kept = list(range(sentences))
        if step in (3, 5):
            kept.pop(step % sentences)
        choice = torch.randint(beams, (len(kept), beams), generator=generator)  # a beam may be continued twice or never
        order = (torch.tensor(kept)[:, None] * beams + choice).view(-1)
        sentences = len(kept)
        model.decoder.reorder_incremental_state_scripting(state, order)
        encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
        new = torch.randint(4, 24, (sentences * beams, 1), generator=generator)
        tokens = torch.cat([tokens[order], new], dim=1)


@torch.no_grad()
def test_one_step_after_another_in_a_model_that_was_used_with_another_beam():
    """A beam size left over from an earlier search must not reach teacher forcing (as in --eval-bleu)."""
    model = amplify_(build())
    source, tokens = batch([5, 4]), batch([4, 3], eos_first=True)
    before = model(source, None, tokens)[0]
    model.decoder.set_beam_size(2)
    assert torch.equal(model(source, None, tokens)[0], before)


@torch.no_grad()
def test_padding_within_the_prefix():
    """Beams that beam search ignores may hold padding: it is masked step by step as it is all at once."""
    model = amplify_(build("ea_transformer_base", "--ea-beta", 0.5))
    encoder_out = model.encoder(batch([5, 4]))
    tokens = batch([6, 6], eos_first=True)
    tokens[1, 2] = 1
    state = {}
    for end in range(1, 7):
        ours = model.decoder(tokens[:, :end], encoder_out=encoder_out, incremental_state=state)[0][:, -1]
        if end != 3:  # what is computed at a padded position is of no use to anybody
            theirs = teacher_forced(model, tokens[:, :end], encoder_out)
            assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)
        assert not ours.isnan().any()


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
