"""The state of step-by-step decoding may be copied, continued twice, moved and shared without giving other numbers.

test_incremental.py shows that steps equal teacher forcing while beams move.
"""

import copy
import pickle

import pytest
import torch
from helpers.models import amplify_, batch, build
from helpers.promises import check_steps
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention
from evolving_attention.evolution import Geometry
from evolving_attention.kernels import Steps


@pytest.fixture(autouse=True)
def no_gradients():
    """As in a search."""
    with torch.no_grad():
        yield


def attention(geometry=Geometry.DECODER_SELF, size=12):
    """An attention whose maps matter."""
    side = "self_attention" if geometry == Geometry.DECODER_SELF else "encoder_decoder_attention"
    return DecoderAttention(geometry, size, 3, beta=0.5, **{side: True}).eval()


def run(module, x, state, **options):
    """Step by step over x, T x B x C, from a state: T x B x C."""
    return torch.cat([module(row, row, row, incremental_state=state, **options)[0] for row in x.split(1)])


def at_once(module, x, **options):
    future = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
    return module(x, x, x, **{"attn_mask": future, **options})[0]


def started(module, x):
    """A state after the steps of x."""
    state = {}
    run(module, x, state)
    return state


@pytest.mark.parametrize("padded_step", [0, 1, 2])
def test_padding_within_the_prefix_moves_with_its_hypothesis(padded_step, each_way):
    """Beams that the search ignores may hold padding. fairseq's decoder gives no mask to steps without any."""
    module, x, state = attention(), 3 * torch.randn(6, 2, 12), {}
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, padded_step] = True
    for step in range(6):
        if step == 3:
            order = torch.tensor([1, 0])
            module.reorder_incremental_state(state, order)
            x, padding = x[:, order], padding[order]
        mask = padding[:, step : step + 1]
        output = run(module, x[step : step + 1], state, key_padding_mask=mask if mask.any() else None)[0]
        expected, real = at_once(module, x, key_padding_mask=padding)[step], ~padding[:, step]
        assert output.isfinite().all()
        assert_close(output[real], expected[real], rtol=1e-5, atol=1e-5)


def test_a_step_that_raises_can_be_tried_again(each_way):
    module, x, state = attention(), 3 * torch.randn(6, 2, 12), {}

    def fail(*_):
        raise InterruptedError

    for step in range(6):
        for kept in state.values():
            kept["steps"] = None  # prepared steps call no module
        hook = module.out_proj.register_forward_pre_hook(fail)
        with pytest.raises(InterruptedError):
            run(module, x[step : step + 1], state)
        hook.remove()
        output = run(module, x[step : step + 1], state)
        assert_close(output[0], at_once(module, x[: step + 1])[-1], rtol=1e-5, atol=1e-5)


COPIES = {
    "shallow": dict,
    "deep": copy.deepcopy,
    "pickled": lambda state: pickle.loads(pickle.dumps(state)),
}


@pytest.mark.parametrize("duplicate", COPIES.values(), ids=COPIES)
def test_a_copied_state_is_continued_in_two_ways(duplicate, each_way):
    """In turns: no continuation sees the steps of the other."""
    module, x = attention(), 3 * torch.randn(3, 4, 2, 12)
    prefix, ends = x[0], x[1:]
    first = started(module, prefix)
    states, outputs = [first, duplicate(first)], [[], []]
    for step in range(4):
        for state, end, output in zip(states, ends, outputs, strict=True):
            output.append(run(module, end[step : step + 1], state))
    for end, output in zip(ends, outputs, strict=True):
        assert_close(torch.cat(output), at_once(module, torch.cat([prefix, end]))[4:], rtol=1e-5, atol=1e-5)


def test_a_step_of_other_hypotheses_than_its_state_has_is_refused():
    """The kernel would read memory behind the state."""
    module, state = attention(Geometry.ENCODER_DECODER), {}
    source = torch.randn(5, 2, 12).repeat_interleave(2, dim=1)
    module(torch.randn(1, 4, 12), source, source, incremental_state=state)
    for hypotheses in (2, 6):
        with pytest.raises(ValueError, match=rf"{hypotheses} hypotheses .* of 4"):
            module(torch.randn(1, hypotheses, 12), source, source, incremental_state=state)


@pytest.fixture
def prepared(monkeypatch):
    """The prepared steps that ran."""
    ran, run_step = [], Steps.run
    monkeypatch.setattr(Steps, "run", lambda *given: ran.append(run_step(*given)) or ran[-1])
    return ran


@pytest.mark.parametrize(("size", "hypotheses"), [(12, 1), (33, 5), (12, 6)])
def test_prepared_steps_give_the_numbers_of_their_calls(size, hypotheses, prepared):
    x, source = 3 * torch.randn(5, hypotheses, size), 3 * torch.randn(4, hypotheses, size)
    own, cross, state = attention(size=size), attention(Geometry.ENCODER_DECODER, size=size), {}
    outputs = torch.cat([cross(row[None], source, source, incremental_state=state)[0] for row in x])
    assert_close(outputs, cross(x, source, source)[0], rtol=1e-5, atol=1e-5)
    assert_close(run(own, x, {}), at_once(own, x), rtol=1e-5, atol=1e-5)
    assert len(prepared) == 8 and all(step is not None for step in prepared)


OTHER_STEPS = {
    "an observer": lambda module: setattr(module, "observer", lambda maps: None),
    "a hook": lambda module: module.q_proj.register_forward_hook(lambda *_: None),
    "a changed evolution": lambda module: module.evolution.register_forward_hook(lambda *_: None),
    "the plain way": lambda module: setattr(module, "plain", True),
    "learnt shares": lambda module: setattr(module.evolution, "beta", torch.nn.Parameter(torch.tensor(0.5))),
    "an output of another width": lambda module: setattr(module, "out_proj", torch.nn.Linear(12, 20)),
    "dropout": lambda module: module.dropout_module.make_generation_fast_("", retain_dropout=True),
}


@pytest.mark.parametrize("what", OTHER_STEPS)
def test_no_step_is_prepared_with(what, prepared):
    module, x = attention(), 3 * torch.randn(4, 2, 12)
    module.dropout_module.p = 1e-9  # drops nothing
    OTHER_STEPS[what](module)
    assert_close(run(module, x, {}), at_once(module, x), rtol=1e-5, atol=1e-5)
    assert not prepared


def test_beams_share_one_copy_of_their_sentences_keys(each_way, monkeypatch):
    """Their order is read once for all layers: to read numbers, one waits for a GPU."""
    model, source = amplify_(build()), batch([6, 4, 3], left_pad=True)
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), torch.tensor([0, 0, 1, 1, 2, 2]))
    order, state, read, tolist = torch.tensor([1, 0, 3, 3, 5, 4]), {}, [], torch.Tensor.tolist
    model.decoder(torch.full((6, 1), 2), encoder_out=encoded, incremental_state=state)
    cross = model.decoder.layers[0].encoder_attn
    keys = cross._get_input_buffer(state)["prev_key"]
    assert keys.size(0) == 3
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: read.append(x) or tolist(x))
    model.decoder.reorder_incremental_state_scripting(state, order)
    assert sum(x is order for x in read) == 1 < len(model.decoder.layers)
    assert cross._get_input_buffer(state)["prev_key"] is keys
    model.decoder.reorder_incremental_state_scripting(state, torch.tensor([3, 2, 5, 5]))
    assert torch.equal(cross._get_input_buffer(state)["prev_key"], keys[1:])


@pytest.mark.parametrize("geometry", [Geometry.DECODER_SELF, Geometry.ENCODER_DECODER])
def test_hypotheses_of_all_sentences_may_come_in_any_order_and_number(geometry, each_way):
    module = attention(geometry)
    source, x = torch.randn(5, 4, 12), 3 * torch.randn(6, 4, 12)
    source[:, 1] = source[:, 0]  # the same sentence twice
    source[:, 3] = source[:, 2]
    state, history = {}, x[:0]
    for step, order in enumerate([[0, 1, 2, 3], [3, 3, 0, 1, 2, 0], [5, 0], [1, 0, 1], [2, 1, 0]]):
        order = torch.tensor(order)
        if step:
            module.reorder_incremental_state(state, order)
            history, source = history[:, order], source[:, order]
        now = x[step, order % 4]
        history = torch.cat([history, now[None]])
        if geometry == Geometry.DECODER_SELF:
            output, expected = run(module, now[None], state), at_once(module, history)
        else:
            output = module(now[None], source, source, incremental_state=state)[0]
            expected = module(history, source, source)[0]
        assert_close(output[0], expected[-1], rtol=1e-5, atol=1e-6)


def test_keys_and_values_from_outside_are_no_state_of_a_convolution():
    """fairseq's layers take them as prev_self_attn_state. Without its rows, the map would continue from zeros."""
    module, x, state = attention(), 3 * torch.randn(4, 2, 12), {}
    kept = module._get_input_buffer(started(module, x[:3]))
    module._set_input_buffer(state, {name: kept[name] for name in ("prev_key", "prev_value")})
    with pytest.raises(ValueError, match=r"^incremental_state "):
        run(module, x[3:], state)


class Experts(torch.nn.Module):
    """A layer of experts, as fairseq calls one (--base-layers); it changes nothing."""

    def forward(self, x, *arguments, **options):
        return x, None, None


def test_maps_and_moving_beams_pass_over_layers_without_attention():
    model = amplify_(build("ea_transformer_base", "--ea-decoder-alpha", 0.5, "--ea-cross-alpha", 0.5))
    source, tokens = batch([6, 3]), batch([3, 3], eos_first=True)
    expected = model(source, None, tokens)[0]
    for place in (1, 0):
        model.decoder.layers.insert(place, Experts())
        model.decoder.num_layers += 1
    assert torch.equal(model(source, None, tokens)[0], expected)
    check_steps(model, source, dropped=(2,))
