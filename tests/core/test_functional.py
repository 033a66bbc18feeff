"""The core's function and modules: their numbers, steps with a cache, refusals, and types of masks."""

import inspect
import itertools

import pytest
import torch
from helpers.reference import COEFFICIENTS, evolve
from torch.testing import assert_close

from evolving_attention import Cache, EvolvingAttention, Geometry, evolving_attention
from evolving_attention.attention import EvolvingHeads
from evolving_attention.call import Result
from evolving_attention.evolution import RULES, Evolution
from evolving_attention.kernels import cpu
from evolving_attention.masks import combine
from evolving_attention.private import has_hooks

ENCODER, DECODER, CROSS = Geometry


def function(kernel_size, rule="evolving", bias=True):
    q, weight = torch.randn(1, 2, 5, 4), torch.randn(2, 2, kernel_size, kernel_size)
    return evolving_attention(q, q, q, None, weight, torch.zeros(2) if bias else None, rule=rule)


def attend(geometry=ENCODER, cache=None, source=None, previous=None, attn_mask=None, **options):
    attention = EvolvingAttention(geometry, 8, 2, **options)
    return attention(torch.randn(1, 5, 8), source, attn_mask=attn_mask, cache=cache, previous=previous)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: function(4), "kernel_size 4: must be "),
        (lambda: function(3, "evolve"), "rule 'evolve': must be "),
        (lambda: function(3, bias=False), "both or neither"),
        (lambda: evolving_attention(*torch.randn(4, 1, 2, 5, 4)), r"previous: .* \(1, 2, 5, 5\), .*\(1, 2, 5, 4\)"),
        (lambda: evolving_attention(*torch.randn(3, 1, 2, 5, 4), logits=torch.randn(1, 1, 5, 5)), "logits: must be"),
        (lambda: attend(previous=torch.randn(1, 1, 5, 5)), r"previous: must be \(1, 2, 5, 5\), not \(1, 1, 5, 5\)"),
        (lambda: attend(previous=torch.randn(1, 2, 5, 5), first=True), "previous: "),
        (lambda: attend(DECODER, previous=torch.randn(1, 2, 5, 5)), "previous: "),
        (lambda: evolving_attention(*torch.randn(4, 1, 2, 5, 5), rule="residual", geometry=DECODER), "previous: "),
        (lambda: attend("decoder"), r"geometry 'decoder': must be one of Geometry.ENCODER_SELF, "),
        (lambda: evolving_attention(*torch.randn(3, 1, 2, 5, 4), geometry="x"), r"geometry 'x': must be one of"),
        (lambda: attend(kernel_size=-1), "kernel_size -1: must be"),
        (lambda: attend(conv="sparse"), "conv 'sparse': must be one of dense, "),
        (
            lambda: evolving_attention(*torch.randn(3, 1, 4, 5, 4), None, torch.randn(4, 2, 3, 3), torch.randn(4)),
            "weight: .* 4 heads has 4 x 2 channels",
        ),
        (lambda: EvolvingAttention(ENCODER, 8, 0), "num_heads 0 does not divide embed_dim 8"),
        (lambda: attend(alpha=3), "alpha 3: must be a number from 0 to 1"),
        (lambda: attend(conv_layers=2), "conv_layers 2: rule 'evolving' takes 1"),
        (lambda: attend(rule="predictive", conv_layers=0), "conv_layers 0: rule 'predictive' takes 1 or more"),
        (lambda: attend(DECODER, rule="predictive", conv_layers=2, first=False), "conv_layers 2: decoder self-att"),
        (lambda: attend(relative_positions=-1), "relative_positions -1: must be 0 or more, and 0 in encoder-decoder"),
        (lambda: attend(CROSS, relative_positions=3), "relative_positions 3: must be .*, and 0 in"),
        (lambda: attend(score="cosine"), "score 'cosine': must be one of dot, "),
        (lambda: attend(cache=Cache()), "cache: an encoder reads its whole sentence at once"),
        (lambda: attend(source=torch.randn(1, 6, 8)), "source: only encoder-decoder attention reads another sequence"),
        (lambda: attend(CROSS), "source: encoder-decoder attention needs the encoder's output"),
        (lambda: attend(attn_mask=torch.ones(5)), r"attn_mask must be T x S.*\(5,\)"),
    ],
)
def test_what_would_give_other_numbers_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("share", [0, 1, torch.tensor(1.5)], ids=["0", "1", "learnt"])
def test_shares_may_be_0_and_1_and_learnt_ones_anything(share):
    q, weight, previous = torch.randn(1, 2, 5, 4), torch.randn(2, 2, 3, 3), torch.randn(1, 2, 5, 5)
    _, a_logit = evolving_attention(q, q, q, previous, weight, torch.zeros(2), alpha=share, beta=0.0)
    assert_close(a_logit, share * previous + (1 - share) * q @ q.mT / 2)


def test_autocast_may_make_logits_of_another_type_than_the_map_before():
    q, previous, weight = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 5, 5), torch.randn(2, 2, 3, 3)
    arguments = q, q, q, previous, weight, torch.zeros(2)
    with torch.autocast("cpu", torch.bfloat16):
        output, _ = evolving_attention(*arguments, plain=True)
    assert_close(output.float(), evolving_attention(*arguments)[0], rtol=0.1, atol=0.1)


@pytest.mark.parametrize("own, other", itertools.permutations([torch.float32, torch.bfloat16]))
@pytest.mark.parametrize("rule", RULES)
def test_the_map_before_may_have_another_type(rule, own, other):
    """As where a layer is computed again outside of autocast."""
    attention, x = EvolvingAttention(ENCODER, 8, 2, rule=rule).to(own), torch.randn(1, 5, 8).to(own)
    previous = torch.randn(1, 2, 5, 5).bfloat16()
    assert_close(attention(x, previous=previous.to(other)), attention(x, previous=previous.to(own)))


def test_help_shows_every_setting_with_its_default():
    shown = inspect.signature(EvolvingAttention).parameters
    assert all(parameter.kind != parameter.VAR_KEYWORD for parameter in shown.values())
    for function in (Evolution, EvolvingHeads):
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                assert shown[name].default == parameter.default, name


def test_projections_may_have_no_bias():
    names = dict(EvolvingAttention(ENCODER, 8, 2, bias=False).named_parameters())
    assert not [name for name in names if name.endswith("proj.bias")]


@pytest.mark.parametrize("rule", RULES)
def test_logits_beyond_float16_stay_finite(rule):
    """As in the plain Transformer, whose softmax alone reads them."""
    q = torch.tensor([-600.0, 600]).half().repeat(1, 2, 3, 4).mT
    previous, weight = torch.zeros(1, 2, 8, 8).half(), torch.ones(2, 2, 3, 3).half()
    for share in (0.1, torch.tensor(0.0)):
        shares = {"alpha": share, "beta": share}
        for _ in range(3):
            output, previous = evolving_attention(q, q, q, previous, weight, torch.zeros(2).half(), rule=rule, **shares)
            assert output.isfinite().all() and previous.abs().max() <= torch.finfo(torch.float16).max / 2


@pytest.mark.parametrize("geometry", [ENCODER, DECODER])
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_a_mask_may_have_any_type(dtype, geometry):
    attention, x = EvolvingAttention(geometry, 8, 2, beta=0.5), torch.randn(2, 4, 8)
    hides = torch.zeros(4, 4, dtype=torch.bool)
    hides[2:, 0] = True
    mask = hides.float().masked_fill(hides, -torch.inf) if dtype == torch.float32 else (2 * hides).to(dtype)
    weights = attention(x, attn_mask=mask, need_weights=True).weights
    unseen = hides | torch.full((4, 4), geometry == DECODER).triu(1)
    assert (weights == 0).equal(unseen.expand_as(weights))


@pytest.mark.parametrize("dtype, plain", [(torch.float32, False), (torch.float64, True)], ids=["kernel", "plain"])
@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_the_function_gives_the_papers_sums(kind, dtype, plain):
    """Every argument counts: each number of them is another."""
    geometry = {"encoder": ENCODER, "decoder": DECODER, "cross": CROSS}[kind]
    q, k, v = torch.randn(3, 2, 3, 4, 5).to(dtype)
    weight, bias = torch.randn(3, 3, 3, 3).to(dtype), torch.randn(3).to(dtype)
    previous = torch.randn(2, 3, 4, 4).to(dtype) if kind == "encoder" else None
    mask = torch.zeros(2, 1, 4, 4, dtype=torch.bool)
    mask[0, ..., 2:] = True
    hidden = mask.clone()
    hidden[1, :, 1] = True
    future = torch.full((4, 4), kind == "decoder").triu(1)  # which nobody gives
    shares = {"alpha": torch.tensor(0.4, dtype=dtype), "beta": 0.3}
    options = {"geometry": geometry, "mask": mask, "hidden": hidden, "plain": plain, **shares}
    output, a_logit = evolving_attention(q, k, v, previous, weight, bias, scale=0.7, **options)
    logits = 0.7 * q @ k.transpose(2, 3)
    for b in range(2):
        coefficients = COEFFICIENTS["evolving", previous is not None](0.4, 0.3)
        before = None if previous is None else previous[b]
        unseen = hidden[b, 0] | future
        sums = evolve(logits[b], kind, [(weight, bias)], coefficients, lambda i, j, x=unseen: x[i, j], before)
        expected = torch.tensor(sums, dtype=dtype)
        assert_close(a_logit[b], expected, rtol=1e-5, atol=1e-5)  # hidden places too: the next layer may see them
        weights = expected.masked_fill(mask[b] | future, -torch.inf).softmax(-1)
        assert_close(output[b], weights @ v[b], rtol=1e-5, atol=1e-5)
    again, nothing = evolving_attention(q, k, v, previous, weight, bias, logits=logits, keep_map=False, **options)
    assert_close(again, output, rtol=1e-5, atol=1e-5)
    assert nothing is None
    dropped, _ = evolving_attention(q, k, v, previous, weight, bias, logits=logits, dropout=1.0, **options)
    assert not dropped.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["kernel", "plain"])
@pytest.mark.parametrize("geometry", [DECODER, CROSS])
@pytest.mark.parametrize("at_once", [1, 2])
@torch.no_grad()
def test_steps_with_a_cache_give_the_rows_of_the_whole(geometry, at_once, dtype):
    """While a search moves its rows; the source is read in the first step alone."""
    attention = EvolvingAttention(geometry, 8, 2, beta=0.5).to(dtype)
    torch.nn.init.normal_(attention.evolution.conv.weight)
    x, source = torch.randn(3, 6, 8, dtype=dtype), None
    padding = torch.tensor([[True, False, False, False, False, False], *[[False] * 6] * 2])
    of_keys = padding
    if geometry == CROSS:
        source, of_keys = torch.randn(3, 5, 8, dtype=dtype), padding[:, 1:].flip(0, 1)
    cache, outputs, order = Cache(), [], torch.tensor([2, 0, 0])
    for start in range(0, 6, at_once):
        if start == 4:
            cache, x, padding, of_keys = cache.reorder(order), x[order], padding[order], of_keys[order]
            source = None if source is None else source[order]
            outputs = [output[order] for output in outputs]
        now = slice(start, start + at_once)
        masks = {"padding": padding[:, now]} if source is None else {"query_padding": padding[:, now]}
        if source is not None and start == 0:
            masks |= {"source": source, "padding": of_keys}
        output, _, _, cache = attention(x[:, now], cache=cache, **masks)
        outputs.append(output)
    whole = attention(x, source, of_keys if source is not None else padding, padding if source is not None else None)
    real = ~padding
    assert_close(torch.cat(outputs, 1)[real], whole.output[real], rtol=1e-5, atol=1e-5)


def test_padding_hides_keys_and_the_rows_of_padded_queries():
    attention, x = EvolvingAttention(ENCODER, 8, 2, beta=0.5), torch.randn(2, 5, 8)
    padding = torch.tensor([[True, True, False, False, False], [False] * 5])
    projections = attention.q_proj, attention.k_proj, attention.v_proj
    q, k, v = (project(x).unflatten(2, (2, 4)).transpose(1, 2) for project in projections)
    keys, conv = padding[:, None, None, :], attention.evolution.conv
    masks = {"mask": keys, "hidden": keys | padding[:, None, :, None]}
    context, _ = evolving_attention(q, k, v, None, conv.weight, conv.bias, beta=0.5, **masks)
    expected = attention.out_proj(context.transpose(1, 2).flatten(2))
    assert_close(attention(x, padding=padding).output, expected, rtol=1e-5, atol=1e-5)


def test_a_mask_of_each_head_has_three_or_four_axes():
    mask = torch.where(torch.rand(3, 2, 4, 5) < 0.5, -torch.inf, 0.5)
    for given in (mask, mask.flatten(0, 1)):
        masked, added = combine(None, given, heads=2)
        assert torch.equal(masked, mask.isneginf()) and torch.equal(added, mask.masked_fill(masked, 0))


@pytest.mark.parametrize("plain", [False, True])
def test_weights_are_those_before_dropout(plain):
    attention = EvolvingAttention(ENCODER, 8, 2, dropout=0.5, plain=plain)
    weights = attention(torch.randn(2, 6, 8), need_weights=True).weights
    assert_close(weights.sum(-1), torch.ones(2, 2, 6))


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_a_result_may_be_changed_in_place_in_training(plain):
    gradients = []
    for change in (lambda x: x * 2, lambda x: x.mul_(2)):
        torch.manual_seed(1)
        q, weight = torch.randn(1, 2, 5, 4, requires_grad=True), torch.randn(2, 2, 3, 3)
        output, _ = evolving_attention(q, q, q, None, weight, torch.zeros(2), plain=plain)
        change(output).square().sum().backward()
        gradients.append(q.grad)
    assert_close(*gradients)


#: in decoder self-attention the rows are the last of the columns
EMPTY = [(one, *size) for one in Geometry for size in ((0, 4), (3, 0), (0, 0)) if (one, *size) != (DECODER, 3, 0)]


@pytest.mark.parametrize("geometry, rows, columns", EMPTY)
def test_nothing_may_attend_to_anything(geometry, rows, columns):
    q, k = torch.randn(1, 2, rows, 4), torch.randn(1, 2, columns, 4)
    output, a_logit = evolving_attention(q, k, k, None, torch.randn(2, 2, 3, 3), torch.zeros(2), geometry=geometry)
    assert output.shape == (1, 2, rows, 4) and a_logit.shape == (1, 2, rows, columns)
    assert not output.any()


def test_the_function_takes_a_kernel(monkeypatch):
    called = []
    monkeypatch.setattr(cpu, "attend", lambda call: called.append(call) or Result(call.v))
    function(3)
    assert called


def test_a_call_without_dropout_leaves_the_generator_alone():
    before = torch.get_rng_state()
    q, weight = torch.zeros(1, 2, 5, 4), torch.zeros(2, 2, 3, 3)
    evolving_attention(q, q, q, None, weight, torch.zeros(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
def test_every_kind_of_hook_is_seen(kind):
    module = torch.nn.Linear(1, 1)
    assert not has_hooks(module)
    getattr(module, f"register_{kind}_hook")(lambda *_: None)
    assert has_hooks(module)


@pytest.mark.parametrize("shape", [(5, 5), (2, 5, 5), (5,)])
def test_a_mask_of_fewer_axes_broadcasts_and_hides_from_the_convolution(shape):
    q, weight, mask = torch.randn(1, 2, 5, 4), torch.randn(2, 2, 3, 3), torch.rand(shape) < 0.3
    given, whole = (q, q, q, None, weight, torch.zeros(2)), mask.expand(1, 2, 5, 5)
    assert_close(evolving_attention(*given, mask=mask), evolving_attention(*given, mask=whole, hidden=whole))
