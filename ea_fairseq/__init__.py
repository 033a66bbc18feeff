"""Evolving Attention Transformers for fairseq: ``fairseq-train --user-dir ea_fairseq --arch ea_transformer_base``."""

import logging

# fairseq's speech tasks announce on import that they miss a package that translation does not need.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)

from .transformer import EATransformerModel  # noqa: E402, I001  (registers a model, first)
from .bart import EABARTModel  # noqa: E402
from .language_model import EATransformerLanguageModel  # noqa: E402
from .roberta import EARobertaModel  # noqa: E402
from . import architectures  # noqa: E402, F401  (registers the presets)
from .compatibility import mend_fairseq  # noqa: E402
from .hub import Translator, load  # noqa: E402
from .loading import allow_in_checkpoints  # noqa: E402
from .options import show_options_in_help  # noqa: E402
from .quantisation import quantise_map_convolutions  # noqa: E402

allow_in_checkpoints()
mend_fairseq()
quantise_map_convolutions()
show_options_in_help()

__all__ = [
    "EABARTModel",
    "EARobertaModel",
    "EATransformerLanguageModel",
    "EATransformerModel",
    "Translator",
    "load",
]
