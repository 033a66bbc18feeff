"""A dictionary for each language: the way from text to translations, exports and pictures."""

import numpy as np
import pytest
from helpers.toy import TINY, prepare, untrained_run

import ea_fairseq
from ea_runtime import Translator
from ea_tools.maps import draw
from ea_tools.training import train
from ea_tools.translating import evaluate, export

SIZE = [*TINY[:-1], "--share-decoder-input-output-embed"]  # in the place of --share-all-embeddings
TEXT = ["Hund Katze, Haus.", "Baum, Buch."]


@pytest.mark.slow
def test_translations_scores_exports_and_pictures(tmp_path, capsys):
    data = prepare(tmp_path / "toy-de-en", separate_dictionaries=True)
    assert (data / "dict.de.txt").read_text() != (data / "dict.en.txt").read_text()
    # fairseq refuses to share embeddings after minutes of loading; without a recipe the flags are the right ones.
    shared = ["multi30k-laptop-de-en", "ea_transformer_lite", "--data", str(data), "--run", str(tmp_path / "shared")]
    with pytest.raises(SystemExit, match="--share-all-embeddings"):
        train.main(shared)
    assert not (tmp_path / "shared").exists()

    run = untrained_run(data, tmp_path / "run", "ea_transformer_base", size=SIZE)
    export.main(["--run", str(run), "--checkpoint", str(run / "checkpoint_last.pt"), "--out", str(tmp_path / "onnx")])
    translated = ea_fairseq.load(run).translate(TEXT, max_len_b=9)
    assert any(translated)
    assert Translator(tmp_path / "onnx").translate(TEXT, max_len_b=9) == translated

    checkpoint = ["--checkpoint", str(run / "checkpoint_last.pt")]
    evaluate.main(["--data", str(data), "--run", str(run), *checkpoint, "--beam", "1", "--", "--max-len-b", "9"])
    assert "tokenised BLEU" in capsys.readouterr().out

    target = "the dog, the cat."
    draw.main(["--run", str(run), "--source", TEXT[0], "--target", target, "--out", str(tmp_path / "maps.npz")])
    tokens = np.load(tmp_path / "maps.npz")["tokens.predicted"]
    assert "".join(tokens).replace("@@", "") == "thedog,thecat.</s>"  # an unknown subword stands in ⟨⟩
