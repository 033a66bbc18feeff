"""Promise 6: a model that a fresh process loads gives the training process's numbers. Loading runs no code."""

import argparse
import pickle
import re
import subprocess
import sys

import pytest
import torch
from helpers.models import TINY, TRAINING
from helpers.other_models import run as run_here
from helpers.promises import each_model, lively, scored
from helpers.toy import Payload, fairseq

from ea_artifacts.checkpoints import load, peek, settings, task_of, updates_of
from ea_fairseq import EATransformerModel

ARCH = ["--arch", "ea_transformer_base", *TINY, "--ea-beta", "0.4"]
# Everything that importing ea_fairseq prints would stand before the first line.
GENERATE = "import ea_fairseq; print('imported', flush=True); from fairseq_cli.generate import cli_main; cli_main()"


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory):
    """A short training that scored its validation set with beam 5 itself: its folder and its log."""
    folder = tmp_path_factory.mktemp("run")
    bleu = ["--eval-bleu", "--eval-tokenized-bleu", "--eval-bleu-args", '{"beam": 5, "max_len_b": 15}']
    length = ["--lr", 0.005, "--max-epoch", 12, "--validate-interval", 12, "--no-epoch-checkpoints"]
    return folder, run_here("train", corpus, *ARCH, *TRAINING, "--save-dir", folder, *length, *bleu)


@pytest.mark.slow
def test_a_fresh_process_gives_the_training_processs_scores(corpus, run):
    """It starts cold, and importing ea_fairseq prints nothing."""
    folder, log = run
    loss, bleu = re.findall(r'"valid_loss": "([\d.]+)".*"valid_bleu": "([\d.]+)"', log)[-1]
    assert float(bleu) > 0.1, "a score of nothing would prove nothing"
    path = ["--path", folder / "checkpoint_last.pt", "--max-tokens", 200, "--required-batch-size-multiple", 1]
    validated = fairseq("validate", corpus, *path, "--task", "translation", "--valid-subset", "valid", "--cpu").stdout
    assert re.search(r"\| loss ([\d.]+)", validated)[1] == loss, validated[-2000:]
    scoring = ["--beam", 5, "--max-len-b", 15, "--scoring", "sacrebleu", "--sacrebleu-tokenizer", "none"]
    words = [corpus, *path, "--gen-subset", "valid", *scoring, "--cpu", "--num-workers", 0]
    command = [sys.executable, "-c", GENERATE, *map(str, words)]
    generated = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True).stdout
    assert generated.startswith("imported\n")
    assert re.search(r"= ([\d.]+)", generated.splitlines()[-1])[1] == bleu, generated[-500:]


@pytest.mark.slow
def test_the_hub_loads_our_model_and_ensembles_of_it(corpus, run):
    one, twice = (
        EATransformerModel.from_pretrained(str(run[0]), checkpoint_file=files, data_name_or_path=str(corpus))
        for files in ("checkpoint_last.pt", "checkpoint_last.pt:checkpoint_last.pt")
    )
    assert [type(model) for model in twice.models] == [EATransformerModel] * 2
    texts = ["w1 w2 w3", "w4"]
    assert one.translate(texts, beam=5) == twice.translate(texts, beam=5)
    assert torch.load(run[0] / "checkpoint_last.pt", weights_only=True)["cfg"]["model"].ea_beta == 0.4


@each_model()
def test_the_state_of_every_model_is_whole(name):
    """Another model that loads it gives the same scores and hypotheses."""
    model, other = lively(name), lively(name)
    other.load_state_dict(model.state_dict())
    (scores, tokens), (expected, expected_tokens) = scored(model.train()), scored(other)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    assert tokens == expected_tokens


def test_a_malicious_checkpoint_is_refused_and_runs_nothing(corpus, tmp_path):
    trace, file = tmp_path / "trace", tmp_path / "evil.pt"
    torch.save({"optimizer_history": [{"num_updates": 7}], "args": None, "payload": Payload(trace)}, file)
    result = fairseq("generate", corpus, "--path", file, "--cpu", check=False)
    assert result.returncode != 0 and "weights_only" in result.stdout.lower()
    with pytest.raises(pickle.UnpicklingError):
        EATransformerModel.from_pretrained(str(tmp_path), checkpoint_file="evil.pt", data_name_or_path=str(corpus))
    assert updates_of(file) == -1
    assert not trace.exists()
    pickle.loads(pickle.dumps(Payload(trace)))  # without protection the payload works
    assert trace.exists()


def test_reading_a_checkpoint_takes_no_permission_away(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"args": argparse.Namespace(a=1), "model": {"w": torch.ones(1)}}, path)
    load(path)
    assert torch.load(path, weights_only=True)["args"].a == 1  # ea_fairseq, imported by now, allows it


def test_checkpoints_of_older_versions_are_read(tmp_path):
    """Files that are no archives, and all options in one place."""
    path, options = tmp_path / "checkpoint.pt", argparse.Namespace(task="language_modeling", encoder_layers=3)
    torch.save({"args": options, "model": {"w": torch.ones(1)}}, path, _use_new_zipfile_serialization=False)
    state = peek(path)
    assert state["model"]["w"].equal(torch.ones(1))
    assert (task_of(state)["_name"], settings(state)["encoder_layers"]) == ("language_modeling", 3)
