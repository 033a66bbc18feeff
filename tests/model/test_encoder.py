"""Encoder and decoder thread the maps: each layer mixes in the evolved map of the layer before."""

import pytest
import torch
from helpers.models import batch, build
from torch.testing import assert_close

EVOLVING = ["--ea-alpha", 0.5]


def maps(encoder, source):
    """Run the encoder: the map that each layer was given, and the map that it evolved, in order of execution."""
    seen = []
    for layer in encoder.layers.children():  # iterating over LayerDrop's list itself drops some
        layer.self_attn.observer = seen.append
    encoder(source)
    return [maps.previous for maps in seen], [maps.a_logit for maps in seen]


@pytest.mark.parametrize("arch", ["ea_transformer_base", "ea_roberta"])
@pytest.mark.parametrize("lengths", [[6, 6], [7, 3, 1]], ids=["no padding", "padding"])
def test_each_layer_gets_the_map_of_the_layer_before(arch, lengths):
    encoder = build(arch, *EVOLVING).encoder
    given, evolved = maps(getattr(encoder, "sentence_encoder", encoder), batch(lengths))
    assert len(given) == 3 and given[0] is None
    for previous, expected in zip(given[1:], evolved, strict=False):
        assert_close(previous, expected)


@pytest.mark.parametrize("names", [["self_attn"], ["encoder_attn"], ["self_attn", "encoder_attn"]], ids=" ".join)
@torch.no_grad()
def test_each_decoder_layer_gets_the_map_of_the_layer_before(names):
    """Of a whole sentence and step by step; a kind of attention without an alpha gets none."""
    flags = {"self_attn": ["--ea-decoder-alpha", 0.3], "encoder_attn": ["--ea-cross-alpha", 0.3]}
    model = build("ea_transformer_base", "--decoder-layers", 3, *(word for name in names for word in flags[name]))
    seen = {name: [] for name in flags}
    for layer in model.decoder.layers:
        for name, maps in seen.items():
            getattr(layer, name).observer = maps.append
    encoded, tokens = model.encoder(batch([6, 3])), batch([4, 2], eos_first=True)
    model.decoder(tokens, encoder_out=encoded)
    state = {}
    for length in (1, 2):
        model.decoder(tokens[:, :length], encoder_out=encoded, incremental_state=state)
    for name, maps in seen.items():
        for first, *others in (maps[:3], maps[3:6], maps[6:]):
            assert first.previous is None
            for before, layer in zip([first, *others], others, strict=False):
                if name in names:
                    assert_close(layer.previous, before.a_logit)
                else:
                    assert layer.previous is None


def test_with_layerdrop_the_map_comes_from_the_last_layer_that_ran():
    model = build("ea_transformer_base", *EVOLVING, "--encoder-layerdrop", 0.5, train=True)
    seen = set()
    for seed in range(20):
        torch.manual_seed(seed)
        given, evolved = maps(model.encoder, batch([6, 4]))
        seen.add(len(given))
        assert not given or given[0] is None
        for previous, before in zip(given[1:], evolved, strict=False):
            assert_close(previous, before)
    assert len(seen) > 1


@pytest.mark.parametrize("alpha, expected", [(0.5, [True, True, False]), (0, [False, False, False])])
def test_only_maps_that_a_layer_reads_are_handed_on(alpha, expected):
    model, handed_on = build("ea_transformer_base", "--ea-alpha", alpha), []
    for layer in model.encoder.layers:
        layer.register_forward_hook(lambda layer, args, output: handed_on.append(output[1] is not None))
    model.encoder(batch([6, 4]))
    assert handed_on == expected


@torch.no_grad()
def test_the_result_has_hidden_states_and_lengths_as_fairseqs():
    output = build().encoder(batch([5, 3, 1], left_pad=True), return_all_hiddens=True)
    assert len(output["encoder_states"]) == 4
    assert_close(output["encoder_states"][-1], output["encoder_out"][0])
    assert output["src_lengths"][0].tolist() == [[5], [3], [1]]
