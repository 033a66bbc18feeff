"""Language models, RoBERTa and BART serve fairseq's tasks, commands and hub interfaces; learnt mixes are logged."""

import pytest
import torch
from fairseq.logging import metrics
from helpers.models import BART, LM, ROBERTA, batch, build
from helpers.other_models import TRAINING, WORDS, monolingual, preprocess, reversed_pair, run

from ea_artifacts.average import average
from ea_fairseq import EABARTModel, EARobertaModel, EATransformerLanguageModel
from ea_fairseq.mixes import learnt_mixes

GENERATE = ["--gen-subset", "valid", "--max-len-b", 8, "--batch-size", 4, "--required-batch-size-multiple", 1]


def test_learnt_mixes_by_name():
    model = build("ea_transformer_base", "--ea-learn-mix", "--ea-alpha", 0.25, "--ea-beta", 0.5)
    with torch.no_grad():
        model.encoder.layers[2].self_attn.evolution.alpha.fill_(0.75)
    betas = [*(f"encoder_{n}" for n in (1, 2, 3)), *(f"{kind}_{n}" for kind in ("decoder", "cross") for n in (1, 2))]
    expected = {"alpha_encoder_2": 0.25, "alpha_encoder_3": 0.75, **{f"beta_{name}": 0.5 for name in betas}}
    assert learnt_mixes(model) == expected
    assert learnt_mixes(build("ea_transformer_base")) == {}


@pytest.mark.parametrize("arch", ["ea_transformer_base", "ea_roberta"])
def test_learnt_mixes_are_logged_while_fairseq_validates_and_not_elsewhere(arch):
    metrics.reset()
    model = build(arch, "--ea-learn-mix", "--ea-alpha", 0.25).eval()
    assert "alpha_encoder_2" not in metrics.get_meters("default")
    with metrics.aggregate(new_root=True) as meters:
        model.eval()
    assert meters.get_smoothed_values()["alpha_encoder_2"] == 0.25
    with metrics.aggregate(new_root=True) as training:  # where reading them would wait for a GPU in each step
        model.train()
    assert "alpha_encoder_2" not in training.get_smoothed_values()


@torch.no_grad()
def test_adaptive_input_and_softmax_keep_their_embeddings():
    adaptive = ["--adaptive-input", "--adaptive-input-cutoff", 10, "--adaptive-softmax-cutoff", 10]
    model = build("ea_transformer_lm", *adaptive, "--tie-adaptive-weights")
    embeddings = model.decoder.embed_tokens.embeddings
    assert model.decoder.adaptive_softmax.head.word_proj.weight is embeddings[0][0].weight
    assert model.get_normalized_probs(model(batch([3, 2])), log_probs=True).shape == (2, 3, 25)


@pytest.mark.slow
def test_a_language_model_trains_scores_and_samples(tmp_path):
    data, blocks = monolingual(tmp_path / "data"), ["--sample-break-mode", "eos", "--tokens-per-sample", 20]
    command = ["--task", "language_modeling", "--arch", "ea_transformer_lm_base", *LM, *TRAINING, *blocks]
    run("train", data, *command, "--lr", 0.02, "--max-update", 60, "--save-dir", tmp_path)
    score = run("eval_lm", data, "--path", tmp_path / "checkpoint_last.pt", "--batch-size", 8, *blocks[2:])
    assert float(score.split("Perplexity: ")[1].split()[0]) < 8, "words are drawn from 16: it has learnt nothing"
    lm = EATransformerLanguageModel.from_pretrained(str(tmp_path), "checkpoint_last.pt", str(data))
    assert lm.sample("w3 w4 w5", beam=2, min_len=6, max_len_b=8).startswith("w3 w4 w5 w6")


@torch.no_grad()
def test_roberta_gives_features_of_all_layers_and_classifies():
    model, tokens = build("ea_roberta"), batch([6, 3])
    model.register_classification_head("sentiment", num_classes=3)
    hidden = model(tokens, features_only=True, return_all_hiddens=True)[1]["inner_states"]
    assert [state.shape for state in hidden] == [(6, 2, 16)] * 4
    assert model(tokens, classification_head_name="sentiment")[0].shape == (2, 3)


def first_word_comes_again(chance):
    """A sentence, and the label 1 where its first word comes again."""
    line = [chance.choice(WORDS) for _ in range(chance.randint(3, 8))]
    return {".input0": " ".join(line), ".label": str(int(line[0] in line[1:]))}


@pytest.mark.slow
def test_roberta_is_fine_tuned_resumed_averaged_and_used(tmp_path):
    """--finetune-from-model starts from the plain checkpoint once; the same command goes on from the run's own."""
    text, data = monolingual(tmp_path / "text"), tmp_path / "data"
    blocks = ["--tokens-per-sample", 20, "--sample-break-mode", "complete"]
    masked = ["--task", "masked_lm", "--criterion", "masked_lm", "--arch", "roberta", *ROBERTA, *TRAINING, *blocks]
    run("train", text, *masked, "--save-dir", tmp_path / "plain")
    for name, flags in (("input0", ["--srcdict", text / "dict.txt"]), ("label", [])):
        preprocess(
            data / name, lambda chance, n=name: {"": first_word_comes_again(chance)[f".{n}"]}, "--only-source", *flags
        )
    plain = tmp_path / "plain/checkpoint_last.pt"

    def fine_tune(folder, updates, *start):
        command = ["--task", "sentence_prediction", "--criterion", "sentence_prediction", *ROBERTA, *TRAINING, *start]
        classes = ["--arch", "ea_roberta", "--num-classes", 2, "--init-token", 0, "--max-update", updates]
        return run("train", data, *command, *classes, "--save-dir", tmp_path / folder)

    first, second = (fine_tune("run", updates, "--finetune-from-model", plain) for updates in (2, 4))
    assert "These parameters start fresh: encoder.sentence_encoder.layers.0.self_attn.evolution.conv.weight" in first
    assert "start fresh" not in second and "checkpoint_last.pt (epoch 1 @ 2 updates)" in second
    reset = ["--reset-optimizer", "--reset-dataloader", "--reset-meters"]
    assert "start fresh" in fine_tune("whole", 4, "--restore-file", plain, *reset)
    paths = [tmp_path / name / "checkpoint_last.pt" for name in ("run", "whole")]
    resumed, expected = (torch.load(path, weights_only=True)["model"] for path in paths)
    assert all(torch.equal(resumed[name], value) for name, value in expected.items())

    torch.save(average(paths[:1]), tmp_path / "run/averaged.pt")
    last, hub = (
        EARobertaModel.from_pretrained(str(tmp_path / "run"), name, str(data), bpe=None).eval()
        for name in ("checkpoint_last.pt", "averaged.pt")
    )
    tokens = torch.tensor([[0, 5, 6, 7, 2]])
    assert torch.equal(hub.extract_features(tokens), last.extract_features(tokens))  # of one
    assert hub.predict("sentence_classification_head", tokens).exp().sum(1).sub(1).abs().max() < 1e-5


@pytest.fixture(scope="module")
def bart(tmp_path_factory):
    """The folder of ea_bart, trained on denoising for a moment, with its data and data of translation."""
    folder = tmp_path_factory.mktemp("bart")
    data = monolingual(folder / "data")
    noise = ["--mask", 0.3, "--mask-length", "span-poisson", "--replace-length", 1, "--poisson-lambda", 2]
    blocks = ["--tokens-per-sample", 32, "--sample-break-mode", "complete", "--criterion", "cross_entropy"]
    command = ["--task", "denoising", "--arch", "ea_bart", *BART, *TRAINING, *blocks, *noise]
    run("train", data, *command, "--save-dir", folder)
    same = ["-s", "de", "-t", "en", "--srcdict", data / "dict.txt", "--tgtdict", data / "dict.txt"]
    preprocess(folder / "pairs", reversed_pair, *same)
    return folder


@pytest.mark.slow
def test_bart_is_fine_tuned_on_translation_and_translates(bart, tmp_path):
    """The dictionary of translation has no <mask>; fairseq takes its row off the embeddings."""
    command = ["--task", "translation", "--arch", "ea_bart", *BART, *TRAINING, "--criterion", "cross_entropy"]
    start = ["--finetune-from-model", bart / "checkpoint_last.pt", "--save-dir", tmp_path]
    log = run("train", bart / "pairs", *command, *start)
    assert "Loaded checkpoint" in log and "start fresh" not in log
    translated = run("generate", bart / "pairs", "--path", tmp_path / "checkpoint_last.pt", "--beam", 3, *GENERATE)
    assert translated.count("\nH-") == 20


@pytest.mark.slow
def test_mbart_translates(bart, tmp_path):
    """Its task adds a symbol for each language."""
    task = ["--task", "translation_from_pretrained_bart", "--langs", "de,en", "-s", "de", "-t", "en"]
    command = ["--arch", "ea_mbart_base", *BART, *TRAINING, "--criterion", "cross_entropy"]
    assert "done training" in run("train", bart / "pairs", *task, *command, "--save-dir", tmp_path)
    path = ["--path", tmp_path / "checkpoint_last.pt", "--beam", 2]
    assert run("generate", bart / "pairs", *task, *path, *GENERATE).count("\nH-") == 20


def test_bart_fills_masks_samples_and_gives_features(bart, tmp_path):
    """The codes of byte-pair encoding leave every word whole."""
    merges = [f"1 {word[2:]}</w>" for word in WORDS if len(word) > 2] + [f"w {word[1:]}</w>" for word in WORDS]
    (tmp_path / "codes").write_text("\n".join(["#version: 0.2", *merges, ""]))
    options = {"bpe": "subword_nmt", "bpe_codes": str(tmp_path / "codes")}
    hub = EABARTModel.from_pretrained(str(bart), "checkpoint_last.pt", str(bart / "data"), **options).eval()
    (filled,) = hub.fill_mask(["w3 w4 <mask> w6"], topk=2, beam=3, match_source_len=False, max_len_b=9)
    assert len(filled) == 2 and all(isinstance(text, str) for text, _ in filled)
    assert isinstance(hub.sample(["w3 w4 w5"], beam=2, max_len_b=9)[0], str)
    assert hub.extract_features(torch.tensor([0, 5, 6, 2])).shape == (1, 4, 16)
