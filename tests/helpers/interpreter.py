"""The GPU's kernels for tests: in Triton's interpreter where there is no GPU."""

import os

import pytest
import torch


def import_kernels():
    """gpu_kernels and gpu_trial. Triton decides on its interpreter when it is imported; other tests must not find it
    switched on."""
    before = os.environ.get("TRITON_INTERPRET")
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        pytest.importorskip("triton")
        from ea_fairseq.kernels import gpu_kernels, gpu_trial
    finally:
        if before is None:
            os.environ.pop("TRITON_INTERPRET", None)
        else:
            os.environ["TRITON_INTERPRET"] = before
    return gpu_kernels, gpu_trial
