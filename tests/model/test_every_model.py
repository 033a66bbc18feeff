"""Language models, RoBERTa and BART keep the promises that models for translation keep."""

import pytest
import torch
from helpers.models import amplify_, batch
from helpers.other_models import build
from helpers.promises import check_alone_or_in_a_batch, check_no_future, check_steps
from torch.testing import assert_close

FLAGS = ["--ea-alpha", 0.4, "--ea-beta", 0.5]
NEW = {
    "transformer_lm": ["decoder.layers.{}.self_attn"],
    "roberta": ["encoder.sentence_encoder.layers.{}.self_attn"],
    "bart_base": ["encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"],
}


def lively(arch, *flags):
    """A model whose maps matter."""
    return amplify_(build(arch, *flags), 4 if "lm" in arch else 20)


def outputs(model, *tokens):
    """B x T x V, of (source, target) or of one text."""
    return (model(tokens[0], None, tokens[1]) if len(tokens) > 1 else model(*tokens))[0]


def inputs(arch, left_pad=False):
    source, target = batch([2, 9, 1], left_pad=left_pad), batch([8, 1, 4], eos_first=True, left_pad=left_pad)
    return [source, target] if "bart" in arch else [target if "lm" in arch else source]


@pytest.mark.parametrize("arch, k", [("ea_transformer_lm", 1), ("ea_transformer_lm", 5), ("ea_bart", 3)])
@torch.no_grad()
def test_step_by_step_equals_teacher_forcing_while_beams_move(arch, k, each_way):
    model = lively(arch, *FLAGS, "--ea-kernel-size", k)
    if arch == "ea_bart":
        model.set_beam_size(2)
        check_steps(model, batch([6, 4, 3]), steps=6)
    else:
        check_steps(model, beams=4)


@pytest.mark.parametrize("arch, k", [("ea_transformer_lm", 3), ("ea_transformer_lm", 5), ("ea_bart", 3)])
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output_bit_for_bit(arch, k, each_way):
    model, source = lively(arch, *FLAGS, "--ea-kernel-size", k), [batch([6, 4])] if arch == "ea_bart" else []
    check_no_future(lambda tokens: outputs(model, *source, tokens), batch([7, 7], eos_first=True))


@pytest.mark.parametrize(
    "arch, k, left_pad",
    [
        ("ea_transformer_lm", 3, True),
        ("ea_transformer_lm", 3, False),
        ("ea_roberta", 3, True),
        ("ea_roberta", 5, False),
        ("ea_bart", 3, False),
    ],
)
@torch.no_grad()
def test_alone_or_in_a_batch(arch, k, left_pad, each_way):
    model = lively(arch, *FLAGS, "--ea-kernel-size", k)
    check_alone_or_in_a_batch(lambda *tokens: outputs(model, *tokens), *inputs(arch, left_pad))


@pytest.mark.parametrize(
    "arch", ["transformer_lm", "transformer_lm_gpt", "roberta", "roberta_prenorm", "bart_base", "mbart_base"]
)
@torch.no_grad()
def test_without_evolution_it_is_fairseqs(arch):
    stock, ours = lively(arch), build(f"ea_{arch}", "--ea-alpha", 0, "--ea-beta", 0)
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    tokens = inputs(arch)
    real = tokens[-1].ne(1)
    for train in (False, True) if "roberta" in arch else (False,):  # fairseq's layer has a kernel for evaluation
        models = [model.train(train) for model in (ours, stock)]
        assert_close(*(outputs(model, *tokens)[real] for model in models), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", NEW)
def test_only_convolutions_are_new(arch):
    ours, stock = build(f"ea_{arch}"), build(arch)
    layers = {"encoder": 3, "decoder": 2}
    names = [name.format(i) for name in NEW[arch] for i in range(layers[name[:7]])]
    new = {f"{name}.evolution.conv.{part}" for name in names for part in ("weight", "bias")}
    assert set(ours.state_dict()) - set(stock.state_dict()) == new


@pytest.mark.parametrize("arch, side", [("ea_transformer_lm", "decoder"), ("ea_roberta", "encoder")])
def test_heads_must_divide_the_dimension(arch, side):
    with pytest.raises(ValueError, match=f"--{side}-attention-heads 3 does not divide --{side}-embed-dim 16"):
        build(arch, f"--{side}-attention-heads", 3)
