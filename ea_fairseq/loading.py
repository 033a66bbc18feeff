"""What a checkpoint may hold beside tensors and plain values, for ``torch.load(weights_only=True)``: the one list.

fairseq's checkpoints hold their options in a Namespace and, with --eval-bleu, counts in NumPy arrays. All of these are
data. Nothing that could run code belongs here. This file imports nothing of fairseq, so that tools may read it alone.
"""

import argparse

import numpy
import torch

SAFE_GLOBALS = [
    argparse.Namespace,
    numpy.ndarray,
    numpy.dtype,
    numpy._core.multiarray._reconstruct,
    numpy._core.multiarray.scalar,
    *{type(numpy.dtype(code)) for code in "?bhilqBHILQefd"},  # bool, and every size of integer and float
]


def allow_in_checkpoints() -> None:
    """Let ``torch.load(weights_only=True)`` read ``SAFE_GLOBALS`` in this process."""
    torch.serialization.add_safe_globals(SAFE_GLOBALS)
