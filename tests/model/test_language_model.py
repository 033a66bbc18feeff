"""ea_transformer_lm keeps the promises of a decoder that stands alone."""

import pytest
import torch
from helpers.models import amplify_, batch
from helpers.other_models import LM, TRAINING, build, monolingual, run
from torch.testing import assert_close

from ea_fairseq import EATransformerLanguageModel

K = [1, 3, 5]


def flags(k):
    return ["--ea-kernel-size", k, "--ea-beta", 0.5]


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("k", K)
@torch.no_grad()
def test_step_by_step_equals_all_at_once_while_beams_move(k):
    model = amplify_(build("ea_transformer_lm", *flags(k)))
    generator = torch.Generator().manual_seed(k)
    tokens, state = torch.full((4, 1), 2), {}
    for _ in range(8):
        ours = model.decoder(tokens, incremental_state=state)[0][:, -1]
        assert_close(ours, model(tokens)[0][:, -1], rtol=1e-5, atol=1e-5)
        order = torch.randint(4, (4,), generator=generator)
        model.decoder.reorder_incremental_state_scripting(state, order)
        tokens = torch.cat([tokens[order], torch.randint(4, 24, (4, 1), generator=generator)], dim=1)


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("k", K)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output_bit_for_bit(k):
    model = amplify_(build("ea_transformer_lm", *flags(k)))
    tokens = batch([7, 7], eos_first=True)
    before = model(tokens)[0]
    for position in range(1, 7):
        changed = tokens.clone()
        changed[:, position] = 4 + (changed[:, position] - 4 + 7) % 20
        after = model(changed)[0]
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@pytest.mark.usefixtures("each_way")
@pytest.mark.parametrize("left_pad", [True, False])
@torch.no_grad()
def test_alone_or_in_a_batch(left_pad):
    model = amplify_(build("ea_transformer_lm", *flags(3)))
    lengths = [2, 9, 1]
    tokens = batch(lengths, left_pad=left_pad, eos_first=True)
    together = model(tokens)[0]
    for row, sentence in enumerate(tokens):
        real = sentence.ne(1)
        assert_close(together[row][real], model(sentence[real][None])[0][0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("arch", ["transformer_lm", "transformer_lm_gpt"])
@torch.no_grad()
def test_without_evolution_it_is_fairseqs(arch):
    stock = amplify_(build(arch))
    ours = build(f"ea_{arch}", "--ea-alpha", 0, "--ea-beta", 0)
    assert list(ours.state_dict()) == list(stock.state_dict())
    ours.load_state_dict(stock.state_dict())
    tokens = batch([7, 4, 1], eos_first=True)
    real = tokens.ne(1)
    assert_close(ours(tokens)[0][real], stock(tokens)[0][real], rtol=1e-5, atol=1e-5)


def test_only_convolutions_are_new():
    ours, stock = build("ea_transformer_lm"), build("transformer_lm")
    new = {f"decoder.layers.{i}.self_attn.evolution.conv.{part}" for i in range(2) for part in ("weight", "bias")}
    assert set(ours.state_dict()) - set(stock.state_dict()) == new


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


def test_heads_must_divide_the_dimension():
    with pytest.raises(ValueError, match="--decoder-attention-heads 3 does not divide --decoder-embed-dim 16"):
        build("ea_transformer_lm", "--decoder-attention-heads", 3)


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
