"""Beam search: a batch decodes as its sentences do alone; ensembles, prefixes and alignments work."""

import pytest
import torch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from helpers.models import amplify_, batch, build, dictionary
from torch.testing import assert_close

SOURCE = batch([9, 2, 6, 1, 4])
END = 2


def sharp(*flags):
    """A model whose hypotheses differ, and end at different times."""
    model = amplify_(build("ea_transformer_base", "--ea-beta", 0.5, *flags))
    weight = model.decoder.output_projection.weight.data
    weight *= 3
    weight[END] *= 4  # likely at some steps, and out of the question at others
    return model


def search(models, source, *, prefix=None, generator=SequenceGenerator, **options):
    sample = {"id": torch.arange(len(source)), "net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    if generator is SequenceGeneratorWithAlignment:
        sample |= {"target": source, "net_input": sample["net_input"] | {"prev_output_tokens": source}}
    search = generator(models, dictionary(), beam_size=5, max_len_b=14, max_len_a=0, **options)
    return search.generate(models, sample, prefix_tokens=prefix)


def after(tokens):
    """The decoder's input for these words, 1 x T."""
    return torch.cat([tokens.new_tensor([END]), tokens[:-1]])[None]


@pytest.mark.parametrize("k", [1, 3, 5])
@torch.no_grad()
def test_a_batch_decodes_as_its_sentences_do_alone_and_scores_as_teacher_forcing(k):
    model = sharp("--ea-kernel-size", k)
    together = search([model], SOURCE)
    assert len({len(hypotheses[0]["tokens"]) for hypotheses in together}) > 1, "sentences should end at different times"
    for row, hypotheses in zip(SOURCE, together, strict=True):
        words = row[row.ne(1)][None]
        for ours, alone in zip(hypotheses, search([model], words)[0], strict=True):
            assert torch.equal(ours["tokens"], alone["tokens"])
            assert_close(ours["positional_scores"], alone["positional_scores"], rtol=1e-4, atol=1e-4)
            log_probs = model.get_normalized_probs(model(words, None, after(ours["tokens"])), log_probs=True)[0]
            expected = log_probs.gather(1, ours["tokens"][:, None])[:, 0]
            assert_close(ours["positional_scores"], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prefix_tokens_begin_every_hypothesis():
    prefix = torch.tensor([[5, 6], [7, 1]])  # the second is one token long
    first, second = search([sharp()], SOURCE[:2], prefix=prefix)
    assert all(h["tokens"][:2].tolist() == [5, 6] for h in first)
    assert all(h["tokens"][0] == 7 for h in second)


@torch.no_grad()
def test_an_ensemble_of_one_model_twice_is_that_model():
    model = sharp()
    assert EnsembleModel([model, model]).has_incremental_states()
    for ours, theirs in zip(search([model], SOURCE), search([model, model], SOURCE), strict=True):
        assert torch.equal(ours[0]["tokens"], theirs[0]["tokens"])


@torch.no_grad()
def test_each_words_alignment_is_the_source_word_of_its_largest_weight():
    model, source = sharp(), SOURCE[:3]
    found = search([model], source, generator=SequenceGeneratorWithAlignment, print_alignment="hard")
    for row, (best, *_) in zip(source, found, strict=True):
        tokens, words = best["tokens"], row > END
        attention = model(row[None], None, after(tokens))[1]["attn"][0][0]
        assert_close(best["attention"].T, attention, rtol=1e-4, atol=1e-5)
        looked_at = attention.masked_fill(~words, -1).argmax(1).tolist()
        assert best["alignment"] == [(looked_at[i], i) for i in range(len(tokens)) if tokens[i] != END]
