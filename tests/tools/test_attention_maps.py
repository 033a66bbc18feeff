"""Attention maps: their parts add up to the map in use, and looking changes nothing."""

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from helpers.maps import inputs, maps_of
from helpers.models import amplify_, build

from ea_tools.maps.collect import collect

#: evolving or not, with and without each part
MODELS = {
    "evolving": "ea_transformer_base",
    "skip connection alone": "ea_transformer_base --ea-beta 0",
    "encoder alone": "ea_transformer_base --ea-decoder-beta 0 --ea-cross-beta 0",
    "predictive": "ea_transformer_base --ea-rule predictive --ea-conv-layers 2",
    "realformer, additive": "ea_transformer_base --ea-rule realformer --ea-score additive",
    "learnt, relative": "ea_transformer_base --ea-learn-mix --ea-alpha 0.1 --ea-relative-positions 2",
    "skips in decoders": "ea_transformer_base --ea-decoder-alpha 0.4 --ea-cross-alpha 0.3 --ea-conv gated",
    "stock": "transformer",
}
MODELS = {name: tuple(words.split()) for name, words in MODELS.items()}


@pytest.mark.parametrize("flags", MODELS.values(), ids=MODELS.keys())
def test_parts_add_up(flags):
    model = amplify_(build(*flags))
    layers = maps_of(model, *inputs([9, 4, 1], [3, 7, 5]))
    order = [("encoder", number) for number in (1, 2, 3)]
    order += [(kind, number) for number in (1, 2) for kind in ("decoder", "cross")]
    assert [(maps.kind, maps.layer) for maps in layers] == order
    for maps in layers:
        shape = (3, 4, 9 if maps.kind == "encoder" else 7, 7 if maps.kind == "decoder" else 9)
        a_logit = sum(part.share * part.map for part in maps.parts.values())
        weights = a_logit.masked_fill(maps.masked, -torch.inf).softmax(dim=-1)
        seen = ~maps.masked.expand(shape)
        rows = seen.any(dim=3)
        assert maps.weights.shape == maps.a_logit.shape == shape
        assert {part.map.shape for part in maps.parts.values()} == {shape}
        torch.testing.assert_close(a_logit[seen], maps.a_logit[seen], atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(weights[rows], maps.weights[rows], atol=1e-6, rtol=0)
        # own logits alone would give another map, or the test would show nothing
        evolves = len(maps.parts) > 1
        assert torch.allclose(maps.alone("logits")[rows], maps.weights[rows], atol=1e-3) != evolves


def test_a_part_has_the_share_of_its_rule():
    model = build("ea_transformer_base", "--ea-cross-beta", "0")
    layers = {(maps.kind, maps.layer): maps for maps in maps_of(model, *inputs([5], [4]))}
    shares = {place: {name: part.share for name, part in maps.parts.items()} for place, maps in layers.items()}
    assert shares["encoder", 1] == shares["decoder", 1] == {"logits": 0.9, "convolution": 0.1}
    assert shares["encoder", 2] == {"logits": 0.45, "previous": 0.45, "convolution": 0.1}
    assert shares["cross", 1] == {"logits": 1}
    torch.testing.assert_close(layers["encoder", 2].parts["previous"].map, layers["encoder", 1].a_logit)


def test_masked_are_padding_and_the_future():
    for flags in MODELS.values():
        by_kind = {maps.kind: maps for maps in maps_of(build(*flags), *inputs([3, 2], [2, 3]))}
        assert by_kind["encoder"].masked[:, 0].int().tolist() == [[[0] * 3] * 3, [[0, 0, 1], [0, 0, 1], [1, 1, 1]]]
        future = [[0, 1, 1], [0, 0, 1], [0, 0, 0]]
        assert by_kind["decoder"].masked[:, 0].int().tolist() == [[*future[:2], [1, 1, 1]], future]
        assert by_kind["cross"].masked[:, 0].int().tolist() == [[[0] * 3, [0] * 3, [1] * 3], [[0, 0, 1]] * 3]


@pytest.mark.parametrize("name", ["stock", "encoder alone"])
def test_stock_maps_are_those_that_fairseq_gives(name):
    """In fairseq's attention, static_kv leads past PyTorch's fused kernel, to the weights of each head."""
    model = amplify_(build(*MODELS[name]))
    theirs = []

    def ask_again(module, args, kwargs, output):
        theirs.append(module.forward(*args, **{**kwargs, "static_kv": True, "need_head_weights": True})[1])

    for layer in model.decoder.layers:
        for attention in (layer.self_attn, layer.encoder_attn):
            attention.register_forward_hook(ask_again, with_kwargs=True)
    ours = [maps.weights for maps in maps_of(model, *inputs([9, 4], [3, 7])) if maps.kind != "encoder"]
    for our, their in zip(ours, theirs, strict=True):
        torch.testing.assert_close(our, their.transpose(0, 1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("name", "left_pad"), [("evolving", True), ("learnt, relative", False), ("predictive", True), ("stock", False)]
)
def test_step_by_step_equals_teacher_forcing(name, left_pad):
    model = amplify_(build(*MODELS[name]))
    source, lengths, target = inputs([9, 4, 1], [6, 6, 6], left_pad=left_pad)
    forced = maps_of(model, source, lengths, target)
    with collect(model) as collected, torch.no_grad():
        encoded, state = model.encoder(source, lengths), {}
        for step in range(1, 7):
            model.decoder(target[:, :step], encoded, incremental_state=state)
    assert len(collected.layers) == 3 + 6 * 4
    for step in range(6):
        for ours, theirs in zip(collected.layers[3 + 4 * step :], forced[3:], strict=False):
            shown = slice(step + 1 if ours.kind == "decoder" else None)
            torch.testing.assert_close(ours.weights, theirs.weights[:, :, step : step + 1, shown], atol=1e-5, rtol=0)


@pytest.mark.parametrize(("name", "train"), [("evolving", True), ("evolving", False), ("stock", True)])
def test_collecting_changes_no_bit(name, train):
    model = amplify_(build(*MODELS[name], "--dropout", "0.3", "--attention-dropout", "0.3", train=train))
    arguments = inputs([9, 4, 1], [3, 7, 5])

    def run():
        torch.manual_seed(5)
        model.zero_grad()
        output = model(*arguments)[0]
        output.square().sum().backward()
        return [output, *(parameter.grad for parameter in model.parameters())]

    before = run()
    with collect(model) as collected:
        during = run()
    assert collected.layers
    assert not any(maps.weights.requires_grad for maps in collected.layers)
    for one, other in zip(before, during, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("name", ["evolving", "stock"])
def test_beam_search_is_the_same_and_can_be_watched(name):
    model = amplify_(build(*MODELS[name]))
    model.max_positions = lambda: (50, 50)
    source, lengths, _ = inputs([9, 4], [1, 1])

    def search():
        generator = SequenceGenerator([model], model.decoder.dictionary, beam_size=3, max_len_b=12)
        found = generator.generate([model], {"net_input": {"src_tokens": source, "src_lengths": lengths}})
        beams = [beam for sentence in found for beam in sentence]
        return [(beam["tokens"].tolist(), pytest.approx(beam["score"].item(), abs=1e-6)) for beam in beams]

    before = search()
    with collect(model) as collected:
        assert search() == before
    step = next(maps for maps in collected.layers if maps.kind == "cross")
    assert step.weights.shape == (6, 4, 1, 9)  # 2 sentences x 3 beams
    assert step.masked[3:].sum() == 3 * 5


@pytest.mark.parametrize("name", ["evolving", "stock"])
def test_nothing_is_left_behind(name):
    model = build(*MODELS[name])

    def traces():
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
        return hooks, [m.observer for m in model.modules() if getattr(m, "observer", None)]

    before = traces()
    with pytest.raises(KeyError), collect(model) as outer:
        with collect(model) as inner:
            assert traces() != before
        model(*inputs([3], [2]))
        assert outer.layers and not inner.layers
        raise KeyError
    assert traces() == before
