"""Scores: how they start, and their memory. test_oracle.py has their numbers."""

import pytest
import torch
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from evolving_attention import scores
from evolving_attention.scores import SCORES

K = 3
in_pieces = pytest.mark.parametrize("score", ["additive", "concatenative"])


@in_pieces
def test_each_head_starts_as_a_layer_of_one_head_would(score):
    """Xavier's bound is that of a head's matrix, however many heads there are."""
    for name, weights in SCORES[score](K, 64).named_parameters():
        rows, columns = (1, 64) if name == "vector" else weights.shape[1:]
        for weight in weights:
            assert weight.abs().max().item() == pytest.approx((6 / (rows + columns)) ** 0.5, rel=0.1), name


class Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation gives."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return result


@pytest.mark.parametrize("piece", [1, 400])
@in_pieces
def test_pieces_of_any_size_give_the_same_numbers_in_less_memory(score, piece, monkeypatch):
    """No tensor is larger than a piece, forwards and backwards, and autograd keeps no piece."""
    size, rows, columns = 8, 24, 20
    module, kept = SCORES[score](K, size).double(), {}
    q = torch.randn(2, K, rows, size, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, K, columns, size, dtype=torch.float64, requires_grad=True)

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()  # the keys are kept for every piece, and are one tensor
        return tensor

    def result():
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            logits = module(q, k)
        probe = torch.linspace(-1, 2, logits.numel(), dtype=torch.float64).view(logits.shape)
        return [logits, *torch.autograd.grad((probe * logits).sum(), [q, k, *module.parameters()])]

    expected = result()
    kept.clear()
    monkeypatch.setattr(scores, "PIECE", piece)
    with Largest() as largest:
        ours = result()
    with torch.no_grad():
        ours.append(module(q, k))
    for one, other in zip(ours, [*expected, expected[0]], strict=True):
        assert_close(one, other, rtol=1e-12, atol=1e-12)
    others = 2 * K * max(rows * columns, rows * size, columns * size)  # the logits, queries and keys themselves
    assert largest.numbers <= max(piece, others)
    assert sum(kept.values()) < 2 * K * rows * columns * size / 2
