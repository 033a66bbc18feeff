"""Folders that may be read and not written: a run translates, scores and exports; finished data are ready."""

import contextlib
import ctypes
import shutil

import pytest
from helpers.data_toy import corpus, custom

from ea_artifacts.preparation import Preparation
from ea_tools.translating import evaluate, export, translate

DAC_OVERRIDE = 1 << 1  # the capability by which root writes any file


def may_write_anything(may):
    """Give this process the capability, or take it away for a while."""
    header, of = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.capget(header, of) == 0
    of[0] = (of[0] | DAC_OVERRIDE) & of[1] if may else of[0] & ~DAC_OVERRIDE
    assert libc.capset(header, of) == 0


@contextlib.contextmanager
def reading_only(folder):
    """Inside, this process may read the folder and not write it."""
    paths = [folder, *folder.rglob("*")]
    modes = {path: path.stat().st_mode for path in paths}
    for path, mode in modes.items():
        path.chmod(mode & 0o555)
    may_write_anything(False)
    try:
        with pytest.raises(PermissionError):
            (folder / "new").touch()
        yield
    finally:
        may_write_anything(True)
        for path, mode in modes.items():
            path.chmod(mode)


def test_a_run_of_another_user_is_used(data, run, tmp_path, capsys):
    theirs, out = tmp_path / "run", tmp_path / "out"
    theirs.mkdir()
    for name in ("checkpoint2.pt", "checkpoint3.pt"):
        shutil.copy(run / name, theirs)
    Preparation.at(data).keep(theirs)
    (tmp_path / "in").write_text("Hund.\n")
    flags, search = ["--run", str(theirs), "--data", str(data)], ["--beam", "1", "--", "--max-len-b", "9"]
    with reading_only(theirs):
        last = ["--checkpoint", str(theirs / "checkpoint3.pt")]
        translate.main([*flags, *last, "--input", str(tmp_path / "in"), "--output", str(out), *search])
        evaluate.main([*flags, "--average", "2", *search])
        export.main([*flags, "--average", "2", "--out", str(tmp_path / "exported")])
    said = capsys.readouterr()
    assert out.read_text().count("\n") == 1
    assert "chrF" in said.out and f"{theirs / 'eval'} cannot be written" in said.err
    assert (tmp_path / "exported/model.json").exists()


def test_a_finished_corpus_is_ready(tmp_path):
    texts, made = corpus(tmp_path / "texts"), tmp_path / "made"
    custom(texts, made / "data")
    with reading_only(made):
        assert "nothing to do" in custom(texts, made / "data")
