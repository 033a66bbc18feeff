"""Explanations: the measures against examples counted by hand, and the command on models of one update."""

import json

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("lime")
from helpers.mistakes import refusal
from transformers import AutoModel, AutoTokenizer, T5Config

from ea_artifacts.command import UserError
from examples.explanations import draw, eraser, explain
from examples.explanations.measures import Example, auprc, faithfulness, lime, measure
from examples.glue import fine_tune

SENTENCE = ["a", "good", "film", "indeed"]
SENTENCES = ("unbelievable film", "good", "bad", "a good film , and a good plot", "so bad a film")


def by_words(sentences):
    """A classifier that adds up words; the probability of the second class is 0.9 for SENTENCE."""
    second = [0.1 + 0.5 * ("good" in sentence.split()) + 0.3 * ("film" in sentence.split()) for sentence in sentences]
    return np.array([[1 - p, p] for p in second])


def test_faithfulness_counted_by_hand():
    """The best 1 to 20% of four words are one word, the first of equals, and the best 50% two."""
    label, comprehensiveness, sufficiency = faithfulness(by_words, SENTENCE, [0.0, 0.9, 0.9, -1.0])
    assert label == 1
    # Without "good" 0.4 stays, without "good film" 0.1; "good" alone has 0.6, "good film" 0.9.
    assert comprehensiveness == pytest.approx((4 * 0.5 + 0.8) / 5)
    assert sufficiency == pytest.approx((4 * 0.3 + 0.0) / 5)
    # The wrong words: without them nothing changes, and they alone change everything.
    assert faithfulness(by_words, SENTENCE, [0.9, 0.0, -1.0, 0.5])[1:] == (pytest.approx(0), pytest.approx(0.8))
    # Both are of the class of the whole sentence, which is the first here.
    of_first = faithfulness(lambda sentences: by_words(sentences)[:, ::-1], SENTENCE, [0.0, 0.9, 0.5, 0.0])
    assert of_first[:2] == (0, pytest.approx((4 * 0.5 + 0.8) / 5))


def test_area_counted_by_hand():
    # Recall 1/2 at precision 1, then from precision 1/2 to 2/3 at recall 1.
    assert auprc([True, False, True, False], [0.9, 0.8, 0.7, 0.1]) == pytest.approx(1 / 2 + (1 / 2 + 2 / 3) / 4)
    assert auprc([True, False], [0.2, 0.1]) == 1
    assert np.isnan([auprc([choice] * 2, [0.2, 0.1]) for choice in (True, False)]).all()


def test_lime_finds_what_each_word_adds():
    assert lime(by_words, SENTENCE, samples=200) == pytest.approx([0, 0.5, 0.3, 0], abs=0.05)
    assert len(lime(by_words, ["a", "good", "a"], samples=20)) == 3


def test_measures_are_means_over_the_examples_that_have_them():
    """F1 of the second class: 2 * (2/3 * 1) / (2/3 + 1) = 0.8, of the first 0; macro 0.4, weighted by examples 0.53."""
    choices = ([True, False], [True, True], [False, True])
    examples = [Example(["good", "film"], "?", label, chosen) for label, chosen in zip((1, 0, 1), choices, strict=True)]
    found = measure(examples, lambda example: {"?": by_words}[example.query], lambda _: [0.2, 0.1])
    expected = {"accuracy": 2 / 3, "F1": 0.4, "AUPRC": (1 + auprc([False, True], [0.2, 0.1])) / 2}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """SST-2 of a few rows, and models of one update."""
    folder = tmp_path_factory.mktemp("explanations")
    rows = "".join(f"{sentence}\t{int('bad' not in sentence)}\n" for sentence in SENTENCES)
    for split in ("train", "dev"):
        (folder / f"{split}.tsv").write_text("sentence\tlabel\n" + rows)
    words = ["--from-scratch", "--data", str(folder), "--updates", "1", "--seeds", "1", "2", "--out", str(folder)]
    fine_tune.main(["SST-2", *words])
    return folder


@pytest.mark.parametrize("kind", ["stock", "evolving"])
def test_attention_explains_by_the_last_layers_weights_from_cls(folder, kind):
    classifier = explain.Classifier(folder / f"SST-2-{kind}-1")
    assert any("evolution" in name for name, _ in classifier.model.named_parameters()) == (kind == "evolving")
    inputs = classifier.tokenizer("unbelievable plotbad", return_tensors="pt")
    assert len(inputs.tokens()) > 4
    assert inputs.word_ids() == [None, 0, *([1] * (len(inputs.tokens()) - 3)), None]
    with torch.no_grad():
        weights = classifier.model(**inputs, output_attentions=True).attentions[-1][0, :, 0].mean(0)
    scores = classifier.attention(Example(["unbelievable", "plotbad"]))
    assert scores == pytest.approx([weights[1].item(), weights[2:-1].sum().item()])


def test_the_command_compares_models_and_methods(folder, capsys, monkeypatch):
    """The hub's sentences end in a space."""
    out, load = folder / "results.json", explain.load
    monkeypatch.setattr(explain, "load", lambda *_: load(*_).map(lambda row: {"sentence": row["sentence"] + " "}))
    explain.main(["--models", str(folder), "--data", str(folder), "--samples", "5", "--out", str(out)])
    lines = [line.split(" | ")[:2] for line in capsys.readouterr().out.splitlines()[2:]]
    assert lines == [[f"| {kind}", method] for kind in ("stock", "evolving") for method in explain.METHODS]
    results = json.loads(out.read_text())["results"]
    assert all(len(seeds) == 2 and seeds[0]["LIME"]["AUPRC"] > 0 for seeds in results.values())


def test_a_model_with_a_decoder_is_refused(tmp_path):
    T5Config().save_pretrained(tmp_path)
    with pytest.raises(UserError, match="t5 has an encoder and a decoder"):
        explain.Classifier(tmp_path)


def test_a_folder_without_models_is_named(folder, tmp_path, capsys):
    message = refusal(capsys, explain.main, "--models", tmp_path, "--data", folder)
    assert f"explain: {tmp_path}: has no SST-2-stock-N" in message


def test_a_picture_has_a_panel_for_each_model_and_layer(folder, tmp_path):
    models = [folder / f"SST-2-{kind}-1" for kind in ("stock", "evolving")]
    panels = draw.draw(models, "so good").axes
    parts = ("", ", convolution", ", self-attention")
    assert [axes.get_title() for axes in panels[3::3]] == [f"SST-2-evolving-1{part}, layer 1" for part in parts]
    assert np.allclose([axes.images[0].get_array().sum(1) for axes in panels], 1, atol=1e-5)
    draw.main([*map(str, models), "--out", str(tmp_path / "maps.png")])
    assert (tmp_path / "maps.png").stat().st_size > 0


def test_rationales_by_layers_are_of_the_classifier_on_that_layer(folder):
    classifier = explain.Classifier(folder / "SST-2-evolving-1")
    each = [classifier.probabilities(["so good"], layer) for layer in (1, 3)]
    assert not np.allclose(*each) and np.allclose(each[1], classifier.probabilities(["so good"]))
    figure = draw.rationales([folder / "SST-2-stock-1", folder / "SST-2-evolving-1"], "so good film", [1, 3], 20)
    assert figure.axes[0].images[0].get_array().shape == (4, 3)


DOCUMENTS = {
    "good.txt": ["a good film indeed ,", "so good"],
    "bad.txt": ["so bad a film .", "unbelievable"],
    "long.txt": ["a plot " * 300, "good"],
    "1_hypothesis": ["a bad plot"],
    "1_premise": ["a good film indeed"],
    "2_hypothesis": ["bad"],
    "2_premise": ["so good"],
}
#: annotation, label, and pieces of evidence: the end of the document's name, the first word, the one after the last
ANNOTATIONS = [
    ("good.txt", "POS", [("", 1, 2), ("", 5, 7)]),
    ("bad.txt", "NEG", [("", 1, 3)]),
    ("long.txt", "POS", [("", 600, 601)]),
    ("1", "NEG", [("_hypothesis", 1, 2)]),
    ("2", "NEG", []),
]


@pytest.fixture(params=["docs", "docs.jsonl"])
def corpus(request, tmp_path):
    """A corpus of ERASER by hand."""
    texts = {name: "\n".join(sentences) for name, sentences in DOCUMENTS.items()}
    if request.param == "docs":
        (tmp_path / "docs").mkdir()
        for name, text in texts.items():
            (tmp_path / "docs" / name).write_text(text)
    else:
        rows = (json.dumps({"docid": name, "document": text}) for name, text in texts.items())
        (tmp_path / "docs.jsonl").write_text("\n".join(rows))
    rows = [
        {
            "annotation_id": name,
            "query": "is it good ?" if request.param == "docs" else None,
            "classification": label,
            "evidences": [[{"docid": name + of, "start_token": at, "end_token": end}] for of, at, end in pieces],
        }
        for name, label, pieces in ANNOTATIONS
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def test_erasers_files_are_read(corpus):
    documents = eraser.read(corpus, "test")
    assert [one.label for one in documents] == ["POS", "NEG", "POS", "NEG", "NEG"]
    chosen = [[word for word, is_chosen in zip(one.words, one.chosen, strict=True) if is_chosen] for one in documents]
    assert chosen == [["good", "so", "good"], ["bad", "a"], ["good"], ["bad"], []]
    # e-SNLI: both sentences, whether they have evidence or not.
    assert [" ".join(one.words) for one in documents[3:]] == [
        "a good film indeed [SEP] a bad plot",
        "so good [SEP] bad",
    ]


def test_evidence_in_two_other_documents_is_read_from_both(tmp_path):
    """Their names do not follow from the annotation's; an annotation without evidence names them itself."""
    rows = [
        {
            "annotation_id": "3",
            "classification": "POS",
            "docids": ["b", "a"],
            "evidences": [[{"docid": name, "start_token": 0, "end_token": 1} for name in names]],
        }
        for names in ("ba", "b", "")
    ]
    texts = [{"docid": name, "document": f"{name} x"} for name in "abc"]
    for name, lines in (("test", rows), ("docs", texts)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert [" ".join(one.words) for one in eraser.read(tmp_path, "test")] == ["a x [SEP] b x", "b x", "b x [SEP] a x"]


ATTENTION = ["BERT+LSTM, attention", "BERT+LSTM, evolving, attention"]
BOTH = [ATTENTION[0], "BERT+LSTM, LIME", ATTENTION[1], "EA-BERT+LSTM, LIME"]


@pytest.mark.parametrize(
    ("corpus", "options", "expected"),
    [("docs", ["--lime", "3"], BOTH), ("docs.jsonl", [], ATTENTION)],
    indirect=["corpus"],
)
def test_a_reader_is_trained_and_measured(options, expected, corpus, folder, tmp_path):
    words = ["--model", str(folder / "SST-2-stock-1"), "--epochs", "1", "--out", str(tmp_path / "out.json")]
    eraser.main([str(corpus), *words, *options])
    results = json.loads((tmp_path / "out.json").read_text())["results"]
    assert list(results) == expected
    assert all(np.isfinite(list(result.values())).all() for result in results.values())
    if options:  # one model, explained in two ways
        first, second = (results[name] for name in expected[:2])
        assert (first["accuracy"], first["F1"]) == (second["accuracy"], second["F1"])


@torch.no_grad()
def test_a_readers_scores_are_its_last_layers_weights(corpus, folder):
    torch.manual_seed(1)
    model = AutoModel.from_pretrained(folder / "SST-2-stock-1")
    tokenizer = AutoTokenizer.from_pretrained(folder / "SST-2-stock-1")
    reader = eraser.Reader(model, tokenizer, labels=2, share=0.5).eval()
    good, bad, long, pair, _ = eraser.read(corpus, "test")
    alone, both = reader(reader.encoded(good)), reader(reader.encoded(good, bad))
    for one, other in zip(alone, both, strict=True):
        torch.testing.assert_close(other[:1, : one.size(1)], one, rtol=1e-4, atol=1e-5)
    assert alone[1].sum().item() == pytest.approx(1, abs=1e-5)
    inputs = reader.encoded(good)
    of_words = sum(w for w, side in zip(alone[1][0].tolist(), inputs.sequence_ids(), strict=True) if side == 1)
    assert sum(reader.attention(good)) == pytest.approx(of_words, abs=1e-5)
    assert reader.attention(long)[-1] == 0, "cut off"
    assert reader.encoded(pair)["input_ids"][0].tolist().count(tokenizer.sep_token_id) == 3, (
        "one between the two documents"
    )
