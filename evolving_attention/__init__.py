"""Evolving attention for PyTorch: attention maps that are convolved and handed from layer to layer."""

from .evolution import RULES, Evolution, Geometry

__all__ = ["RULES", "Evolution", "Geometry"]
