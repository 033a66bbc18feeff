"""In which precision evaluate.sh and translate.sh translate."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import warm

from ea_tools.common import UserError
from ea_tools.training import products
from ea_tools.translating import evaluate, fairseq_bf16, translate, translators


@pytest.fixture(params=[True, False], ids=["a GPU", "no GPU"])
def gpu(request, monkeypatch):
    monkeypatch.setattr(translators, "gpus", lambda: (1, (8, 0)) if request.param else (0, None))
    monkeypatch.setattr(products, "has_bf16_units", lambda: True)
    return request.param


def refused(precision, *flags):
    with pytest.raises(UserError) as caught:
        translators.fairseq_generate(precision, flags)
    return str(caught.value)


def test_fairseq_generate_starts_by_precision_and_device(gpu, monkeypatch):
    itself = [str(Path(sys.executable).with_name("fairseq-generate"))]
    assert translators.fairseq_generate("fp32") == itself
    if gpu:
        assert translators.fairseq_generate("fp16") == [*itself, "--fp16"]
        assert "-- --cpu" in refused("bf16")
    assert "--precision fp16: needs a GPU" in refused("fp16", "--cpu")
    assert translators.fairseq_generate("bf16", ["--cpu"])[-1].endswith("fairseq_bf16.py")
    monkeypatch.setattr(products, "has_bf16_units", lambda: False)
    assert "this CPU has no units for bfloat16" in refused("bf16", "--cpu")


@pytest.mark.parametrize("flag", ["--path", "--lenpen=0.3", "--gen-sub", "-s"])
def test_a_flag_that_contradicts_the_record_is_refused(flag, capsys):
    """fairseq takes the last of several flags, and our record would still hold the first."""
    for command, own in ((evaluate, ["--data", "d", "--run", "r"]), (translate, ["--run", "r"])):
        assert command.parse([*own, "--", "--cpu", "--max-len-b", "3"])
        with pytest.raises(SystemExit):
            command.parse([*own, "--", "--cpu", flag, "1"])
        assert f"-- {flag}: this is not for fairseq alone" in capsys.readouterr().err


def test_fairseq_generate_starts_with_products_in_bfloat16(monkeypatch):
    found, matmul = [], torch.backends.mkldnn.matmul
    monkeypatch.setattr("fairseq_cli.generate.cli_main", lambda: found.append(matmul.fp32_precision))
    try:
        runpy.run_path(fairseq_bf16.__file__, run_name="__main__")
    finally:
        products.use_bf16_products(False)
    assert found == ["bf16"]


@pytest.mark.slow
def test_both_commands_translate_in_bf16(data, run, tmp_path, monkeypatch, capfd):
    """The toy's translations are the same, for its words are far apart."""
    monkeypatch.setattr(products, "has_bf16_units", lambda: True)  # PyTorch takes float32 where there are none
    monkeypatch.setenv("PYTHONPATH", warm.ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setattr(subprocess, "Popen", warm.Popen)
    (tmp_path / "in").write_text("Hund, Katze.\nHaus.\n")
    for precision in ("fp32", "bf16"):
        flags = ["--run", str(run), "--checkpoint", str(run / "checkpoint3.pt"), "--precision", precision]
        out = tmp_path / precision
        translate.main([*flags, "--input", str(tmp_path / "in"), "--output", str(out), "--", "--max-len-b", "20"])
        assert (torch.backends.mkldnn.matmul.fp32_precision == "bf16") == (precision == "bf16")
        products.use_bf16_products(False)
        evaluate.main(["--data", str(data), *flags, "--", "--max-len-b", "20"])
        (started,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("+ ")]
        assert ("fairseq_bf16.py" in started) == (precision == "bf16")
    assert (tmp_path / "fp32").read_text() == (tmp_path / "bf16").read_text()
