"""Mistakes at data-prep/custom.sh: one or two lines name the mistake and the way out, without a usage before."""

import gzip
import sys

import pytest
from helpers.mistakes import check_refusal

from ea_data import prepare

TEXT = b"ein Haus\nzwei Hunde\n"


@pytest.mark.parametrize(
    ("flags", "german", "named"),
    [
        (["--merges", "0"], TEXT, ["custom.sh: error: ", "--merges", "custom.sh --help"]),
        ([], gzip.compress(TEXT), ["custom.sh: ", "valid.de: ", ".gz"]),
    ],
)
def test_a_mistake_is_named_at_once(flags, german, named, tmp_path, capsys, monkeypatch):
    for split in ("train", "valid"):
        (tmp_path / f"{split}.en").write_bytes(TEXT)
        (tmp_path / f"{split}.de").write_bytes(german)
    words = ["--train", "{folder}/train", "--valid", "{folder}/valid", "--out", "{folder}/run", *flags]

    def custom_sh(words):
        monkeypatch.setattr(sys, "argv", ["prepare.py", "custom", "--source-lang", "de", "--target-lang", "en", *words])
        prepare.main()

    check_refusal(capsys, custom_sh, words, named, writes_to=tmp_path, folder=tmp_path)
