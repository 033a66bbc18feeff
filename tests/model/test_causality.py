"""Promise 2: nothing flows from a future target token to an earlier position, in value or in gradient."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from helpers.promises import check_no_future

pytestmark = pytest.mark.usefixtures("each_way")

FLAGS = {k: ["--ea-kernel-size", k, "--ea-beta", 0.5] for k in (1, 3, 5)}


@pytest.mark.parametrize("k", FLAGS)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output_bit_for_bit(k):
    model, source = amplify_(build("ea_transformer_base", *FLAGS[k])), batch([6, 4])
    check_no_future(lambda tokens: model(source, None, tokens)[0], batch([7, 7], eos_first=True))


@pytest.mark.parametrize("k", FLAGS)
def test_no_gradient_flows_from_the_future(k):
    model = amplify_(build("ea_transformer_base", *FLAGS[k]))
    source, tokens = batch([6, 4]), batch([7, 7], eos_first=True)
    embedded = []

    def keep(_, __, output):
        output.retain_grad()
        embedded.append(output)

    model.decoder.embed_tokens.register_forward_hook(keep)
    for position in range(7):
        embedded.clear()
        model(source, None, tokens)[0][:, position].pow(2).sum().backward()
        gradient = embedded[0].grad.abs().sum(-1)  # B x T
        assert (gradient[:, position + 1 :] == 0).all()
        assert (gradient[:, : position + 1] > 0).all()
