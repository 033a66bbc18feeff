"""Promise 1: decoding step by step equals teacher forcing, for every beam, whatever beam search does to the beams."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from helpers.promises import DECODERS, check_steps, each_model, lively
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("each_way")


@each_model(DECODERS)
@torch.no_grad()
def test_steps_equal_teacher_forcing_while_beams_move(name):
    """Three sentences with two beams each; steps 3 and 5 finish one."""
    model = lively(name)
    if name == "language model":
        check_steps(model, beams=4)
    else:
        model.decoder.set_beam_size(2)  # for fairseq's own attentions in it
        check_steps(model, batch([6, 4, 3], left_pad=True), dropped=(3, 5))


@torch.no_grad()
def test_the_last_sentence_of_a_batch_may_end_first():
    """In greedy search the others then keep their places, and their number alone tells."""
    check_steps(lively("kernel 5"), batch([6, 4, 3]), beams=1, dropped=(2,))


@torch.no_grad()
def test_convolutions_in_another_layout_of_memory():
    """A kernel's copies of them must live as long as its prepared steps."""
    check_steps(lively("kernel 5").to(memory_format=torch.channels_last), batch([6, 3]))


def test_attention_weights_and_gradients_equal_those_of_teacher_forcing():
    model = amplify_(build())
    source, tokens = batch([4, 3]), batch([3, 3], eos_first=True)
    names, parameters = zip(*model.named_parameters(), strict=True)

    def results(*prefixes, **options):
        encoder_out = model.encoder(source)
        parts = [model.decoder(prefix, encoder_out=encoder_out, **options) for prefix in prefixes]
        output, weights = torch.cat([x for x, _ in parts], 1), torch.cat([x["attn"][0] for _, x in parts], 1)
        return weights, torch.autograd.grad(output.square().sum(), parameters)

    weights, gradients = results(*(tokens[:, : end + 1] for end in range(3)), incremental_state={})
    expected_weights, expected_gradients = results(tokens)
    assert_close(weights, expected_weights, rtol=1e-5, atol=1e-6)
    for name, ours, expected in zip(names, gradients, expected_gradients, strict=True):
        assert_close(ours, expected, rtol=1e-3, atol=1e-3, msg=name)
