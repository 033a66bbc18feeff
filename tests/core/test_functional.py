"""The core's function and modules: their refusals, and types of masks."""

import pytest
import torch

from evolving_attention import EvolvingAttention, Geometry, evolving_attention


def module(kernel_size, rule="evolving"):
    return EvolvingAttention(Geometry.ENCODER_SELF, 8, 2, kernel_size=kernel_size, rule=rule)


def function(kernel_size, rule="evolving", bias=True):
    q, weight = torch.randn(1, 2, 5, 4), torch.randn(2, 2, kernel_size, kernel_size)
    return evolving_attention(q, q, q, None, weight, torch.zeros(2) if bias else None, rule=rule)


@pytest.mark.parametrize("build", [module, function])
@pytest.mark.parametrize("size, rule, message", [(4, "evolving", "kernel_size 4"), (3, "evolve", "rule 'evolve'")])
def test_an_even_kernel_and_an_unknown_rule_are_refused(build, size, rule, message):
    build(3)
    with pytest.raises(ValueError, match=f"{message}: must be "):
        build(size, rule)


def test_a_weight_without_a_bias_is_refused():
    with pytest.raises(ValueError, match="both or neither"):
        function(3, bias=False)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32])
def test_a_decoders_mask_may_have_any_type(dtype):
    attention, x = EvolvingAttention(Geometry.DECODER_SELF, 8, 2, beta=0.5), torch.randn(2, 4, 8)
    hides = torch.zeros(4, 4, dtype=torch.bool)
    hides[2:, 0] = True
    mask = hides.float().masked_fill(hides, -torch.inf) if dtype == torch.float32 else hides.to(dtype)
    weights = attention(x, attn_mask=mask, need_weights=True).weights
    assert (weights == 0).equal((hides | torch.ones(4, 4).triu(1).bool()).expand_as(weights))
