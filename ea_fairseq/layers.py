"""fairseq's encoder and decoder layers with evolving attention in them.

A kind of attention that evolves nothing is fairseq's own. The encoder's layer also carries the map from layer to layer.
"""

from typing import Any

from fairseq.modules import MultiheadAttention
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor, nn

from evolving_attention.evolution import Geometry

from .attention import DecoderAttention, EncoderSelfAttention, IncrementalState, Padding
from .branches import TwoBranchSelfAttention
from .dropout import adopt_dropout
from .options import Settings


def _common(layer: nn.Module, cfg: Any) -> dict[str, Any]:
    """The keyword arguments that fairseq gives the attentions of a layer."""
    return {
        "dropout": cfg.attention_dropout,
        "q_noise": layer.quant_noise,
        "qn_block_size": layer.quant_noise_block_size,
    }


class EAEncoderLayer(TransformerEncoderLayerBase):
    """Takes x: S x B x C and the map of the layer before; gives x and its own map, B x K x S x S.

    Args:
        cfg: fairseq's configuration.
        first: whether this is the first layer, which gets no map.
    """

    def __init__(self, cfg: Any, first: bool = False):
        self._first = first  # for build_self_attention, which the next line calls
        super().__init__(cfg)
        settings = Settings.of(cfg)
        self.evolves = settings.evolves(Geometry.ENCODER_SELF)
        adopt_dropout(self, settings)

    def build_self_attention(self, embed_dim: int, cfg: Any) -> MultiheadAttention:
        settings = Settings.of(cfg)
        if not settings.evolves(Geometry.ENCODER_SELF):
            return super().build_self_attention(embed_dim, cfg)
        attention = TwoBranchSelfAttention if settings.conv_branch else EncoderSelfAttention
        return attention(
            embed_dim,
            cfg.encoder.attention_heads,
            **settings.attention(Geometry.ENCODER_SELF, self._first),
            **_common(self, cfg),
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        attn_mask: Tensor | None = None,
        previous_map: Tensor | None = None,
        keep_map: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's, with maps.

        Args:
            x: S x B x C.
            encoder_padding_mask: B x S, or None where nothing is padded.
            attn_mask: S x S, anything but zero = masked.
            previous_map: B x K x S x S, A_logit of the layer before; None in the first layer.
            keep_map: whether a layer after this one reads its map.

        Returns:
            x; this layer's A_logit, or None where it is not wanted.
        """
        if not self.evolves:
            return super().forward(x, encoder_padding_mask, attn_mask), None
        residual = x
        if self.normalize_before:
            x = self.self_attn_layer_norm(x)
        masked = None if attn_mask is None else attn_mask.bool()
        x, a_logit, _ = self.self_attn(x, encoder_padding_mask, masked, previous=previous_map, keep_map=keep_map)
        x = self.residual_connection(self.dropout_module(x), residual)
        if not self.normalize_before:
            x = self.self_attn_layer_norm(x)

        residual = x
        if self.normalize_before:
            x = self.final_layer_norm(x)
        x = self.activation_dropout_module(self.activation_fn(self.fc1(x)))
        x = self.residual_connection(self.dropout_module(self.fc2(x)), residual)
        if not self.normalize_before:
            x = self.final_layer_norm(x)
        return x, a_logit


class EADecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer; each of its two attentions is ours where ``Settings.evolves``, else fairseq's."""

    def __init__(self, cfg: Any, no_encoder_attn: bool = False, add_bias_kv: bool = False, add_zero_attn: bool = False):
        super().__init__(cfg, no_encoder_attn, add_bias_kv, add_zero_attn)
        settings = Settings.of(cfg)
        self.cross_evolves = not no_encoder_attn and settings.evolves(Geometry.ENCODER_DECODER)
        adopt_dropout(self, settings)

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> MultiheadAttention:
        settings = Settings.of(cfg)
        if not settings.evolves(Geometry.DECODER_SELF):
            return super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        return DecoderAttention(
            Geometry.DECODER_SELF,
            embed_dim,
            cfg.decoder.attention_heads,
            **settings.attention(Geometry.DECODER_SELF),
            **_common(self, cfg),
            self_attention=True,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> MultiheadAttention:
        settings = Settings.of(cfg)
        if not settings.evolves(Geometry.ENCODER_DECODER):
            return super().build_encoder_attention(embed_dim, cfg)
        return DecoderAttention(
            Geometry.ENCODER_DECODER,
            embed_dim,
            cfg.decoder.attention_heads,
            **settings.attention(Geometry.ENCODER_DECODER),
            **_common(self, cfg),
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            encoder_decoder_attention=True,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | None = None,
        incremental_state: IncrementalState | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None, Any]:
        """As fairseq's. self_attn_padding_mask, B x T, also tells both attentions which rows are padding."""
        if self.cross_evolves:
            encoder_padding_mask = Padding(encoder_padding_mask, self_attn_padding_mask)
        return super().forward(
            *(x, encoder_out, encoder_padding_mask, incremental_state, prev_self_attn_state, prev_attn_state),
            *(self_attn_mask, self_attn_padding_mask, need_attn, need_head_weights),
        )
