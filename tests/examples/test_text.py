"""Classifiers of text: the draft's counts, padding, reading, and the command."""

import json

import pytest
import torch
from helpers.mistakes import check_refusal, mistakes
from torch import nn

from examples.text import classify
from examples.text.model import BLOCKS, SYSTEMS, WIDTH, Classifier, systems

COUNTS = {
    "CNN": 2.77,
    "Transformer": 2.79,
    "PA-Transformer": 2.79,
    "Res-Transformer": 2.79,
    "Conv-Transformer": 2.58,
    "PA-Conv-Transformer": 2.58,
}


def build(name, fields=1, blocks=BLOCKS, width=WIDTH, of=SYSTEMS):
    words = nn.Embedding(20, 300, padding_idx=0).requires_grad_(False)
    return Classifier(of[name], words, classes=5, fields=fields, longest=64, blocks=blocks, width=width).eval()


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


def test_flags_build_table_5_and_figure_6():
    chosen = systems(alpha=0.5, conv_layers=3)
    for name in ("PA-Transformer", "PA-Conv-Transformer", "CNN"):
        model = build(name, blocks=6, width=384, of=chosen)
        assert model(torch.randint(1, 9, (2, 5)), torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5)
        assert len(model.blocks) == 6 and model.classes.in_features == 384
    assert chosen["PA-Transformer"].evolution == {"rule": "predictive", "alpha": 0.5, "conv_layers": 3}
    assert chosen["Res-Transformer"].evolution == {"rule": "residual", "alpha": 0.5}
    assert chosen["Transformer"] == SYSTEMS["Transformer"]


@pytest.mark.parametrize(
    ("step", "expected"),
    [(None, [4e-4, 3.416e-4, 2.005e-4, 5.94e-5]), (2, [4e-4, 4e-4, 4e-5, 4e-5])],
    ids=["a cosine", "steps"],
)
def test_the_rate_falls_along_a_cosine_or_in_steps(step, expected, monkeypatch):
    rates, adam = [], torch.optim.Adam

    class Adam(adam):
        def step(self, *args, **kwargs):
            rates.append(self.param_groups[0]["lr"])
            return super().step(*args, **kwargs)

    monkeypatch.setattr(torch.optim, "Adam", Adam)
    rows = [classify.make_row(["a"], "0"), classify.make_row(["b"], "1")]
    classify.train(build("CNN"), rows, classify.Batches(rows, 8), 4, step)
    assert rates == pytest.approx(expected, rel=1e-3)


def test_a_separator_stands_between_two_sentences_only():
    pair, single = classify.make_row(["A b", "c"], "0"), classify.make_row(["a b"], "0")
    assert single == ([("a", 0), ("b", 0)], "0")
    batches = classify.Batches([single, pair], 8)
    assert batches.words == ["<pad>", "<unk>", "a", "b", "<sep>", "c"]
    words, fields, _ = batches([pair])
    assert words.tolist() == [[2, 3, 4, 5]] and fields.tolist() == [[0, 0, 0, 1]]


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


@mistakes("""
    {tmp} --alpha 2 | 'alpha 2.0'
    {tmp}/none | none: SST-2 train.tsv
    {tmp} | 'train.tsv, line 2: '
""")
def test_mistakes_are_named(words, named, tmp_path, capsys):
    (tmp_path / "train.tsv").write_text("yes\ta cat\nno\n")
    check_refusal(capsys, classify.main, words, named, writes_to=tmp_path, tmp=tmp_path)
