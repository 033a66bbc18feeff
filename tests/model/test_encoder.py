"""The encoder threads the maps: each layer mixes in what the layer before evolved."""

import pytest
import torch
from helpers.models import batch, build
from torch.testing import assert_close


def maps(encoder, source):
    """Run the encoder; the map that each layer was given, and the map that it evolved, in order of execution."""
    seen = []
    for layer in encoder.layers.children():  # iterating over LayerDrop's list itself drops some
        layer.self_attn.observer = seen.append
    output = encoder(source)
    return [maps.previous for maps in seen], [maps.a_logit for maps in seen], output["encoder_out"][0]


@pytest.mark.parametrize("lengths", [[6, 6], [7, 3, 1]])
def test_each_layer_gets_the_map_of_the_layer_before(lengths):
    model = build("ea_transformer_base", "--ea-alpha", 0.5)
    given, evolved, _ = maps(model.encoder, batch(lengths))
    assert len(given) == 3 and given[0] is None
    for previous, expected in zip(given[1:], evolved, strict=False):
        assert_close(previous, expected)


def test_without_the_skip_connection_no_map_is_handed_on():
    model = build("ea_transformer_base", "--ea-alpha", 0)
    given, _, _ = maps(model.encoder, batch([6, 4]))
    assert given == [None] * 3


def test_with_layerdrop_the_map_comes_from_the_last_layer_that_ran():
    model = build("ea_transformer_base", "--ea-alpha", 0.5, "--encoder-layerdrop", 0.5, train=True)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        given, evolved, _ = maps(model.encoder, batch([6, 4]))
        seen.add(len(given))
        assert not given or given[0] is None
        for previous, before in zip(given[1:], evolved, strict=False):
            assert_close(previous, before)
    assert len(seen) > 1


def test_gradients_reach_an_earlier_layers_logits_through_the_maps():
    """Cut the path through x after the first layer: what is left is the path through the maps."""
    model = build("ea_transformer_base", "--ea-alpha", 0.5)
    first, second = model.encoder.layers[:2]
    x = torch.randn(5, 2, 16)
    y, evolved = first(x, None, keep_map=True)
    second(y.detach(), None, previous_map=evolved)[0].pow(2).sum().backward()
    assert first.self_attn.q_proj.weight.grad.abs().sum() > 0
    assert first.fc1.weight.grad is None


@pytest.mark.parametrize("alpha, wanted", [(0.5, [True, True, False]), (0, [False, False, False])])
def test_only_maps_that_somebody_reads_are_handed_on(alpha, wanted):
    model = build("ea_transformer_base", "--ea-alpha", alpha)
    handed_on = []
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda layer, args, output: handed_on.append(output[1] is not None))
    model.encoder(batch([6, 4]))
    assert handed_on == wanted


@torch.no_grad()
def test_all_hidden_states_are_returned_when_asked_for():
    model = build()
    output = model.encoder(batch([5, 3]), return_all_hiddens=True)
    assert len(output["encoder_states"]) == 4
    assert_close(output["encoder_states"][-1], output["encoder_out"][0])


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
@torch.no_grad()
def test_a_layer_attends_to_nothing_that_its_mask_names(dtype):
    """As in fairseq's layer, anything but zero is masked."""
    layer, seen = build().encoder.layers[0], []
    layer.self_attn.observer = seen.append
    masked = torch.ones(5, 5, dtype=torch.bool).triu(1)
    layer(torch.randn(5, 2, 16), None, attn_mask=masked.to(dtype))
    assert torch.equal(seen[0].weights == 0, masked.expand(2, 4, 5, 5))


@torch.no_grad()
def test_the_sentences_lengths_are_told():
    source = batch([5, 3, 1], left_pad=True)
    assert build().encoder(source)["src_lengths"][0].tolist() == [[5], [3], [1]]
