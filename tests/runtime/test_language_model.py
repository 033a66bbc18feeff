"""An exported language model scores and completes text as fairseq does."""

import math
import shutil
import subprocess

import pytest
import torch
from fairseq import options
from helpers import REPO
from helpers.other_models import LM
from helpers.toy import runtime, save_untrained

from ea_runtime import ExportError, LanguageModel, Translator
from ea_tools.translating import export

pytestmark = pytest.mark.slow

LINES = ["The dog, the cat.", "The house.", "", "The garden, the bird, the dog, the house.", "The cat."]


@pytest.fixture(scope="module", params=["ea_transformer_lm", "transformer_lm"])
def pair(request, data, tmp_path_factory):
    """A language model with random weights, loaded by fairseq, and its export."""
    folder = tmp_path_factory.mktemp("language")
    side, run = folder / "data", folder / "run"
    subprocess.run(["bash", REPO / "data-prep" / "one-side.sh", data, "en", side], check=True, capture_output=True)
    run.mkdir()
    command = [str(side), "--task", "language_modeling", "--arch", request.param, *LM, "--tokens-per-sample", "40"]
    args = options.parse_args_and_arch(options.get_training_parser(), command)
    checkpoint = save_untrained(args, side, run / "checkpoint_last.pt")
    moved = side.rename(folder / "moved")
    words = ["--run", str(run), "--out", str(folder / "out")]
    with pytest.raises(SystemExit, match=r"was trained on .*/data, which is not there any more; say where by --data"):
        export.main(words)
    other = shutil.copytree(moved, folder / "other")
    with (other / "dict.txt").open("a") as dictionary:
        dictionary.write("more 1\n")
    with pytest.raises(SystemExit, match=r"was not trained on .*/other: size mismatch for decoder\.embed_tokens"):
        export.main([*words, "--data", str(other)])
    export.main([*words, "--data", str(moved)])
    return export.load_model(checkpoint, run, moved)[0], folder / "out"


@torch.no_grad()
def test_scores_as_fairseq(pair):
    loaded, folder = pair
    language, (model,) = LanguageModel(folder, threads=1), loaded.hub.models
    expected = []
    for line in LINES:
        tokens = loaded.hub.task.source_dictionary.encode_line(loaded.text.subwords(line), add_if_not_exist=False)
        of_words = model.get_normalized_probs(model(tokens.long().roll(1)[None]), log_probs=True)[0]
        expected.append((float(of_words.gather(1, tokens.long()[:, None]).sum()), len(tokens)))
    for batch in (1, 3, 32):
        found = language.score(iter(LINES), batch)
        assert [count for _, count in found] == [count for _, count in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-4)


def test_completes_as_fairseq(pair):
    loaded, folder = pair
    start = loaded.hub.task.source_dictionary.encode_line(loaded.text.subwords("The dog,"), append_eos=False)
    expected = loaded.hub.generate([start.long()], beam=3, max_len_b=9)[0]
    found = LanguageModel(folder, threads=1).complete("The dog,", n_best=3, beam=3, max_len_b=9)
    assert [score for _, score in found] == pytest.approx([float(one["score"]) for one in expected], abs=1e-4)
    assert all(text.startswith("the dog,") for text, _ in found)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_best": 6}, "n_best.* from 1 to 5, not 6"),
        ({"max_len_b": 2}, "start: fills the 2 subwords .*; shorten it or raise max_len_b"),
        ({"max_len_a": 1e308}, "max_len_a: must be a number from -1000 to 1000"),
    ],
)
def test_what_cannot_be_completed_is_refused(pair, settings, message):
    with pytest.raises(ValueError, match=message):
        LanguageModel(pair[1], threads=1).complete("The dog,", **settings)


def test_the_command_prints_scores_and_perplexity(pair):
    _, folder = pair
    scores = LanguageModel(folder, threads=1).score(LINES)
    done = runtime(folder, "--batch", "1", text="".join(f"{line}\n" for line in LINES))
    assert [line.split("\t") for line in done.stdout.splitlines()] == [[f"{x:.4f}", str(n)] for x, n in scores]
    total, count = (sum(column) for column in zip(*scores, strict=True))
    assert done.stderr == f"perplexity {math.exp(-total / count):.2f} of {count} tokens\n"


def test_it_is_no_translator(pair):
    _, folder = pair
    with pytest.raises(ExportError, match="language_modeling"):
        Translator(folder)
    for flags in (["--beam", "2"], ["--serve", "0"]):
        done = runtime(folder, *flags, text="The dog.\n")
        (said,) = done.stderr.splitlines()
        assert "language" in said
        assert done.returncode == 1
