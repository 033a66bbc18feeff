"""The whole way, on a task that a small model learns in seconds: train, average, score, export, translate."""

import json

import pytest
from helpers.toy import TINY, done, prepare, sentences


@pytest.mark.slow
def test_a_model_that_learns_translates_as_well_when_it_is_exported(tmp_path):
    data, run, exported = prepare(tmp_path / "words", train=400), tmp_path / "run", tmp_path / "exported"
    learning = "--lr 1e-2 --warmup-updates 30 --dropout 0 --max-update 300 --save-interval 5 --validate-interval 5"
    done("train.sh", "--data", data, "ea_transformer_lite", "--run", run, "--gpus", 0, *TINY, *learning.split())
    done("export.sh", "--run", run, "--out", exported)
    scores = {}
    for model in (run, exported):
        done("evaluate.sh", "--data", data, "--run", model)
        scores[model] = json.loads((model / "eval/test.json").read_text())["scores"]
    assert scores[run]["sacrebleu"]["score"] > 90, "words one by one, which it learns wholly"
    assert scores[exported]["sacrebleu"]["score"] == scores[run]["sacrebleu"]["score"]
    ((source, expected),) = sentences(1, seed=5)
    assert done("translate.sh", "--run", run, input=f"{source}\n").stdout == f"{expected}\n".capitalize().lower()
