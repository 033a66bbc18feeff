"""Calls of attention to test a kernel with, and the plain composition's results for them.

Axes: B batch, K heads, T target (query) length, S source (key) length, D width of a head.
"""

from copy import deepcopy
from functools import partial
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F

from evolving_attention.call import Call
from evolving_attention.evolution import Coefficients, Evolution, Geometry

#: five numbers that no rule has
ANY = (0.2, 0.7, 0.4, 0.9, -0.3)


class AnyShares(Evolution):
    """The sum of evolution.py with any five numbers; parameters, where they are learnt."""

    def __init__(self, geometry, heads, kernel_size, shares, learnt=False):
        super().__init__(geometry, heads, kernel_size)
        numbers = [torch.nn.Parameter(torch.tensor(share)) for share in shares] if learnt else shares
        self.shares = torch.nn.ParameterList(numbers) if learnt else list(numbers)

    def coefficients(self, has_previous):
        return Coefficients(*self.shares)


class Case(NamedTuple):
    """One call. ``masks``: "" or words of padding, scattered, rows, future, all (see ``masks_of``).

    ``rule``: a rule's name, or any five numbers. ``learn``: its shares are parameters.
    """

    geometry: Geometry = Geometry.ENCODER_SELF
    heads: int = 3
    k: int = 3
    length: int = 5
    columns: int = 6
    masks: str = ""
    dtype: torch.dtype = torch.float32
    rule: str | tuple = "evolving"
    alpha: float = 0.4
    beta: float = 0.3
    learn: bool = False
    previous: bool = True
    given: bool = False
    width: int = 4
    batch: int = 2
    device: str = "cpu"


class Problem(NamedTuple):
    """The inputs of a call: a module, q, k, v (and previous, given) by name, hidden and masked by name."""

    evolution: Evolution
    tensors: dict
    masks: dict

    def call(self, **options):
        return call_of(*self, **options)


def case_id(case):
    """The id of a test."""
    parts = [case.geometry.name, case.heads, f"k{case.k}", f"{case.length}x{case.columns}", case.masks or "open"]
    parts += [str(case.dtype)[6:], case.rule if isinstance(case.rule, str) else "any"]
    parts += [word for word in ("learn", "given") if getattr(case, word)]
    return "-".join(map(str, parts)).replace(" ", "_")


def problem(case):
    return Problem(evolution_of(case), tensors_of(case), masks_of(case))


def masks_of(case):
    """True = masked. A word of ``case.masks`` may mask keys or the future, hide queries, or mask all keys of a row."""
    masked, hidden = [], []
    shape = (case.batch, 1, case.length, case.columns)
    if "padding" in case.masks:
        padding = torch.zeros(case.batch, 1, 1, case.columns, dtype=torch.bool)
        padding[0, ..., -2:] = True
        masked.append(padding)
    if "scattered" in case.masks:  # the first sentence is nothing but padding
        padding = torch.rand(case.batch, 1, 1, case.columns) < 0.3
        padding[0] = True
        masked.append(padding)
        hidden.append(torch.rand(case.batch, 1, case.length, 1) < 0.3)
    if "future" in case.masks:
        masked.append(torch.ones(shape[2:], dtype=torch.bool).triu(1)[None, None])
    if "all" in case.masks:
        masked.append(torch.zeros(shape, dtype=torch.bool))
        masked[-1][-1, 0, 1] = True
    if "rows" in case.masks:
        rows = torch.zeros(case.batch, 1, case.length, 1, dtype=torch.bool)
        rows[0, 0, -1] = True
        hidden.append(rows)
    masks = {"hidden": union([*masked, *hidden]), "masked": union(masked)}
    return {name: mask if mask is None else mask.to(case.device) for name, mask in masks.items()}


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
    return evolution.to(case.device, case.dtype)


def tensors_of(case):
    """q, k, v as views of T x B x C, as a model has them; a map of the layer before; logits that are given."""

    def split(length):
        x = torch.randn(length, case.batch, case.heads * case.width).to(case.device, case.dtype)
        return x.view(length, case.batch, case.heads, case.width).permute(1, 2, 0, 3).requires_grad_()

    def maps():
        x = torch.randn(case.batch, case.heads, case.length, case.columns)
        return x.to(case.device, case.dtype).requires_grad_()

    tensors = {"q": split(case.length), "k": split(case.columns), "v": split(case.columns)}
    return tensors | ({"previous": maps()} if case.previous else {}) | ({"given": maps()} if case.given else {})


def call_of(evolution, tensors, masks, **options):
    """The call of an attention with this module; it asks for A_logit and the weights."""
    conv = evolution.conv
    return Call(
        **{"scale": 0.6, "geometry": evolution.geometry},
        coefficients=evolution.coefficients("previous" in tensors),
        weight=None if conv is None else conv.weight,
        bias=None if conv is None else conv.bias,
        **{"keep_map": True, "need_weights": True, **tensors, **masks, **options},
    )


def plain(evolution, tensors, masks, keep=None):
    """The plain composition's context, A_logit and weights; ``keep``: what dropout multiplies by."""
    q, k, v = (tensors[name] for name in "qkv")
    logits = tensors["given"] if "given" in tensors else 0.6 * (q @ k.transpose(2, 3))
    a_logit = evolution(logits, masks["hidden"], tensors.get("previous"))
    masked = masks["masked"]
    scores = a_logit if masked is None else a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    dropped = weights if keep is None else weights * keep
    return dropped.to(v.dtype) @ v, a_logit, weights


def results(run, evolution, tensors, masks, **options):
    """Context, A_logit, weights, and all gradients of an uneven functional of them, by name."""
    outputs = dict(zip(("context", "a_logit", "weights"), run(evolution, tensors, masks, **options), strict=False))
    loss = sum((x * probe(x)).sum() for x in outputs.values() if x is not None)
    inputs = {**tensors, **dict(evolution.named_parameters())}
    gradients = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True)
    for (name, value), gradient in zip(inputs.items(), gradients, strict=True):
        if gradient is not None:
            assert (gradient.shape, gradient.dtype) == (value.shape, value.dtype), name
            outputs[f"gradient of {name}"] = gradient
    return {name: x.detach() for name, x in outputs.items() if x is not None}


def probe(x):
    """Weights of a sum, each number another."""
    return torch.linspace(-1, 2, x.numel(), device=x.device, dtype=x.dtype).view(x.shape)


def exact(evolution, tensors, masks):
    """The same inputs in float64."""
    double = {name: x.detach().double().requires_grad_() for name, x in tensors.items()}
    return Problem(deepcopy(evolution).double(), double, masks)


def compare(given, kernel, plain=plain):
    """Results and gradients: at most 1.5 times as far from float64's as the plain composition's are.

    float32: or as near as 1e-5 of the largest number. Half precision: or as near as rounding leaves the right result.
    Gradients of shares are measured by the largest of them: a sum of a million numbers of either sign may be near 0.
    """
    ours, theirs, truth = results(kernel, *given), results(plain, *given), results(plain, *exact(*given))
    assert ours.keys() == truth.keys() == theirs.keys()
    shares = [x.abs() for name, x in truth.items() if "shares." in name]
    for name, true in truth.items():
        mine, other = ours[name], theirs[name]
        assert mine.isfinite().all(), name
        if mine.dtype == torch.float32:
            largest = max(shares) if "shares." in name else true.abs().max()
            assert (mine - true).abs().max() <= max(1e-5 * largest, 1.5 * (other - true).abs().max()), name
        elif mine.dim() > 0:  # by chance, a single number may be as near as you like
            error, allowed = (mine - true).norm(), 1.5 * (other - true).norm()
            assert error <= max(allowed, 0.5 * torch.finfo(mine.dtype).eps * true.norm()), name
        else:
            assert (mine - true).abs() <= 8 * torch.finfo(mine.dtype).eps * max(true.abs(), 1), name


def close(ours, theirs):
    """1e-5 of the largest number of each result."""
    assert ours.keys() == theirs.keys()
    for name, true in theirs.items():
        assert (ours[name] - true).abs().max() <= 1e-5 * true.abs().max(), name


@torch.no_grad()
def check_steps(case, attend, at_once=1, beams=1):
    """Step by step, ``at_once`` rows each, a kernel gives the rows of the whole; neighbours may share their keys."""
    evolution, tensors, masks = problem(case)
    each = {name: x[::beams].repeat_interleave(beams, 0) if name in "kv" else x for name, x in tensors.items()}
    expected, q, k, v = plain(evolution, each, masks)[0], *(tensors[name] for name in "qkv")
    above = q.new_zeros(case.batch, case.heads, case.k - 1, 0)
    shape = case.batch, 1, case.length, case.columns
    for i in range(0, case.length, at_once):
        rows, seen = slice(i, i + at_once), slice(i + at_once if case.geometry == Geometry.DECODER_SELF else None)
        part = {name: None if x is None else x.expand(shape)[:, :, rows, seen] for name, x in masks.items()}
        vectors = {"q": q[:, :, rows], "k": k[::beams, :, seen], "v": v[::beams, :, seen]}
        if case.previous:
            vectors["previous"] = tensors["previous"][:, :, rows, seen]
        call = call_of(evolution, vectors, part, above=above, keep_map=False, need_weights=False)
        context, _, _, above = attend(call)
        tolerance = {"rtol": 1e-4, "atol": 1e-5} if case.dtype == torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
        torch.testing.assert_close(context, expected[:, :, rows], **tolerance)


def check_dropout(given, kernel, share):
    """The backward pass drops and scales the weights as the forward pass did.

    Values that are the unit matrix show which ones: D = S.
    """

    def seeded(*arguments):
        torch.manual_seed(5)
        return kernel(*arguments, dropout=share)

    v = given.tensors["v"]
    eye = torch.eye(v.size(2), device=v.device).expand_as(v)
    context, _, weights = seeded(given.evolution, {**given.tensors, "v": eye}, given.masks)
    keep = torch.where(weights > 0, context / weights, 1).detach()
    kept = keep[(keep > 0) & (weights > 0)]
    torch.testing.assert_close(kept, torch.full_like(kept, 1 / (1 - share)), rtol=1e-3, atol=0)
    close(results(seeded, *given), results(partial(plain, keep=keep), *given))


def with_threads(count, what):
    """The result of a function on so many threads of PyTorch."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return what()
    finally:
        torch.set_num_threads(before)


def check_share(case, attend, share):
    """Dropout keeps its share of each sentence, head, row and column; no two keep the same places. D = S."""
    given = problem(case)
    given.tensors["q"] = given.tensors["q"] / case.width**0.5  # else some weights are all but zero
    given.tensors["v"] = torch.eye(case.columns, device=case.device).expand(case.batch, case.heads, -1, -1)
    before, after = (attend(given.call(dropout=dropout)).context.detach() for dropout in (0.0, share))
    keep = (after / before).round(decimals=3)
    assert keep.unique().tolist() == [0, pytest.approx(1 / (1 - share), abs=1e-3)]
    kept = (keep > 0).double()
    spread = (share * (1 - share)) ** 0.5
    assert abs(kept.mean() - (1 - share)) < 4 * spread / kept.numel() ** 0.5
    for parts in (*(kept.movedim(axis, 0).flatten(1) for axis in range(4)), kept.flatten(0, 1).flatten(1)):
        assert (parts.mean(1) - (1 - share)).abs().max() < 5 * spread / parts.size(1) ** 0.5
        assert torch.corrcoef(parts).fill_diagonal_(0).abs().max() < 6 / parts.size(1) ** 0.5
    neighbours = torch.stack([kept[..., :-1].flatten(), kept[..., 1:].flatten()])
    assert torch.corrcoef(neighbours)[0, 1].abs() < 6 / neighbours.size(1) ** 0.5


def check_each_result(given, kernel):
    """The gradients of one result, where the others are not used."""
    inputs = [*given.tensors.values(), *given.evolution.parameters()]
    for number in range(3):
        ours, theirs = (
            torch.autograd.grad(way(*given)[number].square().sum(), inputs, allow_unused=True)
            for way in (kernel, plain)
        )
        for one, other in zip(ours, theirs, strict=True):
            assert (one is None) == (other is None)
            if other is not None:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
