"""fairseq's encoder and decoder layers with evolving attention in them.

A kind of attention that evolves nothing is fairseq's own. Layers also carry maps from layer to layer.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


class Residual:
    """The way into a part of fairseq's layers and out of it, normalised before or after."""

    if TYPE_CHECKING:  # as in attention.py
        normalize_before: bool
        dropout_module: nn.Module
        residual_connection: Callable[[Tensor, Tensor], Tensor]

    def enter(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The part's input."""
        return norm(x) if self.normalize_before else x

    def leave(self, norm: nn.Module, x: Tensor, residual: Tensor) -> Tensor:
        """x: the part's output; residual: what entered it, before any norm."""
        x = self.residual_connection(self.dropout_module(x), residual)
        return x if self.normalize_before else norm(x)


class EAEncoderLayer(Residual, TransformerEncoderLayerBase):
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
        masked = None if attn_mask is None else attn_mask.bool()
        y = self.enter(self.self_attn_layer_norm, x)
        y, a_logit = self.self_attn(y, encoder_padding_mask, masked, previous=previous_map, keep_map=keep_map)
        x = self.leave(self.self_attn_layer_norm, y, x)
        y = self.activation_dropout_module(self.activation_fn(self.fc1(self.enter(self.final_layer_norm, x))))
        return self.leave(self.final_layer_norm, self.fc2(y), x), a_logit


class EADecoderLayer(Residual, TransformerDecoderLayerBase):
    """fairseq's decoder layer; each of its two attentions is ours where ``Settings.evolves``, else fairseq's.

    Args:
        cfg, no_encoder_attn, add_bias_kv, add_zero_attn: fairseq's.
        first: whether this is the first layer, which gets no maps.
    """

    def __init__(
        self,
        cfg: Any,
        no_encoder_attn: bool = False,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        first: bool = False,
    ):
        self._first = first  # for the attentions, which the next line builds
        super().__init__(cfg, no_encoder_attn, add_bias_kv, add_zero_attn)
        settings = Settings.of(cfg)
        self.cross_evolves = not no_encoder_attn and settings.evolves(Geometry.ENCODER_DECODER)
        self.hands_on_self = settings.hands_on_maps(Geometry.DECODER_SELF)
        self.hands_on_cross = not no_encoder_attn and settings.hands_on_maps(Geometry.ENCODER_DECODER)
        self.hands_on_maps = self.hands_on_self or self.hands_on_cross
        adopt_dropout(self, settings)

    def evolution_of(self, settings: Settings, kind: Geometry) -> tuple[Geometry, dict[str, Any]]:
        """The window of this kind of attention's convolution, and the keyword arguments of the attention."""
        return kind, settings.attention(kind, self._first)

    def build_self_attention(
        self, embed_dim: int, cfg: Any, add_bias_kv: bool = False, add_zero_attn: bool = False
    ) -> MultiheadAttention:
        if not Settings.of(cfg).evolves(Geometry.DECODER_SELF):
            return super().build_self_attention(embed_dim, cfg, add_bias_kv, add_zero_attn)
        bias = {"add_bias_kv": add_bias_kv, "add_zero_attn": add_zero_attn}
        config = cfg.decoder.xformers_att_config
        return self._attention(
            Geometry.DECODER_SELF, embed_dim, cfg, self_attention=True, xformers_att_config=config, **bias
        )

    def build_encoder_attention(self, embed_dim: int, cfg: Any) -> MultiheadAttention:
        if not Settings.of(cfg).evolves(Geometry.ENCODER_DECODER):
            return super().build_encoder_attention(embed_dim, cfg)
        return self._attention(
            Geometry.ENCODER_DECODER,
            embed_dim,
            cfg,
            kdim=cfg.encoder.embed_dim,
            vdim=cfg.encoder.embed_dim,
            encoder_decoder_attention=True,
            xformers_att_config=cfg.encoder.xformers_att_config,
        )

    def _attention(self, kind: Geometry, embed_dim: int, cfg: Any, **options: Any) -> DecoderAttention:
        geometry, evolution = self.evolution_of(Settings.of(cfg), kind)
        options |= {**evolution, **_common(self, cfg)}
        return DecoderAttention(geometry, embed_dim, cfg.decoder.attention_heads, **options)

    def forward(
        self,
        x: Tensor,
        encoder_out: Tensor | None = None,
        encoder_padding_mask: Tensor | Padding | None = None,
        incremental_state: IncrementalState | None = None,
        prev_self_attn_state: list[Tensor] | None = None,
        prev_attn_state: list[Tensor] | None = None,
        self_attn_mask: Tensor | None = None,
        self_attn_padding_mask: Tensor | None = None,
        need_attn: bool = False,
        need_head_weights: bool = False,
        previous_self_map: Tensor | None = None,
        previous_cross_map: Tensor | None = None,
        keep_maps: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """As fairseq's, with maps.

        Args:
            self_attn_padding_mask: B x T; it also tells both attentions which rows are padding.
            previous_self_map: B x K x T x T, A_logit of the layer before; None in the first layer.
            previous_cross_map: B x K x T x S, likewise.
            keep_maps: whether a layer after this one reads its maps.

        Returns:
            x; the weights of encoder-decoder attention; A_logit of both attentions, None where it is not wanted.
        """
        if self.cross_evolves and not isinstance(encoder_padding_mask, Padding):
            encoder_padding_mask = Padding(encoder_padding_mask, self_attn_padding_mask)
        if not self.hands_on_maps:
            x, weights, _ = super().forward(
                x,
                encoder_out=encoder_out,
                encoder_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                prev_self_attn_state=prev_self_attn_state,
                prev_attn_state=prev_attn_state,
                self_attn_mask=self_attn_mask,
                self_attn_padding_mask=self_attn_padding_mask,
                need_attn=need_attn,
                need_head_weights=need_head_weights,
            )
            return x, weights, None, None
        if prev_self_attn_state is not None or prev_attn_state is not None:
            raise ValueError("prev_self_attn_state, prev_attn_state: let the steps before fill incremental_state")
        maps = {"previous": previous_self_map, "keep_map": keep_maps} if self.hands_on_self else {}
        y = self.enter(self.self_attn_layer_norm, x)
        y, _, *self_map = self.self_attn(
            y,
            key=y,
            value=y,
            key_padding_mask=self_attn_padding_mask,
            incremental_state=incremental_state,
            need_weights=False,
            attn_mask=self_attn_mask,
            **maps,
        )
        if self.c_attn is not None:
            y = (y.unflatten(2, (self.nh, -1)) * self.c_attn[:, None]).flatten(2)
        x = self.leave(self.self_attn_layer_norm, y if self.attn_ln is None else self.attn_ln(y), x)
        weights, cross_map = None, []
        if self.encoder_attn is not None and encoder_out is not None:
            maps = {"previous": previous_cross_map, "keep_map": keep_maps} if self.hands_on_cross else {}
            y, weights, *cross_map = self.encoder_attn(
                self.enter(self.encoder_attn_layer_norm, x),
                key=encoder_out,
                value=encoder_out,
                key_padding_mask=encoder_padding_mask,
                incremental_state=incremental_state,
                need_weights=need_attn or need_head_weights or (not self.training and self.need_attn),
                static_kv=True,
                need_head_weights=need_head_weights,
                **maps,
            )
            x = self.leave(self.encoder_attn_layer_norm, y, x)
        y = self.activation_dropout_module(self.activation_fn(self.fc1(self.enter(self.final_layer_norm, x))))
        y = self.fc2(y if self.ffn_layernorm is None else self.ffn_layernorm(y))
        x = self.leave(self.final_layer_norm, y, x if self.w_resid is None else self.w_resid * x)
        return x, weights, *(of[0] if of else None for of in (self_map, cross_map))
