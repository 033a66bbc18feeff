"""What evaluate.sh and translate.sh share: the flags after --, the precision, and fairseq-generate's translations."""

import math
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPO
from helpers.mistakes import mistakes
from helpers.toy import untrained_run

import ea_fairseq
from ea_artifacts.command import UserError
from ea_artifacts.files import read_lines
from ea_artifacts.preparation import Preparation
from ea_data.binary import read_sentences
from ea_runtime.translator import BOS
from ea_tools.training import products
from ea_tools.translating import evaluate, model, translate

#: flags of fairseq-generate, the last for the number of lengths
REFINEMENT = ["--task", "translation_lev", "--iter-decode-with-beam"]


def opened(run, *flags):
    args = translate.parse(["--run", str(run), *flags])
    return model.open_model(args, [run / "checkpoint3.pt"], None)


@pytest.mark.parametrize("gpu", [True, False], ids=["a GPU", "no GPU"])
def test_a_precision_that_the_device_lacks_is_refused(gpu, run, monkeypatch):
    monkeypatch.setattr(model, "gpus", lambda: (1, (8, 0)) if gpu else (0, None))
    monkeypatch.setattr(products, "has_bf16_units", lambda: True)
    if gpu:
        with pytest.raises(UserError, match="-- --cpu"):
            opened(run, "--precision", "bf16")
    with pytest.raises(UserError, match=r"--precision fp16: .*GPU"):
        opened(run, "--precision", "fp16", "--", "--cpu")
    monkeypatch.setattr(products, "has_bf16_units", lambda: False)
    with pytest.raises(UserError, match=r"--precision bf16: .*avx512_bf16"):
        opened(run, "--precision", "bf16", "--", "--cpu")


@pytest.mark.parametrize("flag", ["--lenpen=0.3", "-s"])
def test_a_flag_that_contradicts_the_record_is_refused(flag, capsys):
    for command, own in ((evaluate, ["--data", "d", "--run", "r"]), (translate, ["--run", "r"])):
        assert command.parse([*own, "--", "--cpu", "--max-len-b", "3"])
        with pytest.raises(SystemExit):
            command.parse([*own, "--", "--cpu", flag, "1"])
        assert f"-- {flag.partition('=')[0]}: " in capsys.readouterr().err


@mistakes("""
    --path x | '-- --path: '
    --max-len 5 | '-- --max-len: '
    --max-len-b many | '-- --max-len-b many: '
    --unnormalized yes | '-- --unnormalized yes: '
    --seed x | '-- --seed x: '
""")
def test_a_flag_that_the_search_does_not_know_is_refused(run, words, named):
    with pytest.raises(UserError, match=f"^{re.escape(*named)}"):
        opened(run, "--", *words)


def test_both_commands_translate_in_bf16(data, run, tmp_path, monkeypatch):
    """The toy's translations are the same, for its words are far apart."""
    monkeypatch.setattr(products, "has_bf16_units", lambda: True)  # PyTorch takes float32 where there are none
    (tmp_path / "in").write_text("Hund, Katze.\nHaus.\n")
    for precision in ("fp32", "bf16"):
        flags = ["--run", run, "--checkpoint", run / "checkpoint3.pt", "--precision", precision]
        files = ["--input", tmp_path / "in", "--output", tmp_path / precision]
        for command, own in ((translate, files), (evaluate, ["--data", data])):
            try:
                command.main([*map(str, [*flags, *own, "--", "--max-len-b", 20])])
                assert (torch.backends.mkldnn.matmul.fp32_precision == "bf16") == (precision == "bf16")
            finally:
                products.use_bf16_products(False)
    assert (tmp_path / "fp32").read_text() == (tmp_path / "bf16").read_text()


@pytest.fixture(scope="module")
def refining(data, tmp_path_factory):
    """A run whose decoder writes all words at once, of lengths from 3 to 9."""
    folder = tmp_path_factory.mktemp("refining") / "run"
    untrained_run(data, folder, "ea_cmlm_transformer", "--task", "translation_lev", "--noise", "random_mask")
    state = torch.load(folder / "checkpoint_last.pt", weights_only=True)
    lengths = state["model"]["decoder.embed_length.weight"]  # which fairseq begins with zeros: all would be empty
    lengths[3:10] = torch.randn(7, lengths.size(1), generator=torch.Generator().manual_seed(1))
    torch.save(state, folder / "checkpoint_last.pt")
    return folder


@mistakes("""
    --lenpen 0.5 | 'lenpen: '
    -- --max-len-b 9 | '-- --max-len-b: '
""")
def test_what_refinement_does_not_know_is_refused(refining, tmp_path, words, named):
    (tmp_path / "in").write_text("Hund.\n")
    with pytest.raises(SystemExit, match=re.escape(*named)):
        translate.main(["--run", str(refining), "--input", str(tmp_path / "in"), *words])
    for name, value in (("prefixes", ["dog"]), ("n_best", 2)):
        with pytest.raises(ValueError, match=name):
            ea_fairseq.load(refining).translate(["Hund."], **{name: value})


def test_a_diverse_search_shows_no_end_of_a_sentence(run):
    """A hypothesis may go on after its end; fairseq-generate leaves that out."""
    lines = [" ".join(["Hund, Katze."] * n) for n in (1, 2, 3)]
    found = ea_fairseq.load(run).translate(lines, beam=4, n_best=4, diverse_beam_groups=2, max_len_b=20)
    assert not [text for best in found for text, _ in best if "</s>" in text]


GENERATED = {
    "greedy": ("run", 1, [], []),
    "beam": ("run", 5, [], ["--max-len-b", "20", "--no-repeat-ngram-size", "2"]),
    "length penalty": ("run", 5, ["--lenpen", "0.3"], []),
    "refinement": ("refining", 3, [], ["--iter-decode-max-iter", "2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "beam", "own", "others"), GENERATED.values(), ids=GENERATED)
def test_translations_are_fairseq_generates(data, kind, beam, own, others, request):
    """The same words and scores as by the command that a user of fairseq types."""
    run = request.getfixturevalue(kind)
    name, task = {"run": ("checkpoint3.pt", ["--beam"]), "refining": ("checkpoint_last.pt", REFINEMENT)}[kind]
    program = str(Path(sys.executable).with_name("fairseq-generate"))
    given = ("--path", run / name, "--user-dir", REPO / "ea_fairseq", *task, beam, "--batch-size", 4, "--cpu")
    given += ("--required-batch-size-multiple", 1)  # else it leaves two sentences out
    command = [program, data, *map(str, given), *own, *others]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = dict(re.findall(r"^H-(\d+)\t(.*)$", done.stdout, re.M))
    args = translate.parse(["--run", str(run), "--beam", str(beam), *own, "--", "--cpu", *others])
    translator, settings = model.open_model(args, [run / name], None)
    sources = read_sentences(Preparation.at(data).binary("test", "de"))
    found = translator.search_all(sources, settings)
    assert len(found) == len(lines) == len(read_lines(data / "raw/test.de"))
    for number, (best, *_) in enumerate(found):
        score, words = lines[str(number)].split("\t")
        assert " ".join(translator._target[token] for token in best.tokens if token != BOS) == words
        assert best.score / math.log(2) == pytest.approx(float(score), abs=2e-4)  # it prints four places of some
