"""BART with evolving attention: ``--task denoising``, ``translation`` and ``translation_from_pretrained_bart``."""

from fairseq.models import register_model
from fairseq.models.bart import BARTModel

from .transformer import EvolvingEncoderDecoderModel


@register_model("ea_bart")
class EABARTModel(EvolvingEncoderDecoderModel, BARTModel):
    """fairseq's BART, whose three kinds of attention evolve. Its options are BART's and those of ``Settings``."""
