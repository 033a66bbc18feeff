"""Attention maps: collect them from a model, measure them, draw them."""

#: The kinds of attention, and what they are called where people read of them.
KINDS = {"encoder": "encoder self-attention", "decoder": "decoder self-attention", "cross": "encoder-decoder attention"}
