"""fairseq's commands train and run our models in many ways: knobs, processes, resumption, searches, tasks."""

import json
import math
import sys
from pathlib import Path

import fairseq_cli.train
import pytest
import torch
from helpers import REPO, warm
from helpers.models import TINY, TRAINING
from helpers.other_models import run

from ea_fairseq.trainer import FlatTrainer

pytestmark = pytest.mark.slow

ARCH = ["--arch", "ea_transformer_base", *TINY, "--ea-beta", "0.3"]


@pytest.fixture(scope="module", autouse=True)
def our_trainer():
    """As in a process that begins with --optimizer flat_adam on its command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fairseq_cli.train, "Trainer", FlatTrainer)
        yield


def train(data, folder, *flags, length=4):
    """A training of so many updates in this process: its log."""
    words = [*ARCH, *TRAINING, "--save-dir", folder, "--max-update", length, "--no-epoch-checkpoints", *flags]
    return run("train", data, *words)


def updates(log):
    """The line that fairseq logs at every update."""
    lines = [line[line.index("{") :] for line in log.splitlines() if '"gnorm"' in line and '"loss"' in line]
    return [json.loads(line) for line in lines]


def losses(log):
    return [float(line["loss"]) for line in updates(log)]


def load(folder):
    return torch.load(folder / "checkpoint_last.pt", map_location="cpu", weights_only=True)


def generated(data, folder, *flags):
    """The printed text. Hardly trained models find no end, so it has a limit."""
    words = ["--required-batch-size-multiple", 1, "--batch-size", 8, "--max-len-b", 15, *flags]
    return run("generate", data, "--path", folder / "checkpoint_last.pt", *words)


def texts(printed, kind="H"):
    """The texts of each sentence: hypotheses (H) or references (T)."""
    found = {}
    for line in printed.splitlines():
        if line.startswith(f"{kind}-"):
            number, *_, text = line.split("\t")
            found.setdefault(int(number[2:]), []).append(text.split())
    return found


@pytest.mark.parametrize(
    "flags",
    [
        "--bf16 --attention-dropout 0.1 --update-freq 2 --encoder-normalize-before --decoder-normalize-before "
        "--left-pad-source",
        "--memory-efficient-fp16 --encoder-layerdrop 0.5 --decoder-layerdrop 0.5 --ea-kernel-size 5 "
        "--share-decoder-input-output-embed",
    ],
    ids=["bf16", "fp16 with LayerDrop"],
)
def test_fairseqs_knobs_train_and_translate(corpus, tmp_path, flags):
    curve = losses(train(corpus, tmp_path, *flags.split(), length=12))
    assert len(curve) == 12 and all(math.isfinite(loss) for loss in curve)
    assert "layerdrop" in flags or sum(curve[-3:]) < sum(curve[:3])  # dropped layers make the loss jump
    assert "BLEU4" in generated(corpus, tmp_path, "--beam", 3, "--quiet")


def test_two_processes_equal_one_with_twice_the_accumulation(corpus, tmp_path):
    flags = ["--no-save", "--dropout", "0", "--ddp-backend", "legacy_ddp", "--optimizer", "flat_adam"]
    alone = losses(train(corpus, tmp_path, *flags, "--update-freq", 2, length=6))
    command = [Path(sys.executable).parent / "fairseq-train", corpus, "--user-dir", REPO / "ea_fairseq"]
    command += [*ARCH, *TRAINING, *flags, "--max-update", 6, "--save-dir", tmp_path, "--distributed-no-spawn"]
    command += ["--distributed-backend", "gloo", "--distributed-world-size", 2, "--distributed-init-method"]
    log, _ = warm.two_ranks(lambda rank, address: [*command, f"tcp://{address}", "--distributed-rank", rank])
    assert "updates all parameters in one call" in log
    together = losses(log)
    assert len(together) == 6
    assert together == pytest.approx(alone, abs=2e-3)


# Without this, fairseq composes its batches anew where it resumes in a later epoch, and the runs part.
RESUMABLE = ["--update-epoch-batch-itr", "True", "--optimizer", "flat_adam"]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """A run of 20 updates: its last checkpoint, and the number of updates in an epoch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    log = train(corpus, folder, *RESUMABLE, length=20)
    return load(folder), sum(line["epoch"] == 1 for line in updates(log))


@pytest.mark.parametrize("stop_at", [0.5, 1, 1.5])
def test_a_resumed_run_is_bit_identical(corpus, tmp_path, undisturbed, stop_at):
    """Stopped in the middle of the first epoch, at its end, or in the middle of the second."""
    expected, per_epoch = undisturbed
    assert 4 < per_epoch < 12
    train(corpus, tmp_path, *RESUMABLE, length=int(stop_at * per_epoch))
    log = train(corpus, tmp_path, *RESUMABLE, length=20)
    assert len(losses(log)) == 20 - int(stop_at * per_epoch)
    resumed = load(tmp_path)
    assert resumed["optimizer_history"][-1]["num_updates"] == 20
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    ours, theirs = (state["last_optimizer_state"]["state"] for state in (resumed, expected))
    assert ours.keys() == theirs.keys()
    for key, moments in theirs.items():
        for name, value in moments.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours[key][name])), (key, name)


@pytest.fixture(scope="module")
def trained(corpus, tmp_path_factory):
    """The folder of a run of 60 updates."""
    folder = tmp_path_factory.mktemp("trained")
    train(corpus, folder, length=60)
    return folder


# Not --diverse-beam-groups: this fairseq looks its groups up by the sentence's number in the corpus, out of bounds.
@pytest.mark.parametrize(
    "flags, holds",
    [
        ("--sampling --sampling-topp 0.5 --beam 2 --nbest 2 --seed 3", None),
        ("--diversity-rate 0.5 --beam 6 --nbest 2 --print-alignment", None),
        ("--prefix-size 2 --beam 3 --nbest 2", lambda words, target: words[:2] == target[:2]),
        ("--lenpen 0.6 --min-len 3 --max-len-b 7 --beam 2 --nbest 2", lambda words, target: 3 <= len(words) <= 7),
        ("--score-reference", lambda words, target: words == target),
    ],
)
def test_searches_of_every_kind(corpus, trained, flags, holds):
    printed = generated(corpus, trained, *flags.split())
    targets, found = texts(printed, "T"), texts(printed)
    assert len(found) == 10
    for number, hypotheses in found.items():
        assert len(hypotheses) == (2 if "nbest" in flags else 1)
        assert holds is None or all(holds(words, *targets[number]) for words in hypotheses)


def test_a_bidirectional_decoder_learns_and_translates(corpus, tmp_path):
    """Alone and as an ensemble."""
    task = ["--task", "translation_lev", "--noise", "random_mask", "--criterion", "nat_loss"]
    flags = ["--arch", "ea_cmlm_transformer", "--ea-decoder-alpha", 0.2, "--lr", 0.01]
    curve = losses(train(corpus, tmp_path, *task, *flags, length=40))
    assert sum(curve[-5:]) < 0.9 * sum(curve[:5])
    path = tmp_path / "checkpoint_last.pt"
    for models in (path, f"{path}:{path}"):
        flags = ["--path", models, "--iter-decode-max-iter", 2, "--iter-decode-force-max-iter"]
        assert len(texts(generated(corpus, tmp_path, *task[:2], *flags))) == 10
