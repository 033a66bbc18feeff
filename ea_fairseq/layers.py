"""fairseq's encoder and decoder layers with evolving attention in them.

A kind of attention with alpha = beta = 0 evolves nothing, and is fairseq's own. The encoder's layer also carries the
map from layer to layer.
"""

from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase
from torch import Tensor

from .attention import DecoderAttention, EncoderSelfAttention
from .evolution import Geometry


def _beta(cfg, kind: str) -> float:
    """beta of one kind of attention ("encoder", "decoder", "cross"): its own if given, else the common one."""
    own = getattr(cfg, f"ea_{kind}_beta", None)
    return cfg.ea_beta if own is None else own


def _evolving(layer, cfg, kind: str) -> dict:
    """What the attentions of a layer have in common, as keyword arguments."""
    return {
        "beta": _beta(cfg, kind),
        "kernel_size": cfg.ea_kernel_size,
        "plain": getattr(cfg, "ea_plain", False),  # checkpoints may be older than this
        "dropout": cfg.attention_dropout,
        "q_noise": layer.quant_noise,
        "qn_block_size": layer.quant_noise_block_size,
    }


class EAEncoderLayer(TransformerEncoderLayerBase):
    """Takes x: S x B x C and the map of the layer before; gives x and its own map, B x K x S x S."""

    def build_self_attention(self, embed_dim, cfg):
        if cfg.ea_alpha == _beta(cfg, "encoder") == 0:
            return super().build_self_attention(embed_dim, cfg)
        return EncoderSelfAttention(
            embed_dim,
            cfg.encoder.attention_heads,
            alpha=cfg.ea_alpha,
            **_evolving(self, cfg, "encoder"),
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def forward(
        self,
        x: Tensor,
        encoder_padding_mask: Tensor | None,
        attn_mask: Tensor | None = None,
        previous_map: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As fairseq's, with maps.

        Args:
            x: S x B x C.
            encoder_padding_mask: B x S, or None where nothing is padded.
            attn_mask: S x S, anything but zero = masked.
            previous_map: B x K x S x S, A_logit of the layer before; None in the first layer.

        Returns:
            x; this layer's A_logit, or None where alpha = 0.
        """
        if not isinstance(self.self_attn, EncoderSelfAttention):
            return super().forward(x, encoder_padding_mask, attn_mask), None
        self.self_attn.previous_map = previous_map
        x = super().forward(x, encoder_padding_mask, attn_mask)
        return x, self.self_attn.take_map()


class EADecoderLayer(TransformerDecoderLayerBase):
    """fairseq's decoder layer; each of its two attentions evolves unless its beta is 0."""

    def build_self_attention(self, embed_dim, cfg, add_bias_kv=False, add_zero_attn=False):
        if _beta(cfg, "decoder") == 0:
            return super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        return DecoderAttention(
            Geometry.DECODER_SELF,
            embed_dim,
            cfg.decoder.attention_heads,
            **_evolving(self, cfg, "decoder"),
            self_attention=True,
            add_bias_kv=add_bias_kv,
            add_zero_attn=add_zero_attn,
            xformers_att_config=cfg.decoder.xformers_att_config,
        )

    def build_encoder_attention(self, embed_dim, cfg):
        if _beta(cfg, "cross") == 0:
            return super().build_encoder_attention(embed_dim, cfg)
        return DecoderAttention(
            Geometry.ENCODER_DECODER,
            embed_dim,
            cfg.decoder.attention_heads,
            **_evolving(self, cfg, "cross"),
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            encoder_decoder_attention=True,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def forward(self, x, encoder_out=None, *args, self_attn_padding_mask: Tensor | None = None, **kwargs):
        """As fairseq's. self_attn_padding_mask, B x T, also tells both attentions which rows are padding."""
        for attention in (self.self_attn, self.encoder_attn):
            if isinstance(attention, DecoderAttention):
                attention.query_padding_mask = self_attn_padding_mask
        return super().forward(x, encoder_out, *args, self_attn_padding_mask=self_attn_padding_mask, **kwargs)
