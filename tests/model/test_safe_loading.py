"""Our tools' safe loading leaves alone what fairseq's loading is allowed."""

import argparse

import torch

from ea_tools.checkpoints import load


def test_reading_a_checkpoint_takes_no_permission_away(tmp_path):
    path = tmp_path / "checkpoint.pt"
    torch.save({"args": argparse.Namespace(a=1), "model": {"w": torch.ones(1)}}, path)
    load(path)
    assert torch.load(path, weights_only=True)["args"].a == 1  # ea_fairseq, imported by now, allows it
