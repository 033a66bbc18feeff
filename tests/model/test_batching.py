"""Promise 3: a sentence's output does not depend on its neighbours in the batch, nor on the side that is padded."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from torch.testing import assert_close

pytestmark = pytest.mark.usefixtures("each_way")


def outputs(model, sources, targets, *, left_pad_source, left_pad_target):
    """Logits of each sentence without its padding, computed in one batch."""

    def collate(sentences, left):
        width = max(map(len, sentences))
        rows = torch.full((len(sentences), width), 1)
        for row, sentence in zip(rows, sentences, strict=True):
            row[slice(-len(sentence), None) if left else slice(len(sentence))] = sentence
        return rows

    target = collate(targets, left_pad_target)
    logits = model(collate(sources, left_pad_source), None, target)[0]
    return [row[real] for row, real in zip(logits, target.ne(1), strict=True)]


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("left_pad_source", [True, False])
@pytest.mark.parametrize("left_pad_target", [True, False])
@torch.no_grad()
def test_alone_or_in_a_batch(k, left_pad_source, left_pad_target):
    model = amplify_(build("ea_transformer_base", "--ea-kernel-size", k, "--ea-beta", 0.5))
    sources = [batch([n], seed=n)[0] for n in (2, 9, 5)]
    targets = [batch([n], seed=n, eos_first=True)[0] for n in (8, 1, 4)]
    together = outputs(model, sources, targets, left_pad_source=left_pad_source, left_pad_target=left_pad_target)
    for source, target, ours in zip(sources, targets, together, strict=True):
        alone = model(source[None], None, target[None])[0][0]
        assert_close(ours, alone, rtol=1e-5, atol=1e-5)
