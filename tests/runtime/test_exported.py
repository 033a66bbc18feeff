"""An exported model gives the translations and scores of its run; faults are named, and lose no output."""

import json
import os
import pty
import shutil
import subprocess
import sys
from unittest.mock import Mock

import onnx
import pytest
import torch
from fairseq.modules.quantization.scalar import quantize_model_
from helpers import REPO
from helpers.mistakes import check_refusal, mistakes
from helpers.models import build
from helpers.toy import ENVIRONMENT, runtime, script, untrained_run
from onnx import numpy_helper

from ea_artifacts.checkpoints import load
from ea_artifacts.command import UserError
from ea_artifacts.run import Run
from ea_fairseq.export import reason_against
from ea_runtime import Translator
from ea_tools.translating import evaluate, export, translate

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def pair(exported_run):
    """A trained run and two exports of the average of its last two checkpoints: in float32 and in 8 bits."""

    def same(model, folder):  # the model is traced once
        for path in (exported_run / "float32").glob("*.onnx"):
            shutil.copy(path, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ea_fairseq.export.export", same)
        out = str(exported_run / "int8")
        export.main(["--run", str(exported_run / "run"), "--average", "2", "--out", out, "--int8"])
    return exported_run


def nbest(folder, data, *flags):
    """Lines of translate.sh for a test set: number, text, score."""
    flags = ["--input", data / "raw" / "test.de", "--nbest", "5", *flags, "--", "--max-len-b", "12"]
    done = script("translating.translate", *folder, *flags)
    assert done.returncode == 0, done.stderr
    return [line.split(" ||| ") for line in done.stdout.splitlines()]


@pytest.mark.parametrize("lenpen", ["1", "0.6"])
def test_translates_as_the_run(pair, data, lenpen):
    average = pair / "run" / "average2.pt"
    average = average if average.exists() else pair / "run" / "eval" / "average2.pt"
    by_run = nbest(["--run", pair / "run", "--checkpoint", average], data, "--lenpen", lenpen)
    by_export = nbest(["--run", pair / "float32"], data, "--lenpen", lenpen)
    assert len(by_export) == 50
    scores = [float(score) for *_, score in by_run]
    assert [float(score) for *_, score in by_export] == pytest.approx(scores, abs=1e-3)
    assert [line[:2] for line in by_export] == [line[:2] for line in by_run]


def test_scores_as_the_run(pair, data, capsys):
    common = ["--data", str(data), "--beam", "2"]
    evaluate.main([*common, "--run", str(pair / "run"), "--average", "2", "--", "--cpu", "--max-len-b", "9"])
    limits = ["--", "--max-len-b", "9"]
    evaluate.main([*common, "--run", str(pair / "float32"), "--against", str(pair / "run"), *limits])
    assert "identical to those of" in capsys.readouterr().out
    evaluate.main([*common, "--run", str(pair / "int8"), "--against", str(pair / "float32"), *limits])
    assert "exported in 8 bits" in capsys.readouterr().out
    by_run, by_export, int8 = (
        json.loads((pair / name / "eval" / "test.json").read_text()) for name in ("run", "float32", "int8")
    )
    assert by_export["scores"] == by_run["scores"]
    same = ("arch", "settings", "updates", "preparation", "settings_name", "averaged", "references")
    assert {name: by_export[name] for name in same} == {name: by_run[name] for name in same}
    assert (by_export["int8"], int8["int8"]) == (False, True)
    assert {"sacrebleu", "chrf"} <= int8["against"].keys()
    evaluate.main([*common, "--run", str(pair / "int8"), *limits, "--batch-size", "3"])
    assert list((pair / "int8" / "eval").glob("test.beam2.average2.batch3.*.json")), "translations in 8 bits may differ"


def test_products_in_8_bits_are_exact_on_any_cpu(pair):
    """Without VNNI two products of 8 bits are added in 16: 2 x 255 x 64 fits, and 2 x 255 x 127 does not."""
    graph = onnx.load(pair / "int8" / "decoder.onnx").graph
    stored = {value.name: numpy_helper.to_array(value) for value in graph.initializer}
    factors = [stored[node.input[1]] for node in graph.node if node.op_type == "MatMulInteger"]
    assert len(factors) > 5
    assert max(abs(factor.astype(int)).max() for factor in factors) == 64


COMMANDS = {"translate": (translate.main, "--input", "raw/test.de"), "evaluate": (evaluate.main, "--data", "")}


@mistakes("""
    both --checkpoint x.pt         | --checkpoint
    both --precision bf16          | --precision
    both -- --sampling             | --sampling
    both -- --max-len-b many       | --max-len-b many
    both -- --unkpen               | --unkpen number
    both -- --unnormalized False   | --unnormalized False
    both -- --min-len 999          | min_len 999
    evaluate --average 2           | --average
    evaluate --best                | --best
    evaluate -- --batch-size 0     | --batch-size 0
    evaluate -- --batch-size       | --batch-size
    translate -- --batch-size 2    | --batch-size
""")
def test_what_an_export_cannot_do_is_refused_by_name(pair, data, words, named, capsys):
    command, *flags = words
    for main, flag, path in COMMANDS.values() if command == "both" else [COMMANDS[command]]:
        check_refusal(capsys, main, [flag, data / path, "--run", pair / "float32", *flags], named)


def test_an_export_is_no_run_whose_checkpoints_can_be_looked_at(pair):
    with pytest.raises(UserError, match="is an exported model; give the run that it came from"):
        Run(pair / "float32").model()


def test_an_export_names_its_checkpoint(pair):
    described = json.loads((pair / "float32" / "model.json").read_text())
    assert described["checkpoint"] == "average2.pt" and described["search"] == {"beam": 5, "lenpen": 1.0}
    assert [path.rsplit("/", 1)[1] for path in described["averaged"]] == ["checkpoint2.pt", "checkpoint3.pt"]


def test_an_empty_source_line_has_an_empty_translation(pair):
    """As in translate.sh and over HTTP, also where a test set is scored."""
    runtime = Translator(pair / "float32", threads=1)
    words, _ = evaluate.translate(runtime, runtime.settings({"beam": 2, "max_len_b": 5}), [[2], [5, 6, 2]], 8)
    assert words[0] == "" != words[1]
    assert runtime.scored(["", "a"], beam=2, n_best=2)[0] == [("", 0.0), ("", 0.0)]


@pytest.mark.parametrize("name, difference", [("float32", float("nan")), ("float32", 2e-3), ("int8", 0.4)])
def test_an_export_with_other_scores_is_refused(pair, tmp_path, monkeypatch, name, difference):
    """A token's score differs from PyTorch's. In 8 bits, a model that wrote nonsense had a difference of 0.85."""

    def search(self, sources, settings, targets):
        results = search_ids(self, sources, settings, targets)
        if targets is None:  # the trial of a model that has been loaded
            return results
        return [[Mock(score=x.score + difference * len(y))] for (x,), y in zip(results, targets, strict=True)]

    monkeypatch.setattr(export, "write", lambda *given: shutil.copytree(pair / name, given[-1], dirs_exist_ok=True))
    search_ids = Translator.search_ids
    monkeypatch.setattr(Translator, "search_ids", search)
    flags = ["--int8"] if name == "int8" else []
    with pytest.raises(SystemExit, match="nothing kept"):
        export.main(["--run", str(pair / "run"), "--average", "2", "--out", str(tmp_path / "out"), *flags])
    assert not list(tmp_path.iterdir())


#: a word of the message -> a change of the checkpoint
OTHERS = {
    "denoising": lambda state: state["cfg"]["task"].update(_name="denoising"),
    "--add-bos-token": lambda state: state["cfg"]["task"].update(_name="language_modeling", add_bos_token=True),
    "encoder.layers.0.fc1.weight": lambda state: state["model"]["encoder.layers.0.fc1.weight"].fill_(torch.nan),
}


def test_other_models_are_refused_and_nothing_is_written(data, tmp_path, monkeypatch):
    run = untrained_run(data, tmp_path / "run", "ea_transformer_base")
    words = ["--run", str(run), "--out", str(tmp_path / "out")]
    for named, change in OTHERS.items():
        change(state := load(run / "checkpoint_last.pt"))
        monkeypatch.setattr(export, "load", lambda checkpoint, state=state: state)
        with pytest.raises(SystemExit, match=named):
            export.main(words)
    monkeypatch.undo()
    monkeypatch.setattr("ea_fairseq.export.reason_against", lambda model: "it has an adaptive softmax")
    with pytest.raises(SystemExit, match="adaptive softmax"):
        export.main(words)
    with pytest.raises(SystemExit, match=r"none\.pt: no such file"):
        export.main([*words, "--checkpoint", "none.pt"])
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize(
    ("arch", "flags", "reason"),
    [
        ("ea_transformer_base", "", None),
        ("ea_transformer_lm", "", None),
        ("ea_roberta", "", "EARobertaModel is neither"),
        ("ea_transformer_base", "--adaptive-softmax-cutoff 5,10", "it has an adaptive softmax"),
        ("ea_transformer_lm", "--adaptive-input --adaptive-input-cutoff 5,10", "its embedding is AdaptiveInput"),
        ("ea_transformer_base", "--no-cross-attention", "its decoder has no encoder-decoder attention of its own"),
        ("transformer", "--cross-self-attention", "its decoder has no encoder-decoder attention of its own"),
        ("ea_transformer_base", "--ea-cross-alpha 0.1", "its decoder's layers hand on maps"),
    ],
)
def test_models_that_no_graph_holds_are_told_apart(arch, flags, reason):
    said = reason_against(build(arch, *flags.split()))
    assert said is None if reason is None else said.startswith(reason)


def test_models_that_read_or_round_otherwise_are_told_apart(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    rounded, fewer = build("ea_transformer_base"), build("ea_transformer_lm")
    quantize_model_(rounded, p=0.1, bits=8)
    assert "--quant-noise-scalar" in reason_against(rounded)
    fewer.decoder.output_projection = torch.nn.Linear(16, 5)
    assert "--output-dictionary-size" in reason_against(fewer)


def test_bytes_that_are_no_text_lose_no_line_before_them(pair):
    whole = runtime(pair / "float32", text=b"Haus.\nHund.\nBaum.\n")
    done = runtime(pair / "float32", text=b"Haus.\nHund.\nBaum.\nK\xffatze\nBuch.\n")
    assert done.returncode == 1
    assert done.stdout == whole.stdout
    assert done.stderr == b"ea_runtime: standard input:4: not UTF-8: invalid start byte at byte 2\n"


def test_several_translations_of_a_line_have_scores(pair):
    lines, settings = ["Haus.", "", "Hund."], {"beam": 3, "lenpen": 0.5, "n_best": 2}
    scored = Translator(pair / "float32", threads=1).scored(lines, **settings)
    expected = [f"{score:.4f}\t{text}" for hypotheses in scored for text, score in hypotheses]
    flags = ["--beam", "3", "--lenpen", "0.5", "--n-best", "2", "--threads", "1"]
    done = runtime(pair / "float32", *flags, text="".join(f"{line}\n" for line in lines))
    assert done.stdout.splitlines() == expected
    assert len(set(expected)) == 5, "the empty line's are alike"


MANY = "printf 'Haus.\n%.0s' {1..3000} |"  # less than a pipe holds


@pytest.mark.parametrize(
    ("before", "after", "status", "said"),
    [
        (MANY, "--beam 1 --batch 10 | head -n 1", 141, ""),
        (MANY, "--beam 1 --batch 10 > /dev/full", 1, "standard output: No space left on device"),
        ("", "--serve 0 > /dev/full", 1, "standard output: No space left on device"),
        ("", "0<&-", 1, "stdin is closed"),
        ("", "1>&-", 1, "stdout is closed"),
        ("", "--serve 0 1>&-", 1, "stdout is closed"),
    ],
)
def test_streams_that_are_closed_or_full_end_the_command(pair, before, after, status, said):
    line = f'set -o pipefail; {before} "$0" -m ea_runtime "$1" {after}'
    words = ["bash", "-c", line, sys.executable, pair / "float32"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=REPO, env=ENVIRONMENT, timeout=60)
    assert (done.returncode, done.stderr.count("\n")) == (status, 1 if said else 0)
    assert said in done.stderr


@pytest.mark.parametrize("terminal, lines", [(True, 1), (False, 8)], ids=["terminal", "pipe"])
def test_translations_are_printed_as_they_are_made(pair, terminal, lines):
    """By default, four batches together; at a terminal, each line."""
    theirs, ours = pty.openpty()[::-1] if terminal else os.pipe()
    words = [sys.executable, "-m", "ea_runtime", pair / "float32", "--beam", "1", "--batch", "2"]
    with subprocess.Popen(words, stdin=theirs, stdout=subprocess.PIPE, cwd=REPO, env=ENVIRONMENT) as process:
        os.write(ours, b"Haus.\n" * lines)
        assert all(process.stdout.readline() for _ in range(lines))
        assert process.poll() is None
        os.write(ours, b"\x04" if terminal else b"Haus.\n")  # one Ctrl-D
        os.close(ours)
        assert process.communicate(timeout=60)[0].count(b"\n") == (not terminal)


def test_progress_is_shown_on_a_terminal_that_shows_no_translations(pair, tmp_path):
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "ea_runtime", pair / "float32", "--beam", "1", "--batch", "1"]
    with (tmp_path / "out").open("wb") as out:
        done = subprocess.run(words, input=b"Haus.\n" * 5, stdout=out, stderr=theirs, check=False, cwd=REPO)
    said = os.read(ours, 1000).decode()
    assert done.returncode == 0 and "4 lines, " in said and "5 lines, " in said and said.endswith("\r\n")
    assert (tmp_path / "out").read_bytes().count(b"\n") == 5


def test_a_line_of_ten_thousand_words_is_cut_and_named(pair):
    text = "Haus.\n" * 4 + "Hund " * 10_000 + "\nBaum.\n"
    done = runtime(pair / "float32", "--beam", "1", "--batch", "1", text=text)
    assert (done.returncode, done.stdout.count("\n"), done.stderr.count("\n")) == (0, 6, 1)
    assert done.stderr.startswith("line 5: ")


def test_files_of_two_exports_are_not_mixed(pair, tmp_path):
    """test_folder.py has the other faults, and the command of the runtime."""
    mixed = shutil.copytree(pair / "float32", tmp_path / "mixed")
    shutil.copyfile(pair / "int8" / "decoder.onnx", mixed / "decoder.onnx")
    with pytest.raises(SystemExit, match=r"decoder\.onnx: damaged, or of another export"):
        translate.main(["--run", str(mixed), "--input", str(REPO / "README.md")])
