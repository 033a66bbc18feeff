"""Evolving Attention Transformers for fairseq: ``fairseq-train --user-dir ea_fairseq --arch ea_transformer_base``."""

import argparse
import logging

import numpy
import torch

# fairseq's speech tasks announce on import that they miss a package that translation does not need.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

from .transformer import EATransformerModel, show_options_in_help  # noqa: E402, I001  (registers the model, first)
from . import architectures  # noqa: E402, F401  (registers the presets)

# fairseq's checkpoints hold their options in a Namespace and, with --eval-bleu, counts in NumPy arrays: harmless, but
# torch.load(weights_only=True) must be told so.
torch.serialization.add_safe_globals(
    [
        argparse.Namespace,
        numpy.ndarray,
        numpy.dtype,
        numpy._core.multiarray._reconstruct,
        numpy._core.multiarray.scalar,
        *{type(numpy.dtype(name)) for name in ("int64", "float32", "float64")},
    ]
)
show_options_in_help()

__all__ = ["EATransformerModel"]
