"""Promise 1: decoding step by step equals teacher forcing, for every beam, whatever beam search does to the beams."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from helpers.promises import DECODERS, check_steps, each_model, lively, search, sharp
from torch.testing import assert_close


@each_model(DECODERS)
@torch.no_grad()
def test_steps_equal_teacher_forcing_while_beams_move(name, each_way):
    """Three sentences with two beams each; steps 3 and 5 finish one."""
    model = lively(name)
    if name == "language model":
        check_steps(model, beams=4)
    else:
        model.decoder.set_beam_size(2)  # for fairseq's own attentions in it
        check_steps(model, batch([6, 4, 3], left_pad=True), dropped=(3, 5))


@torch.no_grad()
def test_the_last_sentence_of_a_batch_may_end_first(each_way):
    """In greedy search the others then keep their places, and their number alone tells."""
    check_steps(lively("kernel 5"), batch([6, 4, 3]), beams=1, dropped=(2,))


@torch.no_grad()
def test_convolutions_in_another_layout_of_memory(each_way):
    """A kernel's copies of them must live as long as its prepared steps."""
    check_steps(lively("kernel 5").to(memory_format=torch.channels_last), batch([6, 3]))


def test_attention_weights_and_gradients_equal_those_of_teacher_forcing(each_way):
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


SOURCE = batch([9, 2, 6, 1, 4])


@pytest.mark.parametrize("k", [1, 3, 5])
@torch.no_grad()
def test_a_batch_decodes_as_its_sentences_do_alone_and_scores_as_teacher_forcing(k):
    model = sharp("--ea-kernel-size", k)
    together = search(model, SOURCE)
    assert len({len(hypotheses[0]["tokens"]) for hypotheses in together}) > 1, "sentences should end at different times"
    for row, hypotheses in zip(SOURCE, together, strict=True):
        words = row[row.ne(1)][None]
        for ours, alone in zip(hypotheses, search(model, words)[0], strict=True):
            assert torch.equal(ours["tokens"], alone["tokens"])
            assert_close(ours["positional_scores"], alone["positional_scores"], rtol=1e-4, atol=1e-4)
            before = ours["tokens"].roll(1)[None]  # each word's: the last one is the end, which begins a sentence
            log_probs = model.get_normalized_probs(model(words, None, before), log_probs=True)[0]
            expected = log_probs.gather(1, ours["tokens"][:, None])[:, 0]
            assert_close(ours["positional_scores"], expected, rtol=1e-4, atol=1e-4)
