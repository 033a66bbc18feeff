"""Names that others rely on: architectures, their sizes, flags, state-dict keys; and values that are refused."""

import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY
from helpers import REPO, warm
from helpers.models import TINY, batch, build, kind_of, model_args, small_call, tiny_task
from helpers.other_models import monolingual
from helpers.promises import MODELS, each_model, lively, outputs
from omegaconf import OmegaConf

import ea_fairseq
from ea_fairseq.attention import DecoderAttention, EvolvingMultiheadAttention
from ea_fairseq.options import DEFAULTS
from evolving_attention import kernels
from evolving_attention.evolution import Evolution, Geometry

BASE, LANGUAGE = "ea_transformer_base", "ea_transformer_lm"
#: parameters of one convolution, and of the branches of a layer in the place of its attention, at width 160, 4 heads
CONVOLUTION, TWO_BRANCHES = 4 * 4 * 9 + 4, 3 * 161 * 80 + 81 * 80 + (3 * 160 + 1) * 80 - 4 * 161 * 160
LITE = 2_482_560


@pytest.mark.parametrize(
    "command, expected",
    [
        ("transformer", 44_138_496),
        (BASE, 44_149_008),
        ("transformer_lite", LITE),
        ("ea_transformer_lite", 2_485_224),
        ("ea_conv_transformer_lite", 2_368_584),
        ("pa_transformer_lite", 2_483_300),
        ("conv_transformer_lite", LITE + 6 * TWO_BRANCHES),
        ("pa_conv_transformer_lite", LITE + 6 * TWO_BRANCHES + 5 * CONVOLUTION),
        ("res_transformer_lite", LITE),
        ("res_transformer_lite --ea-relative-positions 8", LITE + 2 * 6 * 17 * 40),
        ("res_transformer_lite --ea-score multiplicative", LITE + 3 * 6 * 4 * 40 * 40),
    ],
)
def test_number_of_parameters(command, expected):
    """Without embeddings and output projection."""
    left_out = ("embed_tokens", "output_projection")
    parameters = build(*command.split(), size=()).named_parameters()
    assert sum(p.numel() for name, p in parameters if not any(part in name for part in left_out)) == expected


@pytest.mark.parametrize(
    "arch, rule, branch, alpha, beta",
    [
        ("ea_transformer_lite", "evolving", False, 0.1, 0.1),
        (BASE, "evolving", False, 0.5, 0.1),
        ("pa_transformer_lite", "predictive", False, 0.1, None),
        ("res_transformer_lite", "residual", False, 0.1, None),
        ("conv_transformer_lite", "evolving", True, 0, 0),
        ("pa_conv_transformer_lite", "predictive", True, 0.1, None),
        ("ea_conv_transformer_lite", "evolving", True, 0.1, 0.1),
        *((arch, "evolving", False, 0.1, 0.1) for arch in ("ea_transformer_lm", "ea_roberta", "ea_bart")),
    ],
)
def test_presets_are_the_papers(arch, rule, branch, alpha, beta):
    args = model_args(arch)
    assert (args.ea_rule, args.ea_conv_branch, args.ea_alpha, args.ea_kernel_size) == (rule, branch, alpha, 3)
    assert beta in (None, args.ea_beta)


@pytest.mark.parametrize("preset", ["transformer_iwslt_de_en", "transformer_wmt_en_de_big_t2t", "transformer_lite"])
def test_the_twin_of_a_preset_of_fairseqs_has_its_sizes(preset):
    evolving = vars(model_args(f"ea_{preset}"))
    assert evolving["ea_alpha"] == (0.1 if preset == "transformer_lite" else 0.5)
    sizes = {name: value for name, value in evolving.items() if not name.startswith("ea_")}
    assert sizes == vars(model_args(preset)) | {"arch": f"ea_{preset}"}


def test_a_named_rule_replaces_a_presets():
    """Without its alpha, `--ea-rule predictive` would predict nothing."""
    named = model_args("conv_transformer_lite", "--ea-rule", "predictive")
    assert vars(named) == {**vars(model_args("pa_conv_transformer_lite")), "arch": "conv_transformer_lite"}


NEW = {
    "transformer": ["encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"],
    "transformer_lm": ["decoder.layers.{}.self_attn"],
    "roberta": ["encoder.sentence_encoder.layers.{}.self_attn"],
    "bart_base": ["encoder.layers.{}.self_attn", "decoder.layers.{}.self_attn", "decoder.layers.{}.encoder_attn"],
}


@pytest.mark.parametrize("arch", NEW)
def test_convolutions_have_the_promised_keys_and_all_others_are_fairseqs(arch):
    ours, stock = build(BASE if arch == "transformer" else f"ea_{arch}"), build(arch)
    layers = {"encoder": 3, "decoder": 2}
    names = [name.format(i) for name in NEW[arch] for i in range(layers[name[:7]])]
    new = {f"{name}.evolution.conv.{part}" for name in names for part in ("weight", "bias")}
    assert ours.state_dict().keys() - new == stock.state_dict().keys()
    assert new <= ours.state_dict().keys()


CONV = {"evolution.conv.weight": (4, 4, 3, 3), "evolution.conv.bias": (4,)}
VECTORS = {"score.key_weight": (4, 4, 4), "score.query_weight": (4, 4, 4), "score.vector": (4, 4)}
#: flags -> what the second encoder layer's attention, 4 heads of size 4, has beside fairseq's parameters
SHAPES = {
    "": CONV,
    "--ea-conv depthwise": {**CONV, "evolution.conv.weight": (4, 1, 3, 3)},
    "--ea-conv gated": {"evolution.conv.weight": (8, 4, 3, 3), "evolution.conv.bias": (8,)},
    "--ea-learn-mix": {**CONV, "evolution.alpha": (1,), "evolution.beta": (1,)},
    "--ea-rule predictive --ea-conv-layers 2": CONV | {k.replace("conv", "stacked.0"): x for k, x in CONV.items()},
    "--ea-beta 0 --ea-score multiplicative": {"score.weight": (4, 4, 4)},
    "--ea-beta 0 --ea-score additive": VECTORS,
    "--ea-beta 0 --ea-score concatenative": {"score.weight": (4, 4, 8), "score.vector": (4, 4)},
    "--ea-beta 0 --ea-relative-positions 2": {"relative_positions.weight": (5, 4)},
    "--ea-beta 0 --ea-conv-branch": {"conv_branch.weight": (8, 16, 3), "conv_branch.bias": (8,)},
}


@pytest.mark.parametrize("flags", SHAPES)
def test_new_parameters_have_the_shapes_that_checkpoints_have(flags):
    first, stock = "encoder.layers.1.self_attn.", build("transformer").state_dict()
    own = {name: tuple(x.shape) for name, x in build(BASE, *flags.split()).state_dict().items() if name not in stock}
    assert {name.removeprefix(first): shape for name, shape in own.items() if name.startswith(first)} == SHAPES[flags]


EVERYWHERE = {"encoder conv": 3, "decoder conv": 2, "cross conv": 2}
#: flags of a model of 3 + 2 layers -> its convolutions and learnt shares, by kind of attention
EVOLVED = {
    "": EVERYWHERE,
    "--ea-alpha 0": EVERYWHERE,
    "--ea-encoder-beta 0": {"decoder conv": 2, "cross conv": 2},
    "--ea-decoder-beta 0": {"encoder conv": 3, "cross conv": 2},
    "--ea-cross-beta 0": {"encoder conv": 3, "decoder conv": 2},
    "--ea-beta 0": {},
    "--ea-beta 0 --ea-cross-beta 0.2": {"cross conv": 2},
    "--ea-rule evolving-from-second": {**EVERYWHERE, "encoder conv": 2},
    "--ea-rule predictive": {"encoder conv": 2},
    "--ea-rule predictive --ea-conv-layers 3": {"encoder conv": 2, "encoder stacked": 4},
    "--ea-rule predictive --ea-alpha 0": {},
    "--ea-rule predictive --ea-alpha 0 --ea-decoder-alpha 0.2 --ea-conv-layers 2": {"decoder conv": 1},
    "--ea-rule residual": {},
    "--ea-rule realformer": {},
    # The first layer has nothing to mix in.
    "--ea-learn-mix": {**EVERYWHERE, "encoder alpha": 2, "encoder beta": 3, "decoder beta": 2, "cross beta": 2},
    "--ea-learn-mix --ea-rule predictive --ea-alpha 0": {"encoder conv": 2, "encoder alpha": 2},
    "--ea-learn-mix --ea-rule predictive --ea-alpha 0 --ea-cross-alpha 0.2": {
        "encoder conv": 2,
        "encoder alpha": 2,
        "cross conv": 1,
        "cross alpha": 1,
    },
    "--ea-learn-mix --ea-rule residual --ea-alpha 0": {"encoder alpha": 2},
}


@pytest.mark.parametrize("flags", EVOLVED)
def test_rules_and_ablations_have_exactly_their_convolutions_and_shares(flags):
    counts = Counter()
    for name, _ in build(BASE, *flags.split()).named_parameters():
        place, _, part = name.partition(".evolution.")
        if part and not part.endswith("bias"):
            kind = "cross" if "encoder_attn" in place else place.split(".")[0]
            counts[f"{kind} {part.split('.')[0]}"] += 1
    assert counts == EVOLVED[flags]


@pytest.mark.parametrize("flags", ["--ea-rule predictive --ea-alpha 0", "--ea-rule residual --ea-alpha 0"])
def test_where_nothing_evolves_every_attention_is_fairseqs(flags):
    assert not any(isinstance(module, Evolution) for module in build(BASE, *flags.split()).modules())
    decoder = build(BASE, *flags.split(), "--ea-learn-mix").decoder  # the encoder alone has a share to learn
    assert not any(isinstance(module, Evolution) for module in decoder.modules())


@each_model()
def test_every_parameter_gets_a_gradient(name):
    model = lively(name, train=True)
    outputs(model, batch([6, 3]), batch([5, 4], eos_first=True)).pow(2).mean().backward()
    useless = [key for key, p in model.named_parameters() if p.grad is None or p.grad.abs().sum() == 0]
    assert [key for key in useless if not key.endswith("k_proj.bias")] == []


@each_model(
    [name for name in MODELS if not {"--ea-score", "--ea-relative-positions", "--ea-conv"} & {*MODELS[name].split()}]
)
@torch.no_grad()
def test_the_cpus_kernel_knows_every_call_of_every_rule(name, monkeypatch):
    """Rules are data: none of their calls is left to the plain composition."""
    assert kernels.cpu.refuses(small_call()) is None
    refused, kernel_for = [], kernels.kernel_for
    monkeypatch.setattr(kernels, "kernel_for", lambda call: kernel_for(call) or refused.append(call))
    outputs(lively(name), batch([6, 3]), batch([5, 4], eos_first=True))
    assert not refused


def test_a_checkpoint_may_be_older_than_most_flags():
    """A flag that it does not name keeps its default."""
    args = model_args(BASE, *TINY, "--ea-alpha", 0.3)
    for name in DEFAULTS.keys() - {"ea_alpha", "ea_beta", "ea_kernel_size"}:
        delattr(args, name)
    model = ea_fairseq.EATransformerModel.build_model(args, tiny_task("translation"))
    assert model.state_dict().keys() == build().state_dict().keys()
    assert {layer.self_attn.evolution.alpha for layer in model.encoder.layers} == {0.3}


@pytest.mark.parametrize("arch", ["ea_transformer_lm", "ea_transformer_lm_base", "ea_bart_base"])
def test_offloaded_activations_are_computed_again(arch):
    """fairseq's options of a language model do not say that the one needs the other."""
    model = build(arch, "--offload-activations")
    layers = [layer for name, layer in model.named_modules() if re.search(r"layers\.\d+$", name)]
    assert layers and all(hasattr(layer, "precheckpoint_forward") for layer in layers)


USELESS = [
    (BASE, "--ea-rule residual --ea-decoder-beta 0.2", "--ea-decoder-beta"),
    (BASE, "--ea-rule predictive --ea-beta 0.3", "--ea-beta"),
    (BASE, "--ea-rule realformer --ea-alpha 0.3", "--ea-alpha"),
    (BASE, "--ea-beta 0 --ea-kernel-size 5", "--ea-kernel-size"),
    (BASE, "--ea-beta 0.1 --ea-encoder-beta 0 --ea-decoder-beta 0.2 --ea-cross-beta 0.3", "--ea-beta"),
    (BASE, "--no-cross-attention --ea-cross-beta 0.2", "--ea-cross-beta"),
    (BASE, "--encoder-layers 1 --ea-alpha 0.2", "--ea-alpha"),
    (BASE, "--ea-rule residual --ea-decoder-alpha 0.2", "--ea-decoder-alpha"),
    ("ea_transformer_lm", "--ea-cross-alpha 0.2", "--ea-cross-alpha"),
    ("ea_transformer_lm", "--ea-alpha 0.9", "--ea-alpha"),
    (BASE, "--ea-rule realformer --ea-beta 0.3", "--ea-beta"),
    (BASE, "--ea-rule residual --ea-kernel-size 7", "--ea-kernel-size"),
    ("ea_roberta", "--ea-cross-beta 0.2", "--ea-cross-beta"),
    (BASE, "--ea-rule predictive --ea-decoder-alpha 0.2 --ea-decoder-beta 0.2", "--ea-decoder-beta"),
    (BASE, "--ea-alpha 1 --ea-rule predictive --ea-conv gated", None),
    (BASE, "--ea-rule predictive --ea-decoder-alpha 0.2", None),
    (BASE, "--ea-beta 0 --ea-learn-mix --ea-kernel-size 5", None),
    (BASE, "--ea-rule residual --ea-plain", None),
    ("ea_transformer_lm", "--ea-decoder-beta 0.2 --ea-score additive --ea-decoder-alpha 0.3", None),
]


@pytest.mark.parametrize(("arch", "flags", "useless"), USELESS)
def test_a_flag_that_changes_nothing_is_refused(arch, flags, useless, monkeypatch):
    """An ablation over it would train the same model again and again. A checkpoint may hold such a value."""
    for words in (flags.split(), [f"+model.{word[2:].replace('-', '_')}=1" for word in flags.split() if "--" in word]):
        monkeypatch.setattr(sys, "argv", ["fairseq-train", *words])
        if useless is None:
            build(arch, *flags.split())
        else:
            with pytest.raises(ValueError, match=f"^{useless} .*changes nothing"):
                build(arch, *flags.split())
    monkeypatch.setattr(sys, "argv", ["fairseq-generate"])
    build(arch, *flags.split())


@pytest.mark.parametrize("arch", [BASE, "ea_roberta", "ea_bart_base"])
def test_bf16_asks_for_no_tpu(arch):
    """fairseq would look for one, and end."""
    assert model_args(arch, "--bf16").tpu is False


@pytest.mark.parametrize(
    "flag, value",
    [
        ("--ea-alpha", "1.5"),
        ("--ea-beta", "-0.1"),
        ("--ea-cross-beta", "-1"),
        ("--ea-kernel-size", "4"),
        ("--ea-kernel-size", "2.5"),
        ("--ea-conv-layers", "4"),
        ("--ea-rule", "evolved"),
        ("--ea-conv", "sparse"),
        ("--ea-score", "cosine"),
        ("--ea-relative-positions", "0"),
    ],
)
def test_bad_values_are_refused_by_flag_and_value(flag, value, capsys):
    with pytest.raises(SystemExit) as stop:
        model_args(BASE, flag, value)
    message = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2 and flag in message and value in message


@pytest.mark.parametrize(
    "arch, settings, message",
    [
        (BASE, {"ea_beta": float("nan")}, "--ea-beta nan"),
        (BASE, {"ea_conv_layers": 2.5}, "--ea-conv-layers 2.5"),
        (BASE, {"encoder": {"layers": 1}}, "model.encoder.layers: expected model.encoder_layers"),
        (BASE, {"ea_conv_branch": "no"}, "--ea-conv-branch no: must be true or false"),
        (BASE, {"ea_alfa": 0.9}, r"ea_alfa 0\.9: .* ea_alpha"),
        (BASE, {"ea_conv_layers": 2}, "--ea-conv-layers 2: --ea-rule evolving .* predictive"),
        (BASE, {"ea_rule": "realformer", "ea_learn_mix": True}, "--ea-learn-mix: --ea-rule realformer"),
        (BASE, {"encoder_attention_heads": 3}, "--encoder-attention-heads 3 .* --encoder-embed-dim 16"),
        (BASE, {"decoder_attention_heads": 0}, "--decoder-attention-heads 0 .* --decoder-embed-dim 16"),
        (BASE, {"ea_conv_branch": True, "encoder_embed_dim": 20}, r"--ea-conv-branch: .*-embed-dim 20 .* of 8$"),
        (BASE, {"cross_self_attention": True}, "--cross-self-attention: "),
        (LANGUAGE, {"ea_rule": "predictive"}, "--ea-rule predictive with --ea-decoder-alpha 0: nothing evolves"),
        (LANGUAGE, {"ea_rule": "realformer", "ea_decoder_alpha": 0.5}, "--ea-rule realformer with .* 0.5: nothing"),
        (LANGUAGE, {"ea_conv_branch": True}, "--ea-conv-branch: .*encoder"),
        ("ea_roberta", {"mha_heads_to_keep": 2}, "--mha-heads-to-keep 2: "),
    ],
    ids=str,
)
def test_settings_from_elsewhere_are_checked_too(arch, settings, message):
    """Not every value comes through the parser: --model-overrides, Hydra's +model.NAME, a program."""
    task, size = kind_of(arch)
    args = model_args(arch, *size)
    vars(args).update(settings)
    for made in (args, OmegaConf.create(vars(args))):
        with pytest.raises(ValueError, match=f"^{message}"):
            ARCH_MODEL_REGISTRY[arch].build_model(made, tiny_task(task))


@pytest.mark.parametrize("branch", [[], ["--ea-conv-branch"]], ids=["one branch", "two branches"])
def test_quantisation_noise_reaches_every_projection(branch):
    model = build(BASE, "--quant-noise-pq", 0.5, "--quant-noise-pq-block-size", 2, *branch, train=True)
    attentions = [module for module in model.modules() if isinstance(module, EvolvingMultiheadAttention)]
    for projection in (getattr(one, f"{name}_proj") for one in attentions for name in ("q", "k", "v", "out")):
        x = torch.ones(projection.in_features)
        assert not torch.equal(projection(x), projection(x))


def test_the_projections_beside_a_convolution_start_as_fairseqs():
    """Xavier's uniform distribution, divided by the root of 2 (fairseq's own layers: queries, keys and values)."""
    torch.manual_seed(1)
    weight = build(BASE, "--ea-conv-branch").encoder.layers[0].self_attn.q_proj.weight  # C/2 x C
    assert weight.abs().max().item() == pytest.approx((6 / sum(weight.shape) / 2) ** 0.5, rel=0.05)


def test_no_architecture_has_the_model_name_of_fairseqs_transformer():
    """Converters of other tools go by that name, and would leave out the convolutions without a word."""
    of_fairseq = {arch for arch, name in ARCH_MODEL_NAME_REGISTRY.items() if name == "transformer"}
    assert "transformer_lite" in of_fairseq
    assert not [arch for arch in of_fairseq if arch.startswith(("ea_", "pa_", "res_", "conv_"))]


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn", "xformers_att_config"])
def test_what_has_other_maps_or_none_is_refused(option):
    """The column of keys that belong to no position would have no neighbours."""
    with pytest.raises(ValueError, match=option):
        DecoderAttention(Geometry.DECODER_SELF, 8, 2, self_attention=True, **{option: True})


@pytest.mark.parametrize(
    "flags, actual",
    [(["--ea-kernel-size", 5], r"\[4, 4, 5, 5\]"), (["--encoder-attention-heads", 2], r"\[2, 2, 3, 3\]")],
    ids=["kernel", "heads"],
)
def test_a_checkpoint_of_another_shape_is_refused_by_name(flags, actual, caplog):
    state, name = build().state_dict(), "encoder.layers.0.self_attn.evolution.conv.weight"
    with pytest.raises(RuntimeError, match=rf"{name}.*\n?.*\[4, 4, 3, 3\].*{actual}"):
        build(BASE, *flags).load_state_dict(state)
    assert name in caplog.text and "--ea-kernel-size" in caplog.text


LEARNT = f"{BASE} --ea-learn-mix --ea-decoder-alpha 0.3 --ea-cross-alpha 0.3"


@pytest.mark.parametrize(
    ("side", "kept", "flags"),
    [
        ("encoder", "0,2", LEARNT),
        ("encoder", "0", LEARNT),
        ("decoder", "1", LEARNT),
        ("encoder", "1,2", f"{BASE} --ea-rule predictive"),
        ("decoder", "1", "transformer"),
    ],
)
def test_layers_of_one_side_may_be_left_out(side, kept, flags):
    """fairseq would leave out the whole other side. A layer that becomes the first may have useless parameters."""
    flags = flags.split()
    whole, fewer = build(*flags), build(*flags, f"--{side}-layers-to-keep", kept)
    options = model_args(*flags, f"--{side}-layers-to-keep", kept)
    fewer.load_state_dict(whole.state_dict(), model_cfg=options)
    layers = [fewer.get_submodule(side).layers, whole.get_submodule(side).layers]
    for layer, number in zip(layers[0], kept.split(","), strict=True):
        assert torch.equal(layer.fc1.weight, layers[1][int(number)].fc1.weight)
    again = model_args(*flags, f"--{side}-layers-to-keep", kept)  # of the same command, which goes on
    for saved_or_given in (options, again):
        fewer.load_state_dict(fewer.state_dict(), model_cfg=saved_or_given)


@pytest.mark.slow
def test_hydra_trains_a_language_model(tmp_path):
    data = monolingual(tmp_path / "data")
    config = ["--config-dir", REPO / "ea_fairseq" / "config", f"common.user_dir={REPO / 'ea_fairseq'}"]
    config += ["model=ea_transformer_lm", "+model.ea_kernel_size=5"]
    sizes = [f"+model.decoder_{name}=16" for name in ("embed_dim", "ffn_embed_dim", "input_dim", "output_dim")]
    task = ["task=language_modeling", f"task.data={data}", "task.tokens_per_sample=20"]
    rest = ["common.cpu=true", "criterion=cross_entropy", "dataset.batch_size=4", "optimizer=adam"]
    rest += ["lr_scheduler=fixed", "optimization.lr=[0.001]", "optimization.max_update=2"]
    rest += ["distributed_training.distributed_world_size=1", f"checkpoint.save_dir={tmp_path / 'run'}"]
    words = [str(word) for word in [*config, *sizes, *task, *rest]]
    command = [Path(sys.executable).with_name("fairseq-hydra-train"), *words]
    done = warm.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    state = torch.load(tmp_path / "run" / "checkpoint_last.pt", weights_only=True)["model"]
    assert state["decoder.layers.1.self_attn.evolution.conv.weight"].shape[2:] == (5, 5)


def test_help_shows_every_option():
    command = [Path(sys.executable).with_name("fairseq-train"), "--user-dir", "ea_fairseq", "--arch", BASE, "--help"]
    text = warm.run(list(map(str, command)), cwd=REPO, capture_output=True, text=True, timeout=120).stdout
    for name in DEFAULTS:
        assert f"--{name.replace('_', '-')} " in text
