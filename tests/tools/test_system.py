"""The whole way, on a task that a small model learns in seconds: prepare, train, average, export, score, translate."""

import json

import pytest
from helpers.toy import done, prepare, sentences

SIZE = " ".join(f"--{side}-embed-dim 32 --{side}-ffn-embed-dim 64 --{side}-layers 2" for side in ("encoder", "decoder"))
LEARNING = "--lr 5e-3 --warmup-updates 60 --dropout 0 --max-update 500 --save-interval 2 --validate-interval 10"


@pytest.mark.slow
def test_a_model_learns_to_translate_words_and_its_export_does_as_well(tmp_path):
    data, run, exported = prepare(tmp_path / "words", train=400), tmp_path / "run", tmp_path / "exported"
    flags = ["--gpus", 0, *SIZE.split(), *LEARNING.split()]
    done("train.sh", "--data", data, "ea_transformer_lite", "--run", run, *flags)
    done("export.sh", "--run", run, "--out", exported)
    records = []
    for model in (run, exported):
        said = done("evaluate.sh", "--data", data, "--run", model, cwd=tmp_path, cold=model == run).stdout
        records.append(json.loads((model / "eval/test.json").read_text()))
        assert {"commit", "device", "versions", "command", "speed"} <= records[-1].keys()
        assert records[-1]["scores"]["tokenised_bleu"]["signature"] in said
    assert records[0]["scores"] == records[1]["scores"]
    assert records[0]["scores"]["sacrebleu"]["score"] > 85
    assert (len(records[0]["averaged"]), records[0]["sentences"]) == (10, 10), "10 is no multiple of 8"
    about = {"arch": "ea_transformer_lite", "training_seed": 1, "unfinished": None}
    assert records[0] == records[0] | about
    ((source, expected),) = sentences(1, seed=2)  # the first of the test
    assert done("translate.sh", "--run", run, input=f"{source}\n").stdout == f"{expected}\n"
