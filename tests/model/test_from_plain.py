"""From a checkpoint of fairseq's own model: convolutions start fresh and are named, and nothing else may differ."""

import argparse

import pytest
import torch
from helpers.models import amplify_, batch
from helpers.models import build as translation
from helpers.other_models import ROBERTA, TRAINING, build, labelled, monolingual, run
from torch.testing import assert_close

from ea_fairseq import EARobertaModel
from ea_tools.training.average import average

RESET = ["--reset-optimizer", "--reset-dataloader", "--reset-meters"]


def checkpoint(path, model, **options):
    """A checkpoint as fairseq writes it, of which only the model and its options matter here."""
    args = {"encoder_attention_heads": 4, "activation_fn": "gelu", **options}
    torch.save({"args": argparse.Namespace(**args), "model": model.state_dict()}, path)
    return path


def command_line(path, **options):
    """What fairseq hands to load_state_dict: the command line, which says where a run starts from."""
    defaults = {"arch": "any", "encoder_attention_heads": 4, "activation_fn": "gelu"}
    return argparse.Namespace(**{**defaults, "restore_file": str(path), **options})


def fresh_names(model):
    return {key for key in model.state_dict() if ".evolution." in key}


def load(model, path, **options):
    state = torch.load(path, weights_only=True)["model"]
    return model.load_state_dict(state, model_cfg=command_line(path, **options))


@pytest.mark.parametrize("arch, flags", [("roberta", []), ("roberta", ["--ea-learn-mix"]), ("bart_base", [])])
def test_all_that_is_new_keeps_its_fresh_values_and_is_logged(arch, flags, tmp_path, caplog):
    caplog.set_level("INFO")
    stock, ours = build(arch), build(f"ea_{arch}", *flags)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    path = checkpoint(tmp_path / "model.pt", stock)
    load(ours, path)
    after = ours.state_dict()
    assert fresh_names(ours)
    for name, value in after.items():
        assert torch.equal(value, before[name] if name in fresh_names(ours) else stock.state_dict()[name]), name
    line = next(message for message in caplog.messages if "start fresh" in message)
    assert str(path) in line and all(name in line for name in fresh_names(ours))


@torch.no_grad()
def test_with_learnt_mixes_at_zero_the_function_is_the_plain_models(tmp_path):
    stock = amplify_(build("roberta"), 20)
    ours = build("ea_roberta", "--ea-learn-mix", "--ea-alpha", 0, "--ea-beta", 0)
    load(ours, checkpoint(tmp_path / "model.pt", stock))
    tokens = batch([7, 4, 1])
    assert_close(ours(tokens)[0][tokens.ne(1)], stock(tokens)[0][tokens.ne(1)], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["nothing said", "resumed"])
def test_without_being_told_to_start_from_it_a_plain_checkpoint_is_refused(where, tmp_path):
    stock, ours = build("roberta"), build("ea_roberta")
    said = None if where == "nothing said" else command_line("checkpoint_last.pt")
    with pytest.raises(RuntimeError, match=r"Missing key.*evolution\.conv"):
        ours.load_state_dict(stock.state_dict(), model_cfg=said)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda state: state.pop("encoder.sentence_encoder.layers.1.fc1.bias"), r"Missing.*layers\.1\.fc1\.bias"),
        (lambda state: state.update(stray=torch.zeros(1)), "Unexpected.*stray"),
        (
            lambda state: state.update(
                {"encoder.sentence_encoder.layers.0.self_attn.evolution.conv.bias": torch.zeros(4)}
            ),
            r"Missing.*layers\.0\.self_attn\.evolution\.conv\.weight",
        ),
        (
            lambda state: state.update({"encoder.lm_head.bias": torch.zeros(7)}),
            r"lm_head\.bias.*\[7\].*\[25\]",
        ),
    ],
    ids=["missing", "left over", "half evolved", "another dictionary"],
)
def test_nothing_else_may_be_missing_or_left_over(change, message, tmp_path):
    path = checkpoint(tmp_path / "model.pt", build("roberta"))
    saved = torch.load(path, weights_only=True)
    change(saved["model"])
    torch.save(saved, path)
    with pytest.raises(RuntimeError, match=rf"(?s){message}"):
        load(build("ea_roberta"), path)


@pytest.mark.parametrize("flags", [[], ["--ea-alpha", 0, "--ea-beta", 0]])
@pytest.mark.parametrize(
    "options, message",
    [
        ({"encoder_attention_heads": 2}, "--encoder-attention-heads is 4 here, and 2 in .*model.pt"),
        ({"activation_fn": "relu"}, "--activation-fn is gelu here, and relu in .*model.pt"),
    ],
)
def test_heads_that_differ_are_refused_though_every_shape_fits(options, message, flags, tmp_path):
    with pytest.raises(ValueError, match=message):
        load(build("ea_roberta", *flags), checkpoint(tmp_path / "model.pt", build("roberta"), **options))


def evolved_without_convolutions(plain, ours):
    """What a tool may have made of a trained model."""
    return {name: value + 1 for name, value in ours.items() if name in plain}


def trained_further(plain, ours):
    """As a run with other betas leaves it behind, that began with the plain model."""
    return {name: value + 1 for name, value in plain.items()}


@pytest.mark.parametrize("change", [evolved_without_convolutions, trained_further])
@pytest.mark.parametrize("is_there", [True, False], ids=["the plain checkpoint is there", "and is not"])
def test_what_began_with_a_plain_checkpoint_is_not_one(change, is_there, tmp_path):
    """Its convolutions are lost; those that would start fresh again are others'."""
    plain, ours = build("roberta"), build("ea_roberta")
    path = checkpoint(tmp_path / "model.pt", plain)
    state = change(plain.state_dict(), ours.state_dict())
    if not is_there:
        path.unlink()
    with pytest.raises(RuntimeError, match=r"Missing key.*evolution\.conv"):
        ours.load_state_dict(state, model_cfg=command_line(path))


TRANSLATION = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "activation_fn": "relu"}


def test_a_decoders_heads_that_differ_are_refused(tmp_path):
    path = checkpoint(
        tmp_path / "model.pt", translation("transformer"), **{**TRANSLATION, "decoder_attention_heads": 2}
    )
    with pytest.raises(ValueError, match=r"--decoder-attention-heads is 4 here, and 2 in .*model\.pt"):
        load(translation("ea_transformer_base"), path, **TRANSLATION)


@pytest.mark.parametrize("flags", [[], ["--ea-alpha", 0, "--ea-beta", 0]])
def test_parameters_that_are_one_only_here_are_refused(flags, tmp_path):
    """Else the last one of those that are loaded into it would win, and the others be lost."""
    flag = "--share-all-embeddings"
    apart, shared = translation("transformer"), translation("transformer", flag)
    refused = checkpoint(tmp_path / "apart.pt", apart, **TRANSLATION)
    with pytest.raises(ValueError, match=r"embed_tokens.weight and .* are one parameter here, and two in .*apart.pt"):
        load(translation("ea_transformer_base", flag, *flags), refused, **TRANSLATION)
    fits = checkpoint(tmp_path / "shared.pt", shared, **TRANSLATION)
    for shares in ([flag], []):  # what was one there may become two
        load(translation("ea_transformer_base", *shares, *flags), fits, **TRANSLATION)


@pytest.mark.parametrize(
    "name",
    ["no_scale_embedding", "decoder_normalize_before"],
)
def test_options_without_parameters_are_refused(name, tmp_path):
    given = checkpoint(tmp_path / "model.pt", translation("transformer"), **TRANSLATION, **{name: True})
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} is False here, and True in .*model.pt"):
        load(translation("ea_transformer_base"), given, **TRANSLATION, **{name: False})


def names_of_2019(state):
    """The keys by which roberta.base was published: decoder, emb_layer_norm, and one matrix for three projections."""
    old = {}
    for key, value in state.items():
        key = key.replace("encoder.", "decoder.", 1).replace("layernorm_embedding", "emb_layer_norm")
        if any(part in key for part in (".q_proj.", ".k_proj.", ".v_proj.")):
            if ".q_proj." in key:
                name = key.replace("decoder.", "encoder.", 1)
                three = [state[_projection(name, part)] for part in "qkv"]
                old[key.replace("q_proj.", "in_proj_")] = torch.cat(three)
        else:
            old[key] = value
    return old


def _projection(name, part):
    name = name.replace("emb_layer_norm", "layernorm_embedding")
    return name.replace(".q_proj.", f".{part}_proj.")


@torch.no_grad()
def test_the_keys_of_the_published_checkpoints_are_known(tmp_path):
    stock, ours = amplify_(build("roberta"), 20), build("ea_roberta", "--ea-alpha", 0, "--ea-beta", 0)
    evolving = build("ea_roberta")
    old = names_of_2019(stock.state_dict())
    assert "decoder.sentence_encoder.layers.0.self_attn.in_proj_weight" in old
    assert "decoder.sentence_encoder.emb_layer_norm.weight" in old
    path = tmp_path / "model.pt"
    torch.save({"args": stock.args, "model": old}, path)
    load(ours, path)
    load(evolving, path)
    tokens = batch([7, 4, 1])
    assert_close(ours(tokens)[0][tokens.ne(1)], stock(tokens)[0][tokens.ne(1)], rtol=1e-5, atol=1e-5)


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    """fairseq's own RoBERTa, trained for a moment and saved by fairseq, its keys then renamed to those of 2019."""
    folder = tmp_path_factory.mktemp("pretrained")
    data = monolingual(folder)
    run(
        *("train", data, "--task", "masked_lm", "--criterion", "masked_lm", "--arch", "roberta", *ROBERTA, *TRAINING),
        *("--tokens-per-sample", 20, "--sample-break-mode", "complete", "--save-dir", folder / "run"),
    )
    state = torch.load(folder / "run/checkpoint_last.pt", weights_only=True)
    state["model"] = names_of_2019(state["model"])
    torch.save(state, folder / "model.pt")
    return folder


def fine_tune(pretrained, data, run_folder, *flags):
    return run(
        *("train", data, "--task", "sentence_prediction", "--criterion", "sentence_prediction", *ROBERTA, *TRAINING),
        *("--arch", "ea_roberta", "--num-classes", 2, "--init-token", 0, "--save-dir", run_folder),
        *flags,
    )


@pytest.mark.slow
def test_fine_tuned_resumed_averaged_and_used(pretrained, tmp_path):
    """--finetune-from-model starts from the plain checkpoint once; the same command goes on where it was."""
    data = labelled(tmp_path, pretrained / "bin/dict.txt")
    start = ["--finetune-from-model", pretrained / "model.pt"]
    first = fine_tune(pretrained, data, tmp_path / "run", *start, "--max-update", 2)
    assert "These parameters start fresh: encoder.sentence_encoder.layers.0.self_attn.evolution.conv.weight" in first
    second = fine_tune(pretrained, data, tmp_path / "run", *start, "--max-update", 4)
    assert "start fresh" not in second and "checkpoint_last.pt (epoch 1 @ 2 updates)" in second
    restored = ["--restore-file", pretrained / "model.pt", *RESET]
    whole = fine_tune(pretrained, data, tmp_path / "whole", *restored, "--max-update", 4)
    assert "start fresh" in whole
    resumed, expected = (
        torch.load(tmp_path / name / "checkpoint_last.pt", weights_only=True)["model"] for name in ("run", "whole")
    )
    for name, value in expected.items():
        assert torch.equal(resumed[name], value), name
    averaged = average([tmp_path / name / "checkpoint_last.pt" for name in ("run", "whole")])
    torch.save(averaged, tmp_path / "run/averaged.pt")
    last, hub = (
        EARobertaModel.from_pretrained(str(tmp_path / "run"), name, str(data), bpe=None).eval()
        for name in ("checkpoint_last.pt", "averaged.pt")
    )
    tokens = torch.tensor([[0, 5, 6, 7, 2]])
    assert torch.equal(hub.extract_features(tokens), last.extract_features(tokens))  # of two that are equal
    assert hub.predict("sentence_classification_head", tokens).shape == (1, 2)
    assert hub.extract_features(tokens).shape == (1, 5, 16)
