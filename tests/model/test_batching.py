"""Promise 3: a sentence's output does not depend on its neighbours in the batch, nor on the side that is padded."""

import pytest
import torch
from helpers.promises import check_alone_or_in_a_batch, each_model, lively


@pytest.mark.parametrize("left_source", [True, False], ids=["left-padded source", "left-padded target"])
@each_model()
@torch.no_grad()
def test_a_sentence_has_the_same_output_alone_and_in_a_batch(name, left_source, each_way):
    check_alone_or_in_a_batch(lively(name), left_source, not left_source)
