"""The CPU's kernel gives the plain composition's numbers: maps, context and every gradient."""

import logging
from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from conftest import batch, build
from torch.testing import assert_close

from ea_fairseq import cpu
from ea_fairseq.evolution import Evolution, Geometry


def plain(q, k, v, evolution, hidden=None, masked=None, previous=None, dropout=0.0):
    a_logit = evolution(q @ k.transpose(2, 3), hidden, previous)
    scores = a_logit if masked is None else a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    weights = F.softmax(scores, dim=-1)
    return F.dropout(weights, dropout) @ v, a_logit, weights


def kernel(*args, **kwargs):
    return cpu.evolving_attention(*args, **kwargs, keep_map=True, need_weights=True)


def problem(geometry, heads=4, kernel_size=3, beta=0.3, lengths=(5, 7), depth=6, previous=True, masks=True):
    """(q, k, v, evolution), keyword arguments, all that has a gradient; one sentence of three is all padding."""
    batch, (rows, columns) = 3, lengths
    if geometry != Geometry.ENCODER_DECODER:
        columns = rows
    evolution = Evolution(geometry, heads, kernel_size, 0.4, beta)
    q, k, v = (
        torch.randn(length, batch, heads, depth).permute(1, 2, 0, 3).requires_grad_()
        for length in (rows, columns, columns)
    )
    keywords = {}
    if masks:
        padded = torch.rand(batch, columns) < 0.3
        padded[0] = True
        masked = padded[:, None, None]
        if geometry == Geometry.DECODER_SELF:
            masked = masked | torch.ones(rows, columns, dtype=torch.bool).triu(1)
        if geometry == Geometry.ENCODER_DECODER:
            masked = masked.repeat(1, 1, rows, 1)
            masked[1, :, rows // 2] = True  # a row without keys, among others that have some
        keywords = {"masked": masked, "hidden": masked | (torch.rand(batch, 1, rows, 1) < 0.3)}
    if previous:
        keywords["previous"] = torch.randn(batch, heads, rows, columns, requires_grad=True)
    leaves = [q, k, v, *([keywords["previous"]] if previous else []), *evolution.parameters()]
    return (q, k, v, evolution), keywords, leaves


def run(way, arguments, keywords, leaves, dtype=torch.float32):
    """Results and gradients of `way`, in some precision, for fixed uneven gradients of all results."""
    q, k, v, evolution = arguments
    evolution = deepcopy(evolution).to(dtype)
    tensors = {id(x): x.detach().to(dtype).requires_grad_() for x in leaves if not isinstance(x, torch.nn.Parameter)}
    keywords = {name: tensors.get(id(x), x) for name, x in keywords.items()}
    torch.manual_seed(3)
    results = way(*(tensors[id(x)] for x in (q, k, v)), evolution, **keywords)
    total = sum((x * torch.linspace(-1, 2, x.numel(), dtype=dtype).view(x.shape)).sum() for x in results)
    return [*results, *torch.autograd.grad(total, [*tensors.values(), *evolution.parameters()])]


def compare(arguments, keywords, leaves):
    """As near to float64 as 1e-5 of the largest number, or as the plain composition's float32 times 1.5."""
    exact = run(plain, arguments, keywords, leaves, torch.float64)
    for truth, ours, theirs in zip(
        exact, run(kernel, arguments, keywords, leaves), run(plain, arguments, keywords, leaves), strict=True
    ):
        scale = truth.abs().max().clamp(min=1e-6)
        allowed = max(1e-5, 1.5 * ((theirs - truth).abs().max() / scale).item())
        assert ((ours - truth).abs().max() / scale).item() <= allowed
        assert not ours.isnan().any()


KINDS = list(Geometry)


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("kernel_size, beta", [(1, 0.3), (3, 0.3), (5, 0.3), (3, 1), (3, 0)])
@pytest.mark.parametrize("previous, masks", [(True, True), (False, True), (True, False)])
def test_the_same_numbers_and_gradients(geometry, kernel_size, beta, previous, masks):
    torch.manual_seed(1)
    compare(*problem(geometry, 4, kernel_size, beta, previous=previous, masks=masks))


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("heads", range(1, 17))
def test_any_number_of_heads(geometry, heads):
    torch.manual_seed(heads)
    compare(*problem(geometry, heads))


@pytest.mark.parametrize("geometry", KINDS)
@pytest.mark.parametrize("lengths", [(1, 1), (2, 3), (16, 16), (17, 33), (40, 5), (70, 97)])
@pytest.mark.parametrize("depth", [1, 16, 40])
def test_any_length(geometry, lengths, depth):
    torch.manual_seed(2)
    compare(*problem(geometry, 2, lengths=lengths, depth=depth))


@pytest.mark.parametrize("geometry", KINDS)
def test_dropout_is_the_plain_composition_s(geometry):
    arguments, keywords, leaves = problem(geometry)
    for ours, theirs in zip(
        *(run(way, arguments, {**keywords, "dropout": 0.4}, leaves) for way in (kernel, plain)), strict=True
    ):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_bits_do_not_depend_on_threads():
    arguments, keywords, leaves = problem(Geometry.ENCODER_SELF, lengths=(20, 20))
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3, 2):
            torch.set_num_threads(threads)
            results.append(run(kernel, arguments, keywords, leaves))
    finally:
        torch.set_num_threads(before)
    for first, *others in zip(*results, strict=True):
        assert all(torch.equal(first, other) for other in others)


def test_vectors_may_lie_anywhere():
    torch.manual_seed(5)
    (q, k, v, evolution), keywords, _ = problem(Geometry.ENCODER_SELF)
    expected = kernel(q, k, v, evolution, **keywords)
    for change in (torch.Tensor.contiguous, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        for ours, theirs in zip(kernel(*map(change, (q, k, v)), evolution, **keywords), expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("depth", [1, 8, 13, 16, 27, 40])
@torch.no_grad()
def test_steps_are_the_rows_of_the_whole(depth):
    (q, k, v, evolution), _, _ = problem(Geometry.ENCODER_DECODER, lengths=(6, 19), depth=depth)
    expected = plain(0.5 * q, k, v, evolution)[0]
    above = torch.zeros(3, 4, 2, 19)
    for i in range(6):
        row, above, _ = cpu.evolving_step(q[:, :, i : i + 1], k, v, evolution, scale=0.5, above=above)
        assert_close(row, expected[:, :, i : i + 1])


def test_infinities_that_are_hidden_stay_hidden():
    (q, k, v, evolution), _, _ = problem(Geometry.DECODER_SELF, masks=False, previous=False)
    future = torch.ones(5, 5, dtype=torch.bool).triu(1)[None, None]
    before = kernel(q, k, v, evolution, hidden=future, masked=future)[0]
    broken = k.detach().clone()
    broken[:, :, -1] = float("inf")
    after = kernel(q, broken, v, evolution, hidden=future, masked=future)[0]
    assert torch.equal(before[:, :, :-1], after[:, :, :-1])


@pytest.mark.parametrize("dropout", [0, 0.3])
def test_in_a_model_the_kernel_is_used_unless_ea_plain_is_given(monkeypatch, dropout):
    calls, evolving_attention = [], cpu.evolving_attention
    monkeypatch.setattr(cpu, "evolving_attention", lambda *a, **k: calls.append(1) or evolving_attention(*a, **k))
    gradients = []
    for flags in ([], ["--ea-plain"]):
        torch.manual_seed(1)
        model = build("ea_transformer_base", "--attention-dropout", dropout, *flags, train=True)
        torch.manual_seed(2)
        output, _ = model(batch([5, 3], left_pad=True), None, batch([4, 6], eos_first=True))
        gradients.append([output, *torch.autograd.grad(output.square().mean(), list(model.parameters()))])
    assert len(calls) == 3 + 2 * 2, "three encoder layers, two decoder layers with two kinds each, and only once"
    for ours, plain in zip(*gradients, strict=True):
        assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """As on a machine where nothing has been compiled yet."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cpu._library.cache_clear()
    yield tmp_path
    cpu._library.cache_clear()


def test_compiled_once_and_kept(fresh):
    assert cpu.runs(torch.ones(1))
    (built,) = fresh.glob("ea_fairseq/*")
    made = built.stat().st_mtime_ns
    cpu._library.cache_clear()
    assert cpu.runs(torch.ones(1))
    assert [built.stat().st_mtime_ns] == [path.stat().st_mtime_ns for path in fresh.glob("ea_fairseq/*")] == [made]


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_compiler_the_plain_composition_does_it(fresh, monkeypatch, caplog, compiler):
    model, source, target = build("ea_transformer_base"), batch([5, 3], left_pad=True), batch([4, 6], eos_first=True)
    expected, _ = model(source, None, target)
    monkeypatch.setenv("CC", compiler)
    cpu._library.cache_clear()
    with caplog.at_level(logging.WARNING):
        output, _ = model(source, None, target)
    assert_close(output, expected)
    assert len(caplog.messages) == 1 and compiler in caplog.text and "slower" in caplog.text
    assert len(list(fresh.glob("ea_fairseq/*"))) == 1, "the first compiler's, and nothing half made"


def test_a_file_that_cannot_be_loaded_is_named(fresh, monkeypatch, caplog):
    monkeypatch.setattr(cpu, "_fingerprint", lambda compiler: "torn")
    torn = fresh / "ea_fairseq" / "cpu_kernel-torn.so"
    torn.parent.mkdir()
    torn.write_bytes(b"torn")
    assert not cpu.runs(torch.ones(1)) and str(torn) in caplog.text


def test_only_float32_on_the_cpu():
    assert [cpu.runs(torch.ones(1, dtype=dtype)) for dtype in (torch.float64, torch.bfloat16)] == [False, False]
