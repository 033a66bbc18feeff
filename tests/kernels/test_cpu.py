"""The CPU's kernel gives the plain composition's numbers, maps, context and every gradient, or refuses the call."""

import logging
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import attentions, warm
from helpers.attentions import (
    ANY,
    call_of,
    case_id,
    check_dropout,
    check_steps,
    compare,
    plain,
    probe,
    problem,
    results,
)
from torch import Tensor
from torch.testing import assert_close

from evolving_attention import kernels
from evolving_attention.evolution import RULES, Geometry
from evolving_attention.kernels import cpu
from evolving_attention.kernels.cpu import library as cpu_library

ENCODER, DECODER, CROSS = Geometry
BATCH = 3
Case = partial(attentions.Case, batch=BATCH)


def kernel(evolution, tensors, masks, **options):
    call = call_of(evolution, tensors, masks, **options)
    assert kernels.kernel_for(call) is cpu
    return cpu.attend(call)[:3]


def context_alone(evolution, tensors, masks, **options):
    """The kernel leaves out hidden pixels if the call asks for no map."""
    return kernel(evolution, tensors, masks, keep_map=False, need_weights=False, **options)[:1]


def plain_context(*problem):
    return plain(*problem)[:1]


def encoder(length=5, **options):
    return problem(Case(ENCODER, 4, 3, length, length, **{"masks": "scattered", **options}))


# ---- the same numbers


#: each geometry, number of heads, size of kernel, rule, mask, with most of the others
CASES = [
    *(Case(ENCODER, 4, 3, 5, 5, "scattered", rule=rule, learn=True) for rule in RULES),
    Case(ENCODER, 1, 1, 5, 5, "scattered"),
    Case(ENCODER, 7, 5, 5, 5, "scattered", rule="predictive"),
    Case(ENCODER, 16, 3, 5, 5, "scattered", previous=False, learn=True),
    Case(ENCODER, 3, 3, 16, 16, "scattered", given=True, beta=1.0),
    Case(ENCODER, 4, 3, 5, 5, "", beta=0.0),
    Case(ENCODER, 2, 3, 17, 17, "scattered rows all", rule=ANY, learn=True),
    Case(ENCODER, 5, 3, 5, 5, "", rule=ANY, width=1),
    Case(ENCODER, 4, 3, 5, 5, "scattered", rule=(0.2, 0.7, 0.0, 0.9, 1.1), learn=True),
    Case(ENCODER, 4, 3, 5, 5, "scattered", rule=(1.0, 0.0, 1.0, 0.0, 1.0)),
    Case(ENCODER, 2, 3, 1, 1, width=16),
    Case(DECODER, 4, 3, 5, 5, "scattered future", previous=False),
    Case(DECODER, 2, 1, 5, 5, "scattered future", previous=False, given=True),
    Case(DECODER, 8, 5, 5, 5, "future", previous=False, learn=True),
    Case(DECODER, 4, 3, 40, 40, "scattered future", previous=False, rule=(0.0, 0.5, 0.3, 0.0, 0.5), width=40),
    Case(DECODER, 4, 3, 1, 1, "future", previous=False, beta=1.0),
    Case(CROSS, 4, 3, 5, 7, "scattered all", previous=False),
    Case(CROSS, 3, 5, 2, 3, "scattered", previous=False, learn=True),
    Case(CROSS, 8, 1, 40, 5, "scattered", previous=False, given=True),
    Case(CROSS, 16, 3, 17, 33, "", previous=False, width=16),
    Case(CROSS, 6, 3, 5, 7, "scattered all", rule=ANY, learn=True),
]


@pytest.mark.parametrize("case", CASES, ids=case_id)
def test_as_plain(case):
    compare(problem(case), kernel)


LONG = {
    "one chunk of two bands": (ENCODER, 3, 64, 100),
    "two chunks": (ENCODER, 5, 130, 150),
    "many": (ENCODER, 3, 359, 331),
    "rows that would lie a multiple of 256 numbers apart": (CROSS, 3, 239, 240),
    "chunks of the decoder": (DECODER, 5, 150, 150),
    "chunks of the encoder-decoder attention": (CROSS, 5, 359, 331),
    "a kernel of one pixel": (ENCODER, 1, 130, 150),
}


@pytest.mark.parametrize("size", LONG.values(), ids=LONG)
def test_long_sentences_are_worked_on_in_parts(size):
    """The convolution reads rows of both parts at their border."""
    compare(problem(Case(size[0], 3, *size[1:], "scattered", rule=ANY, learn=True, width=24)), kernel)


@pytest.mark.slow
def test_a_kernel_that_is_taller_than_a_band():
    """Its last bands begin below the map, where all rows are zeros, and no more rows than the band has."""
    compare(problem(Case(CROSS, 1, 39, 40, 1100, "scattered all", previous=False, batch=1)), kernel)


@pytest.mark.parametrize("count", [4, 16])
def test_the_more_sentences_the_larger_the_parts(count):
    """Of 150 rows three parts in a small batch, two in a larger one, and the whole in a large one."""
    compare(problem(Case(ENCODER, 2, 3, 150, 40, "scattered", width=16, batch=count)), kernel)


@pytest.mark.slow
def test_sentences_whose_keys_are_too_large_to_be_packed_all_at_once():
    """26 MB of keys and values in each of three, of which threads share 24 MB at a time or a single sentence."""
    large = problem(Case(CROSS, 2, 3, 130, 1600, "scattered", previous=False, width=1024))
    large.tensors["q"].data *= 0.05
    compare(large, kernel)


def test_long_sentences_without_a_convolution():
    compare(problem(Case(ENCODER, 3, 3, 200, 200, "scattered", rule="residual", learn=True, width=24)), kernel)


RAGGED = {
    "short": Case(ENCODER, 4, 3, 7, 7),
    "short decoder": Case(DECODER, 4, 3, 7, 7, previous=False),
    "given logits": Case(ENCODER, 4, 3, 40, 70, given=True),
    "encoder-decoder": Case(CROSS, 4, 3, 40, 70, previous=False),
    "long": Case(ENCODER, 4, 3, 150, 200),
    "long decoder": Case(DECODER, 4, 3, 150, 150, previous=False),
}


@pytest.mark.parametrize("case", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("mask", ["padding", "ragged"])
def test_what_nothing_sees_may_be_left_out(case, mask):
    """The right ends of rows, whatever their order: rows without keys, hidden rows and hidden columns among them."""
    future = "future" if case.geometry == DECODER else ""
    whole = problem(case._replace(masks=f"scattered {future}", width=24))
    if mask == "ragged":
        ends = torch.randint(0, case.columns + 1, (BATCH, 1, case.length, 1))
        shown = ends + 3 * torch.randint(-1, 2, ends.shape)
        whole.masks.update(masked=torch.arange(case.columns) >= ends, hidden=torch.arange(case.columns) >= shown)
    compare(whole, context_alone, plain_context)


@pytest.mark.parametrize("geometry", [DECODER, CROSS])
def test_of_a_longer_sentence_nothing_is_left_for_a_shorter_one(geometry):
    """One thread works on sentences of 96, 48 and 16 keys, whole vectors: beside their last keys there is nothing."""
    whole = problem(Case(geometry, 4, 3, 96, 96, previous=False, width=24))
    masked = (torch.arange(96) >= torch.tensor([96, 48, 16])[:, None, None, None]).expand(BATCH, 1, 96, 96)
    whole.masks.update(masked=masked, hidden=masked)
    with_threads(1, lambda: compare(whole, context_alone, plain_context))


@pytest.mark.parametrize("vectors", [1, 3, 4, 7])
def test_keys_of_any_number_of_vectors_are_left_out(vectors):
    """Of 112 keys, which products take several vectors at a time."""
    whole = problem(Case(CROSS, 4, 3, 20, 112, previous=False, width=24))
    masked = (torch.arange(112) >= 16 * vectors).expand(BATCH, 1, 20, 112)
    whole.masks.update(masked=masked, hidden=masked)
    compare(whole, context_alone, plain_context)


def test_frozen_inputs_change_no_other_gradient():
    """Not a bit of it."""
    whole = encoder()
    expected = results(kernel, *whole)
    for name in whole.tensors:
        tensors = {other: x.detach().requires_grad_(other == name) for other, x in whole.tensors.items()}
        outputs = kernel(deepcopy(whole.evolution).requires_grad_(False), tensors, whole.masks)
        total = sum((x * probe(x)).sum() for x in outputs)
        assert torch.equal(torch.autograd.grad(total, tensors[name])[0], expected[f"gradient of {name}"]), name


def test_a_result_that_is_not_used_has_no_gradient():
    whole = encoder()
    for number in range(3):
        gradients = []
        for way in (kernel, plain):
            result = way(*whole)[number]
            inputs = list(whole.tensors.values())
            gradients.append(torch.autograd.grad(result.square().sum(), inputs, allow_unused=True))
        for ours, theirs in zip(*gradients, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_a_gradient_whose_memory_holds_its_opposite():
    """Autograd may hand on such a view, as it does behind a complex number's conjugate."""
    gradients = []
    for change in (torch.clone, lambda x: torch._neg_view(-x)):
        whole = encoder()
        context = kernel(*whole)[0]
        context.register_hook(change)
        context.square().sum().backward()
        gradients.append(whole.tensors["q"].grad)
        torch.manual_seed(0)
    assert torch.equal(*gradients)


def test_vectors_may_lie_anywhere():
    whole = encoder()
    expected = kernel(*whole)
    for change in (Tensor.contiguous, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        tensors = {name: change(x) for name, x in whole.tensors.items()}
        for ours, theirs in zip(kernel(whole.evolution, tensors, whole.masks), expected, strict=True):
            assert torch.equal(ours, theirs)


def test_infinities_that_are_hidden_stay_hidden():
    whole = problem(Case(DECODER, 4, 3, 5, 5, "future", previous=False))
    before = kernel(*whole)[0]
    whole.tensors["k"] = whole.tensors["k"].detach().clone()
    whole.tensors["k"][:, :, -1] = float("inf")
    after = kernel(*whole)[0]
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])


# ---- dropout


@pytest.mark.parametrize("geometry", Geometry)
def test_dropout_drops_the_same_forward_and_backward(geometry):
    masks = "scattered future" if geometry == DECODER else "scattered"
    whole = problem(Case(geometry, 4, 3, 40, 40, masks, previous=geometry == ENCODER, width=40))
    check_dropout(whole, kernel, 0.3)


def test_dropout_keeps_the_right_share_everywhere():
    """Each row, column, head and sentence keeps its share, and no two keep the same places."""
    heads, size, share = 8, 256, 0.4
    whole = problem(Case(ENCODER, heads, 3, size, size, previous=False, alpha=0.0, width=size))
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


@pytest.mark.parametrize("geometry", [DECODER, CROSS])
@pytest.mark.parametrize("size", [40, 300])
def test_what_is_left_out_changes_nothing_of_dropout(geometry, size):
    """Maps that are asked for are worked on as a whole, others without what nothing sees."""
    whole = problem(Case(geometry, 4, 3, size, size, previous=False, width=24))
    ends = torch.tensor([[1], [0], [0]]) * torch.arange(1, size + 1) + torch.tensor([[0], [size], [17]])
    masked = torch.arange(size) >= ends[:, None, :, None]
    whole.masks.update(masked=masked, hidden=masked)

    def dropped(*arguments, keep_map):
        torch.manual_seed(3)
        return kernel(*arguments, keep_map=keep_map, need_weights=False, dropout=0.3)[:1]

    parts, all_of_it = (results(dropped, *whole, keep_map=keep) for keep in (False, True))
    for name, expected in all_of_it.items():
        assert_close(parts[name], expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item(), msg=name)


def test_dropout_repeats_with_the_seed_and_with_nothing_else():
    whole = encoder(20)
    contexts = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        contexts += [cpu.attend(whole.call(dropout=0.5)).context for _ in range(2)]
    assert torch.equal(contexts[0], contexts[2]) and torch.equal(contexts[1], contexts[3])
    assert not torch.equal(contexts[0], contexts[1]) and not torch.equal(contexts[0], contexts[4])


def test_dropping_everything_gives_zeros():
    outputs = results(lambda *call: context_alone(*call, dropout=1.0), *encoder())
    assert all(not x.any() for x in outputs.values())


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


@pytest.mark.parametrize("geometry", Geometry)
@pytest.mark.parametrize("lengths", [(20, 20), (150, 170)])
def test_bits_do_not_depend_on_threads(geometry, lengths):
    whole = problem(Case(geometry, 4, 3, *lengths, "scattered", rule=ANY, learn=True, width=40))

    def dropped():
        torch.manual_seed(3)
        return results(lambda *call: kernel(*call, dropout=0.2), *whole)

    first, *others = (with_threads(count, dropped) for count in (1, 2, 3, 2))
    for other in others:
        assert_same_bits(first, other)


def test_eight_threads_at_once_get_what_one_gets():
    """Nothing of a call is kept anywhere, while calls of other sizes run in other threads."""
    sizes = [(2 + i % 3, 3, 3 + 9 * i, 50 - 5 * i) for i in range(8)]
    problems = [problem(Case(list(Geometry)[i % 3], *size, width=8 + i)) for i, size in enumerate(sizes)]
    expected = [results(kernel, *each) for each in problems]

    def work(i):
        for _ in range(20):
            with torch.no_grad():
                assert torch.equal(cpu.attend(problems[i].call()).context, expected[i]["context"])
            assert_same_bits(expected[i], results(kernel, *problems[i]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


def test_memory_of_a_large_call_is_given_back():
    def held():
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20

    large = problem(Case(CROSS, 8, 3, 64, 20_000, previous=False))
    call = large.call(keep_map=False, need_weights=False)
    before = held()
    with torch.no_grad():
        context = with_threads(2, lambda: cpu.attend(call)).context
    assert context.isfinite().all() and held() - before < 32  # MiB; a thread's maps of a band are 42


# ---- step by step


@pytest.mark.parametrize("width", [1, 13, 16, 40, 344])
@pytest.mark.parametrize("at_once", [1, 2])
def test_steps_are_the_rows_of_the_whole(width, at_once):
    check_steps(Case(CROSS, 4, 3, 6, 19, "padding", previous=width == 40, width=width), cpu.attend, at_once)


@pytest.mark.parametrize("previous", [False, True])
def test_steps_of_self_attention_see_one_key_more_each_time(previous):
    check_steps(Case(DECODER, 4, 3, 6, 6, "future", previous=previous), cpu.attend)


def step_of(whole, **options):
    """By default the first, above which there are zeros."""
    zeros = torch.zeros(BATCH, whole.tensors["q"].size(1), 2, 0)
    return whole.call(keep_map=False, need_weights=False, **{"above": zeros, **options})


@torch.no_grad()
def test_steps_without_a_convolution_keep_nothing():
    whole = problem(Case(DECODER, 1, 3, 5, 5, previous=False, beta=0.0))
    assert cpu.attend(step_of(whole)).kept is None


@pytest.mark.parametrize("name", ["q", "k", "v", "weight", "bias", "c"])
def test_steps_are_refused_where_a_gradient_is_needed(name):
    with torch.no_grad():
        call = step_of(problem(Case(DECODER, 4, 3, 5, 5, previous=False)))
        call = call._replace(**{each: getattr(call, each).clone() for each in ("q", "k", "v", "weight", "bias")})
    assert kernels.kernel_for(call) is cpu
    if name == "c":
        differentiable = call._replace(coefficients=call.coefficients._replace(c=torch.tensor(0.3, requires_grad=True)))
    else:
        differentiable = call._replace(**{name: getattr(call, name).clone().requires_grad_()})
    assert kernels.kernel_for(differentiable) is None
    with torch.no_grad():
        assert kernels.kernel_for(differentiable) is cpu


@pytest.mark.parametrize("rows", [1, 5])
@torch.no_grad()
def test_hypotheses_that_share_keys(rows):
    """Neighbours in the batch have one sentence's keys and values."""
    example = problem(Case(CROSS, 4, 3, rows, 7, previous=False))
    tensors = {**example.tensors, "q": torch.randn(2 * BATCH, 4, rows, 4)}
    shared = kernel(example.evolution, tensors, {})
    each = {name: x if name == "q" else x.repeat_interleave(2, dim=0) for name, x in tensors.items()}
    for ours, expected in zip(shared, plain(example.evolution, each, example.masks), strict=True):
        assert_close(ours, expected, rtol=1e-5, atol=1e-5)


# ---- refusals


def half(x):
    return x.half()


REFUSED = {
    "queries of another type": {"q": half, "k": half, "v": half},
    "half-precision convolution weights": {"weight": half},
    "a double map": {"previous": Tensor.double},
    "a convolution of fewer heads": {"weight": lambda x: x[:, :2]},
    "fewer queries' heads than the convolution's": {name: lambda x: x[:, :2] for name in ("q", "k", "v", "previous")},
    "a mask of numbers": {"masked": Tensor.float},
    "a mask for each head": {"masked": lambda x: x.repeat(1, 4, 1, 1)},
    "a hidden mask for each head": {"hidden": lambda x: x.repeat(1, 4, 1, 1)},
    "a map of another length": {"previous": lambda x: x[..., :-1]},
    "values of another size than queries": {"v": lambda x: torch.cat([x, x], dim=3)},
    "keys and values of different lengths": {"k": lambda x: x[:, :, :-1]},
    "keys of another size than queries": {"k": lambda x: x[..., :-1]},
    "keys that sentences share": {"k": lambda x: x[:1], "v": lambda x: x[:1]},
    "no bias": {"bias": lambda x: None},
    "a bias of fewer heads": {"bias": lambda x: x[:2]},
    "values of fewer heads": {"v": lambda x: x[:, :2]},
    "a kernel of another size": {"weight": lambda x: x[..., :1]},
    "given logits of another length": {"given": lambda x: torch.ones(BATCH, 4, 5, 4)},
    "a sparse map": {"previous": Tensor.to_sparse},
    "a tensor on another device": {"bias": lambda x: x.to("meta")},
    "dropout beyond everything": {"dropout": lambda x: 1.5},
    "a learnt scale": {"scale": torch.tensor},
    "a share for each head": {"coefficients": lambda x: x._replace(c=torch.ones(4))},
    "a share in float64": {"coefficients": lambda x: x._replace(c=torch.ones((), dtype=torch.float64))},
    "queries whose memory holds their opposite": {"q": lambda x: torch.complex(x, x).conj().imag},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_and_the_debug_log_says_why(what, caplog):
    call = encoder().call()
    changed = call._replace(**{name: change(getattr(call, name)) for name, change in REFUSED[what].items()})
    with caplog.at_level(logging.DEBUG, "evolving_attention.kernels"):
        assert kernels.kernel_for(call) is cpu
        assert not caplog.messages
        assert kernels.kernel_for(changed) is None
    (line,) = caplog.messages
    assert {"a learnt scale": "scale", "a mask of numbers": "mask"}.get(what, "") in line


@pytest.mark.parametrize("shape", [(2, 4, 2, 5), (3, 4, 1, 5), (3, 4, 2, 6)])
@torch.no_grad()
def test_rows_above_that_do_not_fit_are_refused(shape):
    """B, heads, rows that the kernel reaches up to, and at most as many columns as there are keys."""
    call = step_of(problem(Case(DECODER, 4, 3, 5, 5, previous=False)), above=torch.zeros(3, 4, 2, 5))
    assert kernels.kernel_for(call) is cpu
    assert kernels.kernel_for(call._replace(above=torch.zeros(shape))) is None
    assert kernels.kernel_for(call._replace(geometry=ENCODER)) is None


@torch.no_grad()
def test_sentences_whose_number_does_not_divide_the_batch_are_refused():
    """The kernel would read memory behind the keys."""
    call = problem(Case(DECODER, 4, 3, 5, 5, previous=False)).call()
    assert kernels.kernel_for(call._replace(k=call.k[:1], v=call.v[:1])) is cpu
    assert kernels.kernel_for(call._replace(k=call.k[:2], v=call.v[:2])) is None


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
    cpu_library.library.cache_clear()
    yield tmp_path
    cpu_library.library.cache_clear()


@pytest.fixture
def simple():
    return encoder().call()


def script(folder: Path, body: str) -> Path:
    path = folder / "compiler"
    path.write_text("#!/bin/sh\n" + textwrap.dedent(body))
    path.chmod(0o755)
    return path


@pytest.mark.slow
def test_compiled_once_and_kept(fresh, simple):
    assert cpu.refuses(simple) is None
    (built,) = fresh.glob("evolving_attention/*")
    made = built.stat().st_mtime_ns
    cpu_library.library.cache_clear()
    assert cpu.refuses(simple) is None
    assert (
        [built.stat().st_mtime_ns] == [path.stat().st_mtime_ns for path in fresh.glob("evolving_attention/*")] == [made]
    )


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
    "a compiler that takes too long": (slow_compiler, "timed out"),
    "a cache that cannot be written": (folder_that_cannot_be_written, "file"),
    "a library that never loads": (library_that_never_loads, "cpu_kernel"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failures_are_one_line_in_the_log_and_the_call_is_refused(failure, fresh, simple, monkeypatch, caplog):
    arrange, named = FAILURES[failure]
    arrange(monkeypatch, fresh)
    with caplog.at_level(logging.WARNING):
        assert cpu.refuses(simple) and cpu.refuses(simple) and kernels.kernel_for(simple) is None
    assert len(caplog.messages) == 1 and "\n" not in caplog.text.strip()
    assert "slower" in caplog.text and named in caplog.text
    assert not [path for path in fresh.glob("evolving_attention/*") if path.is_dir()], "nothing half made"


def test_another_compiler_or_c_library_has_a_library_of_its_own(quick_compiler, fresh, simple, monkeypatch):
    for count, (version, c_library) in enumerate([("1.0", "a"), ("1.1", "a"), ("1.1", "b"), ("1.0", "a")], 1):
        monkeypatch.setenv("VERSION", version)
        monkeypatch.setattr(os, "confstr", lambda name, c_library=c_library: f"glibc {c_library}")
        cpu_library.library.cache_clear()
        assert cpu.refuses(simple) is None
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
