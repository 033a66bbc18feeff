"""Fixtures of the kernels' tests."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _new_memory_is_nan():
    """What reads memory before anything is written there gives NaN."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
