"""Evolving Attention Transformers for fairseq: ``fairseq-train --user-dir ea_fairseq --arch ea_transformer_base``."""

import logging
import sys
from importlib.util import find_spec
from typing import Any

from evolving_attention import __version__

if find_spec("fairseq") is None:
    raise ModuleNotFoundError("ea_fairseq needs fairseq: pip install fairseq-fixed==0.12.3.1", name="fairseq")

# Importing fairseq's speech tasks sets up the root logger for debugging, where nothing else has, and announces that a
# package is missing that translation does not need.
logging.getLogger("fairseq.tasks.text_to_speech").setLevel(logging.WARNING)
_set_up = logging.NullHandler()
logging.root.addHandler(_set_up)

from .transformer import EATransformerModel  # noqa: E402, I001  (registers a model, first)
from .bart import EABARTModel  # noqa: E402
from .cmlm import EACMLMModel  # noqa: E402
from .language_model import EATransformerLanguageModel  # noqa: E402
from .roberta import EARobertaModel  # noqa: E402
from . import architectures, optim  # noqa: E402, F401  (registers the presets, and the optimizer)
from .compatibility import mend_fairseq  # noqa: E402
from ea_artifacts.checkpoints import allow_in_checkpoints  # noqa: E402
from .options import show_options_in_help  # noqa: E402
from .quantisation import quantise_map_convolutions  # noqa: E402

logging.root.removeHandler(_set_up)
allow_in_checkpoints()
mend_fairseq()
quantise_map_convolutions()
show_options_in_help()
if "fairseq_cli.train" in sys.modules and any(optim.NAME in word for word in sys.argv):
    from .trainer import FlatTrainer

    # fairseq-train has no hook for a trainer; without --optimizer flat_adam it keeps its own
    vars(sys.modules["fairseq_cli.train"])["Trainer"] = FlatTrainer

__all__ = [
    "EABARTModel",
    "EACMLMModel",
    "EARobertaModel",
    "EATransformerLanguageModel",
    "EATransformerModel",
    "Translator",
    "__version__",
    "load",
]


def __getattr__(name: str) -> Any:
    """``Translator`` and ``load``: training needs none of the packages that split text."""
    if name not in ("Translator", "load"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from . import translator
    except ModuleNotFoundError as error:
        needed = "pip install regex sacremoses subword-nmt sentencepiece"
        raise ModuleNotFoundError(f"{error.name}: is needed to split text; {needed}", name=error.name) from None
    return translator.load if name == "load" else translator.FairseqTranslator
