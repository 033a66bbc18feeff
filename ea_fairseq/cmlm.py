"""A bidirectional decoder: fairseq's conditional masked language model with evolving attention, --task translation_lev.

ICML 2021 and the journal name it as future work. No target token is the future, so both attentions of the decoder have
the window of the encoder, and may hand on maps (--ea-decoder-alpha, --ea-cross-alpha).
"""

import argparse
from typing import Any

from fairseq.data import Dictionary
from fairseq.models import register_model
from fairseq.models.nat import NATransformerDecoder, ensemble_encoder
from fairseq.models.nat.cmlm_transformer import CMLMNATransformerModel
from fairseq.models.transformer import TransformerConfig
from fairseq.modules.transformer_sentence_encoder import init_bert_params
from torch import Tensor, nn

from evolving_attention.evolution import Geometry

from .attention import IncrementalState
from .layers import EADecoderLayer
from .options import Settings
from .transformer import EATransformerDecoder, EATransformerEncoder, EvolvingModel


class BidirectionalDecoderLayer(EADecoderLayer):
    """A decoder layer whose convolutions see both directions."""

    def evolution_of(self, settings: Settings, kind: Geometry) -> tuple[Geometry, dict[str, Any]]:
        """All k x k taps, and the coefficients of decoders, which an encoder's rule has, too."""
        rule = "evolving" if settings.rule == "evolving-from-second" else settings.rule  # in decoders they are the same
        return Geometry.ENCODER_SELF, {**settings.attention(kind, self._first), "rule": rule}


class EACMLMEncoder(EATransformerEncoder):
    """The encoder that threads the maps, alone or one of an ensemble."""

    ensemble_models = None
    forward = ensemble_encoder(EATransformerEncoder.forward)


class EACMLMDecoder(EATransformerDecoder, NATransformerDecoder):
    """fairseq's decoder, which threads the maps."""

    layer_class = BidirectionalDecoderLayer
    forward = NATransformerDecoder.forward

    def extract_features(
        self, prev_output_tokens: Tensor, encoder_out: dict[str, list[Tensor]] | None = None, **unused: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """As fairseq's. prev_output_tokens: B x T -> features, B x T x C."""
        return self.extract_features_scriptable(prev_output_tokens, encoder_out, full_context_alignment=True)

    def _embedded(self, tokens: Tensor, state: IncrementalState | None) -> tuple[Tensor, Tensor]:
        x, padding = self.forward_embedding(tokens)
        return x.transpose(0, 1), padding


@register_model("ea_cmlm_transformer")
class EACMLMModel(EvolvingModel, CMLMNATransformerModel):
    """fairseq's ``cmlm_transformer`` with evolving attention, with the options of both."""

    @classmethod
    def build_encoder(cls, args: argparse.Namespace, src_dict: Dictionary, embed_tokens: nn.Module) -> EACMLMEncoder:
        encoder = EACMLMEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)
        return encoder.apply(init_bert_params) if args.apply_bert_init else encoder

    @classmethod
    def build_decoder(cls, args: argparse.Namespace, tgt_dict: Dictionary, embed_tokens: nn.Module) -> EACMLMDecoder:
        decoder = EACMLMDecoder(args, tgt_dict, embed_tokens)
        return decoder.apply(init_bert_params) if args.apply_bert_init else decoder
