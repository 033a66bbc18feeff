"""scripts/profile_model.sh: parameters exactly, FLOPs within 1% of the papers' table 5."""

import pytest
from helpers.mistakes import check_refusal, mistakes
from helpers.toy import script

from ea_tools import profile_model

TABLE_5 = [
    ("transformer_lite", 2_482_560, 158.31e6),
    ("ea_transformer_lite", 2_485_224, 163.46e6),
    ("transformer", 44_138_496, 2.68e9),
    ("ea_transformer_base", 44_149_008, 2.70e9),
]


@pytest.mark.parametrize(("arch", "parameters", "flops"), TABLE_5)
def test_table_5(arch, parameters, flops):
    """Convolutions are 3% of a small model, and maps, which fused attention would hide, 6%."""
    found = profile_model.profile(arch)
    assert found["parameters"] == parameters
    assert found["flops"] == pytest.approx(flops, rel=0.01)


def test_layers_that_training_leaves_out_are_counted():
    whole = profile_model.profile("transformer_lite")["flops"]
    assert profile_model.profile("transformer_lite", ["--encoder-layerdrop", "1"])["flops"] == whole


def test_command_line():
    result = script("profile_model", "--arch", "ea_transformer_lite", "--src-len", 10, "--tgt-len", 20)
    assert result.returncode == 0, result.stderr
    assert all(words in result.stdout for words in ("2,485,224", "10 source and 20 target tokens"))
    result = script("profile_model", "--arch", "ea_roberta", "--encoder-layers", 1, "--src-len", 10)
    assert result.stderr == "", "no deprecations, and nothing that fairseq reports while it starts"
    assert "10 source tokens" in result.stdout and "target" not in result.stdout


@mistakes("""
    nonsense | 'profile_model: --arch nonsense:'
    ea_transformer_lite --encoder-attention-heads 3 | '--arch ea_transformer_lite --encoder-attention-heads 3:'
    lstm | '--arch lstm:' Transformer
    bart_base --src-len 2000 | '--arch bart_base:' --src-len
""")
def test_a_mistake_is_named(capsys, words, named):
    check_refusal(capsys, profile_model.main, ["--arch", *words], named)
