"""Our own ways to read a checkpoint run nothing in it, and leave alone what fairseq's loading is allowed."""

import argparse

import torch
from helpers.toy import Payload

from ea_fairseq.loading import updates_of
from ea_tools.checkpoints import load


def test_reading_a_checkpoint_takes_no_permission_away(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"args": argparse.Namespace(a=1), "model": {"w": torch.ones(1)}}, path)
    load(path)
    assert torch.load(path, weights_only=True)["args"].a == 1  # ea_fairseq, imported by now, allows it


def test_a_look_into_a_malicious_checkpoint_runs_nothing(tmp_path):
    trace, path = tmp_path / "trace", tmp_path / "checkpoint.pt"
    torch.save({"optimizer_history": [{"num_updates": 7}], "payload": Payload(trace)}, path)
    assert updates_of(path) == -1
    assert not trace.exists()
