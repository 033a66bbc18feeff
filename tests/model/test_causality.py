"""Promise 2: nothing flows from a future target token to an earlier position, in value or in gradient."""

import torch
from helpers.models import batch
from helpers.promises import DECODERS, each_model, lively, outputs


@each_model(DECODERS)
@torch.no_grad()
def test_a_later_token_changes_no_earlier_output_bit_for_bit(name, each_way):
    model, source, tokens = lively(name), batch([6, 4]), batch([7, 7], eos_first=True)
    before = outputs(model, source, tokens)
    for position in range(1, tokens.size(1)):
        changed = tokens.clone()
        changed[:, position] = 4 + (changed[:, position] - 4 + 7) % 20
        after = outputs(model, source, changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


@each_model(["kernel 1", "kernel 5", "relative, additive", "language model", "BART"])
def test_no_gradient_flows_from_the_future(name, each_way):
    model, tokens, embedded = lively(name), batch([7, 7], eos_first=True), []

    def keep(_, given):
        given[0].retain_grad()
        embedded.append(given[0])

    model.decoder.layers[0].register_forward_pre_hook(keep)
    for position in range(7):
        embedded.clear()
        outputs(model, batch([6, 4]), tokens)[:, position].pow(2).sum().backward()
        gradient = embedded[0].grad.abs().sum(-1).T  # B x T
        assert (gradient[:, position + 1 :] == 0).all()
        assert (gradient[:, : position + 1] > 0).all()
