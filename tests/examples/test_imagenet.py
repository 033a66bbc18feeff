"""The paper's recipe for ImageNet: the parts of pictures, the rate, and the command on a few pictures."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

pytest.importorskip("datasets")
from helpers.mistakes import refusal
from PIL import Image
from safetensors.torch import load_file
from transformers import EvalPrediction

from evolving_attention.evolution import MapConvolution
from examples.imagenet import train
from examples.images.resnet import HEADS, AugmentedConvolution, EvolvingResNet


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


def test_parts_of_pictures_have_the_papers_sizes():
    areas = []
    for _ in range(300):
        left, top, right, bottom = train.random_part(100, 100)
        assert 0 <= left < right <= 100 and 0 <= top < bottom <= 100
        areas.append((right - left) * (bottom - top) / 100**2)
        assert 0.749 < (right - left) / (bottom - top) < 1.334
    assert 0.079 < min(areas) < 0.15 and 0.9 < max(areas) <= 1


def test_the_centre_is_that_of_a_picture_of_256_pixels():
    """Red grows to the right, and green to the bottom: their values say which part is seen."""
    rows, columns = np.mgrid[:256, :512]
    picture = Image.fromarray(np.dstack([columns // 2, rows, 0 * rows]).astype(np.uint8))
    (pixels,) = train.tensors({"image": [picture], "label": [0]}, training=False)["pixel_values"]
    red, green, _ = 255 * (pixels * train.DEVIATIONS[:, None, None] + train.MEANS[:, None, None])
    assert pixels.shape == (3, 224, 224)
    assert_close(green[:, 0], torch.arange(16.0, 240), atol=1, rtol=0)
    assert_close(red[0], torch.arange(144.0, 368) / 2, atol=1, rtol=0)


def test_training_pictures_are_mirrored_at_random(folder, monkeypatch):
    pictures = train.read(folder)["train"]
    monkeypatch.setattr(train, "random_part", lambda width, height: (0, 0, width, height))
    monkeypatch.setattr(train.random, "random", lambda: 0.9)
    plain = pictures[1]["pixel_values"]
    monkeypatch.setattr(train.random, "random", lambda: 0.1)
    assert_close(pictures[1]["pixel_values"], plain.flip(2))


def test_the_rate_rises_in_five_epochs_and_falls_four_times():
    shares = [train.share_of_rate(epoch) for epoch in (0, 2.5, 5, 29, 30, 60, 80, 90)]
    assert shares == pytest.approx([0, 0.5, 1, 1, 0.1, 0.01, 0.001, 0.0001])


@pytest.mark.slow
def test_the_command_trains_and_goes_on_from_its_state(capsys, folder, monkeypatch):
    monkeypatch.setattr(train, "SIDE", 32)
    words = [str(folder), "--batch", "8", "--workers", "0", "--out"]
    for epoch in (1, 2):
        train.main([*words, str(folder / "parts"), "--epochs", str(epoch)])
        assert "eval_top-1" in capsys.readouterr().out
    assert "has other alpha;" in refusal(capsys, train.main, *words, folder / "parts", "--alpha", 0.9, writes_to=folder)
    train.main([*words, str(folder / "whole"), "--epochs", "2"])
    # Two epochs of two updates each; the same parts of pictures, mirrored alike.
    states = [load_file(folder / name / "checkpoint-4" / "model.safetensors") for name in ("parts", "whole")]
    assert_close(*states)
    assert states[0]["classifier.1.weight"].shape == (2, 512)
    optimizer = torch.load(folder / "parts" / "checkpoint-4" / "optimizer.pt")
    assert optimizer["param_groups"][0]["lr"] == pytest.approx(0.128 * 2 / 5)


@pytest.mark.parametrize("words", [["--kernel-size", "2"], ["--conv-layers", "2"]], ids=" ".join)
def test_settings_that_no_model_has_leave_no_state(capsys, folder, words):
    message = refusal(capsys, train.main, folder, "--out", folder / "out", *words, writes_to=folder)
    assert f"{words[0][2:].replace('-', '_')} 2" in message


@pytest.mark.parametrize(
    ("words", "attentions", "convolutions"),
    [("--plain", 0, 0), ("--rule predictive --conv-layers 2", 26, 2 * 24)],
    ids=["ResNet", "PA-AA-ResNet"],
)
def test_the_command_builds_the_other_systems(words, attentions, convolutions, folder, monkeypatch):
    models = []
    monkeypatch.setattr(train.PictureTrainer, "train", lambda trainer, **_: models.append(trainer.model))
    train.main([str(folder), "--workers", "0", "--out", str(folder / "out"), *words.split()])
    kinds = [type(module) for module in models[0].modules()]
    assert (kinds.count(AugmentedConvolution), kinds.count(MapConvolution)) == (attentions, convolutions)


def test_a_folder_of_another_shape_is_refused(capsys, folder, tmp_path):
    for place in ("none", "train"):
        message = refusal(capsys, train.main, folder / place, "--out", tmp_path / "out")
        assert "expected pictures of the same classes in train/CLASS/ and val/CLASS/" in message


def test_accuracies_are_those_of_all_pictures():
    found = train.accuracies(EvalPrediction(np.array([[9, 8, 7, 6, 5]] * 3), np.array([9, 6, 4])))
    assert found == pytest.approx({"top-1": 100 / 3, "top-5": 200 / 3})


COUNTS = [(34, 20.7, 24), (50, 25.8, 11), (101, 45.4, 28), (152, 61.6, 45)]


@pytest.mark.parametrize(("layers", "paper", "evolved"), COUNTS)
def test_parameters_of_imagenets_models(layers, paper, evolved):
    """The papers' counts, ICML 2021, table 1; the chain's beginnings, at 14 x 14 and 7 x 7, have no convolution."""
    with torch.device("meta"):
        config = train.configuration(layers, 1000)
        models = [EvolvingResNet(config, alpha=0, beta=0), EvolvingResNet(config)]
    plain, evolving = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert evolving - plain == evolved * (HEADS**2 * 9 + HEADS)
    assert plain / 1e6 == pytest.approx(paper, rel=0.005)
    assert evolving / 1e6 == pytest.approx(paper, rel=0.005)
