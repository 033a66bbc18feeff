"""Evolving attention for PyTorch: attention maps that are convolved and handed from layer to layer."""

from .attention import Attended, EvolvingAttention
from .cache import Cache
from .evolution import RULES, Evolution, Geometry
from .functional import evolving_attention

__version__ = "0.2.0"
__all__ = ["RULES", "Attended", "Cache", "Evolution", "EvolvingAttention", "Geometry", "evolving_attention"]
