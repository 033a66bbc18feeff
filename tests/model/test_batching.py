"""Promise 3: a sentence's output does not depend on its neighbours in the batch, nor on the side that is padded."""

import pytest
import torch
from helpers.models import amplify_, batch, build
from helpers.promises import check_alone_or_in_a_batch

pytestmark = pytest.mark.usefixtures("each_way")


@pytest.mark.parametrize(
    "k, left_pad_source, left_pad_target",
    [(1, True, False), (3, True, False), (3, False, True), (3, False, False), (5, True, True)],
)
@torch.no_grad()
def test_alone_or_in_a_batch(k, left_pad_source, left_pad_target):
    model = amplify_(build("ea_transformer_base", "--ea-kernel-size", k, "--ea-beta", 0.5))
    source = batch([2, 9, 5], left_pad=left_pad_source)
    target = batch([8, 1, 4], left_pad=left_pad_target, eos_first=True)
    check_alone_or_in_a_batch(lambda source, target: model(source, None, target)[0], source, target)
