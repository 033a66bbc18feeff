"""Beam search: a batch decodes as its sentences do alone; ensembles, prefixes and alignments work."""

import pytest
import torch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from helpers.models import amplify_, batch, build, dictionary
from torch.testing import assert_close

LENGTHS = [9, 2, 6, 1, 4]


def sharpen_(model):
    """Weights under which hypotheses differ, and end at different times."""
    amplify_(model)
    weight = model.decoder.output_projection.weight.data
    weight *= 3
    weight[2] *= 4  # the end of the sentence: likely at some steps, and out of the question at others
    return model


def search(models, source, *, beam=5, prefix=None, generator=SequenceGenerator, **options):
    sample = {"id": torch.arange(len(source)), "net_input": {"src_tokens": source, "src_lengths": source.ne(1).sum(1)}}
    if generator is SequenceGeneratorWithAlignment:
        sample |= {"target": source, "net_input": sample["net_input"] | {"prev_output_tokens": source}}
    search = generator(models, dictionary(), beam_size=beam, max_len_b=14, max_len_a=0, **options)
    return search.generate(models, sample, prefix_tokens=prefix)


@pytest.mark.parametrize(
    "k, left_pad, known_to_attention", [(1, True, True), (3, False, True), (3, True, False), (5, True, True)]
)
@torch.no_grad()
def test_a_batch_decodes_as_its_sentences_do_alone(k, left_pad, known_to_attention):
    model = sharpen_(build("ea_transformer_base", "--ea-kernel-size", k, "--ea-beta", 0.5))
    if known_to_attention:
        model.set_beam_size = model.decoder.set_beam_size  # what fairseq's generator calls where a model has it
    source = batch(LENGTHS, left_pad=left_pad)
    together = search([model], source)
    assert len({len(hypotheses[0]["tokens"]) for hypotheses in together}) > 1, "sentences should end at different times"
    for row, hypotheses in zip(source, together, strict=True):
        (alone,) = search([model], row[row.ne(1)][None])
        for ours, theirs in zip(hypotheses, alone, strict=True):
            assert torch.equal(ours["tokens"], theirs["tokens"])
            assert_close(ours["positional_scores"], theirs["positional_scores"], rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_scores_are_those_of_teacher_forcing():
    model = sharpen_(build("ea_transformer_base", "--ea-beta", 0.5))
    source = batch(LENGTHS)
    for row, hypotheses in zip(source, search([model], source), strict=True):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            previous = torch.cat([tokens.new_tensor([2]), tokens[:-1]])[None]
            log_probs = model.get_normalized_probs(model(row[row.ne(1)][None], None, previous), log_probs=True)[0]
            expected = log_probs.gather(1, tokens[:, None])[:, 0]
            assert_close(hypothesis["positional_scores"], expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_prefix_tokens():
    model = sharpen_(build())
    prefix = torch.tensor([[5, 6], [7, 1]])  # the second is one token long
    first, second = search([model], batch([5, 3]), prefix=prefix)
    assert all(h["tokens"][:2].tolist() == [5, 6] for h in first)
    assert all(h["tokens"][0] == 7 for h in second)


@torch.no_grad()
def test_ensemble_of_one_model_twice_is_that_model():
    model = sharpen_(build())
    source = batch([5, 3])
    once, twice = search([model], source), search([model, model], source)
    assert EnsembleModel([model, model]).has_incremental_states()
    for ours, theirs in zip(once, twice, strict=True):
        assert torch.equal(ours[0]["tokens"], theirs[0]["tokens"])


@torch.no_grad()
def test_alignments():
    """Each word's alignment is the source's word that the map of teacher forcing looks at most."""
    model, source, end = sharpen_(build()), batch([5, 3]), 2
    found = search([model], source, generator=SequenceGeneratorWithAlignment, print_alignment="hard")
    for row, ((best, *_), words) in zip(source, zip(found, source > end, strict=True), strict=True):
        tokens = best["tokens"]
        previous = torch.cat([tokens.new_tensor([end]), tokens[:-1]])
        attention = model(row[None], None, previous[None])[1]["attn"][0][0]
        assert_close(best["attention"].T, attention, rtol=1e-4, atol=1e-5)
        looked_at = attention.masked_fill(~words, -1).argmax(1).tolist()
        assert best["alignment"] == [(looked_at[i], i) for i in range(len(tokens)) if tokens[i] != end]
