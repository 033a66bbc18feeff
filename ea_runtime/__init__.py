"""Translates with an exported model: numpy, ONNX Runtime and the text tools, without PyTorch and fairseq."""

from ea_runtime.language_model import LanguageModel
from ea_runtime.translator import ExportError, Translator

__all__ = ["ExportError", "LanguageModel", "Translator"]
