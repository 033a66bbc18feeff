"""The rules by which maps evolve: five numbers each, against loops in float64; limits; what is refused."""

import pytest
import torch
from helpers import reference
from helpers.models import batch, build, model_args, small_call
from torch.testing import assert_close

from ea_fairseq.attention import EncoderSelfAttention
from ea_fairseq.options import check_options
from evolving_attention import kernels
from evolving_attention.evolution import RULES, Evolution, Geometry

C, K, S = 6, 3, 4


@pytest.mark.parametrize(
    "rule, conv_layers, k, learn_mix, padding",
    [
        ("evolving", 1, 1, False, [0, 0, 0, 0]),
        ("evolving", 1, 3, True, [0, 0, 1, 1]),
        ("evolving", 1, 5, True, [1, 0, 0, 0]),
        ("evolving-from-second", 1, 3, False, [0, 0, 1, 1]),
        ("predictive", 1, 1, True, [0, 0, 1, 1]),
        ("predictive", 1, 3, False, [1, 0, 0, 0]),
        ("predictive", 2, 3, True, [0, 0, 1, 1]),
        ("predictive", 3, 3, False, [0, 0, 1, 1]),
        ("residual", 1, 3, True, [1, 0, 0, 0]),
        ("residual", 1, 3, False, [0, 0, 1, 1]),
        ("realformer", 1, 3, False, [0, 0, 1, 1]),
    ],
)
def test_three_layers_against_loops(rule, conv_layers, k, learn_mix, padding):
    options = {"rule": rule, "conv_layers": conv_layers, "kernel_size": k, "alpha": 0.4, "beta": 0.3}
    layers = [EncoderSelfAttention(C, K, first=n == 0, learn_mix=learn_mix, **options) for n in range(3)]
    reference.compare_layers(layers, padding)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_previous", [False, True])
def test_coefficients_are_the_tables(rule, has_previous):
    assert RULES[rule].coefficients(0.4, 0.3, has_previous) == reference.COEFFICIENTS[rule, has_previous](0.4, 0.3)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("has_previous", [False, True])
def test_parts_add_up_to_the_map(rule, has_previous):
    conv_layers = 2 if RULES[rule].stackable else 1
    evolution = Evolution(
        Geometry.ENCODER_SELF, K, alpha=0.4, beta=0.3, rule=rule, first=not has_previous, conv_layers=conv_layers
    )
    logits = torch.randn(2, K, S, S)
    previous = torch.randn(2, K, S, S) if has_previous else None
    parts = evolution.parts(logits, None, previous)
    assert_close(sum(part.share * part.map for part in parts.values()), evolution(logits, None, previous))
    assert list(parts) == [name for name in ("logits", "previous", "convolution") if name in parts]


# ---- in models

SMALL = "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 4 --encoder-layers 3 --dropout 0 "
SMALL = [*SMALL.split(), *"--decoder-attention-heads 4 --decoder-layers 2".split()]


def convolutions(model):
    return sorted(name for name in model.state_dict() if "evolution" in name and name.endswith("weight"))


def test_where_each_rule_has_convolutions():
    def names(rule, *flags):
        return convolutions(build("ea_transformer_base", "--ea-rule", rule, *flags))

    encoder = [f"encoder.layers.{n}.self_attn.evolution.conv.weight" for n in range(3)]
    assert names("predictive") == encoder[1:]
    assert names("predictive", "--ea-conv-layers", 2) == sorted(
        [*encoder[1:], *(name.replace("conv", "stacked.0") for name in encoder[1:])]
    )
    assert names("residual") == names("realformer") == names("predictive", "--ea-alpha", 0) == []
    assert len(names("evolving")) == 3 + 2 * 2


@pytest.mark.parametrize("rule", ["predictive", "residual"])
def test_with_alpha_zero_it_is_fairseqs_transformer(rule):
    model, stock = build("ea_transformer_base", "--ea-rule", rule, "--ea-alpha", 0), build("transformer")
    assert model.state_dict().keys() == stock.state_dict().keys()
    assert not any(isinstance(module, Evolution) for module in model.modules())


def encoder_output(model, *flags):
    """The encoder's output with the weights of `model`, under other flags."""
    other = build("ea_transformer_base", *flags)
    other.load_state_dict(model.state_dict())
    return other.encoder(batch([6, 3]))["encoder_out"][0]


def test_evolving_without_a_convolution_is_residual():
    model = build("ea_transformer_base", "--ea-alpha", 0.4, "--ea-beta", 0)
    padded_rows = torch.tensor([[False] * 6, [False] * 3 + [True] * 3]).T
    outputs = [
        encoder_output(model, "--ea-alpha", 0.4, *flags) for flags in (["--ea-beta", 0], ["--ea-rule", "residual"])
    ]
    assert_close(*(output[~padded_rows] for output in outputs))


def test_from_the_second_layer_on_leaves_one_convolution_out():
    """In the encoder's first layer, and in no decoder."""

    def convolutions(rule):
        model = build("ea_transformer_base", "--ea-rule", rule, "--ea-alpha", 0.3, "--ea-beta", 0.2)
        return {name for name, _ in model.named_parameters() if "evolution" in name}

    missing = convolutions("evolving") - convolutions("evolving-from-second")
    assert missing == {f"encoder.layers.0.self_attn.evolution.conv.{name}" for name in ("weight", "bias")}


@pytest.mark.parametrize("rule", ["evolving", "predictive", "residual"])
def test_learnt_mixes_that_start_at_zero_leave_the_plain_transformer(rule, each_way):
    flags = ["--ea-rule", rule, "--ea-learn-mix", "--ea-alpha", 0, "--ea-beta", 0]
    model, stock = build("ea_transformer_base", *flags), build("transformer")
    missing, unexpected = torch.nn.Module.load_state_dict(model, stock.state_dict(), strict=False)
    assert not unexpected and missing and all(".evolution." in name for name in missing)
    source, target = batch([6, 3]), batch([5, 4], eos_first=True)
    real = target != model.decoder.padding_idx  # a row that is padding means nothing
    output, expected = (translator(source, None, target)[0][real] for translator in (model, stock))
    assert_close(output, expected, rtol=1e-5, atol=1e-6)
    output.square().mean().backward()
    shares = {name: p.grad for name, p in model.named_parameters() if name.endswith(("alpha", "beta"))}
    assert shares and all(gradient is not None and gradient != 0 for gradient in shares.values())


@pytest.mark.parametrize(
    "rule, names",
    [
        ("evolving", {"alpha": 2, "beta": 3 + 2 * 2}),  # the first layer has nothing to mix in
        ("predictive", {"alpha": 2, "beta": 0}),
        ("residual", {"alpha": 2, "beta": 0}),
    ],
)
@pytest.mark.parametrize("start", [[], ["--ea-alpha", 0, "--ea-beta", 0]])
def test_what_is_learnt_is_what_the_rule_uses(rule, names, start):
    model = build("ea_transformer_base", "--ea-rule", rule, "--ea-learn-mix", *start)
    found = [name.rsplit(".", 1)[1] for name, _ in model.named_parameters() if name.endswith(("alpha", "beta"))]
    assert {name: found.count(name) for name in names} == names


@pytest.mark.parametrize("rule", RULES)
@torch.no_grad()
def test_every_rule_is_the_kernels_business(rule, monkeypatch):
    """All four rules are data that the CPU's kernel knows: none of their calls is left to the plain composition."""
    assert kernels.cpu.knows(small_call())
    refused, kernel_for = [], kernels.kernel_for
    monkeypatch.setattr(kernels, "kernel_for", lambda call: kernel_for(call) or refused.append(call))
    model = build("ea_transformer_base", "--ea-rule", rule)
    output = model(batch([6, 3]), None, batch([5, 4], eos_first=True))[0]
    assert not refused
    plain = build("ea_transformer_base", "--ea-rule", rule, "--ea-plain")
    plain.load_state_dict(model.state_dict())
    assert_close(plain(batch([6, 3]), None, batch([5, 4], eos_first=True))[0], output, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--ea-rule", "evolved"], ["--ea-rule evolved", "predictive"]),
        (["--ea-conv-layers", "2"], ["--ea-conv-layers 2", "--ea-rule evolving", "predictive"]),
        (["--ea-rule", "realformer", "--ea-learn-mix"], ["--ea-learn-mix", "--ea-rule realformer"]),
        (["--ea-rule", "predictive", "--ea-conv-layers", "4"], ["--ea-conv-layers 4", "1, 2 or 3"]),
        (["--ea-rule", "predictive", "--ea-conv-layers", "0"], ["--ea-conv-layers 0", "1, 2 or 3"]),
    ],
)
def test_bad_values_are_named(flags, words):
    names = [flag.removeprefix("--").replace("-", "_") for flag in flags[::2]]
    args = model_args("ea_transformer_base", *SMALL)
    for name, value in zip(names, [*flags[1::2], True], strict=False):
        setattr(args, name, value)
    with pytest.raises(ValueError) as refusal:
        check_options(args)
    assert "\n" not in str(refusal.value) and all(word in str(refusal.value) for word in words)
