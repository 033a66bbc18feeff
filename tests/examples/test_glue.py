"""GLUE: reading, metrics, and the command on a few rows."""

import gzip
import json

import pytest
import torch

pytest.importorskip("datasets")
from datasets import Dataset, config
from helpers.mistakes import check_refusal, mistakes, refusal
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

from examples.glue import fine_tune, tasks
from examples.glue.tasks import TASKS

SPLITS = {"SST-2": ("train", "validation"), "MNLI": ("train", "validation_matched", "validation_mismatched")}
PAIRS = "index\tsentence1\tsentence2\tlabel\n"
FILES = {
    "CoLA": "x\t{label}\t*\ta {noun} .\n",
    "SST-2": "sentence\tlabel\na {noun}\t{label}\n",
    "MRPC": "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n{label}\t1\t2\ta {noun}\ta cat\n",
    "STS-B": "index\tsentence1\tsentence2\tscore\n0\ta {noun}\ta cat\t{number}\n",
    "QQP": "question1\tquestion2\tis_duplicate\na {noun}\ta cat\t{label}\nshort\n",
    "MNLI": "sentence1\tsentence2\tgold_label\na {noun}\ta cat\t{label}\n",
    "QNLI": "index\tquestion\tsentence\tlabel\n0\ta {noun}\ta cat\t{label}\n",
    "RTE": PAIRS + "0\ta {noun}\ta cat\t{label}\n",
    "WNLI": PAIRS + "0\ta {noun}\ta cat\t{label}\n",
}


def write(folder, name):
    """A few rows of a task, of every class."""
    (folder / name).mkdir()
    first, *rest = FILES[name].splitlines(keepends=True)
    header, rows = ("", [first]) if not rest else (first, rest)
    labels = TASKS[name].labels or ("0", "1")
    lines = [
        row.format(label=label, noun=noun, number=number)
        for label in labels
        for noun, number in (("dog", 1.25), ("cat", 5))
        for row in rows
    ]
    for split in ("train", *TASKS[name].dev):
        (folder / name / f"{split}.tsv.gz").write_bytes(gzip.compress((header + "".join(lines)).encode()))


def tune(folder, name, *options):
    """The command on a few rows of a task, for one update."""
    if not (folder / name).exists():
        write(folder, name)
    few = ["--updates", "1", "--max-length", "16", "--data", str(folder), "--out", str(folder)]
    fine_tune.main([name, *few, *options])


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_trained_and_scored_with_and_without(name, tmp_path, capsys):
    tune(tmp_path, name, "--from-scratch")
    of_data = [f"{metric} of {split}" for split in TASKS[name].dev for metric in TASKS[name].metrics]
    rows = [f"| {kind}, {one}" for kind in ("stock", "evolving") for one in of_data]
    assert [line.split(" | ")[0] for line in capsys.readouterr().out.splitlines()[3:]] == rows
    assert len(json.loads((tmp_path / f"{name}.json").read_text())["scores"]) == len(rows)
    for kind in ("stock", "evolving"):
        config = json.loads((tmp_path / f"{name}-{kind}-1" / "config.json").read_text())
        assert ("evolving_attention" in config) == (kind == "evolving")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--settings PA", {"rule": "predictive", "alpha": 0.2}),
        ("--rule realformer", {"rule": "realformer"}),
        ("--kernel-size 5 --alpha 0", {"kernel_size": 5, "alpha": 0.0, "rule": "evolving"}),
    ],
)
def test_the_papers_other_rules_and_ablations(options, expected, tmp_path, capsys):
    tune(tmp_path, "CoLA", "--from-scratch", *options.split())
    assert expected["rule"] in capsys.readouterr().out
    config = json.loads((tmp_path / "CoLA-evolving-1" / "config.json").read_text())
    assert expected.items() <= config["evolving_attention"].items()


@mistakes("""
    --from-scratch --alpha 2 | 'fine_tune: alpha 2.0: '
    --from-scratch --seeds 2 | RTE.json seeds
    --model {tmp}/RTE-evolving-1 | RTE-evolving-1:
""")
def test_mistakes_are_named_before_a_training(tmp_path, capsys, monkeypatch, words, named):
    tune(tmp_path, "RTE", "--from-scratch")
    monkeypatch.setattr(fine_tune, "run", None)
    check_refusal(capsys, lambda words: tune(tmp_path, "RTE", *words), words, named, writes_to=tmp_path, tmp=tmp_path)


def test_both_models_see_the_same_batches_in_every_epoch(tmp_path):
    """Other draws of random numbers, as evolving attention's new weights are, have no say."""
    args = fine_tune._arguments(["CoLA", "--from-scratch", "--epochs", "2", "--batch-size", "4"])
    rows, seen = [{"input_ids": [number], "label": 0} for number in range(6)], []
    tokenizer = BertTokenizerFast(vocab={"[PAD]": 0, "[UNK]": 1})
    for drawn in (1, 5):
        torch.rand(drawn)
        sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8}
        model = BertForSequenceClassification(BertConfig(**sizes))
        learner = fine_tune.trainer(args, model, rows, tokenizer, seed=3)
        batches, words = learner.get_train_dataloader(), []
        for epoch in range(2):
            batches.set_epoch(epoch)
            words.append([batch["input_ids"][:, 0].tolist() for batch in batches])
        seen.append((words, torch.rand(2).tolist()))
    assert seen[0] == seen[1]
    assert words[0] != words[1], "each epoch has an order of its own"


def test_rows_have_sentences_and_classes(tmp_path):
    write(tmp_path, "QNLI")
    rows = tasks.load("QNLI", tmp_path)["dev"].to_list()
    assert rows[::2] == [{"question": "a dog", "sentence": "a cat", "label": label} for label in (0, 1)]
    write(tmp_path, "STS-B")
    (tmp_path / "STS-B/train.tsv").write_text('x\tsentence1\tsentence2\tscore\n0\tthe "NA\tnull\t1.25\n')
    rows = tasks.load("STS-B", tmp_path / "STS-B")["train"].to_list()
    assert rows == [{"sentence1": 'the "NA', "sentence2": "null", "label": 1.25}]


@pytest.mark.parametrize(
    "text, message",
    [
        ("sentence\tclass\n", "['label']"),
        ("sentence\tlabel\na\t2\n", "row 1: the label is '2', expected one of 0, 1"),
        ("sentence\tlabel\na\t1\nb\n", "row 2: a column is empty or missing"),
        ("sentence\tlabel\n", "has no rows"),
    ],
)
def test_wrong_files_are_named(tmp_path, text, message, capsys):
    (tmp_path / "train.tsv").write_text(text)
    words, named = ["SST-2", "--from-scratch", "--data", tmp_path], [message, tmp_path / "train.tsv"]
    check_refusal(capsys, fine_tune.main, words, named, writes_to=tmp_path)


def test_metrics():
    expected, predicted = [0, 0, 1, 1], [0, 1, 1, 1]
    assert tasks.score("MRPC", expected, predicted) == pytest.approx({"f1": 80, "accuracy": 75})
    assert tasks.score("CoLA", expected, predicted) == pytest.approx({"matthews": 100 * 3**-0.5})
    found = tasks.score("STS-B", [1.0, 2.0, 3.0], [1.0, 2.0, 9.0])
    assert found == pytest.approx({"pearson": 91.77, "spearman": 100}, abs=0.01)
    assert tasks.score("STS-B", [1.0, 2.0, 3.0], [2.0] * 3) == {"pearson": 0, "spearman": 0}


def test_the_hub_gives_the_columns_of_each_task(monkeypatch, tmp_path):
    """A stand-in for the hub: one folder a task, with the columns that its page shows."""
    asked = []

    def load_dataset(path, name):
        asked.append((path, name))
        columns = {"label": [0], **{column: ["a"] for column in TASKS[task].sentences}}
        return {split: Dataset.from_dict(columns) for split in SPLITS[task]}

    monkeypatch.setattr(tasks, "load_dataset", load_dataset)
    for task in ("SST-2", "MNLI"):
        assert list(tasks.load(task, None)) == ["train", *TASKS[task].dev]
    assert asked == [("nyu-mll/glue", "sst2"), ("nyu-mll/glue", "mnli")]


def test_without_network_one_line_says_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(config, "HF_HUB_OFFLINE", True)
    message = refusal(capsys, fine_tune.main, "RTE", "--from-scratch")
    assert "nyu-mll/glue" in message and "give --data DIR" in message


def test_the_papers_settings_are_complete():
    for settings in fine_tune.PAPERS["settings"].values():
        assert list(settings) == list(TASKS)
    assert fine_tune.PAPERS["settings"]["BERT-Base"]["CoLA"] == [3, 8, 2e-5, 0.2, 0.1]
