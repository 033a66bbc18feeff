"""RoBERTa with evolving attention: ``--task masked_lm``, ``sentence_prediction`` and ``sentence_ranking``."""

import argparse
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.models.roberta import RobertaEncoder, RobertaModel
from fairseq.models.roberta.model import base_architecture
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import nn

from .transformer import EATransformerEncoder, EvolvingModel


class EARobertaEncoder(RobertaEncoder):
    """fairseq's RoBERTa encoder around the encoder that threads the maps."""

    def build_encoder(
        self, args: argparse.Namespace, dictionary: Dictionary, embed_tokens: nn.Embedding
    ) -> EATransformerEncoder:
        encoder = EATransformerEncoder(TransformerConfig.from_namespace(args), dictionary, embed_tokens)
        encoder.apply(init_bert_params)
        return encoder


class RobertaAroundEvolvingEncoder(RobertaModel):
    """fairseq's RoBERTa, which has no hook for the class of its encoder, with ours in its place."""

    @classmethod
    def build_model(cls, args: argparse.Namespace, task: Any) -> RobertaModel:
        base_architecture(args)  # options that an older checkpoint lacks
        if not hasattr(args, "max_positions"):
            args.max_positions = getattr(args, "tokens_per_sample", None) or task.max_positions()
        return cls(args, EARobertaEncoder(args, task.source_dictionary))


@register_model("ea_roberta")
class EARobertaModel(EvolvingModel, RobertaAroundEvolvingEncoder):
    """fairseq's RoBERTa, whose self-attention evolves. Its options are RoBERTa's and those of ``Settings``."""

    SIDES = ("encoder",)
