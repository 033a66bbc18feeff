"""Models with learnt mixes start from fairseq's own Transformer exactly; log and TensorBoard show what they learn."""

import json

import pytest
import torch
from helpers.models import TINY, TRAINING
from helpers.toy import fairseq
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

LEARNT = ["--ea-learn-mix", "--ea-alpha", 0, "--ea-beta", 0]


def last_validation(log):
    """What the last validation wrote, as fairseq's log of JSON has it."""
    lines = [line for line in log.splitlines() if '"valid_loss"' in line]
    return json.loads(lines[-1][lines[-1].index("{") :])


@pytest.fixture(scope="module")
def plain(corpus, tmp_path_factory):
    """fairseq's own Transformer, trained for a moment: its checkpoint, and the loss of its last validation."""
    folder = tmp_path_factory.mktemp("plain")
    train = ["train", corpus, *TRAINING, *TINY, "--arch", "transformer", "--max-update", 12, "--save-dir", folder]
    return folder / "checkpoint_last.pt", last_validation(fairseq(*train).stdout)["valid_loss"]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["evolving", "predictive"])
def test_the_first_validation_is_the_plain_models(corpus, plain, tmp_path, rule):
    """It learns with a rate so small that nothing has changed yet."""
    checkpoint, loss = plain
    train = ["train", corpus, *TRAINING, *TINY, "--arch", "ea_transformer_base", "--ea-rule", rule, *LEARNT]
    start = ["--finetune-from-model", checkpoint, "--max-update", 1, "--lr", 1e-12, "--save-dir", tmp_path]
    log = fairseq(*train, *start, "--tensorboard-logdir", tmp_path / "tensorboard").stdout
    first = last_validation(log)
    assert first["valid_loss"] == loss
    fresh = next(line for line in log.splitlines() if "start fresh" in line)
    assert "encoder.layers.1.self_attn.evolution.alpha" in fresh
    assert ("decoder.layers.0.encoder_attn.evolution.conv.weight" in fresh) == (rule == "evolving")
    assert float(first["valid_alpha_encoder_2"]) == 0
    assert ("valid_beta_cross_1" in first) == (rule == "evolving")
    shown = EventAccumulator(str(tmp_path / "tensorboard" / "valid"))
    shown.Reload()
    assert [event.value for event in shown.Scalars("alpha_encoder_2")] == [0]
    before, after = (
        torch.load(path, weights_only=True)["model"].keys() for path in (checkpoint, tmp_path / "checkpoint_last.pt")
    )
    assert before <= after and all(".evolution." in name for name in after - before)
