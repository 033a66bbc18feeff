"""A kernel gives first derivatives of one output at a time; it refuses others, which the plain composition gives."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from torch.autograd import functional
from torch.testing import assert_close

SOURCE = batch([5, 3])


def encoders():
    """The same encoder twice, by the kernel and by the plain composition: B x T x C embeddings -> T x B x C."""
    models = build(), build("ea_transformer_base", "--ea-plain")
    models[1].load_state_dict(amplify_(models[0]).state_dict())
    return [lambda x, m=model: m.encoder(SOURCE, token_embeddings=x)["encoder_out"][0] for model in models]


def gradient_of_a_gradient(encode, x, backward):
    shift = torch.zeros(16, requires_grad=True)
    (first,) = torch.autograd.grad(encode(x + shift).pow(2).sum(), shift, create_graph=True)
    if backward:
        torch.autograd.backward(first.pow(2).sum(), inputs=[x])
        return x.grad
    return torch.autograd.grad(first.pow(2).sum(), x)[0]


OTHERS = {
    "jvp": lambda encode, x: functional.jvp(encode, x, torch.ones_like(x))[1],
    "hvp": lambda encode, x: functional.hvp(lambda y: encode(y).sin().sum(), x, torch.ones_like(x))[1],
    "grad of some inputs": lambda encode, x: gradient_of_a_gradient(encode, x, False),
    "backward to some inputs": lambda encode, x: gradient_of_a_gradient(encode, x, True),
    "batched": lambda encode, x: functional.jacobian(lambda y: encode(y)[0, 0, :3], x, vectorize=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_derivatives_are_given_or_refused(name):
    by_kernel, plain = encoders()
    x = torch.randn(2, 5, 16, requires_grad=True)
    result = OTHERS[name](plain, x)
    assert result.isfinite().all() and result.norm() > 0
    with pytest.raises(RuntimeError, match=r"--ea-plain|Batching rule"):  # the latter is PyTorch's own
        OTHERS[name](by_kernel, x)


def test_a_jacobian_row_by_row_needs_first_derivatives_only():
    x = torch.randn(2, 5, 16)
    one, other = (functional.jacobian(lambda y, f=encode: f(y)[0, 0, :3], x) for encode in encoders())
    assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert one.norm() > 0
