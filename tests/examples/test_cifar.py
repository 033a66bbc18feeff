"""The draft's image classifiers: CIFAR's files, what training changes of pictures, maps handed on within a stage."""

import json

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from examples.images import cifar, digits


@pytest.mark.parametrize("labels", [1, 2], ids=["CIFAR-10", "CIFAR-100"])
def test_the_authors_binary_files_are_read(labels, tmp_path):
    names = {1: ("data_batch_1.bin", "data_batch_2.bin", "test_batch.bin"), 2: ("train.bin", "test.bin")}[labels]
    for number, name in enumerate(names):
        row = np.arange(labels + 3072) % 256
        row[:labels] = [9, 30 + number][-labels:]
        (tmp_path / name).write_bytes(row.astype(np.uint8).tobytes())
    pictures, classes = cifar.read(tmp_path, training=True)
    assert classes.tolist() == {1: [30, 31], 2: [30]}[labels]
    assert pictures.shape[1:] == (3, 32, 32)
    assert pictures[0, 1, 2, 3].item() == pytest.approx(((labels + 1024 + 2 * 32 + 3) % 256) / 127.5 - 1)
    assert cifar.read(tmp_path, training=False)[1].tolist() == [29 + len(names)]


def test_a_folder_of_another_version_is_refused(capsys, tmp_path):
    (tmp_path / "data_batch_1").touch()
    with pytest.raises(SystemExit):
        cifar.main([str(tmp_path)])
    assert f"{tmp_path}: expected data_batch_*.bin or train.bin" in capsys.readouterr().err


def test_pictures_are_mirrored_moved_and_cut():
    x, seen = torch.arange(1.0, 65).view(1, 1, 8, 8).expand(60, 3, 8, 8), []
    for cutout in (1, 4):
        torch.manual_seed(1)
        seen.append(cifar.changed(x, cutout))
    rows = {tuple(one[0, 3, 2:6].tolist()) for one in seen[0] if one[0, 3, 2:6].all()}
    assert len(rows) == 18, "three rows, three columns, two directions"
    assert all((one == one[0]).all() for one in seen[1])
    lost = (seen[0] != seen[1])[:, 0].sum((1, 2))
    assert lost.max() == 15 and lost.min() >= 0, "a square of 4 x 4, but for the one pixel of the other"


@pytest.mark.parametrize("system", ["Conv-Transformer", "PA-Conv-Transformer", "EA-Conv-Transformer"])
def test_maps_are_handed_on_within_a_stage_and_attention_waits_for_small_pictures(system):
    model, given = cifar.Classifier(system, 10, side=16, width=16, dropout=0.0), []
    for stage in model.stages:
        for block in stage:
            if block.attention is not None:
                block.attention.observer = given.append
    assert [block.attention is not None for stage in model.stages for block in stage] == [False] * 3 + [True] * 9
    model(torch.randn(2, 3, 16, 16)).sum().backward()
    assert all(parameter.grad is not None for name, parameter in model.named_parameters() if "alpha" not in name)
    read = [maps.previous is not None for maps in given]
    assert read == [system != "Conv-Transformer" and number % 3 > 0 for number in range(9)]


@pytest.mark.parametrize(("classes", "of_maps"), [(10, 0.2), (100, 0.0)], ids=["CIFAR-10", "CIFAR-100"])
def test_heads_dropout_and_positions_are_the_drafts(classes, of_maps):
    """Four heads (appendix B.1), dropout of three kinds of layers (B.3.1), two tables of positions (section 3.2)."""
    blocks = [block for stage in cifar.Classifier("PA-Conv-Transformer", classes).stages for block in stage]
    attentions = [block.attention for block in blocks if block.attention is not None]
    assert {(one.num_heads, one.dropout) for one in attentions} == {(4, of_maps)}
    assert [len(one.relative_positions.rows) for one in attentions] == [2 * 8 - 1] * 3 + [2 * 4 - 1] * 3
    for layers in ("convolution", "feed_forward"):
        rates = [[one.p for one in getattr(block, layers) if isinstance(one, nn.Dropout)] for block in blocks]
        assert rates == [[0.2]] * 12


def test_the_command_compares_all_systems(tmp_path, monkeypatch):
    monkeypatch.setattr(digits, "folds", lambda *_: [(np.arange(100), np.arange(100, 150))])
    cifar.main(["digits", "--epochs", "1", "--out", str(tmp_path / "scores.json")])
    kept = json.loads((tmp_path / "scores.json").read_text())
    assert list(kept["scores"]) == list(cifar.SYSTEMS) and kept["parameters"]["CNN"] == 301858
