"""Text in nine scripts goes through the whole toolkit, and what a model has learnt to copy comes back the same."""

import json

import pytest
from helpers.data_toy import script as data_script
from helpers.data_toy import write
from helpers.scripts import SENTENCES
from helpers.toy import fairseq, script

from ea_tools.text import read_lines

REPEATS = 220  # of each sentence in an epoch
TINY = (
    "--encoder-embed-dim 128 --encoder-ffn-embed-dim 128 --encoder-attention-heads 2 --encoder-layers 1 "
    "--decoder-embed-dim 128 --decoder-ffn-embed-dim 128 --decoder-attention-heads 2 --decoder-layers 1 "
    "--share-all-embeddings --optimizer adam --lr 0.004 --lr-scheduler inverse_sqrt --warmup-updates 100 --clip-norm 1 "
    "--batch-size 16 --required-batch-size-multiple 1 --criterion label_smoothed_cross_entropy --dropout 0 --cpu "
    "--no-progress-bar --num-workers 0"
).split()


@pytest.mark.slow
def test_a_model_that_copies_gives_the_same_text_back(tmp_path):
    """Prepared, trained for two epochs, translated and scored: two sentences of each script, by one tiny model."""
    lines = [line for sentences in SENTENCES.values() for line in sentences[2:4]]
    for split, repeats in (("train", REPEATS), ("valid", 1), ("test", 1)):
        for language in ("xx", "yy"):
            write(tmp_path / f"{split}.{language}", lines * repeats)
    data, run = tmp_path / "data", tmp_path / "run"
    prepared = data_script(
        "custom", "--source-lang", "xx", "--target-lang", "yy", "--train", tmp_path / "train", "--valid",
        tmp_path / "valid", "--test", tmp_path / "test", "--merges", "400", "--workers", "1", "--out", data,
    )  # fmt: skip
    assert "come back" not in prepared.stderr, "the round trip loses nothing"
    fairseq(
        *("train", data, "--arch", "ea_transformer_base", "--task", "translation"),
        *("--save-dir", run, "--max-epoch", 2, "--no-epoch-checkpoints", *TINY),
    )
    copied = script("translate.sh", "--run", run, "--input", tmp_path / "test.xx", "--output", tmp_path / "out")
    assert copied.returncode == 0, copied.stderr
    # How well so small a model learns to copy differs from processor to processor. A script that the tools break is
    # broken in both of its sentences.
    same = [theirs == ours for theirs, ours in zip(read_lines(tmp_path / "out"), lines, strict=True)]
    assert all(any(same[i : i + 2]) for i in range(0, len(same), 2)), same
    assert sum(same) >= 0.8 * len(lines), same
    for flags, tokenizer in (((), "13a"), (("--tok", "char"), "char")):
        scored = script("evaluate.sh", "--data", data, "--run", run, "--best", *flags)
        assert scored.returncode == 0, scored.stderr
        scores = json.loads((run / "eval/test.json").read_text())["scores"]
        assert scores.keys() == {"sacrebleu", "chrf"}
        assert all(80 < score["score"] <= 100 + 1e-6 for score in scores.values())
        assert not all(same) or all(score["score"] > 100 - 1e-6 for score in scores.values())
        assert f"tok:{tokenizer}|" in scores["sacrebleu"]["signature"]
