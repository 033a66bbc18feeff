"""Training through fairseq-train: its knobs, several processes, stopping and going on."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import REPO, TINY, TRAINING, fairseq

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
        "--memory-efficient-bf16",
    ],
)
def test_fairseqs_knobs(corpus, tmp_path, flags):
    log = train(corpus, tmp_path, "--max-update", 6, "--no-epoch-checkpoints", *flags.split())
    assert losses(log)[-1] < losses(log)[0]
    output = fairseq("generate", corpus, "--path", tmp_path / "checkpoint_last.pt", "--beam", 3, "--cpu", "--quiet")
    assert "BLEU4" in output.stdout


def test_checkpoint_activations_changes_no_gradient():
    """Maps and their gradients pass through fairseq's checkpointing too."""
    from conftest import batch, build

    plain = build("ea_transformer_base", "--ea-alpha", 0.5, train=True)
    saving = build("ea_transformer_base", "--ea-alpha", 0.5, "--checkpoint-activations", train=True)
    saving.load_state_dict(plain.state_dict())
    for model in (plain, saving):
        model(batch([5, 3]), None, batch([4, 2], eos_first=True))[0].pow(2).mean().backward()
    for (name, a), b in zip(plain.named_parameters(), saving.parameters(), strict=True):
        assert torch.allclose(a.grad, b.grad, atol=1e-7), name


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
        subprocess.Popen(
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


@pytest.mark.parametrize("stop_at", ["middle of an epoch", "end of an epoch"])
def test_a_resumed_run_is_bit_identical(corpus, tmp_path, stop_at):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    flags = ["--no-epoch-checkpoints"]
    per_epoch = len(losses(train(corpus, tmp_path / "probe", "--max-epoch", 1, *flags)))
    first = per_epoch + (per_epoch // 2 if stop_at == "middle of an epoch" else 0)
    train(corpus, whole, "--max-update", 2 * per_epoch + 3, *flags)
    train(corpus, halves, "--max-update", first, *flags)
    train(corpus, halves, "--max-update", 2 * per_epoch + 3, *flags)

    expected, resumed = (load(folder / "checkpoint_last.pt") for folder in (whole, halves))
    assert expected["optimizer_history"][-1]["num_updates"] == 2 * per_epoch + 3
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    ours, theirs = (state["last_optimizer_state"]["state"] for state in (resumed, expected))
    assert ours.keys() == theirs.keys()
    for key, moments in theirs.items():
        for name, value in moments.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(ours[key][name])), (key, name)
