"""Mistakes among options and files: one or two lines name the mistake and the way out, without a usage before."""

import gzip
import json
import re
import shutil
import sys

import pytest

from ea_data import prepare
from ea_tools.training import train
from ea_tools.translating import evaluate

TEXT = b"ein Haus\nzwei Hunde\n"


def train_sh(folder, data, *words):
    train.main(["sample", "transformer_lite", "--data", str(data), "--gpus", "0", "--run", str(folder / "run"), *words])


def train_own_data(folder, data, *words):
    data = shutil.copytree(data, folder / "data")
    prep = json.loads((data / "PREP.json").read_text())
    (data / "PREP.json").write_text(json.dumps({**prep, "splits": {"train": {"pairs": 3}}}))
    train.main(["--data", str(data), "transformer_lite", "--gpus", "0", "--run", str(folder / "run"), *words])


def train_into_a_link(folder, data):
    (folder / "link").symlink_to(folder / "gone")
    train_sh(folder, data, "--run", str(folder / "link"))


def evaluate_sh(folder, data, *words):
    evaluate.main(list(words))


def custom_sh(folder, data, *words, text=TEXT):
    for split in ("train", "valid"):
        (folder / f"{split}.en").write_bytes(TEXT)
        (folder / f"{split}.de").write_bytes(text)
    words = ["--train", folder / "train", "--valid", folder / "valid", "--out", folder / "run", *words]
    sys.argv = ["prepare.py", "custom", "--source-lang", "de", "--target-lang", "en", *map(str, words)]
    prepare.main()


def packed(folder, data):
    custom_sh(folder, data, text=gzip.compress(TEXT))


DETOK = ("--eval-bleu", "--eval-bleu-detok", "nosuch")


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (train_sh, ("--fp16",), "^train: --fp16: needs a GPU; .*--precision bf16"),
        (train_sh, ("--lr", "abc"), "^train: argument --lr: must be a number, or several with commas .* not 'abc'"),
        (train_sh, DETOK, "^train: --eval-bleu-detok nosuch: .* there are: .*moses"),
        (train_sh, ("--gpus", "x"), r"^train.sh: error: argument --gpus: .*\ntrain.sh --help lists all options$"),
        (train_own_data, ("--lr", "abc"), "^train: argument --lr"),
        (train_into_a_link, (), "^train: .*link: is a link to .*gone, which does not exist; make that folder"),
        (evaluate_sh, (), r"^evaluate.sh: error: .* --data, --run\nevaluate.sh --help lists all options$"),
        (custom_sh, ("--merges", "0"), r"^custom.sh: error: .* at least 1.*\ncustom.sh --help lists all options$"),
        (packed, (), r"^custom.sh: .*train.de: is compressed by gzip; let its name end in \.gz"),
    ],
)
def test_a_mistake_is_named_at_once(command, words, message, tmp_path, data, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])  # which is put back at the end
    monkeypatch.setattr("os.execve", lambda *words: pytest.fail("the training began"))
    with pytest.raises(SystemExit) as end:
        command(tmp_path, data, *words)
    said = str(end.value.code) if isinstance(end.value.code, str) else capsys.readouterr().err.strip()
    assert re.search(message, said), said
    assert said.count("\n") < 2
    assert "inherit" not in capsys.readouterr().err, "a whole recipe"
    assert not (tmp_path / "run").exists()
