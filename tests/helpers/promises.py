"""Promises that every model keeps, as checks of one model."""

import torch
from torch.testing import assert_close


def check_steps(model, source=None, beams=2, dropped=(), steps=8, seed=3):
    """Step by step equals teacher forcing while beams move; ``dropped``: after which steps a sentence is finished.

    source: B x S tokens, or None for a model that is a decoder alone.
    """
    generator = torch.Generator().manual_seed(seed)
    sentences, options = 1 if source is None else len(source), {}
    if source is not None:
        order = torch.arange(sentences).repeat_interleave(beams)
        options["encoder_out"] = model.encoder.reorder_encoder_out(model.encoder(source), order)
    tokens, state = torch.full((sentences * beams, 1), 2), {}
    for step in range(steps):
        ours = model.decoder(tokens, incremental_state=state, **options)[0][:, -1]
        assert_close(ours, model.decoder(tokens, **options)[0][:, -1], rtol=1e-5, atol=1e-5)
        kept = list(range(sentences))
        if step in dropped:
            kept.pop(step % sentences)
        sentences = len(kept)
        choice = torch.randint(beams, (sentences, beams), generator=generator)  # a beam may go on twice or never
        order = (torch.tensor(kept)[:, None] * beams + choice).view(-1)
        model.decoder.reorder_incremental_state_scripting(state, order)
        if source is not None:
            options["encoder_out"] = model.encoder.reorder_encoder_out(options["encoder_out"], order)
        new = torch.randint(4, 24, (sentences * beams, 1), generator=generator)
        tokens = torch.cat([tokens[order], new], dim=1)


def check_no_future(run, tokens):
    """A later token changes no earlier output, bit for bit. run: B x T tokens -> B x T x V."""
    before = run(tokens)
    for position in range(1, tokens.size(1)):
        changed = tokens.clone()
        changed[:, position] = 4 + (changed[:, position] - 4 + 7) % 20
        after = run(changed)
        assert torch.equal(before[:, :position], after[:, :position])
        assert not torch.equal(before[:, position], after[:, position])


def check_alone_or_in_a_batch(run, *sides):
    """A sentence has the same output alone, but for its padding. run: tokens of each side -> B x T x V.

    sides: B x S and B x T tokens with padding on either side, or one of them.
    """
    together = run(*sides)
    for row, output in enumerate(together):
        real = [side[row].ne(1) for side in sides]
        alone = run(*(side[row][words][None] for side, words in zip(sides, real, strict=True)))
        assert_close(output[real[-1]], alone[0], rtol=1e-5, atol=1e-5)
