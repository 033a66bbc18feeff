"""A kernel gives first derivatives of one output at a time; it refuses others, which the plain composition gives."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from torch.autograd import functional
from torch.testing import assert_close

SOURCE = batch([5, 3])


@pytest.fixture(params=[[], ["--ea-plain"]], ids=["kernel", "plain"])
def model(request):
    """A model with random weights, and whether it takes the plain way."""
    torch.manual_seed(2)
    return amplify_(build("ea_transformer_base", *request.param)), "--ea-plain" in request.param


def encode(model):
    return lambda embeddings: model.encoder(SOURCE, token_embeddings=embeddings)["encoder_out"][0]


def gradient_of_a_gradient(model, x, backward):
    parameter = model.encoder.layers[1].self_attn.q_proj.weight
    (first,) = torch.autograd.grad(encode(model)(x).pow(2).sum(), parameter, create_graph=True)
    if backward:
        torch.autograd.backward(first.pow(2).sum(), inputs=[x])
        return x.grad
    return torch.autograd.grad(first.pow(2).sum(), x)[0]


OTHERS = {
    "jvp": lambda model, x: functional.jvp(encode(model), x, torch.ones_like(x))[1],
    "hvp": lambda model, x: functional.hvp(lambda y: encode(model)(y).sin().sum(), x, torch.ones_like(x))[1],
    "grad of some inputs": lambda model, x: gradient_of_a_gradient(model, x, False),
    "backward to some inputs": lambda model, x: gradient_of_a_gradient(model, x, True),
    "batched": lambda model, x: functional.jacobian(lambda y: encode(model)(y)[0, 0, :3], x, vectorize=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_derivatives_are_right_or_refused(model, name):
    model, is_plain = model
    x = torch.randn(2, 5, 16, requires_grad=True)
    if is_plain:
        found = OTHERS[name](model, x)
        assert found.isfinite().all() and found.norm() > 0
    else:
        with pytest.raises(RuntimeError, match=r"--ea-plain|Batching rule"):  # the latter is PyTorch's own
            OTHERS[name](model, x)


def test_a_jacobian_row_by_row_needs_first_derivatives_only():
    ours, plain = build(), build("ea_transformer_base", "--ea-plain")
    plain.load_state_dict(amplify_(ours).state_dict())
    x = torch.randn(2, 5, 16)
    one, other = (functional.jacobian(lambda y, m=m: encode(m)(y)[0, 0, :3], x) for m in (ours, plain))
    assert_close(one, other, rtol=1e-3, atol=1e-4)
    assert one.norm() > 0
