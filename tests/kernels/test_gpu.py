"""The GPU kernels give the numbers of the plain composition, forward and every gradient, or refuse.

Without a GPU they run in Triton's interpreter, which shows their numbers; ``test_compiles_without_spills`` shows that
the compiler takes them. As a program, with PYTHONPATH=.:tests, this file compiles them (``test_gpu.py 90``) and
prints the registers that they need, or compares the host's time with a stock attention's (``test_gpu.py host``).
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from helpers import warm
from helpers.interpreter import import_kernels, interpret_quickly
from helpers.models import batch, build
from helpers.shares import AnyShares
from torch.utils.flop_counter import FlopCounterMode

from evolving_attention.evolution import Evolution, Geometry
from evolving_attention.kernels import Call, cpu, gpu

ENCODER, DECODER, CROSS = Geometry
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


if __name__ != "__main__":
    kernels, operation, trial = import_kernels()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setattr(trial, "_verdicts", {})
    gpu._kernels.cache_clear()  # other tests may have asked for it without the interpreter
    gpu._say_once.cache_clear()
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        round_as_gpus_do(monkeypatch)
        interpret_quickly(monkeypatch)
    yield
    gpu._kernels.cache_clear()


def round_as_gpus_do(monkeypatch):
    """Triton's interpreter cuts float32 off to bfloat16 where a GPU rounds to the nearest."""
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data, given, wanted, mode):
        if (given, wanted) != (interpreter.tl.float32, interpreter.tl.bfloat16):
            return convert(data, given, wanted, mode)
        data = torch.from_numpy(data.astype("float32")).to(BFLOAT).view(torch.int16).numpy()
        return data.view("uint16")

    monkeypatch.setattr(interpreter, "_convert_float", rounded)


class Case(NamedTuple):
    """One call. ``masks``: "" or words of padding, rows, future, all (see ``masks_of``).

    ``rule``: of evolution.py, or five numbers, or "learnt" and five numbers that are parameters.
    """

    geometry: Geometry = ENCODER
    heads: int = 3
    k: int = 3
    length: int = 5
    columns: int = 6
    masks: str = ""
    dtype: torch.dtype = SINGLE
    rule: str | tuple = "evolving"
    alpha: float = 0.4
    beta: float = 0.3
    learn: bool = False
    previous: bool = True
    given: bool = False
    width: int = 4
    batch: int = 2


def masks_of(case):
    """hidden and masked: padded keys, padded queries (hidden only), the future, one row that is all masked."""
    masked, hidden = [], []
    if "padding" in case.masks:
        padding = torch.zeros(case.batch, 1, 1, case.columns, dtype=torch.bool, device=DEVICE)
        padding[0, ..., -2:] = True
        masked.append(padding)
    if "future" in case.masks:
        masked.append(torch.ones(case.length, case.columns, dtype=torch.bool, device=DEVICE).triu(1)[None, None])
    if "all" in case.masks:
        masked.append(torch.zeros(case.batch, 1, case.length, case.columns, dtype=torch.bool, device=DEVICE))
        masked[-1][-1, 0, 1] = True
    if "rows" in case.masks:
        rows = torch.zeros(case.batch, 1, case.length, 1, dtype=torch.bool, device=DEVICE)
        rows[0, 0, -1] = True
        hidden.append(rows)
    return {"hidden": union([*masked, *hidden]), "masked": union(masked)}


def union(masks):
    return None if not masks else masks[0] if len(masks) == 1 else masks[0] | union(masks[1:])


def evolution_of(case):
    if isinstance(case.rule, str):
        options = {"rule": case.rule, "first": not case.previous, "learn_mix": case.learn}
        evolution = Evolution(case.geometry, case.heads, case.k, case.alpha, case.beta, **options)
    else:
        evolution = AnyShares(case.geometry, case.heads, case.k, case.rule, case.learn)
    if evolution.conv is not None:
        for parameter in evolution.conv.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return evolution.to(DEVICE, case.dtype)


def tensors_of(case):
    """q, k, v as views of T x B x C, as a model has them; a map of the layer before; logits that are given."""

    def split(length):
        x = torch.randn(length, case.batch, case.heads * case.width, device=DEVICE).to(case.dtype)
        return x.view(length, case.batch, case.heads, case.width).permute(1, 2, 0, 3).requires_grad_()

    def maps():
        x = torch.randn(case.batch, case.heads, case.length, case.columns, device=DEVICE)
        return x.to(case.dtype).requires_grad_()

    tensors = {"q": split(case.length), "k": split(case.columns), "v": split(case.columns)}
    return tensors | ({"previous": maps()} if case.previous else {}) | ({"given": maps()} if case.given else {})


def call_of(evolution, tensors, masks, **options):
    """The call of an attention with this module."""
    conv = evolution.conv
    return Call(
        **{"scale": 0.6, "geometry": evolution.geometry, "kernel_size": evolution.kernel_size},
        coefficients=evolution.coefficients("previous" in tensors),
        weight=None if conv is None else conv.weight,
        bias=None if conv is None else conv.bias,
        **{"keep_map": True, "need_weights": True, **tensors, **masks, **options},
    )


def kernel(evolution, tensors, masks, **options):
    """Context, A_logit and weights by the kernels."""
    return gpu.attend(call_of(evolution, tensors, masks, **options))[:3]


def plain(evolution, tensors, masks, keep=None):
    """What the kernels have to give, by PyTorch's operations; ``keep``: what dropout multiplies by."""
    q, k, v = (tensors[name] for name in "qkv")
    logits = tensors["given"] if "given" in tensors else 0.6 * (q @ k.transpose(2, 3))
    a_logit = evolution(logits, masks["hidden"], tensors.get("previous"))
    masked = masks["masked"]
    scores = a_logit if masked is None else a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, SINGLE))
    dropped = weights if keep is None else weights * keep
    return dropped.to(v.dtype) @ v, a_logit, weights


def results(run, evolution, tensors, masks, **options):
    """Context, A_logit, weights, and all gradients of an uneven functional of them, by name."""
    found = dict(zip(("context", "a_logit", "weights"), run(evolution, tensors, masks, **options), strict=True))
    loss = sum((x * probe(x)).sum() for x in found.values() if x is not None)
    inputs = {**tensors, **dict(evolution.named_parameters())}
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (value.shape, value.dtype), name
            found[f"gradient of {name}"] = gradient
    return {name: x.detach() for name, x in found.items() if x is not None}


def probe(x):
    return torch.linspace(-1, 2, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)


def exact(case, evolution, tensors):
    """The same inputs in float64."""
    twin = evolution_of(case).to(DOUBLE)
    twin.load_state_dict(evolution.state_dict())
    return twin, {name: x.detach().double().requires_grad_() for name, x in tensors.items()}


def check(case):
    """float32: 1e-5 of the largest number. Less: at most 1.5 times as far from float64 as the plain composition is.

    Or as near as rounding the right result to this type may leave it, half an eps.
    """
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    ours = results(kernel, evolution, tensors, masks)
    truth = results(plain, *exact(case, evolution, tensors), masks)
    theirs = results(plain, evolution, tensors, masks) if case.dtype != SINGLE else truth
    assert ours.keys() == truth.keys() == theirs.keys()
    for name, true in truth.items():
        mine, other = ours[name], theirs[name]
        assert mine.isfinite().all(), name
        if case.dtype == SINGLE:
            assert (mine - true).abs().max() <= 1e-5 * true.abs().max(), name
        elif mine.dim() > 0:  # by chance, a single number may be as near as you like
            error, allowed = (mine - true).norm(), 1.5 * (other - true).norm()
            assert error <= max(allowed, 0.5 * torch.finfo(case.dtype).eps * true.norm()), name
        else:
            assert (mine - true).abs() <= 8 * torch.finfo(case.dtype).eps * max(true.abs(), 1), name


def close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, true in theirs.items():
        assert (ours[name] - true).abs().max() <= 1e-5 * true.abs().max(), name


#: each geometry, size of kernel, type, rule and mask with most of the others
CASES = [
    Case(ENCODER, 4, 3, 4, 4, "padding rows"),
    Case(ENCODER, 1, 1, 1, 1, "", previous=False),
    Case(ENCODER, 8, 3, 3, 3, "padding rows all", BFLOAT, batch=1, width=8),
    Case(ENCODER, 2, 5, 5, 6, "rows", HALF, batch=1),
    Case(ENCODER, 3, 3, 4, 16, "padding all", alpha=1, beta=1, batch=1),
    Case(DECODER, 4, 3, 5, 5, "future padding rows", previous=False),
    Case(DECODER, 3, 5, 5, 5, "future", HALF, previous=False, batch=1),
    Case(DECODER, 3, 3, 2, 2, "future all", BFLOAT, previous=False, width=40, batch=1),
    Case(CROSS, 4, 3, 3, 9, "padding", HALF, previous=False),
    Case(CROSS, 16, 3, 2, 17, "padding", previous=False, batch=1),
    Case(CROSS, 9, 5, 3, 1, "", previous=False, width=70, batch=1),
    Case(ENCODER, 4, 3, 3, 5, "padding rows all", rule="predictive"),
    Case(ENCODER, 1, 5, 4, 4, "rows", HALF, rule="predictive", given=True, batch=1),
    Case(ENCODER, 4, 1, 3, 5, "padding rows all", rule="residual", batch=1),
    Case(ENCODER, 8, 1, 3, 5, "padding rows", BFLOAT, rule="realformer", given=True, batch=1),
    Case(DECODER, 2, 3, 4, 4, "future padding", previous=False, given=True, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", beta=0.0, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", rule=(0.6, 0.5, 0.3, 0.2, 0.9)),
    Case(ENCODER, 4, 3, 3, 5, "padding rows", learn=True),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", learn=True, alpha=0.0, beta=0.0, batch=1),
    Case(CROSS, 2, 5, 4, 6, "padding", HALF, learn=True, previous=False, beta=0.0),
    Case(ENCODER, 2, 1, 3, 3, "rows", rule="predictive", learn=True, alpha=0.0, given=True, batch=1),
    Case(ENCODER, 4, 1, 3, 5, "padding rows", rule="residual", learn=True),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", HALF, rule=(0.6, 0.5, 0.3, 0.2, 0.9), learn=True, given=True, batch=1),
]
#: more than one band of rows and one block of columns: in one program, and in one for each
LONG = [
    Case(ENCODER, 3, 3, 40, 60, "padding rows", batch=1),
    Case(ENCODER, 2, 5, 35, 70, "padding", HALF, batch=2),
    Case(DECODER, 2, 3, 65, 65, "future", previous=False, learn=True, batch=1),
    Case(CROSS, 2, 3, 66, 4, "", BFLOAT, previous=False, rule=(0.6, 0.5, 0.3, 0.2, 0.9), batch=1),
]


def name(case):
    parts = [case.geometry.name, case.heads, f"k{case.k}", f"{case.length}x{case.columns}", case.masks or "open"]
    parts += [str(case.dtype)[6:], case.rule if isinstance(case.rule, str) else "any"]
    parts += [word for word in ("learn", "given") if getattr(case, word)]
    return "-".join(map(str, parts)).replace(" ", "_")


@pytest.mark.parametrize("case", CASES, ids=name)
def test_as_plain(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG, ids=name)
def test_as_plain_in_several_blocks(case):
    check(case)


@pytest.mark.parametrize("wanted", ["context", "a_logit", "weights"])
def test_only_one_of_the_results_matters(wanted):
    case = Case(length=2, masks="padding rows", learn=True)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)

    def only(run):
        return lambda *arguments: [
            x if name == wanted else None
            for name, x in zip(("context", "a_logit", "weights"), run(*arguments), strict=True)
        ]

    ours, theirs = (results(only(run), evolution, tensors, masks) for run in (kernel, plain))
    if wanted != "context":  # the kernels say zero where autograd says none
        assert (ours.pop("gradient of v") == 0).all()
    for name, true in theirs.items():
        torch.testing.assert_close(ours[name], true, rtol=1e-4, atol=1e-5)
    assert ours.keys() == theirs.keys()


def test_two_layers():
    """The map of the first goes to the second, and the gradient of the map back."""
    case = Case(length=3, columns=6, masks="padding rows", heads=2)
    first, second = evolution_of(case._replace(previous=False)), evolution_of(case._replace(rule="predictive"))
    one, two = (tensors_of(case._replace(previous=False)) for _ in range(2))
    masks = masks_of(case)
    inputs = [*one.values(), *two.values(), *first.parameters(), *second.parameters()]
    gradients = []
    for run in (kernel, plain):
        context, previous, _ = run(first, one, masks)
        after, last, _ = run(second, {**two, "previous": previous}, masks)
        gradients.append(torch.autograd.grad((context * probe(context)).sum() + (after**2).sum() + last.sum(), inputs))
    for mine, true in zip(*gradients, strict=True):
        assert (mine - true).abs().max() <= 1e-5 * true.abs().max()


def test_rows_that_are_all_masked_are_uniform():
    case = Case(masks="all", width=6, columns=6)
    _, _, weights = kernel(evolution_of(case), tensors_of(case), masks_of(case))
    torch.testing.assert_close(weights[-1, :, 1], torch.full((3, 6), 1 / 6, device=DEVICE))


@pytest.mark.parametrize("learn", [False, True])
def test_removed_taps_have_no_effect_and_no_gradient(learn):
    case = Case(DECODER, 2, 3, 4, 4, "future", previous=False, learn=learn)
    evolution, tensors = evolution_of(case), tensors_of(case)
    upper = torch.ones(3, 3, device=DEVICE).triu(1).bool().expand_as(evolution.conv.weight)
    with torch.no_grad():
        evolution.conv.weight[upper] = torch.nan
    found = results(kernel, evolution, tensors, masks_of(case))
    for result in found.values():
        assert result.isfinite().all()
    gradient = found["gradient of conv.weight"]
    assert (gradient[upper] == 0).all()
    assert (gradient[~upper] != 0).all()


def test_what_has_no_share_is_not_read():
    """As in the plain composition, where infinities in it do no harm; it gets no gradient."""
    case = Case(rule="residual", alpha=0.0)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    with torch.no_grad():
        tensors["previous"].fill_(torch.inf)
    found = results(kernel, evolution, tensors, masks)
    assert "gradient of previous" not in found
    close(found, results(plain, evolution, tensors, masks))


def test_what_is_not_finite_shows():
    """Mixed precision finds a loss scale that is too high by it."""
    case = Case(previous=False)
    evolution, tensors = evolution_of(case), tensors_of(case)
    with torch.no_grad():
        tensors["q"][1, 2, 3] = torch.inf
    context, *_ = kernel(evolution, tensors, masks_of(case))
    assert not context[1, :, 3:4].isfinite().any()
    assert context[0].isfinite().all()


def test_float16_stays_finite():
    """A_logit is kept within half of the range; where it is cut off no gradient flows, as of torch.clamp."""
    case = Case(ENCODER, 2, 3, 3, 4, "", HALF, previous=True, batch=1)
    tensors = tensors_of(case)
    with torch.no_grad():
        tensors["previous"][0, 0, 0, 0] = 60000
    call = call_of(AnyShares(ENCODER, 2, 3, (0.0, 1.0, 0.5, 1.9, 1.0), False).to(HALF), tensors, masks_of(case))
    a_logit = gpu.attend(call).a_logit
    assert a_logit[0, 0, 0, 0] == torch.finfo(HALF).max / 2
    (gradient,) = torch.autograd.grad(a_logit.sum(), tensors["previous"])
    assert gradient[0, 0, 0, 0] == 0
    assert gradient[0, 0, 0, 1] != 0


def test_learnt_shares_may_stay_float32_among_half_tensors():
    """As under --amp: the numbers are those of shares in half precision, the gradients are float32."""
    case = Case(ENCODER, 2, 3, 3, 4, "padding rows", HALF, alpha=0.5, beta=0.25, learn=True)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    half = results(kernel, evolution, tensors, masks)
    evolution.alpha, evolution.beta = (
        torch.nn.Parameter(x.detach().float()) for x in (evolution.alpha, evolution.beta)
    )
    single = results(kernel, evolution, tensors, masks)
    for share in ("gradient of alpha", "gradient of beta"):
        assert single[share].dtype == SINGLE
        torch.testing.assert_close(single.pop(share).half(), half.pop(share), rtol=1e-2, atol=1e-2)
    assert all(single[name].equal(half[name]) for name in half)


# ---- dropout


def weights_after(case, dropout, seed):
    """P after dropout, B x K x T x S: the context of values that are the unit vectors."""
    torch.manual_seed(1)
    evolution, tensors = evolution_of(case), tensors_of(case)
    tensors["v"] = torch.eye(case.columns, device=DEVICE).expand(case.batch, case.heads, -1, -1)
    torch.manual_seed(seed)
    return kernel(evolution, tensors, masks_of(case), dropout=dropout)[0].detach()


def test_dropout_keeps_its_share_and_the_expectation():
    case = Case(ENCODER, 10, 1, 16, 16, previous=False, width=16)
    without = weights_after(case, 0.0, seed=1)
    after = weights_after(case, 0.3, seed=1)
    keep = (after / without).round(decimals=3)
    assert keep.unique().tolist() == [0, pytest.approx(1 / 0.7, abs=1e-3)]
    kept = (keep > 0).double()
    spread = (0.3 * 0.7 / kept.numel()) ** 0.5
    assert abs(kept.mean() - 0.7) < 4 * spread
    assert abs((after.sum(-1) - 1).mean()) < 0.02
    # heads, sentences, rows and columns each draw their own: no two are alike
    for axis in range(4):
        slices = kept.movedim(axis, 0).flatten(1)
        alike = torch.corrcoef(slices).fill_diagonal_(0).abs().max()
        assert alike < 6 / slices.size(1) ** 0.5, f"axis {axis}"


def test_dropout_follows_the_seed():
    case = Case(previous=False, width=6)
    assert weights_after(case, 0.5, seed=3).equal(weights_after(case, 0.5, seed=3))
    assert not weights_after(case, 0.5, seed=3).equal(weights_after(case, 0.5, seed=4))


def test_dropout_of_everything_gives_zeros():
    case = Case(length=2, masks="padding")
    found = results(kernel, evolution_of(case), tensors_of(case), masks_of(case), dropout=1.0)
    assert (found["context"] == 0).all()
    assert (found["gradient of v"] == 0).all()
    assert all(x.isfinite().all() for x in found.values())
    torch.testing.assert_close(found["weights"].sum(-1), torch.ones(2, 3, 2, device=DEVICE))  # before dropout


@pytest.mark.parametrize("beta", [0, 0.3])
def test_gradients_are_of_the_mask_that_the_forward_pass_drew(beta):
    case = Case(masks="padding", columns=6, width=6, beta=beta)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    eye = torch.eye(6, device=DEVICE).expand(2, 3, 6, 6)
    torch.manual_seed(5)
    after, _, without = kernel(evolution, {**tensors, "v": eye}, masks, dropout=0.4)
    keep = torch.where(without > 0, after / without, 1).detach()
    torch.manual_seed(5)
    ours = results(kernel, evolution, tensors, masks, dropout=0.4)
    close(ours, results(plain, evolution, tensors, masks, keep=keep))


# ---- promises about runs


def test_twice_the_same_bits():
    case = Case(masks="padding rows", dtype=HALF, learn=True)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    once, again = (results(kernel, evolution, tensors, masks) for _ in range(2))
    assert all(once[name].equal(again[name]) for name in once)


def test_a_gradient_of_a_gradient_is_refused():
    """autograd's own way to refuse it leaves terms out without a word where it needs a part of the graph only."""
    case = Case(length=2)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    context, _, _ = kernel(evolution, tensors, masks)
    with pytest.raises(RuntimeError, match="--ea-plain can"):
        torch.autograd.grad(context.sum(), tensors["q"], create_graph=True)


def test_checkpointed_layers_drop_the_same():
    case = Case(length=2, masks="padding rows")
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)

    def checkpointed(*arguments, **options):
        return torch.utils.checkpoint.checkpoint(kernel, *arguments, use_reentrant=False, **options)

    found = []
    for run in (kernel, checkpointed):
        torch.manual_seed(7)
        found.append(results(run, evolution, tensors, masks, dropout=0.4))
    assert all(found[0][name].equal(found[1][name]) for name in found[0])


@pytest.mark.parametrize("rule", ["evolving", "predictive", "realformer"])
def test_no_map_is_kept_for_the_backward_pass(rule):
    """But for the inputs, which others keep anyway."""
    case = Case(masks="padding", rule=rule)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        gpu.attend(call_of(evolution, tensors, masks, need_weights=False))
    maps = [x for x in saved if x is not None and x.shape == (2, 3, 5, 6)]
    assert [x.data_ptr() for x in maps] == [tensors["previous"].data_ptr()]


@pytest.mark.slow
def test_in_a_model(monkeypatch):
    """All three kinds of attention take the kernels, the last one too, which is asked for its weights."""
    monkeypatch.setattr(trial, "passed", lambda variant: True)  # see "the trial" below
    monkeypatch.setattr(cpu, "knows", lambda call: False)
    calls, attend = [], gpu.attend
    monkeypatch.setattr(gpu, "attend", lambda call: calls.append(call) or attend(call))
    gradients = []
    for flags in ([], ["--ea-plain"]):
        torch.manual_seed(1)
        model = build("ea_transformer_base", *flags, train=True).to(DEVICE)
        source, target = batch([3, 1], left_pad=True).to(DEVICE), batch([1, 2], eos_first=True).to(DEVICE)
        output, _ = model(source, None, target)
        gradients.append([output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))])
    assert len(calls) == 3 + 2 + 2
    assert sum(call.need_weights for call in calls) >= 1
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


def test_float32_under_autocast():
    case = Case(ENCODER, 2, 3)
    torch.manual_seed(3)
    evolution, tensors = evolution_of(case), tensors_of(case)
    expected = gpu.attend(call_of(evolution, tensors, masks_of(case)))
    with torch.autocast(DEVICE, BFLOAT):
        result = gpu.attend(call_of(evolution, tensors, masks_of(case)))
    assert torch.equal(result.context, expected.context)
    result.context.sum().backward()
    assert tensors["q"].grad.isfinite().all()


# ---- the dispatcher


@pytest.mark.slow
def test_compile_and_export_keep_the_kernels():
    case = Case(ENCODER, 2, 3, 3, 4, "padding rows", learn=True)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)

    def attention(q, k, v, previous):
        own = {"q": q, "k": k, "v": v, "previous": previous}
        return gpu.attend(call_of(evolution, own, masks, need_weights=False, dropout=0.5))[:2]

    def gradients(run):
        torch.manual_seed(2)
        outputs = run(*tensors.values())
        return [*outputs, *torch.autograd.grad(sum((x * probe(x)).sum() for x in outputs), list(tensors.values()))]

    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for mine, true in zip(gradients(compiled), gradients(attention), strict=True):
        torch.testing.assert_close(mine, true)

    class Module(torch.nn.Module):
        def forward(self, *vectors):
            return attention(*vectors)

    exported = torch.export.export(Module(), tuple(tensors.values()))
    assert "evolving_attention.gpu_forward" in str(exported.graph)


def test_operations_are_counted():
    case = Case(DECODER, 2, 3, 3, 4, previous=False, width=8, batch=1)
    evolution, tensors = evolution_of(case), tensors_of(case)
    with FlopCounterMode(display=False) as counter:
        result = gpu.attend(call_of(evolution, tensors, masks_of(case), need_weights=False))
        result.context.sum().backward()
    pixels = 2 * 3 * 4
    assert counter.get_total_flops() == 2 * pixels * (7 * 8 + 4 * 2 * 6)


def test_the_operation_is_declared_rightly():
    case = Case(ENCODER, 2, 3, 3, 4, "padding rows")
    arguments = gpu.arguments_of(call_of(evolution_of(case), tensors_of(case), masks_of(case)))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.evolving_attention.gpu_forward.default, arguments, test_utils=checks)


# ---- what it refuses


def small_call(**options):
    """The quickest call: one head, k = 1, a sentence of two words."""
    case = Case(heads=1, k=1, length=2, columns=2, dtype=options.pop("dtype", SINGLE), previous=False, batch=1, width=1)
    options = {"keep_map": False, "need_weights": False, **options}
    return call_of(evolution_of(case), tensors_of(case), masks_of(case), **options)


def test_refuses_what_it_does_not_know(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "passed", lambda variant: tried.append(variant) or True)
    call = small_call()
    assert gpu.knows(call)
    assert len(tried) == 1
    many, wide = torch.zeros(1, 17, 2, 1, device=DEVICE), torch.zeros(1, 1, 2, 129, device=DEVICE)
    refused = [
        small_call(dtype=DOUBLE),
        replace(call, q=many, k=many, v=many),
        replace(call, q=wide, k=wide, v=wide),
        replace(call, v=wide[..., :2]),
        replace(call, step=True),
        replace(call, above=torch.zeros(1, 1, 0, 2, device=DEVICE)),
        replace(call, q=call.q.repeat(2, 1, 1, 1)),
        replace(call, kernel_size=2),
        replace(call, dropout=1.5),
        replace(call, coefficients=call.coefficients._replace(c=torch.ones((), dtype=DOUBLE, device=DEVICE))),
    ]
    assert not any(map(gpu.knows, refused))
    assert len(tried) == 1
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        assert not gpu.knows(call)


def test_says_once_why_more_heads_are_refused(caplog):
    many = torch.zeros(1, 17, 2, 1, device=DEVICE)
    call = replace(small_call(), q=many, k=many, v=many)
    assert not gpu.knows(call)
    assert not gpu.knows(call)
    (line,) = caplog.messages
    assert "16 heads" in line
    assert "has 17" in line


def test_says_why_it_cannot_run(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "evolving_attention.kernels.gpu.operation", None)
    monkeypatch.delattr(gpu, "operation", raising=False)
    with caplog.at_level(logging.WARNING):
        assert not gpu.knows(small_call())
        assert not gpu.knows(small_call())
    (line,) = caplog.messages
    assert "slower way on the GPU" in line
    assert "kernels.gpu.operation" in line


def test_triton_is_imported_only_when_it_is_needed():
    program = """
import sys, torch
from evolving_attention import evolution, kernels
one = torch.ones(1, 1, 1, 1)
call = kernels.Call(one, one, one, 1.0, evolution.Geometry.ENCODER_SELF, 3, evolution.LOGITS_ONLY)
assert not kernels.gpu.knows(call)
kernels.kernel_for(call)
assert "evolving_attention.kernels.gpu" in sys.modules
assert "evolving_attention.kernels.gpu.operation" not in sys.modules
"""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    done = warm.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ---- the trial


@pytest.fixture
def small_trial(monkeypatch):
    """The trial's problems at their smallest: the interpreter is slow."""
    monkeypatch.setattr(trial, "SIZES", {True: (3, 4), False: (3, 4)})


def variant(**options):
    plain = {"dtype": SINGLE, "heads": 2, "kernel_size": 3, "width": 16, "unit": 8, "short": True, "gradients": True}
    return trial.Variant(torch.device(DEVICE), **{**plain, **options})


@pytest.mark.parametrize(
    "options",
    [{"dtype": BFLOAT}, {"dtype": HALF, "kernel_size": 5, "unit": 1}, {"kernel_size": 0, "short": False}],
    ids=["bfloat16", "float16", "none"],
)
def test_trial_passes_what_is_right(small_trial, options):
    """With room to spare: on another device rounding differs."""
    tried = variant(**options)
    errors = trial.errors(tried)
    assert {"the context", "A_logit", "the gradient of q", "the gradient of given"} <= errors.keys()
    assert max(errors.values()) < trial.TOLERANCE[tried.dtype] / 1.5


@pytest.mark.parametrize(
    ("function", "index"), [*(("forward", index) for index in (0, 1, 3)), *(("backward", index) for index in range(6))]
)
def test_trial_finds_a_kernel_that_is_wrong(monkeypatch, small_trial, caplog, function, index):
    right = getattr(operation, function)

    def wrong(*arguments):
        found = right(*arguments)
        found[index].mul_(1.25)
        return found

    monkeypatch.setattr(operation, function, wrong)
    tried = variant(heads=1, kernel_size=1)
    assert not trial.passed(tried)
    assert not trial.passed(tried)
    (line,) = caplog.messages
    assert "differs from the plain composition's by" in line
    assert "a convolution of size 1, short maps, float32" in line


def test_sizes_that_get_other_machine_code_are_tried_by_themselves(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "find_difference", lambda variant: tried.append(variant) or "")
    call, mask = small_call(), torch.zeros(1, 1, 2, 2, device=DEVICE, dtype=torch.bool)
    same = [
        call,
        replace(call, geometry=DECODER, need_weights=True, keep_map=True, hidden=mask, masked=mask),
        replace(call, given=torch.zeros(1, 1, 2, 2, device=DEVICE), dropout=0.1),
        replace(call, previous=torch.zeros(1, 1, 2, 2, device=DEVICE), coefficients=call.coefficients._replace(d=1.0)),
    ]
    others = [
        small_call(dtype=HALF),
        replace(call, weight=None, bias=None),
        replace(call, k=call.k.repeat(1, 1, 40, 1), v=call.v.repeat(1, 1, 40, 1)),
    ]
    for _ in range(2):
        assert all(gpu.knows(call) for call in [*same, *others])
    assert len(tried) == 1 + len(others)
    with torch.no_grad():
        assert gpu.knows(call)
    assert len(tried) == 2 + len(others)


def test_a_verdict_is_kept_between_processes(monkeypatch, tmp_path, caplog):
    tried = []
    monkeypatch.setattr(trial, "_path", lambda variant: tmp_path / "gpu" / str(variant.heads))
    monkeypatch.setattr(
        trial, "find_difference", lambda variant: tried.append(variant) or ("" if variant.heads > 1 else "no")
    )
    for _ in range(2):
        monkeypatch.setattr(trial, "_verdicts", {})
        assert trial.passed(variant())
        assert not trial.passed(variant(heads=1))
    assert len(tried) == 2
    assert [line.endswith(": no") for line in caplog.messages] == [True, True]


def test_a_device_that_a_trial_breaks_ends_the_program(monkeypatch):
    def fail(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(trial, "find_difference", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    monkeypatch.setattr(trial, "_path", lambda variant: None)
    monkeypatch.setattr(trial, "_capturing", lambda device: False)
    with pytest.raises(RuntimeError, match=r"broke the device when it was tried for .*--ea-plain"):
        trial.passed(variant()._replace(device=torch.device("cuda")))


def test_what_a_compiler_says_last_is_in_the_log(monkeypatch, caplog):
    def fail(_):
        raise RuntimeError("at 12:4:\n    x = y\n    ^\nno such operation\n")

    monkeypatch.setattr(trial, "find_difference", fail)
    assert not trial.passed(variant())
    assert "RuntimeError: at 12:4: ... no such operation" in caplog.text


def test_short_memory_decides_nothing(monkeypatch, caplog):
    """A trial without memory leaves this call to the plain composition, and the next one is tried again."""

    def short(variant):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "find_difference", short)
    assert not trial.passed(variant(gradients=False))
    assert not caplog.messages
    monkeypatch.setattr(trial, "find_difference", lambda variant: "")
    assert trial.passed(variant(gradients=False))


def test_no_trial_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(trial, "find_difference", lambda variant: "")
    for capturing, verdict in ((True, False), (False, True), (True, True)):
        monkeypatch.setattr(trial, "_capturing", lambda device, capturing=capturing: capturing)
        assert trial.passed(variant()) == verdict


def test_trial_leaves_the_caller_as_he_was(small_trial):
    """Random numbers, modes, and hooks on saved tensors, which count what is saved."""
    saved = []
    torch.manual_seed(1)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x), torch.inference_mode():
        assert trial.passed(variant(heads=1, kernel_size=1))
        assert torch.is_inference_mode_enabled()
    assert not saved
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.rand(3).equal(after)


# ---- the compiler

#: heads, k, type, rows, columns, D: in each the machine code of both kernels has no room to spill
COMPILED = [
    (4, 3, HALF, 30, 30, 40),
    (8, 3, HALF, 256, 256, 64),
    (16, 5, HALF, 60, 60, 128),
    (4, 0, BFLOAT, 30, 30, 40),
]
#: these may
UNUSUAL = [(4, 3, SINGLE, 30, 30, 40)]


def without_gpu(capability):
    """Triton's driver for a GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    class NoGPU:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    triton.runtime.driver.set_active(NoGPU())


def arguments(heads, k, dtype, rows, columns, width):
    """The arguments of the operation's ``forward``, on numbers that mean nothing."""
    vectors = torch.zeros(max(rows, columns), 2, heads, width, dtype=dtype).permute(1, 2, 0, 3)
    q, keys = vectors[:, :, :rows], vectors[:, :, :columns]
    weight, bias = (
        (torch.zeros(heads, heads, k, k, dtype=dtype), torch.zeros(heads, dtype=dtype)) if k else (None, None)
    )
    return (
        q,
        keys,
        keys,
        *(None, None, weight, bias, None, None, None, None),
        [0.0, 1.0, 0.1, 0.0, 0.0],
        k == 0,
        0.1,
        [1, 1, 0],
        0.0,
        False,
    )


def compiled(capability, *case):
    """Registers and bytes of stack and shared memory of each kernel, compiled for a GPU that is not there."""
    import triton

    from evolving_attention.kernels.gpu import operation

    def compile_only(kernel, grid, arguments, key):
        made = kernel.warmup(*arguments, grid=grid, **operation.OPTIONS)
        used[f"{kernel.__name__} {arguments[-1]}"] = {
            **resources(triton, made.asm["cubin"]),
            "SHARED": made.metadata.shared,
        }

    used = {}
    without_gpu(capability)
    operation._run, run = compile_only, operation._run
    inputs = arguments(*case)
    context, a_logit, stats, _ = operation.forward(*inputs)
    operation.backward(context, a_logit, None, context, stats, None, *inputs)
    operation._run = run
    return used


def resources(triton, cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 86, 89, 90, 100])
def test_compiles_without_spills(capability):
    """In a process of its own: Triton here was imported for its interpreter.

    What it compiles is kept in Triton's own cache, by its source: a second time it takes a moment.
    """
    if not (Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this Triton has no compiler for NVIDIA")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cases = [*COMPILED, *UNUSUAL] if capability == 90 else COMPILED[:1]
    command = [sys.executable, __file__, str(capability), str(len(cases))]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(cases)
    for case, report in zip(cases, reports, strict=True):
        assert len(report) == (2 if max(case[3:5]) <= operation.SHORT else 6), report
        for kernel_name, used in report.items():
            assert used["SHARED"] <= 99 * 1024, f"{kernel_name} of {case} does not fit into an RTX 3090 or 4090: {used}"
            assert used["STACK"] == 0 or case in UNUSUAL, f"{kernel_name} spills for {case}: {used}"


def traced():
    """Which tensors torch.compile takes each kernel for to change, in forward and backward, without a GPU."""
    from torch._functorch.aot_autograd import aot_export_module
    from torch._subclasses.fake_tensor import FakeTensorMode

    from evolving_attention.kernels.gpu import operation  # noqa: F401  (declares the operation)

    class Attention(torch.nn.Module):
        def forward(self, q, weight, bias):
            given = (
                *(q, q, q, None, None, weight, bias, None, None, None, None),
                [0.0, 1.0, 0.1, 0.0, 0.0],
                False,
                0.1,
            )
            context, a_logit, _, _ = torch.ops.evolving_attention.gpu_forward(*given, [1, 1, 0], 0.0, False)
            return (context.float().sum() + a_logit.float().sum(),)

    without_gpu(90)
    with FakeTensorMode():
        inputs = [torch.empty(size, dtype=HALF, requires_grad=True) for size in ((2, 4, 30, 40), (4, 4, 3, 3), (4,))]
        graph, _ = aot_export_module(Attention(), inputs, trace_joint=True, output_loss_index=0)
    return [node.kwargs["tensors_to_clone"] for node in graph.graph.nodes if "tensors_to_clone" in node.kwargs]


@pytest.mark.slow
def test_compile_knows_what_the_kernels_change():
    """Else it would copy every input, or refuse. What is changed may not be given under two names."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = warm.run([sys.executable, __file__, "traced"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    forward, backward = json.loads(done.stdout)
    assert set(forward) == {"stats", "scratch", "a_logit", "context", "weights"}
    assert set(backward) == {"scratch", "inner", "grad", "grad_q", "grad_k", "grad_v", "grad_previous", "partial"}


def host_time(steps=30):
    """Milliseconds of the host for forward and backward of 18 attentions, a stock one's and ours, launches stubbed.

    Sentences of one token, on the CPU: what PyTorch's operations compute there takes no time beside their calls.
    """
    from evolving_attention.kernels.gpu import operation

    class Nothing:
        def __getitem__(self, grid):
            return lambda *arguments: None

    class Compiled(dict):
        def get(self, key):
            return Nothing()

    operation._compiled = Compiled()
    torch.set_num_threads(1)
    dim, heads = 160, 4
    x = torch.zeros(1, 1, dim, requires_grad=True)
    weight, bias = (torch.nn.Parameter(torch.zeros(size)) for size in ((heads, heads, 3, 3), (heads,)))
    linear = [[torch.nn.Linear(dim, dim) for _ in range(4)] for _ in range(18)]
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool)
    coefficients = Evolution(ENCODER, heads, 3, 0.1, 0.1).coefficients(True)

    def stock(projections, x):
        q, k, v = (projection(x).view(1, 1, heads, -1).permute(1, 2, 0, 3) for projection in projections[:3])
        scores = (q * 0.1 @ k.transpose(2, 3)).masked_fill(mask, -torch.inf)
        weights = F.dropout(F.softmax(scores, -1, dtype=torch.float32).type_as(v), 0.1)
        return projections[3]((weights @ v).permute(2, 0, 1, 3).reshape(1, 1, dim))

    def fused(projections, x):
        q, k, v = (projection(x).view(1, 1, heads, -1).permute(1, 2, 0, 3) for projection in projections[:3])
        context = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)
        return projections[3](context.permute(2, 0, 1, 3).reshape(1, 1, dim))

    def ours(projections, x):
        nonlocal previous
        q, k, v = (projection(x).view(1, 1, heads, -1).permute(1, 2, 0, 3) for projection in projections[:3])
        call = Call(
            *(q, k, v, 0.1, ENCODER, 3, coefficients, weight, bias), hidden=mask, masked=mask, previous=previous,
            dropout=0.1, keep_map=True,
        )  # fmt: skip
        assert gpu.knows(call)
        context, previous, _, _ = gpu.attend(call)
        return projections[3](context.permute(2, 0, 1, 3).reshape(1, 1, dim))

    def step(attention):
        nonlocal previous
        previous, y = torch.zeros(1, heads, 1, 1, requires_grad=True), x
        for projections in linear:
            y = attention(projections, y)
        y.sum().backward()

    from evolving_attention.kernels.gpu import trial

    previous, found, gpu._interpreted, trial.find_difference = None, {}, lambda: True, lambda variant: ""
    operation.INTERPRETED, gpu._kernels = False, lambda: operation
    for attention in (stock, fused, ours):
        best = float("inf")
        for _ in range(steps):
            start = time.perf_counter()
            step(attention)
            best = min(best, time.perf_counter() - start)
        found[attention.__name__] = round(best * 1000, 2)
    return found


if __name__ == "__main__":  # test_gpu.py CAPABILITY [CASES], or test_gpu.py host, or test_gpu.py traced
    if sys.argv[1:] == ["host"]:
        print(json.dumps(host_time()))
    elif sys.argv[1:] == ["traced"]:
        print(json.dumps(traced()))
    else:
        for case in [*COMPILED, *UNUSUAL][: int((*sys.argv[2:], 99)[0])]:
            print(json.dumps(compiled(int(sys.argv[1]), *case)), flush=True)
