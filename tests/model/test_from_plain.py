"""A start from another model's checkpoint: new parameters start fresh and are logged; others must mean the same."""

import argparse

import pytest
import torch
from helpers.models import amplify_, batch, build, model_args
from helpers.promises import outputs
from torch.testing import assert_close

BASE, OFF = "ea_transformer_base", ["--ea-alpha", 0, "--ea-beta", 0]
LEARNT = ["--ea-learn-mix", *OFF]
OPTIONS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "activation_fn": "gelu"}
SHARED = "--share-all-embeddings"


def checkpoint(path, model, **options):
    """A checkpoint as fairseq writes it; only the model and its options matter here."""
    torch.save({"args": argparse.Namespace(**{**OPTIONS, **options}), "model": model.state_dict()}, path)
    return path


def load(model, path, state=None, **options):
    """As fairseq loads a checkpoint, or another state, in a run that starts from this checkpoint."""
    state = torch.load(path, weights_only=True)["model"] if state is None else state
    command_line = {"arch": "any", **OPTIONS, "restore_file": str(path), **options}
    return model.load_state_dict(state, model_cfg=argparse.Namespace(**command_line))


def fresh_names(model):
    return {key for key in model.state_dict() if ".evolution." in key}


@pytest.mark.parametrize("arch, flags", [("roberta", []), ("roberta", ["--ea-learn-mix"]), ("bart_base", [])])
def test_new_parameters_keep_their_fresh_values_and_are_logged(arch, flags, tmp_path, caplog):
    caplog.set_level("INFO")
    stock, ours = build(arch), build(f"ea_{arch}", *flags)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    path = checkpoint(tmp_path / "model.pt", stock)
    load(ours, path)
    assert fresh_names(ours)
    for name, value in ours.state_dict().items():
        assert torch.equal(value, before[name] if name in fresh_names(ours) else stock.state_dict()[name]), name
    line = next(message for message in caplog.messages if "start fresh" in message)
    assert str(path) in line and all(name in line for name in fresh_names(ours))


@pytest.mark.parametrize(
    "arch, rule",
    [("roberta", "evolving"), *(("transformer", rule) for rule in ("evolving", "predictive", "residual"))],
)
def test_learnt_mixes_at_zero_leave_the_plain_models_function_and_get_gradients(arch, rule, tmp_path, each_way):
    stock = amplify_(build(arch, train=True), 20 if arch == "roberta" else 4)
    ours = build("ea_roberta" if arch == "roberta" else BASE, *LEARNT, "--ea-rule", rule, train=True)
    load(ours, checkpoint(tmp_path / "model.pt", stock))
    source, target = batch([7, 4, 1]), batch([5, 2, 6], eos_first=True)
    real = source.ne(1) if arch == "roberta" else target.ne(1)
    scores, expected = (outputs(model, source, target)[real] for model in (ours, stock))
    assert_close(scores, expected, rtol=1e-5, atol=1e-5)
    scores.square().mean().backward()
    shares = [parameter for name, parameter in ours.named_parameters() if name.endswith(("alpha", "beta"))]
    assert shares and all(share.grad is not None and share.grad != 0 for share in shares)


LAYERS = "encoder.sentence_encoder.layers"


@pytest.mark.parametrize(
    "lost, added, message",
    [
        ([f"{LAYERS}.1.fc1.bias"], {}, r"Missing.*layers\.1\.fc1\.bias"),
        ([], {"stray": torch.zeros(1)}, "Unexpected.*stray"),
        ([], {f"{LAYERS}.0.self_attn.evolution.conv.bias": torch.zeros(4)}, r"Missing.*\.0\..*\.conv\.weight"),
        ([], {"encoder.lm_head.bias": torch.zeros(7)}, r"lm_head\.bias.*\[7\].*\[25\]"),
    ],
    ids=["missing", "left over", "half evolved", "another dictionary"],
)
def test_any_other_mismatch_is_an_error(lost, added, message, tmp_path):
    state = {name: value for name, value in build("roberta").state_dict().items() if name not in lost} | added
    torch.save({"args": argparse.Namespace(**OPTIONS), "model": state}, tmp_path / "model.pt")
    with pytest.raises(RuntimeError, match=rf"(?s){message}"):
        load(build("ea_roberta"), tmp_path / "model.pt")


#: (the model that a run starts from, and its options; that of the run, and its flags)
STARTS = {
    "plain to evolving": ("transformer", {}, []),
    "plain to plain": ("transformer", {}, OFF),
    "evolving": (BASE, {"ea_alpha": 0.5}, []),
}
each_start = pytest.mark.parametrize(("before", "evolves", "flags"), STARTS.values(), ids=STARTS)


@each_start
@pytest.mark.parametrize(
    "name, here, there",
    [
        ("encoder_attention_heads", 4, 2),
        ("decoder_attention_heads", 4, 2),
        ("activation_fn", "gelu", "relu"),
        ("no_scale_embedding", False, True),
        ("no_token_positional_embeddings", True, False),
        ("decoder_normalize_before", False, True),
        ("encoder_xyz", 1, 2),  # an unknown option may change the function, too
    ],
)
def test_options_that_differ_are_refused_though_every_shape_fits(name, here, there, before, evolves, flags, tmp_path):
    path = checkpoint(tmp_path / "model.pt", build(before), **evolves, **{name: there})
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is {here} here, and {there} in .*model.pt"):
        load(build(BASE, *flags), path, **evolves, **{name: here})
    load(build(BASE, *flags), path, **evolves, encoder_layerdrop=0.1, **{name: there})


#: (flags of the first model, those of the model that starts from it, the flag that is refused)
FUNCTIONS = [
    ("--ea-alpha 0.5", "--ea-alpha 0.9", "--ea-alpha is 0.9 here, and 0.5"),
    ("--ea-beta 0.2", "--ea-beta 0.3", "--ea-beta is 0.3 here, and 0.2"),
    ("--ea-beta 0.2", "--ea-beta 0.2 --ea-cross-beta 0.3", "--ea-cross-beta is 0.3 here, and None"),
    ("--ea-rule residual", "--ea-rule realformer", "--ea-rule is realformer here, and residual"),
    ("--ea-rule residual", "", "--ea-rule is evolving here, and residual"),
    ("--ea-beta 0", "--ea-beta 0 --ea-score multiplicative", "--ea-score is multiplicative here, and dot"),
    ("--ea-beta 0.2", "--ea-encoder-beta 0.2 --ea-decoder-beta 0.2 --ea-cross-beta 0.2", None),
    ("--ea-rule predictive --ea-beta 0.2", "--ea-rule predictive --ea-beta 0.3", None),
    ("--ea-learn-mix --ea-alpha 0.2", "--ea-learn-mix --ea-alpha 0.3", None),
    ("--ea-alpha 0.5", "--ea-alpha 0.5 --ea-plain", None),
]


@pytest.mark.parametrize(("before", "now", "message"), FUNCTIONS)
def test_a_model_that_evolves_in_another_way_is_refused(before, now, message, tmp_path):
    """No shape shows it: the same parameters would compute something else, and no one would be told."""
    first, ours = (build(BASE, *words.split()) for words in (before, now))
    of_first, of_ours = (
        {name: value for name, value in vars(model_args(BASE, *words.split())).items() if "ea_" in name}
        for words in (before, now)
    )
    path = checkpoint(tmp_path / "model.pt", first, **of_first)
    if message is None:
        load(ours, path, **of_ours)
        assert all(value.equal(first.state_dict()[name]) for name, value in ours.state_dict().items())
        return
    with pytest.raises(ValueError, match=message):
        load(ours, path, **of_ours)


@pytest.mark.parametrize("evolved", [True, False], ids=["evolved", "plain"])
@pytest.mark.parametrize("start", ["model.pt", "gone.pt", None, "checkpoint_last.pt"])
def test_a_run_that_began_with_a_plain_checkpoint_does_not_lose_its_convolutions(evolved, start, tmp_path):
    """Its parameters without convolutions, as a tool may leave them, are no plain model. Nor is one that is resumed."""
    plain, ours = build("roberta"), build("ea_roberta")
    path = checkpoint(tmp_path / "model.pt", plain)
    trained = (ours if evolved else plain).state_dict()
    state = {name: trained[name] + 1 for name in plain.state_dict()}
    restored = start if start in (None, "checkpoint_last.pt") else str(tmp_path / start)
    with pytest.raises(RuntimeError, match=r"Missing key.*evolution\.conv"):
        load(ours, path, state, restore_file=restored)


def test_a_model_without_new_parameters_needs_no_plain_checkpoint_later(tmp_path):
    ours = build("ea_roberta", "--ea-rule", "residual")
    load(ours, tmp_path / "gone.pt", ours.state_dict(), encoder_attention_heads=2)


@each_start
def test_parameters_that_are_one_only_here_are_refused(before, evolves, flags, tmp_path):
    """Else the last of them would win."""
    apart, shared = (
        checkpoint(tmp_path / f"{len(shares)}.pt", build(before, *shares), **evolves) for shares in ([], [SHARED])
    )
    with pytest.raises(ValueError, match=r"embed_tokens.weight and .* are one parameter here, and two in .*0.pt"):
        load(build(BASE, SHARED, *flags), apart, **evolves)
    for shares in ([SHARED], []):  # one parameter may become two
        load(build(BASE, *shares, *flags), shared, **evolves)


def names_of_2019(state):
    """The keys by which roberta.base was published: decoder, emb_layer_norm, and one matrix for three projections."""
    old = {}
    for key, value in state.items():
        if ".q_proj." in key:
            value = torch.cat([state[key.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"])
        if ".k_proj." not in key and ".v_proj." not in key:
            key = key.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm")
            old[key.replace("q_proj.", "in_proj_")] = value
    return old


@torch.no_grad()
def test_the_keys_of_the_published_checkpoints_are_known(tmp_path):
    stock = amplify_(build("roberta"), 20)
    old = names_of_2019(stock.state_dict())
    assert "decoder.sentence_encoder.layers.0.self_attn.in_proj_weight" in old
    assert "decoder.sentence_encoder.emb_layer_norm.weight" in old
    torch.save({"args": stock.args, "model": old}, tmp_path / "model.pt")
    load(build("ea_roberta"), tmp_path / "model.pt")
    ours = build("ea_roberta", *OFF)
    load(ours, tmp_path / "model.pt")
    tokens = batch([7, 4, 1])
    assert_close(ours(tokens)[0][tokens.ne(1)], stock(tokens)[0][tokens.ne(1)], rtol=1e-5, atol=1e-5)
