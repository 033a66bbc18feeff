"""The tools on language models, RoBERTa and BART: maps are collected, sizes are counted."""

import pytest
import torch
from conftest import batch
from helpers.other_models import build
from torch.testing import assert_close

from ea_tools import profile_model
from ea_tools.maps.collect import collect

INPUTS = {
    "ea_transformer_lm": lambda source, target: (target,),
    "transformer_lm": lambda source, target: (target,),
    "ea_roberta": lambda source, target: (source,),
    "roberta": lambda source, target: (source,),
    "ea_bart": lambda source, target: (source, None, target),
}
KINDS = {
    "transformer_lm": [("decoder", 1), ("decoder", 2)],
    "roberta": [("encoder", 1), ("encoder", 2), ("encoder", 3)],
    "bart": [("encoder", 1), ("encoder", 2), ("encoder", 3)]
    + [(kind, layer) for layer in (1, 2) for kind in ("decoder", "cross")],
}


@pytest.mark.parametrize("arch", INPUTS)
def test_maps_of_whichever_sides_a_model_has(arch):
    model = build(arch, train=True)  # fairseq's own encoder leaves for a fused kernel in evaluation
    inputs = INPUTS[arch](batch([6, 3]), batch([5, 4], eos_first=True))
    expected = model(*inputs)[0]
    with collect(model) as collected:
        assert torch.equal(model(*inputs)[0], expected)
    assert [(maps.kind, maps.layer) for maps in collected.layers] == KINDS[arch.removeprefix("ea_")]
    for maps in collected.layers:
        total = maps.weights.sum(3)
        assert_close(total, torch.ones_like(total))
        assert ("convolution" in maps.parts) == arch.startswith("ea_")


@pytest.mark.parametrize(
    "arch, heads, layers",
    [("roberta", 12, [12, 0, 0]), ("transformer_lm", 8, [0, 6, 0]), ("bart_base", 12, [6, 6, 6])],
)
def test_what_evolving_adds_is_its_convolutions(arch, heads, layers):
    plain, evolving = profile_model.profile(arch), profile_model.profile(f"ea_{arch}")
    assert evolving["parameters"] - plain["parameters"] == sum(layers) * (heads * heads * 9 + heads)
    assert evolving["flops"] > plain["flops"]
    assert set(evolving["flops_by_part"]) == set(plain["flops_by_part"])
    sides = {"encoder": bool(layers[0]), "decoder": bool(layers[1])}
    assert set(plain["flops_by_part"]) == {side for side, there in sides.items() if there}
