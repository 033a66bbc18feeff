"""Dropout of the CPU's kernel: the right share, in places that nothing else tells, the same in the backward pass."""

import pytest
import torch
import torch.nn.functional as F
from fairseq.modules.fairseq_dropout import FairseqDropout
from helpers.attentions import with_threads
from helpers.models import batch, build

from ea_fairseq.dropout import Dropout
from evolving_attention.kernels.cpu import dropout as cpu_dropout


def seeded(seed, drop, *given):
    torch.manual_seed(seed)
    return drop(*given)


@pytest.mark.parametrize("probability", [0.1, 0.5])
def test_the_right_share_is_dropped_and_the_rest_divided(probability):
    x = torch.randn(400, 501)
    result = cpu_dropout.drop(x, probability)
    dropped, places = result == 0, x.numel()
    spread = (probability * (1 - probability) / places) ** 0.5
    assert abs(dropped.double().mean().item() - probability) < 5 * spread
    torch.testing.assert_close(result[~dropped], x[~dropped] / (1 - probability), rtol=1e-4, atol=0)


def test_what_is_dropped_tells_nothing_of_its_neighbours_or_of_another_draw():
    """In rows, in columns, at the distances that draws of random bits and vectors have, and from call to call."""
    first, second = (cpu_dropout.drop(torch.ones(64, 4096), 0.5) == 0 for _ in range(2))
    few = 5 * 0.5 / first.numel() ** 0.5  # five standard deviations
    for distance in (1, 2, 7, 8, 15, 16, 32, 64, 128, 256, 1024):
        both = first[:, distance:] == first[:, :-distance]
        assert abs(both.double().mean().item() - 0.5) < 1.2 * few, distance
    assert abs((first[1:] == first[:-1]).double().mean().item() - 0.5) < 1.2 * few
    assert abs((first == second).double().mean().item() - 0.5) < few


@pytest.mark.parametrize("shape", [(0, 3), (), (7,), (64,), (129,), (3, 5, 7, 11)])
def test_any_shape(shape):
    x = torch.rand(shape) + 1
    result = cpu_dropout.drop(x, 0.5)
    assert result.shape == x.shape
    assert torch.equal(result, torch.where(result == 0, 0, 2 * x))


def test_the_gradient_passes_where_the_number_did():
    """And that of the gradient."""
    x = torch.randn(33, 65, requires_grad=True)
    result = cpu_dropout.drop(x, 0.5)
    weights = torch.randn(65, 33, requires_grad=True).t()  # a gradient that lies otherwise in memory
    (gradient,) = torch.autograd.grad(result, x, weights, create_graph=True)
    assert torch.equal(gradient, torch.where(result == 0, 0, 2 * weights))
    (second,) = torch.autograd.grad(gradient.sum(), weights)
    assert torch.equal(second, torch.where(result == 0, 0.0, 2.0))


def test_the_same_seed_drops_the_same_wherever_numbers_lie():
    x = torch.randn(31, 47)
    expected = seeded(1, cpu_dropout.drop, x, 0.4)
    assert torch.equal(seeded(1, cpu_dropout.drop, x.t().contiguous().t(), 0.4), expected)
    assert torch.equal(seeded(1, cpu_dropout.drop, torch.stack([x, x], 2)[..., 1], 0.4), expected)
    assert not torch.equal(seeded(2, cpu_dropout.drop, x, 0.4), expected)


def test_bits_do_not_depend_on_threads():
    x = torch.randn(300_000)
    first, *others = (with_threads(count, lambda: seeded(1, cpu_dropout.drop, x, 0.1)) for count in (1, 2, 5))
    assert all(torch.equal(other, first) for other in others)


def test_the_way_back_keeps_no_mask():
    """PyTorch's keeps one byte or more for each number; ours one number in all."""
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda x: x):
        cpu_dropout.drop(torch.randn(10, requires_grad=True), 0.5)
    assert sum(x.numel() for x in kept) == 1


def test_in_evaluation_it_drops_where_it_is_retained_alone():
    """fairseq's --retain-dropout."""
    x, dropout = torch.ones(100), Dropout(0.5).eval()
    assert dropout(x) is Dropout(0.0)(x) is x
    dropout.make_generation_fast_("", retain_dropout=True)
    assert 20 < (dropout(x) == 0).sum() < 80


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.float32])
def test_numbers_of_other_types_or_without_the_library_are_pytorchs(dtype, monkeypatch):
    if dtype == torch.float32:
        monkeypatch.setattr(cpu_dropout.library, "library", lambda: None)
    x = torch.ones(100, dtype=dtype)
    assert torch.equal(seeded(1, Dropout(0.5), x), seeded(1, F.dropout, x, 0.5))


@pytest.mark.parametrize("arch", ["ea_transformer_base", "pa_transformer_lite"])
def test_a_training_step_drops_by_it_everywhere_but_in_attentions(arch, monkeypatch):
    model = build(arch, "--dropout", 0.25, "--activation-dropout", 0.5, train=True)
    drawn, drop = [], cpu_dropout.drop
    monkeypatch.setattr(F, "dropout", lambda *_, **__: pytest.fail("PyTorch's dropout was taken"))
    monkeypatch.setattr(cpu_dropout, "drop", lambda x, p: drawn.append(p) or drop(x, p))
    model(batch([6, 4]), torch.tensor([6, 4]), batch([5, 3], eos_first=True))
    assert sorted(drawn) == [0.25] * (1 + 3 * 2 + 1 + 2 * 3) + [0.5] * (3 + 2)
    plain = build(arch, "--ea-plain").modules()
    assert {type(one) for one in plain if isinstance(one, FairseqDropout)} == {FairseqDropout}
