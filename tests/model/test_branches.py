"""A convolution beside attention, against loops in float64; the papers' other presets, their sizes, and bad values."""

import pytest
import torch
from fairseq.logging import metrics
from helpers import reference
from helpers.models import TINY, build, model_args

from ea_fairseq.branches import TwoBranchSelfAttention
from ea_fairseq.mixes import learnt_mixes
from ea_fairseq.options import check_options

C, K, S = 12, 3, 5


def slowly(module, x, _, kind, padding, __, previous):
    """One sentence, S x C, through both branches: attention by the reference, the convolution tap by tap."""
    attended, a_logit = reference.attention(module, x, x, kind, padding, padding, previous)
    weight, bias = module.conv_branch.weight, module.conv_branch.bias  # C/2 x C x 3
    rows = []
    for i in range(len(x)):
        row = bias
        for tap in range(3):
            j = i + tap - 1
            if 0 <= j < len(x) and not padding[j]:
                row = row + weight[:, :, tap] @ x[j]
        rows.append(row)
    return torch.cat([attended, torch.stack(rows)], dim=1), a_logit


@pytest.mark.parametrize(
    "rule, alpha, padding",
    [("evolving", 0, [0, 0, 0, 0, 1]), ("evolving", 0.4, [1, 1, 0, 0, 0]), ("predictive", 0.4, [0, 0, 0, 0, 1])],
)
def test_two_layers_of_two_branches_against_loops(rule, alpha, padding):
    options = {"rule": rule, "alpha": alpha, "beta": 0.3 if alpha else 0}
    layers = [TwoBranchSelfAttention(C, K, first=number == 0, **options) for number in range(2)]
    reference.compare_layers(layers, padding, slowly)


@torch.no_grad()
def test_what_padding_holds_reaches_no_branch():
    module, padding = TwoBranchSelfAttention(C, K, beta=0.5), torch.zeros(2, S, dtype=torch.bool)
    padding[0, -2:] = padding[1, :1] = True
    x = torch.randn(S, 2, C)
    changed = x.masked_fill(padding.t().unsqueeze(-1), 1e3)
    before, after = (module(inputs, key_padding_mask=padding)[0][~padding.t()] for inputs in (x, changed))
    assert torch.equal(before, after)


def counted(arch, *flags):
    """Parameters without embeddings and output projection."""
    model = build(arch, *flags, size=())
    left_out = ("embed_tokens", "output_projection")
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in left_out))


def linear(inputs, outputs):
    return inputs * outputs + outputs


#: a Transformer of 6+6 layers whose dimensions are all 160: attentions, two linear layers and norms in each layer
WIDTH, HEADS, LAYERS = 160, 4, 6
ATTENTION, NORM = 4 * linear(WIDTH, WIDTH), 2 * WIDTH
FEED_FORWARD = 2 * linear(WIDTH, WIDTH)
PLAIN = LAYERS * (ATTENTION + FEED_FORWARD + 2 * NORM) + LAYERS * (2 * ATTENTION + FEED_FORWARD + 3 * NORM)
CONVOLUTION = HEADS * HEADS * 3 * 3 + HEADS
HALF = WIDTH // 2
TWO_BRANCHES = 3 * linear(WIDTH, HALF) + linear(HALF, HALF) + linear(3 * WIDTH, HALF)
HEAD = WIDTH // HEADS


@pytest.mark.parametrize(
    "arch, flags, expected",
    [
        ("transformer_lite", [], PLAIN),
        ("pa_transformer_lite", [], PLAIN + (LAYERS - 1) * CONVOLUTION),
        ("pa_transformer_lite", ["--ea-conv-layers", 3], PLAIN + (LAYERS - 1) * 3 * CONVOLUTION),
        ("res_transformer_lite", [], PLAIN),
        ("conv_transformer_lite", [], PLAIN + LAYERS * (TWO_BRANCHES - ATTENTION)),
        (
            "pa_conv_transformer_lite",
            [],
            PLAIN + LAYERS * (TWO_BRANCHES - ATTENTION) + (LAYERS - 1) * CONVOLUTION,
        ),
        ("res_transformer_lite", ["--ea-relative-positions", 8], PLAIN + 2 * LAYERS * 17 * HEAD),
        ("res_transformer_lite", ["--ea-score", "multiplicative"], PLAIN + 3 * LAYERS * HEADS * HEAD**2),
        ("res_transformer_lite", ["--ea-score", "additive"], PLAIN + 3 * LAYERS * HEADS * (2 * HEAD**2 + HEAD)),
        ("res_transformer_lite", ["--ea-score", "concatenative"], PLAIN + 3 * LAYERS * HEADS * (2 * HEAD**2 + HEAD)),
        ("ea_transformer_lite", ["--ea-learn-mix"], PLAIN + 3 * LAYERS * CONVOLUTION + 5 + 3 * LAYERS),
    ],
)
def test_number_of_parameters(arch, flags, expected):
    assert counted(arch, *flags) == expected


def test_the_papers_sizes():
    """Table 1 of the draft has the numbers of smaller models; these are what its models for translation come to."""
    assert PLAIN == 2_482_560
    assert PLAIN + 5 * CONVOLUTION == 2_483_300


@pytest.mark.parametrize(
    "arch, rule, branch",
    [
        ("pa_transformer_lite", "predictive", False),
        ("res_transformer_lite", "residual", False),
        ("conv_transformer_lite", "evolving", True),
        ("pa_conv_transformer_lite", "predictive", True),
    ],
)
def test_presets(arch, rule, branch):
    args = model_args(arch)
    assert (args.ea_rule, args.ea_conv_branch) == (rule, branch)
    assert args.ea_alpha == (0 if arch == "conv_transformer_lite" else 0.1)
    assert (args.encoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_attention_heads) == (160, 160, 4)
    assert model_args(arch, "--ea-alpha", 0.3).ea_alpha == 0.3


def test_a_branch_and_a_rule_that_is_named():
    """Else `--ea-rule predictive` would have nothing to predict with."""
    named = model_args("conv_transformer_lite", "--ea-rule", "predictive")
    assert vars(named) == {**vars(model_args("pa_conv_transformer_lite")), "arch": "conv_transformer_lite"}


@pytest.mark.parametrize(
    "flag, value",
    [("--ea-score", "cosine"), *(("--ea-relative-positions", value) for value in ("0", "-1", "2.5", "far"))],
)
def test_bad_values_are_refused_by_name(flag, value, capsys):
    with pytest.raises(SystemExit):
        model_args("ea_transformer_base", flag, value)
    assert flag in capsys.readouterr().err.splitlines()[-1]


def test_widths_that_do_not_halve_into_heads_are_refused():
    args = model_args("ea_transformer_base", *TINY, "--ea-conv-branch", "--encoder-embed-dim", 20)
    with pytest.raises(ValueError, match=r"--ea-conv-branch: half of --encoder-embed-dim 20 .*heads 4; .* of 8$"):
        check_options(args)
    with pytest.raises(ValueError, match=r"--ea-conv-branch: .* no encoder"):
        check_options(model_args("ea_transformer_base", *TINY, "--ea-conv-branch"), sides=("decoder",))


def test_learnt_mixes_by_name():
    model = build("ea_transformer_base", "--ea-learn-mix", "--ea-alpha", 0.25, "--ea-beta", 0.5)
    with torch.no_grad():
        model.encoder.layers[2].self_attn.evolution.alpha.fill_(0.75)
    alphas = {"alpha_encoder_2": 0.25, "alpha_encoder_3": 0.75}
    betas = {
        f"beta_{kind}_{n}": 0.5 for kind, n in (("encoder", 3), ("decoder", 2), ("cross", 2)) for n in (1, 2, 3)[:n]
    }
    assert learnt_mixes(model) == {**alphas, **betas}
    assert learnt_mixes(build("ea_transformer_base")) == {}


@pytest.mark.parametrize("collecting", [False, True])
def test_learnt_mixes_are_logged_while_fairseq_validates(collecting):
    from helpers.models import batch

    model = build("ea_transformer_base", "--ea-learn-mix", "--ea-alpha", 0.25)
    source, target = batch([3]), batch([3], eos_first=True)
    metrics.reset()
    with torch.no_grad():
        if collecting:
            with metrics.aggregate(new_root=True) as meters:
                model(source, None, target)
            assert meters.get_smoothed_values()["alpha_encoder_2"] == 0.25
        else:
            model(source, None, target)
    assert "alpha_encoder_2" not in metrics.get_meters("default")
