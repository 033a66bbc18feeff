"""Translates with an exported model: numpy, ONNX Runtime and the text tools, without PyTorch and fairseq.

ONNX Runtime is imported only with these classes: others use ``text`` and ``translator``.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"
_PLACES = {
    "ExportError": ("folder", "ExportError"),
    "LanguageModel": ("onnx", "LanguageModel"),
    "Translator": ("onnx", "OnnxTranslator"),
}
__all__ = ["ExportError", "LanguageModel", "Translator"]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _PLACES[name]
    return getattr(import_module(f"{__name__}.{module}"), attribute)
