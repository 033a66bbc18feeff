"""Attention maps: collect them from a model, measure them, draw them."""

#: The kinds of attention, and their names for readers.
KINDS = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "encoder-decoder attention"}
