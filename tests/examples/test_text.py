"""Classifiers of text: the draft's counts, padding, reading, and the command."""

import json

import pytest
import torch

from examples.glue.tasks import DataError
from examples.text import classify
from examples.text.model import SYSTEMS, Classifier

COUNTS = {
    "CNN": 2.77,
    "Transformer": 2.79,
    "PA-Transformer": 2.79,
    "Conv-Transformer": 2.58,
    "PA-Conv-Transformer": 2.58,
}


def build(name, words=20, fields=1, size=300):
    torch.manual_seed(1)
    vectors = torch.randn(words, size)
    return Classifier(SYSTEMS[name], vectors, fixed=True, classes=5, fields=fields, longest=64).eval()


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_the_drafts(name):
    """Table 1: M parameters on SST, whose word vectors are fixed."""
    count = sum(p.numel() for p in build(name).parameters() if p.requires_grad)
    assert count / 1e6 == pytest.approx(COUNTS[name], rel=0.005)


@pytest.mark.parametrize("name", SYSTEMS)
def test_padding_changes_nothing(name):
    model = build(name, fields=2)
    words, fields = torch.randint(1, 20, (1, 7)), torch.tensor([[0, 0, 0, 0, 1, 1, 1]])
    more = torch.zeros(1, 5, dtype=torch.long)
    padded = model(torch.cat([words, more], 1), torch.cat([fields, more], 1))
    torch.testing.assert_close(padded, model(words, fields), atol=1e-5, rtol=0)


def test_the_first_block_does_not_predict_maps_and_later_ones_do():
    convolutions = [block.attention.evolution.conv for block in build("PA-Transformer").blocks]
    assert [convolution is None for convolution in convolutions] == [True, False, False]


def test_vectors_come_from_the_file(tmp_path):
    numbers = " ".join(["0.5"] * 300)
    (tmp_path / "glove").write_text(f". . . {numbers}\nhund {numbers}\n")
    vectors = classify.glove(tmp_path / "glove", ["<pad>", "<unk>", "hund"])
    assert vectors[2].tolist() == [0.5] * 300 and vectors[1].std() > 0.1


@pytest.mark.slow
def test_the_command_classifies_pairs(tmp_path, capsys):
    lines = [f"{label}\ta {noun} .\tone more {noun}\n" for label, noun in (("no", "dog"), ("yes", "cat"))] * 40
    for split in ("train", "test"):
        (tmp_path / f"{split}.tsv").write_text("".join(lines))
    some = ["Transformer", "PA-Conv-Transformer"]
    classify.main([str(tmp_path), "--updates", "40", "--systems", *some, "--out", str(tmp_path / "out.json")])
    assert json.loads((tmp_path / "out.json").read_text())["scores"] == {name: [100.0] for name in some}
    assert "PA-Conv-Transformer" in capsys.readouterr().out


def test_faulty_rows_are_named(tmp_path):
    with pytest.raises(DataError, match=r"train\.tsv: no such file"):
        classify.read(str(tmp_path), "train")
    (tmp_path / "train.tsv").write_text("yes\ta cat\nno\n")
    with pytest.raises(DataError, match=r"train\.tsv, line 2"):
        classify.read(str(tmp_path), "train")
