"""Promise 8: several threads may use one model in evaluation, and a call that raises leaves nothing behind."""

import copy
import pickle
import random

import pytest
import torch
from helpers.models import batch, build, in_threads
from helpers.promises import each_model, lively, outputs, search

#: sentences of many lengths, each batch with its own padding
BATCHES = [
    (batch([n, max(1, n - 3)], seed=n, left_pad=n % 2 > 0), batch([n + 1, 2], seed=n, eos_first=True))
    for n in range(1, 17)
]


def check_threads(work, count):
    """Every thread gets the results of one thread, whatever the others do. work: number of an example -> result"""
    expected = [work(place) for place in range(count)]

    @torch.no_grad()
    def turns(number):
        for place in random.Random(number).sample(range(count), count):
            assert work(place) == expected[place]

    in_threads(turns)


@each_model(["kernel 5", "predictive everywhere, 3 convolutions", "learnt", "relative, additive"])
@torch.no_grad()
def test_many_threads_get_the_scores_of_one(name, each_way):
    model = lively(name)
    check_threads(lambda place: outputs(model, *BATCHES[place]).tolist(), len(BATCHES))


@pytest.mark.slow
@torch.no_grad()
def test_many_threads_translate_as_one_does(each_way):
    """Beam search with its caches and reordering; each thread has its own generator."""
    model = lively("kernel 5")

    def translate(place):
        found = search(model, BATCHES[place][0], beam=3)
        return [[hypothesis["tokens"].tolist() for hypothesis in beams] for beams in found]

    check_threads(translate, 4)


@torch.no_grad()
def test_a_sentence_beyond_the_table_of_positions_leaves_it_as_it_is():
    """Else another thread could read a table that is too short for it."""
    short, long = (build("ea_transformer_base", "--max-source-positions", length).encoder for length in (8, 64))
    long.load_state_dict(short.state_dict())
    table, source = short.embed_positions.weights, batch([40, 7])
    for name, expected in long(source).items():
        assert not expected or torch.equal(short(source)[name][0], expected[0])
    assert short.embed_positions.weights is table


def test_the_mask_of_the_future_is_not_kept_in_the_module():
    """fairseq keeps it there, where a second thread may put a smaller one."""
    decoder = build().decoder
    long = decoder.buffered_future_mask(torch.zeros(9, 1, 8))
    decoder.buffered_future_mask(torch.zeros(4, 1, 8))
    assert "_future_mask" not in vars(decoder) or decoder._future_mask.numel() == 0
    assert torch.equal(long.bool(), torch.ones(9, 9, dtype=torch.bool).triu(1))


def attributes(model):
    """The names of all attributes of all modules."""
    named = [(path, name, value) for path, module in model.named_modules() for name, value in vars(module).items()]
    return {(path, name) for path, name, value in named if value is not None}


@pytest.mark.parametrize("place", ["encoder.layers.1.self_attn.out_proj", "decoder.layers.0.fc2"])
@torch.no_grad()
def test_a_call_that_raises_leaves_nothing_behind(place, each_way):
    model, (source, target) = lively("kernel 5"), BATCHES[5]
    before, expected = attributes(model), model(source, None, target)[0]

    def fail(module, args):
        raise InterruptedError

    hook = model.get_submodule(place).register_forward_pre_hook(fail)
    with pytest.raises(InterruptedError):
        model(batch([9, 2]), None, target)
    hook.remove()
    assert attributes(model) == before
    assert torch.equal(copy.deepcopy(model)(source, None, target)[0], expected)
    assert torch.equal(model(source, None, target)[0], expected)


def test_a_model_is_copied_and_pickled_in_the_middle_of_training():
    model, (source, target) = lively("kernel 5", train=True), BATCHES[5]
    output = model(source, None, target)[0]  # its graph is alive
    duplicate = copy.deepcopy(model.encoder.layers)
    assert pickle.loads(pickle.dumps(model.encoder.layers[1].self_attn)).evolution.alpha == 0.5
    output.sum().backward()
    for ours, theirs in zip(duplicate.parameters(), model.encoder.layers.parameters(), strict=True):
        assert ours.grad is None and theirs.grad is not None
