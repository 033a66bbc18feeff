"""Scores and relative positions: against loops in float64, values and gradients; their limits; their memory."""

import pytest
import torch
from helpers import reference
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention
from evolving_attention import scores
from evolving_attention.evolution import Geometry
from evolving_attention.scores import SCORES, AdditiveScore, ConcatenativeScore, RelativePositions

C, K, T, S = 6, 3, 5, 4

#: every score, without and with relative positions shorter than the sentences
CHOICES = [(score, reach) for score in SCORES for reach in (0, 2) if (score, reach) != ("dot", 0)]


def paddings(*choices):
    """Each score with one of the ways to pad."""
    return [(*choice, choices[number % len(choices)]) for number, choice in enumerate(CHOICES)]


@pytest.mark.parametrize("score, reach, padding", paddings([0, 0, 0, 1, 1], [1, 0, 0, 0, 0]))
def test_two_encoder_layers_against_loops(score, reach, padding):
    options = {"alpha": 0.4, "beta": 0.3, "score": score, "relative_positions": reach}
    reference.compare_layers([EncoderSelfAttention(C, K, **options) for _ in range(2)], padding)


@pytest.mark.parametrize("score, reach, padding", paddings([1, 1, 0, 0, 0], [0, 0, 0, 0, 1]))
def test_decoder_self_attention_against_loops(score, reach, padding):
    options = {"beta": 0.3, "score": score, "relative_positions": reach, "self_attention": True}
    reference.compare_decoder(DecoderAttention(Geometry.DECODER_SELF, C, K, **options), padding)


@pytest.mark.parametrize(
    "score, beta, padding",
    [("multiplicative", 0.3, [1, 0, 0, 0]), ("additive", 0.3, [0, 0, 1, 1]), ("concatenative", 0, [0, 0, 0, 0])],
)
def test_encoder_decoder_attention_against_loops(score, beta, padding):
    options = {"beta": beta, "score": score, "kdim": 7, "vdim": 7, "encoder_decoder_attention": True}
    reference.compare_cross(DecoderAttention(Geometry.ENCODER_DECODER, C, K, **options), padding, [0] * T)


def test_additive_is_concatenative_with_the_same_weights():
    additive, concatenative = AdditiveScore(K, 4).double(), ConcatenativeScore(K, 4).double()
    with torch.no_grad():
        concatenative.weight.copy_(torch.cat([additive.key_weight, additive.query_weight], dim=2))
        concatenative.vector.copy_(additive.vector)
    q, k = torch.randn(2, K, T, 4, dtype=torch.float64), torch.randn(2, K, S, 4, dtype=torch.float64)
    assert_close(additive(q, k), concatenative(q, k), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("score", ["additive", "concatenative"])
def test_each_head_starts_as_a_layer_of_its_own_would(score):
    """Xavier's bound is that of a head's matrix, however many heads there are."""
    for name, weights in SCORES[score](K, 64).named_parameters():
        rows, columns = (1, 64) if name == "vector" else weights.shape[1:]
        for weight in weights:
            assert weight.abs().max().item() == pytest.approx((6 / (rows + columns)) ** 0.5, rel=0.1), name


@torch.no_grad()
@pytest.mark.parametrize("options", [{"score": "multiplicative"}, {"relative_positions": 2}])
def test_what_starts_as_scaled_dot_products(options):
    plain, module = EncoderSelfAttention(C, K, beta=0), EncoderSelfAttention(C, K, beta=0, **options)
    missing, unexpected = module.load_state_dict(plain.state_dict(), strict=False)
    assert missing and not unexpected
    x = torch.randn(T, 2, C)
    assert_close(module(x)[0], plain(x)[0], rtol=1e-5, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("new", [1, 2, 5])
def test_relative_positions_of_new_queries_count_from_the_end(new):
    module, q = RelativePositions(2, 4).double(), torch.randn(2, K, T, 4, dtype=torch.float64)
    torch.nn.init.normal_(module.weight)
    assert_close(module(q[:, :, -new:], T), module(q, T)[:, :, -new:])


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
@pytest.mark.parametrize("score", ["additive", "concatenative"])
def test_memory_is_that_of_one_piece(score, piece, monkeypatch):
    """With any size of a piece the same numbers, and no tensor larger than one, forwards and backwards."""
    size, rows, columns = 8, 12, 10
    module = SCORES[score](K, size).double()
    q = torch.randn(2, K, rows, size, dtype=torch.float64, requires_grad=True)
    k = torch.randn(2, K, columns, size, dtype=torch.float64, requires_grad=True)

    def result():
        logits = module(q, k)
        probe = torch.linspace(-1, 2, logits.numel(), dtype=torch.float64).view(logits.shape)
        return [logits, *torch.autograd.grad((probe * logits).sum(), [q, k, *module.parameters()])]

    expected = result()
    monkeypatch.setattr(scores, "PIECE", piece)
    with Largest() as largest:
        for ours, theirs in zip(result(), expected, strict=True):
            assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    whole = 2 * K * rows * columns * size
    others = 2 * K * max(rows * columns, rows * size, columns * size)  # the logits, queries and keys themselves
    assert largest.numbers <= max(min(piece, whole), others)


@pytest.mark.parametrize("score", ["additive", "concatenative"])
def test_training_keeps_no_piece(score, monkeypatch):
    """What autograd is given to keep until the way back is far less than one number for each query, key and entry."""
    monkeypatch.setattr(scores, "PIECE", 2000)
    size, rows, columns = 8, 24, 20
    module, kept = SCORES[score](K, size), {}

    def keep(tensor):
        kept[tensor.data_ptr()] = tensor.numel()  # the keys are kept for every piece, and are one tensor
        return tensor

    q, k = torch.randn(2, K, rows, size, requires_grad=True), torch.randn(2, K, columns, size)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = module(q, k)
    assert logits.requires_grad and sum(kept.values()) < 2 * K * rows * columns * size / 2
