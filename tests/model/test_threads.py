"""Promise 8: several threads may use one model in evaluation, and a call that raises leaves nothing behind."""

import copy
import pickle
import random

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers.models import amplify_, batch, build, dictionary, in_threads
from torch.testing import assert_close

from ea_fairseq.attention import EncoderSelfAttention

THREADS = 8  # which in_threads starts
CALLS = 32  # by each thread; a few are enough to fail where anything of a call is kept in a module


def tiny(*flags):
    size = "--encoder-embed-dim 8 --encoder-ffn-embed-dim 8 --encoder-attention-heads 2 --encoder-layers 2 "
    size += "--decoder-attention-heads 2 --decoder-layers 1 --dropout 0"
    return amplify_(build("ea_transformer_base", "--ea-alpha", 0.5, "--ea-beta", 0.5, *flags, size=size.split()))


@torch.no_grad()
def test_a_sentence_beyond_the_table_of_positions_leaves_it_as_it_is():
    """Else a second thread's shorter table may be there when this one's is read."""
    short, long = (tiny("--max-source-positions", length).encoder for length in (8, 64))
    long.load_state_dict(short.state_dict())
    table, source = short.embed_positions.weights, batch([40, 7])
    for name, expected in long(source).items():
        assert not expected or torch.equal(short(source)[name][0], expected[0])
    assert short.embed_positions.weights is table


@pytest.mark.parametrize("rule", ["evolving", "predictive"])
@torch.no_grad()
def test_many_threads_get_what_one_thread_gets(rule, each_way):
    """Sentences of many lengths, each with padding of its own, through encoder and decoder."""
    model = tiny("--ea-rule", rule)
    examples = [
        (
            batch([length, max(1, length - 3)], seed=length, left_pad=length % 2 > 0),
            batch([length + 1, 2], eos_first=True),
        )
        for length in range(1, 17)
    ]
    expected = [model(source, None, target)[0] for source, target in examples]
    wrong = []

    @torch.no_grad()
    def work(number):
        chance = random.Random(number)
        for _ in range(CALLS // len(examples)):
            for place in chance.sample(range(len(examples)), len(examples)):
                source, target = examples[place]
                if not torch.equal(model(source, None, target)[0], expected[place]):
                    wrong.append((number, place))

    in_threads(work)
    assert not wrong, f"{len(wrong)} of {THREADS * CALLS} outputs are wrong"


def test_the_future_of_one_call_is_not_that_of_another():
    """fairseq keeps the mask of the future in the module, where a second thread may put a smaller one."""
    decoder = tiny().decoder
    long = decoder.buffered_future_mask(torch.zeros(9, 1, 8))
    decoder.buffered_future_mask(torch.zeros(4, 1, 8))
    assert "_future_mask" not in vars(decoder) or decoder._future_mask.numel() == 0
    assert torch.equal(long.bool(), torch.ones(9, 9, dtype=torch.bool).triu(1))


@pytest.mark.slow
def test_many_threads_translate_as_one_does(each_way):
    """Beam search with its caches and reordering, each thread with a generator of its own."""
    model, words = tiny(), dictionary()

    def translate(source):
        generator = SequenceGenerator([model], words, beam_size=3, max_len_b=12)
        return [
            [hypothesis["tokens"].tolist() for hypothesis in beams]
            for beams in generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": None}})
        ]

    examples = [batch([length, max(1, length - 2)], seed=length) for length in range(2, 10)]
    expected = [translate(source) for source in examples]
    wrong = []

    def work(number):
        for place in random.Random(number).sample(range(len(examples)), len(examples)):
            if translate(examples[place]) != expected[place]:
                wrong.append(place)

    in_threads(work, 4)
    assert not wrong


@torch.no_grad()
def test_an_attention_called_twice_gives_the_same_twice(each_way):
    module = EncoderSelfAttention(8, 2, alpha=0.5, beta=0.5).eval()
    short, long = torch.randn(5, 1, 8), torch.randn(7, 1, 8)
    expected = module(long)[0]
    module(short)
    assert torch.equal(module(long)[0], expected)
    assert torch.equal(module(long)[0], expected)


class Broken(Exception):
    """What the tests raise in the middle of a layer."""


@pytest.mark.parametrize(
    "place", ["encoder.layers.1.self_attn.out_proj", "encoder.layers.0.fc1", "decoder.layers.0.fc2"]
)
@torch.no_grad()
def test_a_call_that_raises_leaves_nothing_behind(place, each_way):
    model = tiny()
    source, target = batch([6, 4]), batch([5, 3], eos_first=True)
    attributes = states_of(model)
    expected = model(source, None, target)[0]

    def fail(module, args):
        raise Broken

    hook = model.get_submodule(place).register_forward_pre_hook(fail)
    with pytest.raises(Broken):
        model(batch([9, 2]), None, target)
    hook.remove()
    assert states_of(model) == attributes
    assert torch.equal(copy.deepcopy(model)(source, None, target)[0], expected)
    assert torch.equal(model(source, None, target)[0], expected)


def states_of(model):
    """The names of all attributes of all modules: a call adds none, tensors least of all."""
    return {
        (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if value is not None
    }


def test_copied_and_pickled_in_the_middle_of_training():
    model = tiny().train()
    source, target = batch([6, 4]), batch([5, 3], eos_first=True)
    output = model(source, None, target)[0]  # its graph is alive
    duplicate = copy.deepcopy(model.encoder.layers)
    assert pickle.loads(pickle.dumps(model.encoder.layers[1].self_attn)).evolution.alpha == 0.5
    output.sum().backward()
    for ours, theirs in zip(duplicate.parameters(), model.encoder.layers.parameters(), strict=True):
        assert ours.grad is None and theirs.grad is not None


def test_a_wrapper_around_an_attention_passes_maps_on():
    """Adapters wrap attentions: whatever hands on its arguments as they are hands on the maps too."""

    class Wrapper(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, *args, **kwargs):
            return self.inner(*args, **kwargs)

    model, source, target = tiny(), batch([6, 4]), batch([5, 3], eos_first=True)
    expected = model(source, None, target)[0]
    for layer in model.encoder.layers:
        layer.self_attn = Wrapper(layer.self_attn)
    for layer in model.decoder.layers:
        layer.encoder_attn = Wrapper(layer.encoder_attn)
    assert_close(model(source, None, target)[0], expected)
