"""Names that others rely on: architectures, their sizes, flags, state-dict keys; and what is refused."""

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import REPO, other_models, warm
from helpers.models import TINY, batch, build, dictionary, model_args
from helpers.toy import fairseq
from omegaconf import OmegaConf

import ea_fairseq
from ea_fairseq.attention import DecoderAttention
from ea_fairseq.options import DEFAULTS
from evolving_attention.evolution import Evolution, Geometry

CONVOLUTIONS = {
    "encoder": "encoder.layers.{}.self_attn.evolution.conv.{}",
    "decoder": "decoder.layers.{}.self_attn.evolution.conv.{}",
    "cross": "decoder.layers.{}.encoder_attn.evolution.conv.{}",
}


@pytest.mark.parametrize(
    "arch, expected",
    [
        ("ea_transformer_lite", 2_485_224),
        ("ea_conv_transformer_lite", 2_368_584),
        ("ea_transformer_base", 44_149_008),
        ("transformer_lite", 2_482_560),
        ("transformer", 44_138_496),
    ],
)
def test_number_of_parameters(arch, expected):
    model = build(arch, size=())
    count = sum(p.numel() for name, p in model.named_parameters() if "embed_tokens" not in name)
    assert count - model.decoder.output_projection.weight.numel() == expected


@pytest.mark.parametrize("arch, alpha", [("ea_transformer_lite", 0.1), ("ea_transformer_base", 0.5)])
def test_hyper_parameters_of_the_papers(arch, alpha):
    args = model_args(arch)
    assert (args.ea_alpha, args.ea_beta, args.ea_kernel_size) == (alpha, 0.1, 3)
    model = build(arch, size=())
    assert {layer.self_attn.evolution.alpha for layer in model.encoder.layers} == {alpha}
    assert {layer.self_attn.evolution.beta for layer in model.decoder.layers} == {0.1}


def convolution_keys(model):
    return {key for key in model.state_dict() if "evolution" in key}


def expected_keys(kinds):
    layers = {"encoder": 3, "decoder": 2, "cross": 2}
    return {
        CONVOLUTIONS[kind].format(layer, part)
        for kind in kinds
        for layer in range(layers[kind])
        for part in ("weight", "bias")
    }


@pytest.mark.parametrize(
    "flags, kinds",
    [
        ([], ["encoder", "decoder", "cross"]),
        (["--ea-encoder-beta", 0], ["decoder", "cross"]),
        (["--ea-decoder-beta", 0], ["encoder", "cross"]),
        (["--ea-cross-beta", 0], ["encoder", "decoder"]),
        (["--ea-beta", 0], []),
        (["--ea-beta", 0, "--ea-cross-beta", 0.2], ["cross"]),
        (["--ea-alpha", 0], ["encoder", "decoder", "cross"]),
        (["--ea-kernel-size", 5], ["encoder", "decoder", "cross"]),
    ],
)
def test_ablations_remove_exactly_their_convolutions_and_run(flags, kinds):
    model = build("ea_transformer_base", *flags, train=True)
    assert convolution_keys(model) == expected_keys(kinds)
    logits = model(batch([5, 3]), None, batch([4, 2], eos_first=True))[0]
    logits.pow(2).mean().backward()
    assert all(p.grad is not None for p in model.parameters())
    stock = build("transformer")
    assert set(model.state_dict()) - convolution_keys(model) == set(stock.state_dict())


def test_a_checkpoint_may_be_older_than_most_flags():
    """What it says nothing of is as it was before there was a flag."""
    args, words = model_args("ea_transformer_base", *TINY, "--ea-alpha", 0.3), dictionary()
    for name in DEFAULTS.keys() - {"ea_alpha", "ea_beta", "ea_kernel_size"}:
        delattr(args, name)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model, today = ea_fairseq.EATransformerModel.build_model(args, task), build("ea_transformer_base")
    assert model.state_dict().keys() == today.state_dict().keys()
    assert {layer.self_attn.evolution.alpha for layer in model.encoder.layers} == {0.3}


@pytest.mark.parametrize("arch", ["ea_transformer_lm", "ea_transformer_lm_base", "ea_bart_base"])
def test_activations_that_are_offloaded_are_computed_again(arch):
    """fairseq's options of a language model do not say that the one needs the other."""
    model = other_models.build(arch, "--offload-activations")
    layers = [layer for name, layer in model.named_modules() if re.search(r"layers\.\d+$", name)]
    assert layers and all(hasattr(layer, "precheckpoint_forward") for layer in layers)


@pytest.mark.parametrize(
    ("arch", "flags", "said"),
    [
        ("ea_transformer_base", ["--ea-rule", "residual", "--ea-decoder-beta", 0.2], "--ea-rule residual has no beta"),
        ("ea_transformer_base", ["--ea-rule", "predictive", "--ea-encoder-beta", 0.2], "predictive has no beta there"),
        ("ea_transformer_base", ["--no-cross-attention", "--ea-cross-beta", 0.2], "this model has no such attention"),
        (
            "ea_transformer_lm",
            ["--ea-encoder-beta", 0.2],
            "--ea-encoder-beta 0.2 changes nothing: this model has no such",
        ),
        (
            "ea_roberta",
            ["--ea-cross-beta", 0.2],
            "--ea-cross-beta 0.2 changes nothing: this model has no such attention",
        ),
        ("ea_transformer_base", ["--ea-encoder-beta", 0, "--ea-decoder-beta", 0.2, "--ea-cross-beta", 0.3], None),
        ("ea_transformer_lm", ["--ea-decoder-beta", 0.2], None),
    ],
)
def test_a_beta_that_changes_nothing_is_noted(arch, flags, said, caplog):
    """An ablation over it would train the same model again and again."""
    (build if arch == "ea_transformer_base" else other_models.build)(arch, *flags)
    notes = [message for message in caplog.messages if "changes nothing" in message]
    assert len(notes) == (said is not None)
    assert said is None or said in notes[0]


@pytest.mark.parametrize("rule", ["evolving", "residual"])
def test_heads_are_not_pruned_where_maps_are_handed_on(rule):
    flags = ["--ea-rule", rule, "--mha-heads-to-keep"]
    with pytest.raises(ValueError, match="--mha-heads-to-keep 2: each layer would keep other heads"):
        other_models.build("ea_roberta", *flags, 2)
    other_models.build("ea_roberta", *flags, -1)


@pytest.mark.parametrize("arch", ["ea_transformer_base", "ea_roberta", "ea_bart_base"])
def test_bf16_asks_for_no_tpu(arch):
    """fairseq would look for one, and end."""
    assert model_args(arch, "--bf16").tpu is False


def test_the_skip_connection_reaches_the_next_layer():
    """Changing how the first layer attends changes the second layer's logits only through the skip connection."""
    model = build("ea_transformer_base", "--ea-alpha", 0.5)
    layer = model.encoder.layers[1]
    x, previous = torch.randn(4, 1, 16), torch.randn(1, 4, 4, 4)
    assert not torch.equal(layer(x, None)[0], layer(x, None, previous_map=previous)[0])


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--ea-alpha", "1.5"),
        ("--ea-beta", "-0.1"),
        ("--ea-cross-beta", "-1"),
        ("--ea-kernel-size", "4"),
        ("--ea-kernel-size", "2.5"),
    ],
)
def test_bad_values_are_refused_by_name(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        model_args("ea_transformer_base", flag, value)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert flag in message and value in message


@pytest.mark.parametrize(
    "name, value, flag",
    [
        ("ea_beta", float("nan"), "--ea-beta"),
        ("ea_conv_layers", 2.5, "--ea-conv-layers"),
    ],
)
def test_bad_values_from_elsewhere_are_refused_too(name, value, flag):
    """Not every value comes through the parser: --model-overrides, a configuration, a program."""
    args = model_args("ea_transformer_base", *TINY)
    setattr(args, name, value)
    with pytest.raises(ValueError, match=f"{flag} {value}"):
        ea_fairseq.EATransformerModel.build_model(args, SimpleNamespace())


@pytest.mark.parametrize("made", [lambda args: args, lambda args: OmegaConf.create(vars(args))], ids=["args", "hydra"])
def test_unknown_settings_from_elsewhere_are_refused(made):
    """fairseq takes any name from --model-overrides, and Hydra from +model.NAME."""
    args = made(model_args("ea_transformer_base", *TINY))
    args.ea_alfa = 0.9
    with pytest.raises(ValueError, match=r"ea_alfa 0\.9: .* is ea_alpha meant"):
        ea_fairseq.EATransformerModel.build_model(args, SimpleNamespace())


def test_hydras_settings_reach_every_layer():
    args = OmegaConf.create(vars(model_args("ea_transformer_base", *TINY, "--ea-kernel-size", 5, "--ea-alpha", 0.7)))
    task = SimpleNamespace(source_dictionary=dictionary(), target_dictionary=dictionary())
    model = ea_fairseq.EATransformerModel.build_model(args, task)
    evolutions = [module for module in model.modules() if isinstance(module, Evolution)]
    assert {evolution.conv.kernel_size for evolution in evolutions} == {(5, 5)}
    assert {layer.self_attn.evolution.alpha for layer in model.encoder.layers} == {0.7}


@pytest.mark.slow
def test_hydra_trains_a_language_model(tmp_path):
    data = other_models.monolingual(tmp_path)
    config = ["--config-dir", REPO / "ea_fairseq" / "config", f"common.user_dir={REPO / 'ea_fairseq'}"]
    config += ["model=ea_transformer_lm", "+model.ea_kernel_size=5"]
    sizes = [f"+model.decoder_{name}=16" for name in ("embed_dim", "ffn_embed_dim", "input_dim", "output_dim")]
    task = ["task=language_modeling", f"task.data={data}", "task.tokens_per_sample=20"]
    rest = ["common.cpu=true", "criterion=cross_entropy", "dataset.batch_size=4", "optimizer=adam"]
    rest += ["lr_scheduler=fixed", "optimization.lr=[0.001]", "optimization.max_update=2"]
    rest += ["distributed_training.distributed_world_size=1", f"checkpoint.save_dir={tmp_path / 'run'}"]
    words = [str(word) for word in [*config, *sizes, *task, *rest]]
    command = [Path(sys.executable).with_name("fairseq-hydra-train"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    state = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=False)["model"]
    assert state["decoder.layers.1.self_attn.evolution.conv.weight"].shape[2:] == (5, 5)


@pytest.mark.slow
def test_model_overrides_of_fairseqs_programs_are_checked(data, checkpoints):
    overrides = ["--path", checkpoints.evolving, "--model-overrides", "{'ea_alfa': 0.9}"]
    result = fairseq("generate", data, *overrides, "--cpu", check=False)
    assert result.returncode == 1
    assert "ea_alfa 0.9: evolving attention has no such setting; is ea_alpha meant?" in result.stdout.splitlines()[-1]


@pytest.mark.parametrize(("side", "heads"), [("encoder", 3), ("decoder", 0)])
def test_heads_must_divide_the_dimension(side, heads):
    with pytest.raises(ValueError, match=f"--{side}-attention-heads {heads} .* --{side}-embed-dim 16"):
        build("ea_transformer_base", f"--{side}-attention-heads", heads)


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_that_belong_to_no_position_are_refused(option):
    """A map would have a column that is nobody's neighbour."""
    with pytest.raises(ValueError, match=option):
        DecoderAttention(Geometry.DECODER_SELF, 8, 2, self_attention=True, **{option: True})


@pytest.mark.parametrize(
    "flags, expected, actual",
    [
        (["--ea-kernel-size", 5], r"\[4, 4, 3, 3\]", r"\[4, 4, 5, 5\]"),
        (["--encoder-attention-heads", 2], r"\[4, 4, 3, 3\]", r"\[2, 2, 3, 3\]"),
    ],
)
def test_a_checkpoint_of_another_shape_is_refused_by_name(flags, expected, actual, caplog):
    state = build().state_dict()
    name = "encoder.layers.0.self_attn.evolution.conv.weight"
    with pytest.raises(RuntimeError, match=rf"{name}.*\n?.*{expected}.*{actual}"):
        build("ea_transformer_base", *flags).load_state_dict(state)
    assert name in caplog.text and "--ea-kernel-size" in caplog.text


def run(code, by=subprocess):
    return by.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_import_is_silent():
    result = run("import ea_fairseq")
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_help_shows_every_option():
    code = (
        "import sys; sys.argv = 'fairseq-train --user-dir ea_fairseq --arch ea_transformer_base --help'.split();"
        "from fairseq_cli.train import cli_main; cli_main()"
    )
    text = run(code, by=warm).stdout
    for flag in ("alpha", "beta", "encoder-beta", "decoder-beta", "cross-beta", "kernel-size"):
        assert f"--ea-{flag} " in text
