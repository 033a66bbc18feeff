"""The CPU's kernel gives the plain composition's numbers, maps, context and every gradient, or refuses the call."""

import ctypes
import logging
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import warm
from helpers.shares import AnyShares
from torch import Tensor
from torch.testing import assert_close

from evolving_attention import kernels
from evolving_attention.evolution import RULES, Evolution, Geometry
from evolving_attention.kernels import Call, cpu
from evolving_attention.kernels.cpu import library as cpu_library

KINDS = list(Geometry)
BATCH = 3
SCALE = 0.4


@dataclass
class Problem:
    """Inputs of one attention; B = 3 sentences."""

    evolution: Evolution
    tensors: dict[str, Tensor]  # q, k, v, and where there are any: given, previous
    masks: dict[str, Tensor] = field(default_factory=dict)  # hidden, masked

    def call(self, **options) -> Call:
        return call_of(self.evolution, self.tensors, self.masks, **options)


def call_of(evolution, tensors, masks, **options) -> Call:
    conv = evolution.conv
    return Call(
        **{"scale": SCALE, "geometry": evolution.geometry, "kernel_size": evolution.kernel_size},
        coefficients=evolution.coefficients("previous" in tensors),
        weight=None if conv is None else conv.weight,
        bias=None if conv is None else conv.bias,
        **{**tensors, **masks, **options},
    )


def problem(evolution, lengths=(5, 7), depth=6, previous=True, masks=True, given=False) -> Problem:
    """One sentence of three is all padding; where masks are wanted some rows are hidden, and one has no keys."""
    geometry, heads = evolution.geometry, 1 if evolution.conv is None else evolution.conv.out_channels
    rows, columns = lengths if geometry == Geometry.ENCODER_DECODER else (lengths[0], lengths[0])
    q, k, v = (torch.randn(n, BATCH, heads, depth).permute(1, 2, 0, 3) for n in (rows, columns, columns))
    tensors = {"q": q, "k": k, "v": v}
    if given:
        tensors["given"] = torch.randn(BATCH, heads, rows, columns)
    if previous:
        tensors["previous"] = torch.randn(BATCH, heads, rows, columns)
    if not masks:
        return Problem(evolution, tensors)
    padded = torch.rand(BATCH, columns) < 0.3
    padded[0] = True
    masked = padded[:, None, None]
    if geometry == Geometry.DECODER_SELF:
        masked = masked | torch.ones(rows, columns, dtype=torch.bool).triu(1)
    if geometry == Geometry.ENCODER_DECODER:
        masked = masked.repeat(1, 1, rows, 1)
        masked[1, :, rows // 2] = True  # a row without keys, among others that have some
    return Problem(evolution, tensors, {"masked": masked, "hidden": masked | (torch.rand(BATCH, 1, rows, 1) < 0.3)})


def equation_4(geometry, heads=4, kernel_size=3, beta=0.3, **options) -> Problem:
    return problem(Evolution(geometry, heads, kernel_size, 0.4, beta), **options)


def plain(evolution, tensors, masks):
    """Context, A_logit and weights by PyTorch's operations one by one."""
    logits = tensors["given"] if "given" in tensors else SCALE * tensors["q"] @ tensors["k"].transpose(2, 3)
    a_logit = evolution(logits, masks.get("hidden"), tensors.get("previous"))
    masked = masks.get("masked")
    scores = a_logit if masked is None else a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    weights = F.softmax(scores, dim=-1)
    return weights @ tensors["v"], a_logit, weights


def kernel(evolution, tensors, masks, **options):
    call = call_of(evolution, tensors, masks, keep_map=True, need_weights=True, **options)
    assert kernels.kernel_for(call) is cpu
    return cpu.attend(call)[:3]


def run(way, given: Problem, dtype=torch.float32) -> dict[str, Tensor | None]:
    """Results and gradients by name, in some precision, for fixed uneven gradients of all results."""
    evolution = deepcopy(given.evolution).to(dtype)
    tensors = {name: x.detach().to(dtype).requires_grad_() for name, x in given.tensors.items()}
    torch.manual_seed(3)
    results = dict(zip(("context", "a_logit", "weights"), way(evolution, tensors, given.masks), strict=False))
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=dtype).view(x.shape)).sum() for x in results.values())
    leaves = {**tensors, **dict(evolution.named_parameters())}
    gradients = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    return {**results, **{f"gradient of {name}": x for name, x in zip(leaves, gradients, strict=True)}}


def compare(given: Problem, ours=kernel, theirs=plain):
    """As near to float64 as 1e-5 of the largest number, or as the plain composition's float32 times 1.5.

    Gradients of shares are measured by the largest: sums of a million numbers of either sign may come near zero.
    """
    exact, ours, theirs = run(theirs, given, torch.float64), run(ours, given), run(theirs, given)
    of_shares = [x.abs() for name, x in exact.items() if "shares." in name and x is not None]
    for name, truth in exact.items():
        if truth is None:  # it has no effect
            assert ours[name] is None or not ours[name].any(), name
            continue
        scale = (max(of_shares) if "shares." in name else truth.abs().max()).clamp(min=1e-6)
        allowed = max(1e-5, 1.5 * ((theirs[name] - truth).abs().max() / scale).item())
        assert ((ours[name] - truth).abs().max() / scale).item() <= allowed, name
        assert not ours[name].isnan().any(), name


# ---- the same numbers


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("heads", [1, 4, 8, 16])
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("rule", RULES)
def test_every_rule_with_learnt_shares(rule, kernel_size, heads, geometry):
    encoder = geometry == Geometry.ENCODER_SELF
    evolution = Evolution(geometry, heads, kernel_size, 0.4, 0.3, rule=rule, learn_mix=True)
    evolution_problem = problem(evolution, previous=encoder)
    if evolution.conv is None:  # then nothing says how many heads there are
        evolution_problem = with_heads(evolution_problem, heads)
    compare(evolution_problem)


def with_heads(one_head: Problem, heads: int) -> Problem:
    tensors = {name: torch.randn(BATCH, heads, *x.shape[2:]) for name, x in one_head.tensors.items()}
    return replace(one_head, tensors=tensors)


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("kernel_size, beta", [(1, 0.3), (3, 0.3), (5, 0.3), (3, 1.0), (3, 0.0)])
@pytest.mark.parametrize("previous, masks", [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("given", [False, True])
def test_the_same_numbers_and_gradients(geometry, kernel_size, beta, previous, masks, given):
    encoder = geometry == Geometry.ENCODER_SELF
    compare(equation_4(geometry, 4, kernel_size, beta, previous=previous and encoder, masks=masks, given=given))


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("learnt", [False, True])
@pytest.mark.parametrize(
    "shares",
    [(0.2, 0.7, 0.4, 0.9, -0.3), (0.2, 0.7, 0.0, 0.9, 1.1), (1.0, 0.0, 1.0, 0.0, 1.0), (0.0, 0.5, 0.3, 0.0, 0.5)],
)
def test_any_five_numbers(geometry, learnt, shares):
    if not learnt and shares[2] == 0:
        pytest.skip("a convolution without a share is refused")
    compare(problem(AnyShares(geometry, 4, 3, shares, learnt)))


@pytest.mark.parametrize("heads", range(1, 17))
@pytest.mark.parametrize("geometry", KINDS)
def test_any_number_of_heads(geometry, heads):
    compare(equation_4(geometry, heads, previous=geometry == Geometry.ENCODER_SELF))


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 3), (16, 16), (17, 33), (40, 5), (70, 97)])
@pytest.mark.parametrize("depth", [1, 16, 40])
def test_any_length(geometry, lengths, depth):
    compare(equation_4(geometry, 2, lengths=lengths, depth=depth))


LONG = {
    "one chunk of two bands": (64, 100),
    "two chunks": (130, 150),
    "many, and maps that caches do not hold": (359, 331),
    "rows that would lie a multiple of 256 numbers apart": (239, 240),
}


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
@pytest.mark.parametrize("lengths", LONG.values(), ids=LONG)
def test_long_sentences_are_worked_on_in_parts(geometry, kernel_size, lengths):
    """Where parts meet, the convolution reads rows of both."""
    shares = (0.2, 0.7, 0.4, 0.9, -0.3)
    compare(problem(AnyShares(geometry, 3, kernel_size, shares, learnt=True), lengths, 24))


def test_a_kernel_that_is_taller_than_a_band():
    """Its last bands begin below the map, where all rows are zeros, and no more rows than the band has."""
    compare(equation_4(Geometry.ENCODER_DECODER, 1, 39, lengths=(64, 1100), previous=False))


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("count", [4, 16])
def test_the_more_sentences_the_larger_the_parts(geometry, count):
    """Of 150 rows three parts in a small batch, two in a larger one, and the whole in a large one."""
    whole = equation_4(geometry, 2, lengths=(150, 40), depth=16)
    sentences = torch.arange(count) % BATCH
    for kept in (whole.tensors, whole.masks):
        kept.update({name: x[sentences] for name, x in kept.items()})
    whole.tensors["v"] = torch.randn_like(whole.tensors["v"])  # which are not equal then
    compare(whole)


def test_sentences_whose_keys_are_too_large_to_be_packed_all_at_once():
    """26 MB of keys and values in each of three, of which threads share 24 MB at a time or a single sentence."""
    large = equation_4(Geometry.ENCODER_DECODER, 2, lengths=(130, 1600), depth=1024, previous=False)
    large.tensors["q"] *= 0.05
    compare(large)


def test_long_sentences_without_a_convolution():
    evolution = Evolution(Geometry.ENCODER_SELF, 1, alpha=0.4, rule="residual", learn_mix=True)
    compare(with_heads(problem(evolution, (200, 200), 24), 3))


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("lengths", [(7, 7), (40, 70), (150, 200)])
@pytest.mark.parametrize("mask", ["the future and padding", "ragged"])
@pytest.mark.parametrize("given", [False, True])
def test_what_nobody_sees_may_be_left_out(geometry, lengths, mask, given):
    """The right ends of rows, whatever their order: rows without keys, hidden rows and hidden columns among them."""
    encoder = geometry == Geometry.ENCODER_SELF
    whole = equation_4(geometry, lengths=lengths, depth=24, previous=encoder, given=given)
    if mask == "ragged":
        rows, columns = whole.masks["masked"].expand(BATCH, 1, lengths[0], -1).shape[2:]
        ends = torch.randint(0, columns + 1, (BATCH, 1, rows, 1))
        shown = ends + 3 * torch.randint(-1, 2, ends.shape)
        whole.masks = {"masked": torch.arange(columns) >= ends, "hidden": torch.arange(columns) >= shown}

    def context_alone(evolution, tensors, masks):
        call = call_of(evolution, tensors, masks)
        assert cpu.knows(call)
        return (cpu.attend(call).context,)

    compare(whole, context_alone, lambda *arguments: plain(*arguments)[:1])


@pytest.mark.parametrize("geometry", [Geometry.DECODER_SELF, Geometry.ENCODER_DECODER])
def test_of_a_longer_sentence_nothing_is_left_for_a_shorter_one(geometry):
    """One thread works on sentences of 96, 48 and 16 keys, whole vectors: beside their last keys there is nothing."""
    whole = equation_4(geometry, lengths=(96, 96), depth=24, previous=False, masks=False)
    masked = torch.arange(96) >= torch.tensor([96, 48, 16])[:, None, None, None]
    whole.masks = {"masked": masked.expand(BATCH, 1, 96, 96), "hidden": masked}

    def context_alone(evolution, tensors, masks):
        return (cpu.attend(call_of(evolution, tensors, masks)).context,)

    with_threads(1, lambda: compare(whole, context_alone, lambda *arguments: plain(*arguments)[:1]))


@pytest.mark.parametrize("vectors", range(1, 8))
def test_keys_of_any_number_of_vectors_are_left_out(vectors):
    """Of 112 keys, which products take several vectors at a time."""
    whole = equation_4(Geometry.ENCODER_DECODER, lengths=(20, 112), depth=24, previous=False, masks=False)
    masked = (torch.arange(112) >= 16 * vectors).expand(BATCH, 1, 20, 112)
    whole.masks = {"masked": masked, "hidden": masked}

    def context_alone(evolution, tensors, masks):
        return (cpu.attend(call_of(evolution, tensors, masks)).context,)

    compare(whole, context_alone, lambda *arguments: plain(*arguments)[:1])


def test_gradients_only_where_they_are_wanted():
    """Whatever is frozen, the others' gradients are the same, bit for bit."""
    whole = equation_4(Geometry.ENCODER_SELF)
    expected = run(kernel, whole)
    for name in whole.tensors:
        tensors = {other: x.detach().requires_grad_(other == name) for other, x in whole.tensors.items()}
        results = kernel(deepcopy(whole.evolution).requires_grad_(False), tensors, whole.masks)
        total = sum((x * torch.linspace(-1, 2, x.numel()).view(x.shape)).sum() for x in results)
        assert torch.equal(torch.autograd.grad(total, tensors[name])[0], expected[f"gradient of {name}"]), name


def test_a_result_that_nobody_uses_has_no_gradient():
    whole = equation_4(Geometry.ENCODER_SELF)
    for number in range(3):
        gradients = []
        for way in (kernel, plain):
            tensors = {name: x.detach().requires_grad_() for name, x in whole.tensors.items()}
            result = way(whole.evolution, tensors, whole.masks)[number]
            gradients.append(torch.autograd.grad(result.square().sum(), list(tensors.values()), allow_unused=True))
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_vectors_may_lie_anywhere():
    whole = equation_4(Geometry.ENCODER_SELF)
    expected = kernel(whole.evolution, whole.tensors, whole.masks)
    for change in (Tensor.contiguous, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        tensors = {name: change(x) for name, x in whole.tensors.items()}
        for ours, theirs in zip(kernel(whole.evolution, tensors, whole.masks), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_infinities_that_are_hidden_stay_hidden():
    whole = equation_4(Geometry.DECODER_SELF, masks=False, previous=False)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None]
    masks = {"hidden": future, "masked": future}
    before = kernel(whole.evolution, whole.tensors, masks)[0]
    broken = whole.tensors["k"].clone()
    broken[:, :, -1] = float("inf")
    after = kernel(whole.evolution, {**whole.tensors, "k": broken}, masks)[0]
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])


# ---- dropout


@pytest.mark.parametrize("geometry", KINDS)
def test_dropout_keeps_the_same_weights_forward_and_backward(geometry):
    """With values that are the unit matrix the context shows which weights were kept; the rest follows from that."""
    size, share = 40, 0.3
    whole = equation_4(geometry, lengths=(size, size), depth=size, previous=geometry == Geometry.ENCODER_SELF)
    whole.tensors["v"] = torch.eye(size).expand(BATCH, 4, size, size)
    kept = []

    def dropped(evolution, tensors, masks):
        context, a_logit, weights = kernel(evolution, tensors, masks, dropout=share)
        kept.append((context != 0) | (weights == 0))
        return context, a_logit, weights

    def by_hand(evolution, tensors, masks):
        _, a_logit, weights = plain(evolution, tensors, masks)
        return (weights * kept[0] / (1 - share)) @ tensors["v"], a_logit, weights

    ours, theirs = run(dropped, whole), run(by_hand, whole)
    for name, expected in theirs.items():
        assert_close(ours[name], expected, rtol=1e-3, atol=1e-4, msg=name)


def test_dropout_keeps_the_right_share_everywhere():
    """Of each row, each column, each head and each sentence, and no two of them the same places."""
    heads, size, share = 8, 256, 0.4
    whole = problem(
        Evolution(Geometry.ENCODER_SELF, heads, 3, beta=0.3), (size, size), size, previous=False, masks=False
    )
    whole.tensors["v"] = torch.eye(size).expand(BATCH, heads, size, size)
    kept = cpu.attend(whole.call(dropout=share)).context != 0
    for axes in [(2, 3), (0, 1, 2), (0, 1, 3), (0, 2, 3), (1, 2, 3)]:
        count = kept.numel() / kept.float().mean(axes).numel()
        assert (kept.float().mean(axes) - (1 - share)).abs().max() < 5 * (share * (1 - share) / count) ** 0.5
    pictures = 2 * kept.flatten(0, 1).flatten(1).float() - 1
    likeness = torch.corrcoef(pictures).fill_diagonal_(0)
    assert likeness.abs().max() < 5 / size
    neighbours = torch.corrcoef(torch.stack([kept[..., :-1].flatten(), kept[..., 1:].flatten()]).float())
    assert neighbours[0, 1].abs() < 0.01


@pytest.mark.parametrize("geometry", [Geometry.DECODER_SELF, Geometry.ENCODER_DECODER])
@pytest.mark.parametrize("lengths", [(40, 40), (300, 300)])
def test_what_is_left_out_changes_nothing_of_dropout(geometry, lengths):
    """Maps that are wanted are worked on as a whole, others without what nobody sees."""
    whole = equation_4(geometry, lengths=lengths, depth=24, previous=False, masks=False)
    ends = torch.tensor([[1], [0], [0]]) * torch.arange(1, lengths[0] + 1) + torch.tensor([[0], [lengths[1]], [17]])
    masked = torch.arange(lengths[1]) >= ends[:, None, :, None]
    whole.masks = {"masked": masked, "hidden": masked}

    def context_alone(evolution, tensors, masks, **options):
        return (cpu.attend(call_of(evolution, tensors, masks, dropout=0.3, **options)).context,)

    parts, all_of_it = (run(partial(context_alone, keep_map=keep), whole) for keep in (False, True))
    for name, expected in all_of_it.items():
        assert_close(parts[name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item(), msg=name)


def test_dropout_repeats_with_the_seed_and_with_nothing_else():
    whole = equation_4(Geometry.ENCODER_SELF, lengths=(20, 20))
    contexts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        contexts += [cpu.attend(whole.call(dropout=0.5)).context for _ in range(2)]
    assert torch.equal(contexts[0], contexts[2]) and torch.equal(contexts[1], contexts[3])
    assert not torch.equal(contexts[0], contexts[1]) and not torch.equal(contexts[0], contexts[4])


def test_dropping_everything_gives_zeros():
    whole = equation_4(Geometry.ENCODER_SELF)
    tensors = {name: x.requires_grad_() for name, x in whole.tensors.items()}
    context = cpu.attend(whole.call(dropout=1.0)).context
    assert torch.equal(context, torch.zeros_like(context))
    for gradient in torch.autograd.grad(context.sum(), list(tensors.values())):
        assert torch.equal(gradient, torch.zeros_like(gradient))


# ---- threads


def with_threads(count, what):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return what()
    finally:
        torch.set_num_threads(before)


def assert_same_bits(first, other):
    for name, x in first.items():
        assert torch.equal(x, other[name]), name


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("lengths", [(20, 20), (150, 170)])
def test_bits_do_not_depend_on_threads(geometry, lengths):
    shares = (0.2, 0.7, 0.4, 0.9, -0.3)
    whole = problem(AnyShares(geometry, 4, 3, shares, learnt=True), lengths, 40)

    def dropped(*arguments):
        return kernel(*arguments, dropout=0.2)

    first, *others = (with_threads(count, lambda: run(dropped, whole)) for count in (1, 2, 3, 2))
    for other in others:
        assert_same_bits(first, other)


def test_eight_threads_at_once_get_what_one_gets():
    """Nothing of a call is kept anywhere, while calls of other sizes run in other threads."""
    problems = [equation_4(KINDS[i % 3], 2 + i % 3, lengths=(3 + 9 * i, 50 - 5 * i), depth=8 + i) for i in range(8)]
    calls = [each.call(keep_map=True, need_weights=True) for each in problems]
    with torch.no_grad():
        expected = [cpu.attend(call) for call in calls]
    gradients = [run(kernel, each) for each in problems]

    def work(i):
        for _ in range(20):
            with torch.no_grad():
                for ours, theirs in zip(cpu.attend(calls[i])[:3], expected[i][:3], strict=True):
                    assert torch.equal(ours, theirs)
            assert_same_bits(gradients[i], run(kernel, problems[i]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_memory_of_a_large_call_is_given_back():
    def held():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    large = equation_4(Geometry.ENCODER_DECODER, 8, lengths=(64, 20_000), previous=False, masks=False)
    before = held()
    with torch.no_grad():
        context = cpu.attend(large.call()).context
    assert context.isfinite().all() and held() - before < 64  # MiB; the maps of a band alone are 42


# ---- step by step


@pytest.mark.parametrize("depth", [1, 8, 13, 16, 27, 40, 64, 344])
@pytest.mark.parametrize("at_once", [1, 2])
@torch.no_grad()
def test_steps_are_the_rows_of_the_whole(depth, at_once):
    whole = equation_4(Geometry.ENCODER_DECODER, lengths=(6, 19), depth=depth, previous=False, masks=False)
    expected = plain(whole.evolution, whole.tensors, {})[0]
    above = torch.zeros(BATCH, 4, 2, 19)
    for i in range(0, 6, at_once):
        rows = slice(i, i + at_once)
        call = replace(whole.call(step=True), q=whole.tensors["q"][:, :, rows], above=above)
        assert cpu.knows(call)
        result = cpu.attend(call)
        above = result.kept
        assert_close(result.context, expected[:, :, rows])


@torch.no_grad()
def test_steps_of_self_attention_see_one_key_more_each_time():
    whole = equation_4(Geometry.DECODER_SELF, lengths=(6, 6), previous=False, masks=False)
    future = torch.ones(6, 6, dtype=torch.bool).triu(1)
    expected = plain(whole.evolution, whole.tensors, {"hidden": future, "masked": future})[0]
    above = None
    for i in range(6):
        q, k, v = (whole.tensors[name] for name in "qkv")
        call = replace(whole.call(step=True), q=q[:, :, i : i + 1], k=k[:, :, : i + 1], v=v[:, :, : i + 1], above=above)
        result = cpu.attend(call)
        above = result.kept
        assert above.shape == (BATCH, 4, 2, i + 1)
        assert_close(result.context, expected[:, :, i : i + 1])


def test_steps_without_a_convolution_keep_nothing():
    whole = problem(Evolution(Geometry.DECODER_SELF, 1, beta=0.0), previous=False)
    assert cpu.attend(whole.call(step=True)).kept is None


@pytest.mark.parametrize("name", ["q", "k", "v", "weight", "bias", "c"])
def test_steps_are_refused_where_any_gradient_is_wanted(name):
    whole = equation_4(Geometry.DECODER_SELF, previous=False)
    call = replace(whole.call(step=True), weight=torch.ones(4, 4, 3, 3), bias=torch.ones(4))
    assert cpu.knows(call)
    if name == "c":
        wanting = replace(call, coefficients=call.coefficients._replace(c=torch.tensor(0.3, requires_grad=True)))
    else:
        wanting = replace(call, **{name: getattr(call, name).clone().requires_grad_()})
    assert not cpu.knows(wanting)
    with torch.no_grad():
        assert cpu.knows(wanting)


# ---- what is refused


def half(x):
    return x.half()


REFUSED = {
    "queries of another type": {"q": half, "k": half, "v": half},
    "half-precision convolution weights": {"weight": half},
    "a half-precision bias": {"bias": half},
    "a half-precision map": {"previous": half},
    "a double map": {"previous": Tensor.double},
    "a convolution of fewer heads": {"weight": lambda x: x[:, :2]},
    "fewer queries' heads than the convolution's": {name: lambda x: x[:, :2] for name in ("q", "k", "v", "previous")},
    "a mask of numbers": {"masked": Tensor.float},
    "a mask of bytes": {"hidden": Tensor.byte},
    "a mask for each head": {"masked": lambda x: x.repeat(1, 4, 1, 1)},
    "a map of another length": {"previous": lambda x: x[..., :-1]},
    "keys and values of different lengths": {"k": lambda x: x[:, :, :-1]},
    "keys of another size than queries": {"k": lambda x: x[..., :-1]},
    "values of another size than queries": {"v": lambda x: x[..., :-1]},
    "keys that sentences share": {"k": lambda x: x[:1], "v": lambda x: x[:1]},
    "no bias": {"bias": lambda x: None},
    "a bias of fewer heads": {"bias": lambda x: x[:2]},
    "given logits of another length": {"given": lambda x: torch.ones(BATCH, 4, 5, 4)},
    "a sparse map": {"previous": Tensor.to_sparse},
    "a tensor on another device": {"bias": lambda x: x.to("meta")},
    "dropout beyond everything": {"dropout": lambda x: 1.5},
    "negative dropout": {"dropout": lambda x: -0.5},
    "a constant share of nothing": {"coefficients": lambda x: x._replace(c=0.0)},
    "a share for each head": {"coefficients": lambda x: x._replace(c=torch.ones(4))},
    "a share of another type": {"coefficients": lambda x: x._replace(c=torch.ones((), dtype=torch.float64))},
    "values with one axis too many": {"v": lambda x: x.unsqueeze(-1)},
    "queries whose memory holds their opposite": {"q": lambda x: torch.complex(x, x).conj().imag},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused(what):
    call = equation_4(Geometry.ENCODER_SELF).call()
    assert kernels.kernel_for(call) is cpu
    changed = replace(call, **{name: change(getattr(call, name)) for name, change in REFUSED[what].items()})
    assert kernels.kernel_for(changed) is None


@pytest.mark.parametrize("shape", [(2, 4, 2, 5), (3, 2, 2, 5), (3, 4, 1, 5), (3, 4, 3, 5), (3, 4, 2, 6)])
@torch.no_grad()
def test_rows_above_that_do_not_fit_are_refused(shape):
    """B, heads, rows that the kernel reaches up to, and at most as many columns as there are keys."""
    call = equation_4(Geometry.DECODER_SELF, previous=False).call(step=True, above=torch.zeros(3, 4, 2, 5))
    assert kernels.kernel_for(call) is cpu
    assert kernels.kernel_for(replace(call, above=torch.zeros(shape))) is None


@torch.no_grad()
def test_too_little_memory_is_an_error(simple, monkeypatch):
    """Else results would be what lay in memory before."""
    without = SimpleNamespace(evolving_attention_forward=lambda argument, threads: 1)
    monkeypatch.setattr(cpu_library, "library", lambda: without)
    with pytest.raises(MemoryError, match="not enough memory for attention maps of 4 x 5 x 5"):
        cpu.attend(simple)


# ---- the C file, compiled


@pytest.fixture
def quick_compiler(monkeypatch, tmp_path_factory):
    """Compiling takes seconds: this compiler gives the library that has been compiled already, after a moment."""
    body = f"""
        [ "$1" = --version ] && exec echo quick $VERSION
        case "$*" in *" -o "*) ;; *) exec cc "$@" ;; esac
        while [ "$1" != -o ]; do shift; done
        sleep 0.5
        cp "{cpu_library.library()._name}" "$2"
    """
    monkeypatch.setenv("CC", str(script(tmp_path_factory.mktemp("compiler"), body)))


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As on a machine where nothing has been compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library._load.cache_clear()
    yield tmp_path
    cpu_library._load.cache_clear()


@pytest.fixture
def simple():
    return equation_4(Geometry.ENCODER_SELF).call()


def script(folder: Path, body: str) -> Path:
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_compiled_once_and_kept(fresh, simple):
    assert cpu.knows(simple)
    (built,) = fresh.glob("evolving_attention/*")
    made = built.stat().st_mtime_ns
    cpu_library._load.cache_clear()
    assert cpu.knows(simple)
    assert (
        [built.stat().st_mtime_ns] == [path.stat().st_mtime_ns for path in fresh.glob("evolving_attention/*")] == [made]
    )


def no_home(monkeypatch, folder):
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)


def slow_compiler(monkeypatch, folder):
    monkeypatch.setattr(cpu_library, "_COMPILING_TAKES_AT_MOST", 0.5)
    body = """
        [ "$1" = --version ] && exec echo slow 1.0
        echo warning: this takes long >&2
        exec sleep 20
    """
    monkeypatch.setenv("CC", str(script(folder, body)))


def folder_that_cannot_be_written(monkeypatch, folder):
    (folder / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))


def library_that_never_loads(monkeypatch, folder):
    body = """
        [ "$1" = --version ] && exec echo odd 1.0
        while [ "$1" != -o ]; do shift; done
        echo no library > "$2"
    """
    monkeypatch.setenv("CC", str(script(folder, body)))


FAILURES = {
    "a compiler that fails": (lambda patch, folder: patch.setenv("CC", "false"), "false"),
    "no compiler": (lambda patch, folder: patch.setenv("CC", "no-such-compiler"), "no-such-compiler"),
    "an unbalanced quote": (lambda patch, folder: patch.setenv("CC", 'cc "'), "quotation"),
    "no home": (no_home, "home"),
    "a compiler that takes too long": (slow_compiler, "timed out"),
    "a cache that cannot be written": (folder_that_cannot_be_written, "file"),
    "a library that never loads": (library_that_never_loads, "cpu_kernel"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failures_are_one_line_in_the_log_and_the_call_is_refused(failure, fresh, simple, monkeypatch, caplog):
    arrange, named = FAILURES[failure]
    arrange(monkeypatch, fresh)
    with caplog.at_level(logging.WARNING):
        assert [cpu.knows(simple), cpu.knows(simple), kernels.kernel_for(simple)] == [False, False, None]
    assert len(caplog.messages) == 1 and "\n" not in caplog.text.strip()
    assert "slower" in caplog.text and named in caplog.text
    assert not [path for path in fresh.glob("evolving_attention/*") if path.is_dir()], "nothing half made"


def test_a_library_that_does_not_load_is_compiled_again(quick_compiler, fresh, simple, caplog):
    assert cpu.knows(simple)
    (built,) = fresh.glob("evolving_attention/*")
    cpu_library._load.cache_clear()
    size = built.stat().st_size
    built.unlink()  # what is loaded must not be changed
    built.write_bytes(b"made for another machine".ljust(size))
    assert cpu.knows(simple) and not caplog.messages
    ctypes.CDLL(str(built))


def test_a_library_of_which_a_part_is_there_is_compiled_again(quick_compiler, fresh):
    """To call what is missing of it would end the process, and every one after it."""
    assert cpu_library.library() is not None
    (built,) = fresh.glob("evolving_attention/*")
    part = built.read_bytes()[:20_000]
    built.unlink()  # what is loaded must not be changed
    built.write_bytes(part)
    code = "from evolving_attention.kernels.cpu.library import library; print(library()._name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{built}\n" and built.stat().st_size > len(part)


def test_another_compiler_or_c_library_has_a_library_of_its_own(quick_compiler, fresh, simple, monkeypatch):
    for count, (version, c_library) in enumerate([("1.0", "a"), ("1.1", "a"), ("1.1", "b"), ("1.0", "a")], 1):
        monkeypatch.setenv("VERSION", version)
        monkeypatch.setattr(os, "confstr", lambda name, c_library=c_library: c_library)
        cpu_library._load.cache_clear()
        assert cpu.knows(simple)
        assert len(list(fresh.glob("evolving_attention/*"))) == min(count, 3)


def test_another_header_or_processor_has_a_library_of_its_own(monkeypatch, tmp_path):
    """Homes are shared by machines, on some of which the others' instructions end the process."""
    names, read = [cpu_library._fingerprint(["cc"])], Path.read_text
    for path in (cpu_library._INCLUDED, Path("/proc/cpuinfo")):
        changed = {path: "flags : of another kind\n"}
        monkeypatch.setattr(Path, "read_text", lambda path, changed=changed: changed.get(path) or read(path))
        names.append(cpu_library._fingerprint(["cc"]))
    assert len(set(names)) == 3


def test_several_processes_may_compile_at_once(quick_compiler, tmp_path):
    program = (
        "from evolving_attention.kernels.cpu import library as cpu_library; assert cpu_library.library() is not None"
    )
    command, environment = [sys.executable, "-c", program], {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    processes = [warm.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert "slower" not in process.communicate(timeout=300)[1]
        assert process.returncode == 0
    assert len(list(tmp_path.glob("evolving_attention/*"))) == 1


@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_hypotheses_that_share_keys(rows):
    """Neighbours in the batch have one sentence's keys and values."""
    example = equation_4(Geometry.ENCODER_DECODER, lengths=(rows, 7), previous=False, masks=False)
    tensors = {**example.tensors, "q": torch.randn(2 * BATCH, 4, rows, 6)}
    shared = kernel(example.evolution, tensors, {})
    each = {name: x if name == "q" else x.repeat_interleave(2, dim=0) for name, x in tensors.items()}
    for ours, expected in zip(shared, plain(example.evolution, each, {}), strict=True):
        assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_keys_that_are_shared_have_no_gradients_here():
    example = equation_4(Geometry.ENCODER_DECODER, previous=False, masks=False)
    example.tensors |= {name: example.tensors[name][:1].requires_grad_() for name in ("k", "v")}
    assert kernels.kernel_for(example.call()) is None
