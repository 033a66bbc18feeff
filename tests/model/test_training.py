"""Training through fairseq-train: its knobs, several processes, stopping and going on."""

import json
import math
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPO, warm
from helpers.models import TINY, TRAINING
from helpers.toy import fairseq

import ea_fairseq  # noqa: F401  (lets torch.load read our checkpoints)

ARCH = ["--arch", "ea_transformer_base", *TINY, "--ea-beta", "0.3"]
pytestmark = pytest.mark.slow


def train(corpus, save_dir, *flags, arch=ARCH):
    return fairseq("train", corpus, *arch, *TRAINING, "--save-dir", save_dir, *flags).stdout


def losses(log, name="train_inner"):
    """The loss at every update."""
    lines = [json.loads(text) for text in re.findall(rf"\| {name} \| (\{{.*\}})", log)]
    return [float(line["loss"]) for line in lines]


def load(path):
    return torch.load(path, map_location="cpu", weights_only=True)


@pytest.mark.parametrize(
    "flags",
    [
        "--update-freq 2 --encoder-normalize-before --decoder-normalize-before --left-pad-source",
        "--encoder-layerdrop 0.5 --decoder-layerdrop 0.5 --ea-kernel-size 5",
        "--checkpoint-activations --ea-kernel-size 1 --ea-alpha 0",
        "--bf16 --attention-dropout 0.1",
        "--memory-efficient-fp16 --update-freq 2 --share-decoder-input-output-embed",
    ],
)
def test_fairseqs_knobs(corpus, tmp_path, flags):
    curve = losses(train(corpus, tmp_path, "--max-update", 12, "--no-epoch-checkpoints", *flags.split()))
    assert len(curve) == 12 and all(math.isfinite(loss) for loss in curve)
    assert "layerdrop" in flags or sum(curve[-3:]) < sum(curve[:3])  # dropped layers make the loss jump
    decoding = ["--beam", 3, "--max-len-b", 15, "--cpu", "--quiet"]
    output = fairseq("generate", corpus, "--path", tmp_path / "checkpoint_last.pt", *decoding)
    assert "BLEU4" in output.stdout


def test_two_processes_equal_one_with_twice_the_accumulation(corpus, tmp_path):
    flags = ["--max-update", "6", "--no-save", "--dropout", "0", "--ddp-backend", "legacy_ddp"]
    alone = losses(train(corpus, tmp_path, *flags, "--update-freq", 2))

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        Path(sys.executable).parent / "fairseq-train",
        corpus,
        "--user-dir",
        REPO / "ea_fairseq",
        *ARCH,
        *TRAINING,
    ]
    command += [*flags, "--save-dir", tmp_path, "--distributed-backend", "gloo", "--distributed-world-size", 2]
    command += ["--distributed-no-spawn", "--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-rank"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ranks = [
        warm.Popen(
            [str(word) for word in [*command, rank]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    logs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], logs[0] + logs[1]
    together = losses(logs[0])
    assert len(together) == 6
    assert together == pytest.approx(alone, abs=2e-3)


# Without this, fairseq composes its batches anew where it resumes in a later epoch, and the runs part.
RESUMABLE = ["--no-epoch-checkpoints", "--update-epoch-batch-itr", "True"]


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """A run of 20 updates: its last checkpoint, and the number of updates in an epoch."""
    folder = tmp_path_factory.mktemp("undisturbed")
    log = train(corpus, folder, "--max-update", 20, *RESUMABLE)
    return load(folder / "checkpoint_last.pt"), log.count('"epoch": 1,') - 1


@pytest.mark.parametrize("stop_at", [0.5, 1, 1.5])
def test_a_resumed_run_is_bit_identical(corpus, tmp_path, undisturbed, stop_at):
    """Stopped in the middle of the first epoch, at its end, or in the middle of the second."""
    expected, per_epoch = undisturbed
    assert 4 < per_epoch < 12
    train(corpus, tmp_path, "--max-update", int(stop_at * per_epoch), *RESUMABLE)
    log = train(corpus, tmp_path, "--max-update", 20, *RESUMABLE)
    assert len(losses(log)) == 20 - int(stop_at * per_epoch)

    resumed = load(tmp_path / "checkpoint_last.pt")
    assert resumed["optimizer_history"][-1]["num_updates"] == 20
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    ours, theirs = (state["last_optimizer_state"]["state"] for state in (resumed, expected))
    assert ours.keys() == theirs.keys()
    for key, moments in theirs.items():
        for name, value in moments.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours[key][name])), (key, name)
