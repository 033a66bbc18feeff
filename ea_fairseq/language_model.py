"""A Transformer language model with evolving attention: ``--task language_modeling``."""

import argparse
from typing import Any

from fairseq.dataclass.utils import gen_parser_from_dataclass
from fairseq.models import register_model
from fairseq.models.transformer import TransformerConfig
from fairseq.models.transformer_lm import TransformerLanguageModel, TransformerLanguageModelConfig

from evolving_attention.evolution import Geometry

from .options import Settings, add_options, as_namespace
from .transformer import EATransformerDecoder, EvolvingModel


@register_model("ea_transformer_lm")
class EATransformerLanguageModel(EvolvingModel, TransformerLanguageModel):
    """fairseq's language model, whose decoder self-attention evolves: options as its own and those of ``Settings``."""

    SIDES = ("decoder",)

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        gen_parser_from_dataclass(parser, TransformerLanguageModelConfig(), delete_default=True)
        add_options(parser)

    @classmethod
    def build_model(cls, args: argparse.Namespace, task: Any) -> "EATransformerLanguageModel":
        """As fairseq's, which names the class of its decoder outright: its model is built, and gives the embedding.

        Raises:
            ValueError: as ``check_options``, and for a rule by which nothing evolves in a decoder.
        """
        args = as_namespace(args)
        model = super().build_model(args, task)
        settings = Settings.of(args)
        rule, alpha = settings.rule, settings.decoder_alpha
        if not Settings(rule=rule, decoder_alpha=alpha).evolves(Geometry.DECODER_SELF):
            raise ValueError(
                f"--ea-rule {rule} with --ea-decoder-alpha {alpha:g}: nothing evolves in decoders, and a "
                "language model has no encoder; leave the rule out"
            )
        cfg = TransformerConfig.from_namespace(args)
        embedding = model.decoder.embed_tokens
        model.decoder = EATransformerDecoder(cfg, task.target_dictionary, embedding, no_encoder_attn=True)
        return model
