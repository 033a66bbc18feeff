"""Evolving Attention Transformers for fairseq: ``fairseq-train --user-dir ea_fairseq --arch ea_transformer_base``."""

import logging

# fairseq's speech tasks announce on import that they miss a package that translation does not need.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

from .transformer import EATransformerModel  # noqa: E402, I001  (registers the model, first)
from . import architectures  # noqa: E402, F401  (registers the presets)
from .loading import allow_in_checkpoints  # noqa: E402
from .options import show_options_in_help  # noqa: E402

allow_in_checkpoints()
show_options_in_help()

__all__ = ["EATransformerModel"]
