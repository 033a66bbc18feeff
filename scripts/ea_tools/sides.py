"""The sides of a model of fairseq: both, an encoder alone or a decoder alone.

Axes: B batch, T target length, S source length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # imported where a model is there, or its class
    from torch import Tensor

Sides = tuple[str, ...]
BOTH, ENCODER, DECODER = ("encoder", "decoder"), ("encoder",), ("decoder",)

#: what such models are called where people read of them
NAMES = {BOTH: "encoder and decoder", ENCODER: "an encoder only", DECODER: "a decoder only"}
#: a task of fairseq that builds such a model from a dictionary
TASKS = {BOTH: "translation", ENCODER: "masked_lm", DECODER: "language_modeling"}


def sides_of(model_class: type) -> Sides:
    """The sides of the models of this class."""
    from fairseq.models import FairseqEncoderModel, FairseqLanguageModel

    if issubclass(model_class, FairseqLanguageModel):
        return DECODER
    return ENCODER if issubclass(model_class, FairseqEncoderModel) else BOTH


def arguments(sides: Sides, source: Tensor | None, read: Tensor | None) -> dict[str, Any]:
    """The arguments of `model(**arguments)`.

    Args:
        source: B x S, the encoder's input; ignored where there is none.
        read: B x T, the decoder's input; ignored where there is none.
    """
    if sides == DECODER:
        return {"src_tokens": read, "features_only": True}
    if sides == ENCODER:
        return {"src_tokens": source, "features_only": True}
    assert source is not None, "a model of two sides reads one"
    lengths = source.new_full((len(source),), source.size(1))
    return {"src_tokens": source, "src_lengths": lengths, "prev_output_tokens": read, "features_only": True}
