"""ea_transformer_lm keeps the promises of a decoder that stands alone."""

import pytest
import torch
from helpers.models import batch
from helpers.other_models import LM, TRAINING, build, monolingual, run

from ea_fairseq import EATransformerLanguageModel


@torch.no_grad()
def test_adaptive_input_and_softmax_stay_the_embeddings_own():
    adaptive = ["--adaptive-input", "--adaptive-input-cutoff", 10, "--adaptive-softmax-cutoff", 10]
    model = build("ea_transformer_lm", *adaptive, "--tie-adaptive-weights")
    embeddings = model.decoder.embed_tokens.embeddings
    assert model.decoder.adaptive_softmax.head.word_proj.weight is embeddings[0][0].weight
    assert model.get_normalized_probs(model(batch([3, 2])), log_probs=True).shape == (2, 3, 25)


@pytest.mark.parametrize("rule", ["predictive", "residual", "realformer"])
def test_a_rule_that_evolves_no_decoder_is_refused(rule):
    with pytest.raises(ValueError, match=f"--ea-rule {rule} evolves encoders only"):
        build("ea_transformer_lm", "--ea-rule", rule)


@pytest.mark.slow
def test_trains_scores_and_samples(tmp_path):
    """fairseq-train, fairseq-eval-lm on its checkpoint, and sample() through the hub interface."""
    data = monolingual(tmp_path)
    command = [data, "--task", "language_modeling", "--arch", "ea_transformer_lm_base", *LM, *TRAINING]
    blocks = ["--sample-break-mode", "eos", "--tokens-per-sample", 20]
    run("train", *command, *blocks, "--lr", 0.02, "--max-update", 60, "--save-dir", tmp_path / "run")
    score = run("eval_lm", data, "--path", tmp_path / "run/checkpoint_last.pt", "--batch-size", 8, *blocks[2:])
    assert float(score.split("Perplexity: ")[1].split()[0]) < 8, "words are drawn from 16: it has learnt nothing"
    lm = EATransformerLanguageModel.from_pretrained(str(tmp_path / "run"), "checkpoint_last.pt", str(data))
    assert lm.sample("w3 w4 w5", beam=2, min_len=6, max_len_b=8).startswith("w3 w4 w5 w6")
