"""The CPU's kernel gives the plain composition's numbers, maps, context and every gradient, or refuses the call."""

import logging
import os
import subprocess
import sys
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
    check_each_result,
    check_share,
    check_steps,
    compare,
    plain,
    probe,
    problem,
    results,
    with_threads,
)
from helpers.models import in_threads
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
    Case(ENCODER, 4, 3, 5, 5, "scattered", alpha=0.0, beta=0.0, learn=True),
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


Long = partial(Case, heads=3, masks="scattered", rule=ANY, learn=True, width=24)
LONG = {
    "one chunk of two bands": Long(ENCODER, k=3, length=64, columns=100),
    "two chunks": Long(ENCODER, k=5, length=130, columns=150),
    "many": Long(ENCODER, k=3, length=359, columns=331),
    "rows that would lie a multiple of 256 numbers apart": Long(CROSS, k=3, length=239, columns=240),
    "chunks of the decoder": Long(DECODER, k=5, length=150, columns=150),
    "chunks of the encoder-decoder attention": Long(CROSS, k=5, length=359, columns=331),
    "a kernel of one pixel": Long(ENCODER, k=1, length=130, columns=150),
    "without a convolution": Long(ENCODER, k=3, length=200, columns=200, rule="residual"),
    # Of 150 rows three parts in a small batch, two in a larger one, and the whole in a large one.
    "two parts": Case(ENCODER, 2, 3, 150, 40, "scattered", width=16, batch=4),
    "the whole": Case(ENCODER, 2, 3, 150, 40, "scattered", width=16, batch=16),
    # Its last bands begin below the map, where all rows are zeros, and no more rows than the band has.
    "a kernel taller than a band": Case(CROSS, 1, 39, 40, 1100, "scattered all", previous=False, batch=1),
}


@pytest.mark.parametrize("case", LONG.values(), ids=LONG)
def test_long_sentences_are_worked_on_in_parts(case):
    """The convolution reads rows of both parts at their border."""
    compare(problem(case), kernel)


@pytest.mark.slow
def test_sentences_whose_keys_are_too_large_to_be_packed_all_at_once():
    """26 MB of keys and values in each of three, of which threads share 24 MB at a time or a single sentence."""
    large = problem(Case(CROSS, 2, 3, 130, 1600, "scattered", previous=False, width=1024))
    large.tensors["q"].data *= 0.05
    compare(large, kernel)


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


@pytest.mark.parametrize(
    ("geometry", "rows", "keys", "seen"),
    [
        *((geometry, 96, 96, [96, 48, 16]) for geometry in (DECODER, CROSS)),
        *((CROSS, 20, 112, [16 * vectors] * 3) for vectors in (1, 3, 4, 7)),
    ],
)
def test_keys_of_any_number_of_vectors_are_left_out(geometry, rows, keys, seen):
    """Products take several vectors at a time. One thread leaves nothing of a longer sentence for a shorter one."""
    whole = problem(Case(geometry, 4, 3, rows, keys, previous=False, width=24))
    masked = (torch.arange(keys) >= torch.tensor(seen)[:, None, None, None]).expand(BATCH, 1, rows, keys)
    whole.masks.update(masked=masked, hidden=masked)
    with_threads(1, lambda: compare(whole, context_alone, plain_context))


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
    check_each_result(encoder(), kernel)


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
    check_share(Case(ENCODER, 8, 3, 256, 256, previous=False, alpha=0.0, width=256), cpu.attend, 0.4)


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


def test_dropping_everything_gives_zeros():
    outputs = results(lambda *call: context_alone(*call, dropout=1.0), *encoder())
    assert all(not x.any() for x in outputs.values())


# ---- threads


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

    in_threads(work)


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


STEPS = [Case(CROSS, 4, 3, 6, 19, "padding", previous=width == 40, width=width) for width in (1, 13, 16, 40, 344)]
STEPS += [Case(DECODER, 4, 3, 6, 6, "future", previous=previous) for previous in (False, True)]
STEPS += [Case(DECODER, 4, 3, 6, 6, "future", previous=False, beta=0.0)]  # they keep no rows
STEPS += [Case(CROSS, 4, 3, 6, 7, previous=False, batch=4)]


@pytest.mark.parametrize("at_once", [1, 2])
@pytest.mark.parametrize("case", STEPS, ids=lambda case: f"{case_id(case)}-{case.width}-{case.previous}-{case.beta}")
def test_steps_are_the_rows_of_the_whole(case, at_once):
    """Those of self-attention see more keys each time. Neighbours may have one sentence's keys."""
    check_steps(case, cpu.attend, at_once, beams=2 if case.batch == 4 else 1)


def step_of(whole, **options):
    """By default the first, above which there are zeros."""
    zeros = torch.zeros(BATCH, whole.tensors["q"].size(1), 2, 0)
    return whole.call(keep_map=False, need_weights=False, **{"above": zeros, **options})


@pytest.mark.parametrize("name", ["q", "k", "v", "weight", "bias", "coefficients"])
def test_steps_are_refused_where_a_gradient_is_needed(name):
    with torch.no_grad():
        call = step_of(problem(Case(DECODER, 4, 3, 5, 5, previous=False)))
        call = call._replace(**{each: getattr(call, each).clone() for each in ("q", "k", "v", "weight", "bias")})
    assert kernels.kernel_for(call) is cpu
    learnt = call.coefficients._replace(c=torch.tensor(0.3, requires_grad=True))
    value = learnt if name == "coefficients" else getattr(call, name).clone().requires_grad_()
    differentiable = call._replace(**{name: value})
    assert kernels.kernel_for(differentiable) is None
    with torch.no_grad():
        assert kernels.kernel_for(differentiable) is cpu


# ---- refusals


def half(x):
    return x.half()


REFUSED = {
    "queries of another type": {"q": half, "k": half, "v": half},
    "half-precision convolution weights": {"weight": half},
    "a convolution of fewer heads": {"weight": lambda x: x[:, :2]},
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
def test_rows_above_and_sentences_that_do_not_fit_are_refused(shape):
    """B, heads, rows that the kernel reaches up to, and at most as many columns as there are keys.

    The kernel would read memory behind the keys of sentences whose number does not divide the batch.
    """
    call = step_of(problem(Case(DECODER, 4, 3, 5, 5, previous=False)), above=torch.zeros(3, 4, 2, 5))
    assert kernels.kernel_for(call) is kernels.kernel_for(call._replace(k=call.k[:1], v=call.v[:1])) is cpu
    assert kernels.kernel_for(call._replace(above=torch.zeros(shape))) is None
    assert kernels.kernel_for(call._replace(geometry=ENCODER)) is None
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
def fresh(monkeypatch, tmp_path):
    """As on a machine where nothing has been compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu_library.library.cache_clear()
    yield tmp_path
    cpu_library.library.cache_clear()


@pytest.fixture
def simple():
    return encoder().call()


def compiler(folder, body):
    """A compiler that does this; $2 is the library that it should make."""
    path = folder / "compiler"
    version = '[ "$1" = --version ] && exec echo odd $VERSION'
    path.write_text("\n".join(["#!/bin/sh", version, 'while [ "$1" != -o ]; do shift; done', body]))
    path.chmod(0o755)
    return str(path)


@pytest.mark.slow
def test_compiled_once_and_kept(fresh, simple):
    assert cpu.refuses(simple) is None
    (built,) = fresh.glob("evolving_attention/*")
    made = built.stat().st_mtime_ns
    cpu_library.library.cache_clear()
    assert cpu.refuses(simple) is None
    assert [path.stat().st_mtime_ns for path in fresh.glob("evolving_attention/*")] == [made]


#: a compiler's program, or another environment; a word of the log
FAILURES = {
    "a compiler that fails": ({"CC": "false"}, "false"),
    "no compiler": ({"CC": "no-such-compiler"}, "no-such-compiler"),
    "a compiler that takes too long": ("echo warning: this takes long >&2; exec sleep 20", "timed out"),
    "a cache that cannot be written": ({"XDG_CACHE_HOME": "/dev/null"}, "/dev/null"),
    "a library that never loads": ('echo no library > "$2"', "cpu_kernel"),
}


@pytest.mark.parametrize("failure", FAILURES)
def test_failures_are_one_line_in_the_log_and_the_call_is_refused(failure, fresh, simple, monkeypatch, caplog):
    how, named = FAILURES[failure]
    for name, value in (how if isinstance(how, dict) else {"CC": compiler(fresh, how)}).items():
        monkeypatch.setenv(name, value)
    if "too long" in failure:
        monkeypatch.setattr(cpu_library, "_COMPILING_TAKES_AT_MOST", 0.5)
    with caplog.at_level(logging.WARNING):
        assert cpu.refuses(simple) and cpu.refuses(simple) and kernels.kernel_for(simple) is None
    assert len(caplog.messages) == 1 and "\n" not in caplog.text.strip()
    assert "slower" in caplog.text and named in caplog.text
    assert not [path for path in fresh.glob("evolving_attention/*") if path.is_dir()], "nothing half made"


def test_another_compiler_c_library_header_or_processor_has_a_library_of_its_own(monkeypatch, tmp_path):
    """Homes are shared by machines, on some of which the others' instructions end the process."""
    command, read = [compiler(tmp_path, "")], Path.read_text
    names = [cpu_library._fingerprint(command)]
    monkeypatch.setenv("VERSION", "1.1")
    names.append(cpu_library._fingerprint(command))
    monkeypatch.setattr(os, "confstr", lambda name: "glibc of another kind")
    names.append(cpu_library._fingerprint(command))
    for path in (cpu_library._INCLUDED, Path("/proc/cpuinfo")):
        changed = {path: "flags : of another kind\n"}
        monkeypatch.setattr(Path, "read_text", lambda path, changed=changed: changed.get(path) or read(path))
        names.append(cpu_library._fingerprint(command))
    assert len(set(names)) == 5


def test_several_processes_may_compile_at_once(tmp_path):
    """Compiling takes seconds: this compiler gives the library that has been compiled already, after a moment."""
    program = "from evolving_attention.kernels.cpu import library; assert library.library() is not None"
    quick = compiler(tmp_path, f'sleep 0.5; cp "{cpu_library.library()._name}" "$2"')
    command, environment = [sys.executable, "-c", program], {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "CC": quick}
    processes = [warm.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    for process in processes:
        assert "slower" not in process.communicate(timeout=300)[1]
        assert process.returncode == 0
    assert len(list(tmp_path.glob("evolving_attention/*"))) == 1
