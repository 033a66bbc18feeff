"""Translates with an exported model: numpy, ONNX Runtime and the text tools, without PyTorch and fairseq.

ONNX Runtime is imported only with these classes: others use ``text`` and ``kept``.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
_MODULES = {"ExportError": "folder", "LanguageModel": "language_model", "Translator": "translator"}
__all__ = ["ExportError", "LanguageModel", "Translator"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
