"""Mistakes among options and files: one or two lines name the mistake and the way out, without a usage before."""

import gzip
import re
import sys

import pytest

from ea_data import prepare
from ea_tools.training import train
from ea_tools.translating import evaluate

TEXT = b"ein Haus\nzwei Hunde\n"


def train_sh(folder, *words):
    train.main(["sample", "transformer_lite", "--run", str(folder / "run"), *words])


def evaluate_sh(folder, *words):
    evaluate.main(list(words))


def custom_sh(folder, *words, text=TEXT):
    for split in ("train", "valid"):
        (folder / f"{split}.en").write_bytes(TEXT)
        (folder / f"{split}.de").write_bytes(text)
    words = ["--train", folder / "train", "--valid", folder / "valid", "--out", folder / "run", *words]
    sys.argv = ["prepare.py", "custom", "--source-lang", "de", "--target-lang", "en", *map(str, words)]
    prepare.main()


def packed(folder):
    custom_sh(folder, text=gzip.compress(TEXT))


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (train_sh, ("--gpus", "x"), r"^train.sh: error: argument --gpus: .*\ntrain.sh --help lists all options$"),
        (evaluate_sh, (), r"^evaluate.sh: error: .* --data, --run\nevaluate.sh --help lists all options$"),
        (custom_sh, ("--merges", "0"), r"^custom.sh: error: .* at least 1.*\ncustom.sh --help lists all options$"),
        (packed, (), r"^custom.sh: .*valid.de: is compressed by gzip; let its name end in \.gz"),
    ],
)
def test_a_mistake_is_named_at_once(command, words, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest"])  # which is put back at the end
    with pytest.raises(SystemExit) as end:
        command(tmp_path, *words)
    printed = str(end.value.code) if isinstance(end.value.code, str) else capsys.readouterr().err.strip()
    assert re.search(message, printed), printed
    assert printed.count("\n") < 2
    assert not (tmp_path / "run").exists()
