"""scripts/profile_model.sh: parameters exactly, FLOPs within 1% of the papers' table 5."""

import pytest
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
    found = profile_model.profile(arch)
    assert found["parameters"] == parameters
    assert found["flops"] == pytest.approx(flops, rel=0.01)


def by_hand(length, dim, ffn, layers):
    """A Transformer's multiply-adds, twice: projections, maps and their products with values, feed-forward."""
    attention = 4 * length * dim * dim + 2 * length * length * dim
    feed_forward = 2 * length * dim * ffn
    return 2 * layers * (3 * attention + 2 * feed_forward)


def test_stock_attention_is_counted_fully(length=30):
    """fairseq's Transformer uses fused attention where it may, which the counter would not see."""
    assert profile_model.profile("transformer", (), length, length)["flops"] == by_hand(length, 512, 2048, 6)


def test_layers_that_training_leaves_out_are_counted():
    whole = profile_model.profile("transformer_lite")["flops"]
    assert profile_model.profile("transformer_lite", ["--encoder-layerdrop", "1"])["flops"] == whole


def test_convolutions_are_counted():
    """K x K x k x k multiply-adds a pixel, in each kind of attention of each layer."""
    plain = profile_model.profile("transformer_lite")["flops"]
    for kernel in (1, 3):
        evolving = profile_model.profile("ea_transformer_lite", ["--ea-kernel-size", str(kernel)])["flops"]
        at_least = 2 * 18 * 30 * 30 * 4 * 4 * kernel**2
        assert at_least <= evolving - plain <= 1.3 * at_least  # the decoder's maps are padded before they are convolved
    assert profile_model.profile("ea_transformer_lite", ["--ea-beta", "0"])["flops"] == plain


def test_command_line():
    result = script("profile_model", "--arch", "ea_transformer_lite", "--src-len", 10, "--tgt-len", 20)
    assert result.returncode == 0, result.stderr
    assert all(words in result.stdout for words in ("2,485,224", "10 source and 20 target tokens"))
    result = script("profile_model", "--arch", "ea_roberta", "--encoder-layers", 1, "--src-len", 10)
    assert result.stderr == "", "no deprecations, and nothing that fairseq reports while it starts"
    assert "10 source tokens" in result.stdout and "target" not in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nonsense"], "--arch nonsense: there is no such architecture"),
        (["ea_transformer_lite", "--encoder-attention-heads", "3"], "--arch ea_transformer_lite --encoder-attention"),
        (["lstm"], "--arch lstm: is no Transformer"),
        (["bart_base", "--src-len", "2000"], "--arch bart_base: has fewer positions than --src-len"),
    ],
    ids=["architecture", "value", "no Transformer", "length"],
)
def test_a_mistake_is_one_line(capsys, words, message):
    with pytest.raises(SystemExit) as end:
        profile_model.main(["--arch", *words])
    assert end.value.code.startswith(f"profile_model: {message}")
    assert "\n" not in end.value.code + capsys.readouterr().err
