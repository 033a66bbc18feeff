"""The GPU kernels give the numbers of the plain composition, forward and every gradient.

Without a GPU they run in Triton's interpreter, which shows what they compute; ``test_compiles_for_an_H100`` then shows
that the compiler takes them, too: run as a program, this file compiles them and prints the registers they need.
"""

import gc
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
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
from torch.multiprocessing.reductions import StorageWeakRef

from evolving_attention.evolution import Evolution, Geometry
from evolving_attention.kernels import Call, cpu, gpu

ENCODER, DECODER, CROSS = Geometry
HALF, BFLOAT, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


if __name__ != "__main__":
    kernels, trial = import_kernels()


@pytest.fixture(autouse=True)
def _interpreter(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(kernels, "PARTIAL_SUMS", 3)  # of several rows each
    monkeypatch.setattr(trial, "_verdicts", {})
    gpu._kernels.cache_clear()  # other tests may have asked for it without the interpreter
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


# each geometry, k, mask, type and kind of length with most of the others
CASES = [
    Case(ENCODER, 4, 3, 4, 4, "padding rows"),
    Case(ENCODER, 1, 1, 1, 1, "", previous=False),
    Case(ENCODER, 8, 3, 3, 3, "padding rows all", BFLOAT, batch=1),
    Case(ENCODER, 2, 5, 5, 6, "rows", HALF, batch=1),
    Case(ENCODER, 5, 5, 3, 3, "padding", previous=False, batch=1),
    Case(ENCODER, 3, 3, 4, 16, "padding all", alpha=1, beta=1, batch=1),
    Case(DECODER, 4, 3, 5, 5, "future padding rows", previous=False),
    Case(DECODER, 3, 5, 5, 5, "future", HALF, previous=False, batch=1),
    Case(DECODER, 16, 1, 4, 4, "future", previous=False, batch=1),
    Case(DECODER, 3, 3, 2, 2, "future all", BFLOAT, previous=False, width=40, batch=1),
    Case(CROSS, 4, 3, 3, 9, "padding", HALF, previous=False),
    Case(CROSS, 4, 5, 4, 2, "padding rows", previous=False, batch=1),
    Case(CROSS, 8, 3, 3, 1, "rows all", BFLOAT, previous=False, batch=1),
    Case(CROSS, 16, 3, 2, 17, "padding", previous=False, batch=1),
    Case(CROSS, 9, 3, 3, 5, "", previous=False, width=70, batch=1),
]
# every rule with and without a convolution of each size, heads, masks, given logits, and shares that are learnt
RULES = [
    Case(ENCODER, 4, 3, 3, 5, "padding rows all", rule="predictive"),
    Case(ENCODER, 1, 5, 4, 4, "rows", HALF, rule="predictive", given=True, batch=1),
    Case(ENCODER, 8, 1, 2, 6, "padding", BFLOAT, rule="predictive", batch=1),
    Case(ENCODER, 16, 3, 2, 3, "padding rows", rule="predictive", given=True, batch=1),
    Case(ENCODER, 4, 3, 3, 3, "padding rows", rule="predictive", previous=False, batch=1),
    Case(ENCODER, 4, 1, 3, 5, "padding rows all", rule="residual", batch=1),
    Case(ENCODER, 16, 1, 2, 4, "rows", HALF, rule="residual", given=True, batch=1),
    Case(ENCODER, 8, 1, 3, 5, "padding rows", BFLOAT, rule="realformer", batch=1),
    Case(ENCODER, 1, 1, 3, 3, "all", rule="realformer", given=True, batch=1),
    Case(ENCODER, 4, 3, 3, 5, "padding rows", rule="evolving", given=True),
    Case(DECODER, 2, 3, 4, 4, "future padding", previous=False, given=True, batch=1),
    Case(CROSS, 2, 3, 4, 5, "padding", HALF, previous=False, given=True),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", alpha=0.0, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", beta=0.0, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", rule=(0.0, 0.7, 0.3, 0.5, 0.0), batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", rule=(0.6, 0.5, 0.3, 0.2, 0.9)),
]
LEARNT = [
    Case(ENCODER, 4, 3, 3, 5, "padding rows", learn=True),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", learn=True, alpha=0.0, beta=0.0, batch=1),
    Case(DECODER, 4, 3, 4, 4, "future padding rows", learn=True, previous=False),
    Case(CROSS, 2, 5, 3, 4, "padding", HALF, learn=True, previous=False, beta=0.0, batch=1),
    Case(ENCODER, 4, 3, 3, 5, "padding rows", BFLOAT, rule="predictive", learn=True, batch=1),
    Case(ENCODER, 2, 1, 3, 3, "rows", rule="predictive", learn=True, alpha=0.0, given=True, batch=1),
    Case(ENCODER, 4, 1, 3, 5, "padding rows", rule="residual", learn=True),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", rule=(0.6, 0.5, 0.3, 0.2, 0.9), learn=True),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", HALF, rule=(0.6, 0.5, 0.3, 0.2, 0.9), learn=True, given=True, batch=1),
    Case(ENCODER, 2, 3, 3, 4, "padding rows", rule=(0.6, 0.5, 0.3, 0.2, 0.9), learn=True, previous=False),
]
LONG = [  # more than one block of columns: of the convolution (64 and 128), of the softmax (2048 / heads)
    Case(ENCODER, 9, 3, 1, 140, "padding", batch=1),
    Case(CROSS, 2, 5, 2, 133, "rows", HALF, previous=False, batch=1),
    Case(ENCODER, 16, 3, 3, 259, "padding", BFLOAT, batch=1),
]


def name(case):
    parts = [case.geometry.name, case.heads, f"k{case.k}", f"{case.length}x{case.columns}", case.masks or "open"]
    parts += [str(case.dtype)[6:], case.rule if isinstance(case.rule, str) else "any"]
    parts += [word for word in ("learn", "given") if getattr(case, word)]
    return "-".join(map(str, parts)).replace(" ", "_")


@pytest.mark.parametrize("case", [*CASES, LONG[0], *RULES, *LEARNT], ids=name)
def test_as_plain(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("case", LONG[1:], ids=name)
def test_as_plain_in_several_blocks(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("heads", [6, 7, 10, 11, 12, 13, 14, 15])
def test_as_plain_for_the_counts_of_heads_that_are_not_above(heads):
    geometry = list(Geometry)[heads % 3]
    dtype = (SINGLE, HALF, BFLOAT, SINGLE)[heads % 4]
    columns = 3 if geometry != CROSS else 4
    check(Case(geometry, heads, 3, 3, columns, "padding rows", dtype, previous=geometry == ENCODER, batch=1))


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


@pytest.mark.parametrize("columns", [6, 16])
def test_two_layers(columns):
    """The map of the first goes to the second, and the gradient of the map back."""
    case = Case(length=3, columns=columns, masks="padding rows", heads=2)
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


def test_what_lies_beside_a_map_in_memory_does_not_matter():
    case = Case(columns=5, length=2, learn=True, rule=(0.6, 0.5, 0.3, 0.2, 0.9), given=True)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    expected = results(kernel, evolution, tensors, masks)
    for beyond in (11, 3):  # the pitch of the kernels' own maps, and another
        for name in ("previous", "given"):
            wide = F.pad(tensors[name].detach(), (0, beyond), value=torch.nan)
            tensors[name] = wide[..., :5].requires_grad_()
        found = results(kernel, evolution, tensors, masks)
        assert all(found[name].equal(true) for name, true in expected.items())


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
    case = Case(ENCODER, 10, 1, 16, 16, previous=False)
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
    case = Case(previous=False)
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
def test_one_map_is_kept_for_the_backward_pass(monkeypatch, rule):
    case = Case(masks="padding", rule=rule)
    evolution, tensors, masks = evolution_of(case), tensors_of(case), masks_of(case)
    made, new_maps = [], kernels.new_maps

    def counted(*arguments):
        maps = new_maps(*arguments)
        made.append(StorageWeakRef(maps.untyped_storage()))
        return maps

    monkeypatch.setattr(kernels, "new_maps", counted)
    tensors["previous"] = kernels.padded(tensors["previous"].detach()).requires_grad_()  # as a layer leaves it
    made.clear()
    result = kernel(evolution, tensors, masks, keep_map=False, need_weights=False)  # noqa: F841  (holds the graph)
    assert len(made) >= 2
    gc.collect()  # the interpreter leaves cycles
    assert sum(not maps.expired() for maps in made) == 1


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_in_a_model(monkeypatch, train):
    """All three kinds of attention take the kernels, the last one too, which is asked for its weights."""
    monkeypatch.setattr(trial, "passed", lambda call, may_try: True)  # see "the trial" below
    monkeypatch.setattr(cpu, "knows", lambda call: False)
    calls, attend = [], gpu.attend
    monkeypatch.setattr(gpu, "attend", lambda call: calls.append(call) or attend(call))
    gradients = []
    for flags in ([], ["--ea-plain"]):
        torch.manual_seed(1)
        model = build("ea_transformer_base", *flags, train=train).to(DEVICE)
        source, target = batch([3, 1], left_pad=True).to(DEVICE), batch([1, 2], eos_first=True).to(DEVICE)
        output, _ = model(source, None, target)
        gradients.append([output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))])
    assert len(calls) == 3 + 2 + 2
    assert sum(call.need_weights for call in calls) >= 1
    for ours, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-3, atol=1e-4)


# ---- what it refuses


def small_call(**options):
    """The quickest call: one head, k = 1, a sentence or two of a few words."""
    case = Case(heads=1, k=1, length=2, columns=2, dtype=options.pop("dtype", SINGLE), previous=False, batch=1, width=1)
    options = {"keep_map": False, "need_weights": False, **options}
    return call_of(evolution_of(case), tensors_of(case), masks_of(case), **options)


def test_refuses_what_it_does_not_know(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "passed", lambda call, may_try: tried.append(call) or True)
    call = small_call()
    assert gpu.knows(call)
    assert len(tried) == 1
    many = torch.zeros(1, 17, 2, 1, device=DEVICE)
    refused = [
        small_call(dtype=DOUBLE),
        replace(call, q=many, k=many, v=many),
        replace(call, step=True),
        replace(call, k=call.k[:, :, :1], v=call.v[:, :, :1]),
        replace(call, q=call.q[:, :, :1]),
        replace(call, above=torch.zeros(1, 1, 0, 2, device=DEVICE)),
        replace(call, kernel_size=2),
        replace(call, dropout=1.5),
        replace(call, coefficients=call.coefficients._replace(c=torch.ones((), dtype=DOUBLE, device=DEVICE))),
        replace(call, v=torch.view_as_complex(torch.zeros(1, 1, 2, 1, 2, device=DEVICE)).conj().imag),
    ]
    monkeypatch.setattr(gpu, "_capturing", lambda device: True)
    refused.append(replace(call, dropout=0.1))
    assert gpu.knows(call)
    assert not any(map(gpu.knows, refused))
    assert len(tried) == 2
    if DEVICE == "cpu":
        monkeypatch.delenv("TRITON_INTERPRET")
        assert not gpu.knows(call)


def test_says_why_it_cannot_run(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "evolving_attention.kernels.gpu.kernels", None)
    monkeypatch.delattr(gpu, "kernels", raising=False)
    with caplog.at_level(logging.WARNING):
        assert not gpu.knows(small_call())
        assert not gpu.knows(small_call())
    (line,) = caplog.messages
    assert "slower way on the GPU" in line
    assert "kernels.gpu.kernels" in line


def test_triton_is_imported_only_when_it_is_needed():
    program = """
import sys, torch
from evolving_attention import evolution, kernels
one = torch.ones(1, 1, 1, 1)
call = kernels.Call(one, one, one, 1.0, evolution.Geometry.ENCODER_SELF, 3, evolution.LOGITS_ONLY)
assert not kernels.gpu.knows(call)
kernels.attend(call)
assert "evolving_attention.kernels.gpu" in sys.modules
assert "evolving_attention.kernels.gpu.kernels" not in sys.modules
"""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    done = warm.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_is_kept_for_the_backward_pass_may_be_moved(monkeypatch):
    """As by ``torch.autograd.graph.save_on_cpu``: a copy has no room between its rows."""
    case = Case(ENCODER, 2, 3)
    gradients = []
    for pack in (lambda x: x, lambda x: x.clone()):
        torch.manual_seed(3)
        evolution, tensors = evolution_of(case), tensors_of(case)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            result = gpu.attend(call_of(evolution, tensors, masks_of(case)))
        loss = result.context.float().square().sum()
        gradients.append(torch.autograd.grad(loss, [tensors["q"], tensors["v"], evolution.conv.weight]))
    for kept, moved in zip(*gradients, strict=True):
        assert torch.equal(kept, moved)


def test_float32_under_autocast(monkeypatch):
    """Of a projection that gives float32, such as one of float32 alone."""
    case = Case(ENCODER, 2, 3)
    torch.manual_seed(3)
    evolution, tensors = evolution_of(case), tensors_of(case)
    expected = gpu.attend(call_of(evolution, tensors, masks_of(case)))
    with torch.autocast(DEVICE, BFLOAT):
        result = gpu.attend(call_of(evolution, tensors, masks_of(case)))
    assert torch.equal(result.context, expected.context)
    result.context.sum().backward()
    assert tensors["q"].grad.isfinite().all()


@pytest.mark.parametrize("geometry", [ENCODER, DECODER], ids=lambda geometry: geometry.value)
def test_what_lies_between_the_rows_of_others_maps_has_no_effect(geometry, monkeypatch):
    """Not a number, for example: memory that nobody has written."""
    case = Case(geometry, 2, 3, previous=geometry is ENCODER, given=True, learn=True)
    found = []
    for filling in (0.0, float("nan")):
        torch.manual_seed(3)
        evolution, tensors = evolution_of(case), tensors_of(case)
        maps = {
            name: with_gaps(tensors[name], filling) for name in ("given", "previous") if tensors.get(name) is not None
        }
        result = gpu.attend(call_of(evolution, tensors | maps, masks_of(case), keep_map=True, need_weights=True))
        outputs = [result.context, result.a_logit, result.weights]
        grads = [with_gaps(torch.ones_like(output), filling) if output.dim() == 4 else None for output in outputs]
        grads[0] = torch.ones_like(result.context)
        wanted = [maps["given"], evolution.conv.weight, *evolution.parameters()]
        found.append([*outputs, *torch.autograd.grad(outputs, wanted, grads, allow_unused=True)])
    for zeros, anything in zip(*found, strict=True):
        assert (zeros is None and anything is None) or torch.equal(zeros, anything)


def with_gaps(maps, filling):
    """The same map, with this between its rows."""
    whole = maps.new_full((*maps.shape[:3], -(-maps.size(3) // 16) * 16), filling)
    whole[..., : maps.size(3)] = maps.detach()
    return whole[..., : maps.size(3)].requires_grad_(maps.requires_grad)


# ---- the trial


@pytest.fixture
def small_trial(monkeypatch):
    """The trial's problem at its smallest: the interpreter is slow."""
    monkeypatch.setattr(trial, "_like", lambda size, most: 6)


@pytest.mark.parametrize(
    "case",
    [
        Case(ENCODER, 2, 3, masks="padding rows", dtype=BFLOAT, learn=True),
        Case(ENCODER, 1, 1, masks="padding rows", dtype=HALF, rule="predictive", given=True),
        Case(ENCODER, 4, 1, rule="realformer"),
        Case(DECODER, 2, 3, 4, 4, "future", HALF, previous=False),
        Case(CROSS, 1, 3, masks="padding", previous=False, dtype=BFLOAT, width=33),
    ],
    ids=name,
)
def test_trial_passes_what_is_right(monkeypatch, case):
    """With room to spare: on another device rounding differs."""
    monkeypatch.setattr(trial, "_like", lambda size, most: 5)
    variant = trial.Variant.of(call_of(evolution_of(case), tensors_of(case), masks_of(case), dropout=0.1))
    errors = trial.errors(variant)
    assert {"the context", "A_logit", "the weights", "the gradient of v"} <= errors.keys()
    assert ("the gradient of a to e" in errors) == case.learn
    assert ("the gradient of given" in errors) == case.given
    assert max(errors.values()) < trial.tolerance(variant) / 2


def changed(function, index):
    """A function of the kernels with one of its results, the one with this number or name, a quarter too large."""

    def wrong(*arguments, **options):
        found = function(*arguments, **options)
        result = found if index is None else getattr(found, index) if isinstance(index, str) else found[index]
        if result is not None:
            result.mul_(1.25)
        return found

    return wrong


@pytest.mark.parametrize(
    ("broken", "index"),
    [
        ("mix", 0),
        ("product", None),
        ("evolve", "a_logit"),
        ("evolve", "probs"),
        ("evolve", "weights"),
        ("evolve", "totals"),
        ("soften_backward", 0),
        ("soften_backward", 1),
        ("mix_backward", "previous"),
        ("mix_backward", "weight"),
        ("mix_backward", "bias"),
        ("mix_backward", "shares"),
    ],
)
def test_trial_finds_a_kernel_that_is_wrong(monkeypatch, small_trial, caplog, broken, index):
    case = Case(ENCODER, 1, 1, dtype=BFLOAT, masks="padding", learn=True)
    call = call_of(evolution_of(case), tensors_of(case), masks_of(case))
    monkeypatch.setattr(kernels, broken, changed(getattr(kernels, broken), index))
    with caplog.at_level(logging.WARNING):
        assert not gpu.knows(call)
        assert not gpu.knows(call)
    (line,) = caplog.messages
    assert "differs from the plain composition's by" in line
    assert "encoder self-attention, with a convolution, k = 1, 1 heads, bfloat16" in line


def test_trial_finds_products_of_fewer_bits(monkeypatch, small_trial, caplog):
    """As TF32's, which leave out the last 13 bits of a factor."""
    case = Case(ENCODER, 1, 1, previous=False)
    call, mix = call_of(evolution_of(case), tensors_of(case), masks_of(case)), kernels.mix

    def short(x):
        return (x.contiguous().view(torch.int32) & -(2**13)).view(SINGLE)

    monkeypatch.setattr(kernels, "mix", lambda q, k, *rest: mix(short(q), short(k), *rest))
    assert not gpu.knows(call)
    assert "of numbers with many bits, differs" in caplog.text


def test_a_layer_that_is_computed_again_takes_the_same_way(monkeypatch, caplog):
    """fairseq computes a checkpointed layer without gradients first: both must draw dropout in one way."""
    tried = []
    monkeypatch.setattr(trial, "errors", lambda variant: tried.append(variant) or {})
    call = small_call(dropout=0.1)
    with torch.no_grad():
        assert gpu.knows(call)
    assert gpu.knows(call)
    assert len(tried) == 1
    assert tried[0].gradients

    def short(variant):
        raise RuntimeError("Triton Error [CUDA]: out of memory")

    monkeypatch.setattr(trial, "errors", short)
    assert not gpu.knows(small_call(dropout=0.1, need_weights=True))
    monkeypatch.setattr(trial, "errors", lambda variant: {})
    assert not gpu.knows(small_call(dropout=0.1, need_weights=True))
    assert "memory was short" in caplog.text


def test_sizes_that_get_other_machine_code_are_tried_by_themselves():
    cases = [Case(heads=1, k=1, length=3, columns=size, previous=False) for size in (48, 50, 64, 1000, 1008)]
    columns = [trial.Variant.of(call_of(evolution_of(case), tensors_of(case), {})).columns for case in cases]
    assert columns[:3] == [59, 59, 59]
    assert columns[3] == columns[4] > 256, "and none of a multiple of 16, whose numbers would hide a wrong mask"


def test_a_device_that_a_trial_breaks_ends_the_program(monkeypatch):
    variant = trial.Variant.of(small_call())._replace(device=torch.device("cuda"))

    def fail(_):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(trial, "errors", fail)
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    with pytest.raises(RuntimeError, match=r"broke the device when it was tried for .*--ea-plain"):
        trial._try(variant)


def test_what_a_compiler_says_last_is_in_the_log(monkeypatch, caplog):
    """It begins with the place."""

    def fail(_):
        raise RuntimeError("at 12:4:\n    x = y\n    ^\nno such operation\n")

    monkeypatch.setattr(trial, "errors", fail)
    assert not trial._try(trial.Variant.of(small_call()))
    assert "RuntimeError: at 12:4: ... no such operation" in caplog.text


def test_each_variant_is_tried_once(monkeypatch):
    tried = []
    monkeypatch.setattr(trial, "errors", lambda variant: tried.append(variant) or {})
    call = small_call()
    one = torch.ones((), device=DEVICE, requires_grad=True)
    variants = [
        call,
        small_call(dtype=HALF),
        small_call(dropout=0.1),
        small_call(need_weights=True),
        small_call(keep_map=True),
        small_call(given=torch.zeros(1, 1, 2, 2, device=DEVICE)),
        small_call(hidden=torch.zeros(1, 1, 2, 2, device=DEVICE, dtype=torch.bool)),
        small_call(masked=torch.zeros(1, 1, 2, 2, device=DEVICE, dtype=torch.bool)),
        replace(call, geometry=DECODER),
        replace(call, coefficients=call.coefficients._replace(c=one)),
        replace(call, coefficients=call.coefficients._replace(c=0.0)),
        replace(call, coefficients=call.coefficients._replace(e=0.5)),
        replace(call, weight=None, bias=None),
        replace(call, previous=torch.zeros(1, 1, 2, 2, device=DEVICE), coefficients=call.coefficients._replace(d=1.0)),
        replace(call, k=call.k.expand(1, 1, 2, 1).repeat(1, 1, 20, 1), v=call.v.repeat(1, 1, 20, 1)),
    ]
    for _ in range(2):
        assert all(gpu.knows(variant) for variant in variants)
    assert len(tried) == len(variants) - 1  # c = 0 is no convolution
    with torch.no_grad():
        assert gpu.knows(call)
    assert len(tried) == len(variants)


def test_short_memory_decides_nothing(monkeypatch, caplog):
    """A trial without memory leaves this call to the plain composition, and the next one is tried again."""

    def short(variant):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trial, "errors", short)
    assert not gpu.knows(small_call())
    assert not caplog.messages
    monkeypatch.setattr(trial, "errors", lambda variant: {})
    assert gpu.knows(small_call())


def test_a_failing_variant_is_named_once(monkeypatch, caplog):
    tried = []

    def fail(variant):
        tried.append(variant)
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(trial, "errors", fail)
    with caplog.at_level(logging.WARNING):
        assert not gpu.knows(small_call())
        assert not gpu.knows(small_call())
        assert not gpu.knows(small_call(dtype=HALF))
    assert len(tried) == len(caplog.messages) == 2
    assert caplog.messages[0].endswith("RuntimeError: no such instruction ... and more")


def test_no_trial_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr(trial, "errors", lambda variant: {})
    monkeypatch.setattr(gpu, "_capturing", lambda device: True)
    assert not gpu.knows(small_call())
    monkeypatch.setattr(gpu, "_capturing", lambda device: False)
    assert gpu.knows(small_call())
    monkeypatch.setattr(gpu, "_capturing", lambda device: True)
    assert gpu.knows(small_call())


def test_trial_leaves_the_caller_as_he_was(small_trial):
    """Random numbers, modes, and hooks on saved tensors, which count what is saved."""
    saved = []
    call = small_call(dropout=0.1)
    before = torch.get_rng_state()
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        assert gpu.knows(call)
        assert torch.is_grad_enabled()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert gpu.knows(small_call(dropout=0.2))
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
    with torch.inference_mode():
        assert gpu.knows(small_call(keep_map=True))
        assert torch.is_inference_mode_enabled()
    assert not saved
    # ``small_call`` itself draws its tensors
    torch.set_rng_state(before)
    expected = torch.rand(3)
    torch.set_rng_state(before)
    trial._verdicts.clear()
    assert gpu.knows(call)
    assert torch.rand(3).equal(expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_first_use_in_a_checkpointed_layer(small_trial, reentrant):
    call = small_call(dropout=0.3)

    def layer(q):
        own = replace(call, q=q)
        assert gpu.knows(own)
        return gpu.attend(own).context

    def checkpointed(q):
        return torch.utils.checkpoint.checkpoint(layer, q, use_reentrant=reentrant)

    gradients = []
    for run in (layer, checkpointed):
        trial._verdicts.clear()
        torch.manual_seed(1)
        q = call.q.detach().clone().requires_grad_()
        run(q).square().sum().backward()
        gradients.append(q.grad)
    assert gradients[0].equal(gradients[1])


def test_two_threads_at_a_first_use(monkeypatch):
    tried, both_are_here = [], threading.Barrier(2)

    def slow(variant):
        tried.append(variant)
        threading.Event().wait(0.2)
        return {}

    monkeypatch.setattr(trial, "errors", slow)
    call = small_call()

    def use(_):
        both_are_here.wait()
        return gpu.knows(call)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(use, range(2))) == [True, True]
    assert len(tried) == 1


# ---- the compiler

#: (heads, k, type, geometry, T, S, D) and what is unusual; no registers may spill in the first ones
COMPILED = [
    (8, 3, HALF, ENCODER, 256, 256, 64, {}),
    (8, 3, SINGLE, ENCODER, 250, 250, 64, {}),
    (8, 3, BFLOAT, CROSS, 30, 33, 64, {"previous": False}),
    (4, 3, HALF, DECODER, 30, 30, 40, {"previous": False}),
    (4, 3, SINGLE, ENCODER, 60, 60, 40, {}),
    (4, 3, BFLOAT, ENCODER, 250, 250, 40, {"dropout": 0.0}),
    (4, 3, HALF, ENCODER, 60, 60, 40, {"separate": True}),
    (8, 3, HALF, CROSS, 30, 33, 64, {"previous": False, "need_weights": True}),
    (4, 1, HALF, ENCODER, 60, 60, 40, {"convolved": False, "separate": True}),
]
UNUSUAL = [
    (1, 1, HALF, ENCODER, 1, 1, 1, {}),
    (16, 5, SINGLE, CROSS, 100, 130, 64, {"previous": False}),
    (16, 3, BFLOAT, DECODER, 40, 40, 64, {"previous": False}),
    (5, 3, HALF, ENCODER, 1, 20, 256, {"convolved": False, "separate": True, "learn": True}),
    (8, 3, HALF, ENCODER, 250, 250, 64, {"learn": True}),
    (8, 3, SINGLE, ENCODER, 60, 60, 64, {"separate": True, "learn": True, "given": True}),
]


def compiled(capability, heads, k, dtype, geometry, length, columns, width, options):
    """Registers and bytes of stack of each kernel as the launchers call it, compiled for a GPU that is not there."""
    import triton
    from triton.backends.compiler import GPUTarget

    from evolving_attention.kernels.gpu import kernels

    class NoGPU:
        def get_current_target(self):
            return GPUTarget("cuda", capability, 32)

        def get_current_device(self):
            return 0

        def get_current_stream(self, device=None):
            return 0

    class Compiler:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            return lambda *given, **constants: found.append(self.kernel.warmup(*given, grid=grid, **constants))

    found = []
    triton.runtime.driver.set_active(NoGPU())
    names = [name for name in vars(kernels) if name.endswith("_kernel")]
    originals = {name: getattr(kernels, name) for name in names}
    for name in names:
        setattr(kernels, name, Compiler(originals[name]))
    launch(kernels, heads, k, dtype, geometry, length, columns, width, **options)
    for name in names:
        setattr(kernels, name, originals[name])
    return {kernel.metadata.name: resources(triton, kernel.asm["cubin"]) for kernel in found}


def launch(
    kernels, heads, k, dtype, geometry, length, columns, width, previous=True, dropout=0.1, convolved=True,
    separate=False, learn=False, given=False, need_weights=False,
):  # fmt: skip
    """The launchers one after the other, on numbers that mean nothing."""
    split = torch.zeros(max(length, columns), 2, heads, width, dtype=dtype).permute(1, 2, 0, 3)
    q, keys = split[:, :, :length], split[:, :, :columns]
    maps = kernels.new_maps(q, columns)
    hidden = torch.zeros(2, 1, length, columns, dtype=torch.bool)
    weight = torch.zeros(heads, heads, k, k, dtype=dtype) if convolved else None
    bias = torch.zeros(heads, dtype=dtype) if convolved else None
    taps, drop = kernels.Taps.of(geometry, k), kernels.Dropout.of(dropout)
    share = torch.zeros((), dtype=dtype) if learn else 0.5
    before, scores = (maps if previous else None), (maps if given else None)
    of_before = share if previous else 0.0
    mixed, carried = ((of_before, share) if convolved else None), ((of_before, share) if separate else None)
    shares = kernels.Shares(
        *(mixed or (0.0, 0.0)), share if convolved else 0.0, *(carried or (0.0, 0.0)), convolved, separate
    )
    kernels.mix(q, keys, scores, before, hidden, 0.125, mixed, carried)
    maps_of = (maps if convolved else None, maps if separate else None)
    evolved = kernels.evolve(*maps_of, weight, bias, hidden[:, :, :1], taps, shares, drop, need_weights)
    grad_map = maps if previous else None
    _, grad_conv = kernels.soften_backward(evolved, hidden, grad_map, evolved.weights, maps, drop)
    kernels.mix_backward(maps_of[0], before, maps, weight, bias, hidden, grad_conv, maps, taps, shares)


def resources(triton, cubin):
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True).stdout
    return {key: int(value) for key, value in re.findall(r"(REG|STACK):(\d+)", text)}


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, 1])
def test_compiles_for_an_H100(part):
    """In a process of its own: Triton here was imported for its interpreter.

    What it compiles is kept in Triton's own cache, by its source: a second time it takes a moment.
    """
    if not (Path(kernels.triton.__file__).parent / "backends/nvidia/bin/cuobjdump").exists():
        pytest.skip("this Triton has no compiler for NVIDIA")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, __file__, "90", str(part), "2"]
    done = warm.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    cases = [*COMPILED, *UNUSUAL][part::2]
    reports = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(reports) == len(cases)
    for case, report in zip(cases, reports, strict=True):
        if case not in COMPILED:
            continue
        assert len(report) == 4, report
        for kernel_name, used in report.items():
            assert used["STACK"] == 0, f"{kernel_name} spills for {case}: {used}"


if __name__ == "__main__":  # test_gpu.py [CAPABILITY [PART PARTS]]
    capability, part, parts = [int(word) for word in sys.argv[1:]] + [90, 0, 1][len(sys.argv) - 1 :]
    for case in [*COMPILED, *UNUSUAL][part::parts]:
        print(json.dumps(compiled(capability, *case)), flush=True)
