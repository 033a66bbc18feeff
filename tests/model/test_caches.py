"""What step-by-step decoding keeps: it is copied, continued twice, moved and shared without giving other numbers.

That steps equal teacher forcing while beams move is in test_incremental.py.
"""

import copy
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from ea_fairseq.caches import Room, shared_sources
from helpers.models import amplify_, batch, build
from torch.testing import assert_close

from ea_fairseq.attention import DecoderAttention
from evolving_attention import kernels
from evolving_attention.evolution import Geometry
from evolving_attention.kernels.cpu import library as cpu_library

STEPS = 40  # more than a room has at first


def attention(geometry=Geometry.DECODER_SELF, size=12):
    """Decoder self-attention or encoder-decoder attention whose maps matter."""
    side = "self_attention" if geometry == Geometry.DECODER_SELF else "encoder_decoder_attention"
    return DecoderAttention(geometry, size, 3, beta=0.5, kdim=size, vdim=size, **{side: True}).eval()


def run(module, x, state):
    """Step by step over x, T x B x C, on from what the state holds: T x B x C."""
    return torch.cat([module(row[None], row[None], row[None], incremental_state=state)[0] for row in x])


def at_once(module, x):
    future = torch.full((len(x), len(x)), -torch.inf).triu(1)
    return module(x, x, x, attn_mask=future)[0]


def buffer(module, state):
    return module._get_input_buffer(state)


@torch.no_grad()
def test_a_long_sentence_outgrows_its_room(each_way):
    module, x = attention(), 3 * torch.randn(STEPS, 2, 12)
    assert_close(run(module, x, {}), at_once(module, x), rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_state_whose_keys_were_cut_from_outside_gets_the_plain_numbers():
    """What was kept of the rows above is wider than the keys then; the kernel would write past its memory."""
    module, x, outputs = attention(), 3 * torch.randn(STEPS, 2, 12), []
    for plain in (False, True):
        state = {}
        run(module, x, state)
        kept = buffer(module, state)
        for name in ("prev_key", "prev_value"):
            kept[name] = kept[name][:, :, :3].clone()
        kept["prev_key_padding_mask"] = None
        module._set_input_buffer(state, kept)
        with pytest.MonkeyPatch.context() as patch:
            if plain:
                patch.setattr(kernels.Steps, "run", lambda *_, **__: None)
            outputs.append(run(module, x[:1], state))
    assert_close(*outputs, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_state_whose_padding_was_cut_from_outside_is_refused(each_way):
    """The kernel would read what lies behind the mask."""
    module, state = attention(Geometry.ENCODER_DECODER), {}
    source, padding = torch.randn(5, 2, 12), torch.tensor([[False] * 5, [False] * 4 + [True]])
    x = torch.randn(1, 2, 12)
    module(x, source, source, key_padding_mask=padding, incremental_state=state)
    buffer(module, state)["prev_key_padding_mask"] = padding[:, 1:].clone()
    with pytest.raises(RuntimeError):
        module(x, source, source, incremental_state=state)


@torch.no_grad()
def test_a_long_sentence_whose_hypotheses_change_places(each_way):
    """Places alone: where one is copied, the others' older positions are soon those of its copies."""
    module, x, state = attention(), 3 * torch.randn(STEPS, 3, 12), {}
    for step in range(STEPS):
        if step:
            order = torch.tensor([[1, 2, 0], [0, 2, 1], [2, 1, 0]][step % 3])
            module.reorder_incremental_state(state, order)
            x[:step] = x[:step, order].clone()
        output = run(module, x[step : step + 1], state)
        assert_close(output[0], at_once(module, x[: step + 1])[-1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_padding_moves_with_its_hypothesis(each_way):
    module, x, state = attention(), 3 * torch.randn(4, 2, 12), {}
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 1] = True
    for row, mask in zip(x[:3], padding[:, :3].T, strict=True):
        mask = mask[:, None] if mask.any() else None
        module(row[None], row[None], row[None], key_padding_mask=mask, incremental_state=state)
    order = torch.tensor([1, 0])
    module.reorder_incremental_state(state, order)
    x, padding = x[:, order], padding[order]
    future = torch.full((4, 4), -torch.inf).triu(1)
    expected, _ = module(x, x, x, key_padding_mask=padding, attn_mask=future)
    assert_close(run(module, x[3:], state)[0], expected[3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("added", [0.0, 1.0])
@torch.no_grad()
def test_a_step_may_have_a_mask_of_its_own(added, each_way):
    """What it masks is masked, what it adds is added, though the steps before had none."""
    module, x, state = attention(), 3 * torch.randn(6, 2, 12), {}
    mask = torch.full((6, 6), -torch.inf).triu(1)
    mask[3, :4] = torch.tensor([0, -torch.inf, added, 0])
    outputs = [run(module, x[:3], state), module(*3 * [x[3:4]], incremental_state=state, attn_mask=mask[3:4, :4])[0]]
    outputs.append(run(module, x[4:], state))
    assert_close(torch.cat(outputs), module(x, x, x, attn_mask=mask)[0], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_projections_in_one_product(monkeypatch):
    """As on a GPU, for which the parameters of this module pass."""
    module, x, state = attention(), 3 * torch.randn(6, 2, 12), {}
    expected = at_once(module, x)
    monkeypatch.setattr(torch.nn.Parameter, "is_cpu", False)
    assert_close(run(module, x, state), expected, rtol=1e-5, atol=1e-5)
    assert buffer(module, state)["projection"] is not None


@torch.no_grad()
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


@pytest.mark.parametrize("duplicate", [lambda state: {key: dict(kept) for key, kept in state.items()}, dict])
@torch.no_grad()
def test_a_state_that_is_continued_twice(duplicate, each_way):
    """In turns: what one continuation appends must not reach the other."""
    module, x = attention(), 3 * torch.randn(3, 6, 2, 12)
    prefix, ends = x[0], x[1:]
    first = {}
    run(module, prefix, first)
    states, outputs = [first, duplicate(first)], [[], []]
    for step in range(6):
        for state, end, output in zip(states, ends, outputs, strict=True):
            output.append(run(module, end[step : step + 1], state))
    for end, output in zip(ends, outputs, strict=True):
        expected = at_once(module, torch.cat([prefix, end]))[6:]
        assert_close(torch.cat(output), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))])
@torch.no_grad()
def test_a_state_is_copied_and_pickled_in_the_middle(duplicate, each_way):
    module, x = attention(), 3 * torch.randn(8, 2, 12)
    state = {}
    run(module, x[:4], state)
    duplicated = duplicate(state)
    run(module, torch.randn(4, 2, 12), state)  # the original goes on in its own way
    assert_close(run(module, x[4:], duplicated), at_once(module, x)[4:], rtol=1e-5, atol=1e-6)


@torch.no_grad()
def test_a_step_copies_no_earlier_position():
    module, x, state = attention(), torch.randn(6, 2, 12), {}
    run(module, x[:1], state)
    place = buffer(module, state)["prev_key"].data_ptr()
    run(module, x[1:], state)
    assert buffer(module, state)["prev_key"].data_ptr() == place


def test_two_threads_that_append_to_one_room_get_two(monkeypatch):
    """Both look whether there is room before either takes it."""
    is_free = Room._is_free

    def slowly(room, *place):
        found = is_free(room, *place)
        time.sleep(0.05)
        return found

    monkeypatch.setattr(Room, "_is_free", slowly)
    room = Room(torch.zeros(8, 1, 2, 1, 1), 2)
    with ThreadPoolExecutor(2) as threads:
        rooms = list(threads.map(lambda number: room.append(2, torch.full((1, 1, 2, 1, 1), number)), (1.0, 2.0)))
    assert [float(each.vectors[2, 0, 0, 0, 0]) for each in rooms] == [1, 2]


def test_a_room_from_inference_mode_is_left_outside_of_it():
    with torch.inference_mode():
        room = Room(torch.empty(0, 1, 2, 1, 2), 0).append(0, torch.ones(1, 1, 2, 1, 2))
    with torch.no_grad():
        keys, _ = room.append(1, torch.zeros(1, 1, 2, 1, 2)).keys_and_values(2)
    assert keys.flatten().tolist() == [1, 1, 0, 0]


def test_what_is_kept_in_float32_stays_so_beside_what_is_not():
    """As fairseq's torch.cat has it: mixed precision that begins in the middle rounds nothing that was there."""
    room = Room(torch.full((8, 1, 2, 1, 1), 1 / 3), 2).append(2, torch.ones(1, 1, 2, 1, 1, dtype=torch.bfloat16))
    keys, _ = room.keys_and_values(3)
    assert torch.equal(keys.flatten(), torch.tensor([1 / 3, 1 / 3, 1]))


def test_gradients_may_be_wanted_after_steps_without_them(each_way):
    module, x, state = attention(), 3 * torch.randn(6, 2, 12), {}
    with torch.no_grad():
        run(module, x[:3], state)
    output = run(module, x[3:], state)
    assert_close(output, at_once(module, x)[3:], rtol=1e-5, atol=1e-6)
    output.sum().backward()
    assert module.k_proj.weight.grad.abs().sum() > 0
    with torch.no_grad():
        run(module, x[:2], state)


@torch.no_grad()
def test_prepared_steps_are_the_calls_they_stand_for(monkeypatch):
    """After the first step the kernel is asked nothing more; an observer is shown what a call would have had."""
    module, x, state, asked = attention(), 3 * torch.randn(6, 2, 12), {}, []
    attend = kernels.attend
    monkeypatch.setattr(kernels, "attend", lambda call: asked.append(call) or attend(call))
    expected = at_once(module, x)
    asked.clear()
    assert_close(run(module, x[:5], state), expected[:5], rtol=1e-5, atol=1e-6)
    assert len(asked) == 1
    seen = []
    module.observer = seen.append
    assert_close(run(module, x[5:], state), expected[5:], rtol=1e-5, atol=1e-6)
    assert len(asked) == 1
    whole = []
    module.observer = whole.append
    at_once(module, x)
    for name in ("logits", "a_logit", "weights"):
        assert_close(getattr(seen[0], name)[:, :, 0], getattr(whole[0], name)[:, :, 5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("size", "beams"), [(12, 1), (15, 5), (48, 9)])
@torch.no_grad()
def test_steps_project_as_their_layers_do(size, beams, few, monkeypatch):
    """For few hypotheses the kernel's own products, for more PyTorch's: of any size, for any number of rows."""
    monkeypatch.setattr(kernels.Steps, "FEW", size * beams if few else size * beams - 1)
    calls = []
    call = cpu_library.call
    monkeypatch.setattr(cpu_library, "call", lambda name, *given: calls.append(name) or call(name, *given))
    x, source = 3 * torch.randn(6, beams, size), 3 * torch.randn(5, beams, size)
    own, cross, states = attention(size=size), attention(Geometry.ENCODER_DECODER, size), ({}, {})
    outputs = torch.cat([cross(row[None], source, source, incremental_state=states[1])[0] for row in x])
    assert_close(outputs, cross(x, source, source)[0], rtol=1e-5, atol=1e-5)
    assert_close(run(own, x, states[0]), at_once(own, x), rtol=1e-5, atol=1e-5)
    assert calls.count("evolving_attention_step") == (10 if few else 0)


@pytest.mark.parametrize("width", [8, 20])
@torch.no_grad()
def test_steps_whose_output_has_another_width(width):
    """A projection that was put in the place of the attention's own."""
    module, x = attention(), 3 * torch.randn(6, 2, 12)
    module.out_proj = torch.nn.Linear(12, width)
    assert_close(run(module, x, {}), at_once(module, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("few", [True, False])
@torch.no_grad()
def test_steps_do_not_depend_on_the_default_type(few, monkeypatch):
    """The kernel writes float32, whatever type new tensors have."""
    monkeypatch.setattr(kernels.Steps, "FEW", 10**9 if few else 0)
    module, x = attention(), 3 * torch.randn(6, 2, 12)
    expected = at_once(module, x)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        output = run(module, x, {})
    finally:
        torch.set_default_dtype(default)
    assert_close(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@torch.no_grad()
def test_who_listens_to_a_projection_hears_every_step(name, each_way):
    module, x, heard = attention(), 3 * torch.randn(6, 2, 12), []
    expected = at_once(module, x)
    getattr(module, name).register_forward_hook(lambda *_: heard.append(name))
    assert_close(run(module, x, {}), expected, rtol=1e-5, atol=1e-5)
    assert len(heard) == 6


@torch.no_grad()
def test_steps_under_autocast_are_its_own():
    """Whoever asks for bfloat16 in the middle of a search gets it."""
    module, x, state = attention(), torch.randn(4, 2, 12), {}
    run(module, x[:2], state)
    with torch.autocast("cpu", torch.bfloat16):
        output = module(x[2:3], x[2:3], x[2:3], incremental_state=state)[0]
    assert output.dtype == torch.bfloat16


@pytest.mark.parametrize("hypotheses", [2, 6])
@pytest.mark.parametrize("kernel_size", [1, 3])
@torch.no_grad()
def test_a_step_of_other_hypotheses_than_its_state_has_is_refused(kernel_size, hypotheses, each_way):
    options = {"encoder_decoder_attention": True, "beta": 0.5, "kernel_size": kernel_size}
    module, state = DecoderAttention(Geometry.ENCODER_DECODER, 16, 4, **options).eval(), {}
    source = torch.randn(5, 2, 16).repeat_interleave(2, dim=1)
    module(torch.randn(1, 4, 16), source, source, incremental_state=state)
    with pytest.raises((RuntimeError, IndexError)):
        module(torch.randn(1, hypotheses, 16), source, source, incremental_state=state)


@torch.no_grad()
def test_steps_that_are_prepared_drop_nothing_silently():
    """A module that is set to training in the middle drops weights again."""
    module, x, state = attention(), torch.randn(4, 2, 12), {}
    module.dropout_module.p = 1.0
    run(module, x[:2], state)
    module.train()
    assert_close(run(module, x[2:], state), module.out_proj.bias.expand(2, 2, -1))


@torch.no_grad()
def test_what_beams_share_is_kept_once(each_way):
    model, source = amplify_(build()), batch([6, 4, 3], left_pad=True)
    order = torch.tensor([0, 0, 1, 1, 2, 2])
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), order)
    state, tokens = {}, torch.full((6, 1), 2)
    model.decoder(tokens, encoder_out=encoded, incremental_state=state)
    attention = model.decoder.layers[0].encoder_attn
    assert buffer(attention, state)["prev_key"].size(0) == 3
    keys = buffer(attention, state)["prev_key"].data_ptr()
    model.decoder.reorder_incremental_state_scripting(state, torch.tensor([3, 2, 5, 5]))
    assert buffer(attention, state)["prev_key"].data_ptr() == keys
    assert buffer(attention, state)["sources"].tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize("geometry", [Geometry.DECODER_SELF, Geometry.ENCODER_DECODER])
@torch.no_grad()
def test_any_order_of_anything(geometry, each_way):
    """Hypotheses of all sentences in any order, more of them than before and fewer."""
    module = attention(geometry)
    source, x = torch.randn(5, 4, 12), 3 * torch.randn(6, 4, 12)
    source[:, 1] = source[:, 0]  # the same sentence twice
    state, history = {}, x[:0]
    for step, order in enumerate([[0, 1, 2, 3], [3, 3, 0, 1, 2, 0], [5, 0], [1, 0, 1], [2, 1, 0]]):
        order = torch.tensor(order)
        if step:
            module.reorder_incremental_state(state, order)
            history, source = history[:, order], source[:, order]
        now = x[step, : len(order)] if len(order) <= 4 else x[step, order % 4]
        history = torch.cat([history, now[None]])
        if geometry == Geometry.DECODER_SELF:
            output, expected = run(module, now[None], state), at_once(module, history)
        else:
            output = module(now[None], source, source, incremental_state=state)[0]
            expected = module(history, source, source)[0]
        assert_close(output[0], expected[-1], rtol=1e-5, atol=1e-6)


def test_shared_sources():
    source = torch.tensor([[1.0], [1], [2], [1], [1]]).unsqueeze(0)  # S x B x C
    first, sources = shared_sources(source, None, 5)
    assert (first.tolist(), sources.tolist()) == ([0, 2, 3], [0, 0, 1, 2, 2])
    padding = torch.tensor([[False], [True], [False], [False], [False]])
    assert shared_sources(source, padding, 5)[1].tolist() == [0, 1, 2, 3, 3]
    assert shared_sources(torch.arange(3.0).view(1, 3, 1), None, 3)[1] is None
    assert shared_sources(source, None, 10)[1].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    with pytest.raises(ValueError, match="7 hypotheses cannot share the encoder's output of 5 sentences"):
        shared_sources(source, None, 7)


@pytest.mark.parametrize("step_by_step", [False, True])
def test_hypotheses_share_their_sentence_where_gradients_are_wanted_too(step_by_step, each_way):
    module, source = attention(Geometry.ENCODER_DECODER), torch.randn(5, 2, 12)
    x, repeated = 3 * torch.randn(1, 4, 12), source.repeat_interleave(2, dim=1)
    state = {} if step_by_step else None
    output, _ = module(x, source, source, incremental_state=state)
    expected, _ = module(x, repeated, repeated)
    assert_close(output, expected, rtol=1e-5, atol=1e-5)
    weight = module.v_proj.weight
    gradients = [torch.autograd.grad(each.square().sum(), weight)[0] for each in (output, expected)]
    assert_close(*gradients, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_hypotheses_that_are_dropped_at_the_end_leave_the_others():
    """As in greedy decoding of several sentences, the last of which ends first."""
    model, source = amplify_(build()), batch([6, 4, 3])
    encoded = model.encoder.reorder_encoder_out(model.encoder(source), torch.arange(3))
    state, tokens = {}, torch.tensor([[2, 5], [2, 6], [2, 7]])
    model.decoder(tokens[:, :1], encoder_out=encoded, incremental_state=state)
    model.decoder.reorder_incremental_state_scripting(state, torch.arange(2))
    encoded = model.encoder.reorder_encoder_out(encoded, torch.arange(2))
    output = model.decoder(tokens[:2], encoder_out=encoded, incremental_state=state)[0]
    assert_close(output[:, -1], model(source[:2], None, tokens[:2])[0][:, -1], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_nothing_moves_where_the_order_stays():
    """As in greedy decoding: neither what steps keep nor what the encoder gave."""
    model = build()
    encoded = model.encoder.reorder_encoder_out(model.encoder(batch([6, 4, 3])), torch.arange(3))
    state = {}
    model.decoder(torch.full((3, 1), 2), encoder_out=encoded, incremental_state=state)
    before = dict(state)
    model.decoder.reorder_incremental_state_scripting(state, torch.arange(3))
    assert all(state[key] is kept for key, kept in before.items())
    assert model.encoder.reorder_encoder_out(encoded, torch.arange(3)) is encoded


@torch.no_grad()
def test_the_encoders_output_follows_sentences_not_hypotheses():
    model = build()
    whole = model.encoder(batch([6, 4, 3]))
    beams = model.encoder.reorder_encoder_out(whole, torch.tensor([0, 0, 1, 1, 2, 2]))
    assert model.encoder.reorder_encoder_out(beams, torch.tensor([1, 0, 3, 3, 4, 5])) is beams
    moved = model.encoder.reorder_encoder_out(beams, torch.tensor([4, 4, 1, 0]))
    assert torch.equal(moved["encoder_out"][0], whole["encoder_out"][0][:, [2, 2, 0, 0]])
    assert torch.equal(moved["encoder_padding_mask"][0], whole["encoder_padding_mask"][0][[2, 2, 0, 0]])


@torch.no_grad()
def test_keys_and_values_from_outside_are_no_state_of_a_convolution():
    """fairseq's layers take them as prev_self_attn_state; the rows of the map that are missing would count as zero."""
    inputs = 3 * torch.randn(4, 2, 12)
    for beta, refused in ((0.5, True), (0.0, False)):
        module = DecoderAttention(Geometry.DECODER_SELF, 12, 3, beta=beta, self_attention=True).eval()
        state = {}
        run(module, inputs[:3], state)
        given = {name: buffer(module, state)[name].clone() for name in ("prev_key", "prev_value")}
        state = {}
        module._set_input_buffer(state, given)
        if refused:
            with pytest.raises(ValueError, match="rows of earlier steps' maps"):
                run(module, inputs[3:], state)
        else:
            assert_close(run(module, inputs[3:], state), at_once(module, inputs)[3:], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_layers_without_attention_are_passed_over_where_beams_move():
    """fairseq puts layers of experts (--base-layers) among the decoder's."""
    decoder = build().decoder
    encoded = {"encoder_out": [torch.randn(3, 2, 16)], "encoder_padding_mask": []}
    state = {}
    tokens = torch.tensor([[2], [2]])
    decoder(tokens, encoded, incremental_state=state)
    before = {name: kept["prev_key"].clone() for name, kept in state.items() if name.endswith("attn_state")}
    decoder.layers.insert(0, torch.nn.Identity())
    decoder.reorder_incremental_state_scripting(state, torch.tensor([0, 1]))
    decoder.reorder_incremental_state_scripting(state, torch.tensor([1, 0]))
    moved = 0
    for name, keys in before.items():
        after = state[name]
        if after.get("sources") is None:
            moved += torch.equal(after["prev_key"], keys.flip(0))
    assert before and moved
