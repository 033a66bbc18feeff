"""Classifiers of text: the draft's counts, padding, reading, and the command."""

import json

import pytest
import torch

from examples.glue.tasks import DataError
from examples.text import classify
from examples.text.model import SYSTEMS, Classifier, systems

COUNTS = {
    "CNN": 2.77,
    "Transformer": 2.79,
    "PA-Transformer": 2.79,
    "Res-Transformer": 2.79,
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


def test_flags_build_table_5_and_figure_6():
    chosen, sizes = systems(alpha=0.5, conv_layers=3), {"blocks": 6, "width": 384}
    for name in ("PA-Transformer", "PA-Conv-Transformer", "CNN"):
        model = Classifier(chosen[name], torch.randn(9, 30), True, classes=3, fields=2, longest=8, **sizes).eval()
        assert model(torch.randint(1, 9, (2, 5)), torch.zeros(2, 5, dtype=torch.long)).shape == (2, 3)
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
    rows = [([["a"]], "0"), ([["b"]], "1")]
    batches = classify.Batches(rows, 8)
    classify.train(Classifier(SYSTEMS["CNN"], torch.randn(4, 8), False, 2, 1, 8), rows, batches, 4, step)
    assert rates == pytest.approx(expected, rel=1e-3)


def test_a_separator_stands_between_two_sentences_only():
    pair, single = [["a", "b"], ["c"]], [["a", "b"]]
    assert classify.join(pair) == [("a", 0), ("b", 0), ("<sep>", 0), ("c", 1)]
    assert classify.join(single) == [("a", 0), ("b", 0)]
    assert classify.Batches([(single, "0")], 8).words == ["<pad>", "<unk>", "a", "b"]
    words, fields, _ = classify.Batches([(pair, "0")], 8)([(pair, "0")])
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


def test_a_line_ends_where_the_file_says_so(tmp_path):
    (tmp_path / "train.tsv").write_text("5\tgood\u0085and\u2028cheap\n1\tbad\n", encoding="utf-8")
    assert [row for row, _ in classify.read(str(tmp_path), "train")] == [[["good", "and", "cheap"]], [["bad"]]]


def test_a_share_is_between_0_and_1(tmp_path):
    with pytest.raises(SystemExit, match=r"alpha 2\.0"):
        classify.main([str(tmp_path), "--alpha", "2"])


def test_faulty_rows_are_named(tmp_path):
    with pytest.raises(DataError, match=r"train\.tsv: no such file"):
        classify.read(str(tmp_path), "train")
    (tmp_path / "train.tsv").write_text("yes\ta cat\nno\n")
    with pytest.raises(DataError, match=r"train\.tsv, line 2"):
        classify.read(str(tmp_path), "train")
