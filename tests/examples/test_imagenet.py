"""The paper's recipe for ImageNet: the parts of pictures, the rate, and the command on a few pictures."""

import socket

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("transformers")
from PIL import Image

from examples.imagenet import train
from examples.images.resnet import HEADS, EvolvingResNet


@pytest.fixture
def folder(tmp_path):
    """Two classes: six pictures each to train on, one of which is grey, and two to test on; 120 x 90 pixels."""
    random = np.random.default_rng(0)
    for part, count in (("train", 6), ("val", 2)):
        for number, name in enumerate(("n01440764", "n01443537")):
            (tmp_path / part / name).mkdir(parents=True)
            for place in range(count):
                size = (90, 120, 3) if place else (90, 120)
                pixels = random.integers(100 * number, 100 * number + 50, size, dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / part / name / f"{place}.png")
    return tmp_path


@pytest.fixture
def processes(monkeypatch):
    """What torchrun tells a single process."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    where = {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    for name, value in where.items():
        monkeypatch.setenv(name, str(value))


def test_parts_of_pictures_have_the_papers_sizes():
    areas = []
    for _ in range(300):
        left, top, right, bottom = train.random_part(100, 100)
        assert 0 <= left < right <= 100 and 0 <= top < bottom <= 100
        areas.append((right - left) * (bottom - top) / 100**2)
        assert 0.749 < (right - left) / (bottom - top) < 1.334
    assert 0.079 < min(areas) < 0.15 and 0.9 < max(areas) <= 1


def test_the_centre_is_that_of_a_picture_of_256_pixels(tmp_path):
    """Red grows to the right, and green to the bottom: their values say which part is seen."""
    (tmp_path / "class").mkdir()
    rows, columns = np.mgrid[:256, :512]
    Image.fromarray(np.dstack([columns // 2, rows, 0 * rows]).astype(np.uint8)).save(tmp_path / "class" / "1.png")
    ((pixels, number),) = train.Pictures(tmp_path, training=False)
    red, green, _ = 255 * (pixels * train.DEVIATIONS[:, None, None] + train.MEANS[:, None, None])
    assert number == 0 and pixels.shape == (3, 224, 224)
    assert_close(green[:, 0], torch.arange(16.0, 240), atol=1, rtol=0)
    assert_close(red[0], torch.arange(144.0, 368) / 2, atol=1, rtol=0)


def test_other_files_are_no_pictures(folder):
    before = len(train.Pictures(folder / "train", training=False))
    (folder / "train" / "n01440764" / ".DS_Store").write_bytes(b"x")
    (folder / "train" / "n01440764" / "list.txt").write_text("x")
    assert len(train.Pictures(folder / "train", training=False)) == before


def test_training_pictures_are_mirrored_at_random(folder, monkeypatch):
    picture = train.Pictures(folder / "train", training=True)
    monkeypatch.setattr(train, "random_part", lambda width, height: (0, 0, width, height))
    monkeypatch.setattr(train.random, "random", lambda: 0.9)
    plain, _ = picture[1]
    monkeypatch.setattr(train.random, "random", lambda: 0.1)
    assert_close(picture[1][0], plain.flip(2))


def test_the_rate_rises_in_five_epochs_and_falls_four_times():
    shares = [train.share_of_rate(epoch) for epoch in (0, 2.5, 5, 29, 30, 60, 80, 90)]
    assert shares == pytest.approx([0, 0.5, 1, 1, 0.1, 0.01, 0.001, 0.0001])


@pytest.mark.slow
def test_the_command_trains_and_goes_on_from_its_state(capsys, folder, monkeypatch, processes):
    monkeypatch.setattr(train, "SIDE", 32)
    words = [str(folder), "--batch", "8", "--workers", "0", "--out"]
    for epoch in (1, 2):
        train.main([*words, str(folder / "state.pt"), "--epochs", str(epoch)])
        assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == [f"epoch {epoch}"]
    with pytest.raises(SystemExit, match=r"is of a training with {.*'alpha': 0.5.*}, this one has {.*'alpha': 0.9"):
        train.main([*words, str(folder / "state.pt"), "--epochs", "3", "--alpha", "0.9"])
    torch.distributed.destroy_process_group()
    train.main([*words, str(folder / "whole.pt"), "--epochs", "2"])
    state, whole = torch.load(folder / "state.pt"), torch.load(folder / "whole.pt")
    assert_close(state["model"], whole["model"])  # the same parts of pictures, mirrored alike
    assert state["schedule"]["last_epoch"] == 2
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.128 * 2 / 5)
    assert state["model"]["resnet.classifier.1.weight"].shape == (2, 512)


def test_a_folder_of_another_shape_is_refused(capsys, tmp_path):
    with pytest.raises(SystemExit):
        train.main([str(tmp_path), "--out", str(tmp_path / "state.pt")])
    assert "expected pictures of the same classes in train/CLASS/ and val/CLASS/" in capsys.readouterr().err


def test_accuracies_are_those_of_all_pictures(processes):
    scores = torch.arange(20.0).view(2, 10)  # class 9 is first, then 8, 7, 6, 5
    batches = [(scores, torch.tensor([9, 6])), (scores[:1], torch.tensor([4]))]
    torch.distributed.init_process_group()
    try:
        assert train.accuracies(torch.nn.Identity(), batches, "cpu") == pytest.approx([100 / 3, 200 / 3])
    finally:
        torch.distributed.destroy_process_group()


COUNTS = [(34, 20.7, 24), (50, 25.8, 11), (101, 45.4, 28), (152, 61.6, 45)]


@pytest.mark.parametrize(("layers", "paper", "evolved"), COUNTS)
def test_parameters_of_imagenets_models(layers, paper, evolved):
    """The papers' counts, ICML 2021, table 1; the chain's beginnings, at 14 x 14 and 7 x 7, have no convolution."""
    with torch.device("meta"):
        models = [EvolvingResNet(train.configuration(layers, 1000), 224, *shares) for shares in ((0, 0), (0.5, 1.0))]
    plain, evolving = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert evolving - plain == evolved * (HEADS**2 * 9 + HEADS)
    assert plain / 1e6 == pytest.approx(paper, rel=0.005)
    assert evolving / 1e6 == pytest.approx(paper, rel=0.005)
