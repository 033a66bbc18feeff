"""Faults of fairseq that ea_fairseq mends: R-Drop beside --eval-bleu, and flags that today's packages broke."""

import copy

import numpy
import pytest
import torch
from fairseq.criterions import label_smoothed_cross_entropy_with_rdrop as rdrop
from fairseq.data import bucket_pad_length_dataset
from fairseq.ngram_repeat_block import NGramRepeatBlock
from helpers.models import build
from helpers.other_models import run as fairseq
from helpers.toy import TINY

from ea_fairseq import compatibility


def test_rdrop_trains_on_the_same_numbers_and_leaves_the_batch_as_it_was(monkeypatch):
    model, gradients = build("ea_transformer_base", "--dropout", 0.3, train=True), []
    tokens = torch.randint(4, 20, (2, 5), generator=torch.Generator().manual_seed(1))
    inputs = {"src_tokens": tokens, "src_lengths": torch.tensor([5, 5]), "prev_output_tokens": tokens.roll(1, 1)}
    sample = {"net_input": inputs, "target": tokens, "ntokens": 10}
    task = type("Task", (), {"target_dictionary": model.decoder.dictionary})
    criterion = rdrop.RdropLabelSmoothedCrossEntropyCriterion(task, False, 0.1, rdrop_alpha=5)
    for duplicate in (compatibility._duplicate_in_place, rdrop.duplicate_input):
        monkeypatch.setattr(rdrop, "duplicate_input", duplicate)
        given = copy.deepcopy(sample)
        torch.manual_seed(7)
        model.zero_grad()
        criterion(model, given)[0].backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
    in_place, by_copy = gradients
    assert all(torch.equal(in_place[name], by_copy[name]) for name in in_place)
    assert all(torch.equal(given["net_input"][name], value) for name, value in inputs.items())


@pytest.mark.parametrize(
    "size, banned", [(1, [{4, 5}, {6, 7}]), (2, [{5}, {6, 7}]), (3, [{5}, set()]), (6, [set(), set()])]
)
def test_no_ngram_comes_twice(size, banned):
    """The buffer of fairseq's search is longer than the hypotheses; the first symbol ends the sentence before."""
    tokens = torch.tensor([[2, 4, 5, 4, 5, 4, 1, 1], [2, 6, 7, 7, 6, 6, 1, 1]])
    lprobs = NGramRepeatBlock(size, use_extension=False)(tokens, torch.zeros(2, 9), bsz=1, beam_size=2, step=5)
    assert [set(row.isneginf().nonzero()[:, 0].tolist()) for row in lprobs] == banned


def test_stock_fairseq_stays_as_it_was():
    assert not hasattr(numpy, "compat")
    doubled = rdrop.duplicate_input({"src_tokens": torch.ones(2, 3)})
    assert doubled["src_tokens"].shape == (4, 3)
    scripted = torch.jit.script(NGramRepeatBlock(2, use_extension=False))
    tokens, lprobs = torch.tensor([[2, 4, 5, 4, 1]]), torch.zeros(1, 9)
    assert scripted(tokens, lprobs, bsz=1, beam_size=1, step=3).isneginf().nonzero().tolist() == [[0, 5]]


def test_buckets_are_the_percentiles_of_the_lengths():
    sizes = [9, 1, 3, 3, 7, 5, 8, 2, 6, 4]
    assert bucket_pad_length_dataset.get_buckets(sizes, 3).tolist() == [3, 6, 9]
    assert bucket_pad_length_dataset.get_buckets([4] * 5, 3).tolist() == [4]


@pytest.mark.slow
def test_flags_that_fail_without_it_train(data, run, tmp_path):
    flags = ["--optimizer", "adam", "--criterion", "cross_entropy", "--max-tokens", 400, "--max-update", 2]
    flags += ["--finetune-from-model", run / "checkpoint_last.pt", "--num-batch-buckets", 4]
    flags += ["--encoder-layers-to-keep", "0", "--decoder-layers-to-keep", "0"]
    fairseq("train", data, "--arch", "ea_transformer_base", *TINY, *flags, "--save-dir", tmp_path)
    assert (tmp_path / "checkpoint_last.pt").exists()
