"""The Evolving Attention Transformer for translation: encoder, decoder and model."""

import argparse
import logging
import math
import re
from typing import Any

import torch
from fairseq.data import Dictionary
from fairseq.distributed import fsdp_wrap
from fairseq.models import BaseFairseqModel, register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from evolving_attention.evolution import Geometry

from . import decoding
from .attention import DecoderAttention, IncrementalState
from .compatibility import layers_to_keep
from .dropout import adopt_dropout
from .from_plain import accept_first_model
from .layers import EADecoderLayer, EAEncoderLayer
from .mixes import log_mixes
from .options import Settings, add_options, as_namespace, check_options
from .recording import RecordablePositions, is_recorded

logger = logging.getLogger(__name__)


class EATransformerEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder, which threads the attention maps from layer to layer."""

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any):
        self._layers_built = 0
        super().__init__(cfg, *args, **kwargs)
        settings = Settings.of(cfg)
        self.hands_on_maps = settings.hands_on_maps(Geometry.ENCODER_SELF)
        adopt_dropout(self, settings)
        self.embed_positions: Any = RecordablePositions.instead_of(self.embed_positions)

    def build_encoder_layer(self, cfg: Any) -> nn.Module:
        self._layers_built += 1
        return _wrapped(EAEncoderLayer(cfg, first=self._layers_built == 1), cfg)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """As fairseq's, whose loop over the layers has no place for maps.

        Args:
            src_tokens: B x S.
            src_lengths: unused; padding is found in src_tokens.
            return_all_hiddens: also return what every layer gives.
            token_embeddings: B x S x C, in the place of the embedding's.

        Returns:
            dict of lists as fairseq's decoder and generator expect it: encoder_out S x B x C, encoder_padding_mask
            B x S, encoder_embedding B x S x C, src_lengths B x 1, and encoder_states, S x B x C each; fc_results and
            src_tokens are empty, as fairseq's are.
        """
        padding = src_tokens.eq(self.padding_idx)
        any_padding = is_recorded() or bool(padding.any())
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if any_padding:
            x = x.masked_fill(padding.unsqueeze(-1), 0)
        x = x.transpose(0, 1)  # S x B x C

        states = [x] if return_all_hiddens else []
        # With LayerDrop, the map comes from the last layer that ran.
        evolved = None
        layers = list(self.layers)
        for number, layer in enumerate(layers, 1):
            wanted = self.hands_on_maps and number < len(layers)
            x, evolved = layer(x, padding if any_padding else None, previous_map=evolved, keep_map=wanted)
            if return_all_hiddens:
                states.append(x)
        if self.layer_norm is not None:
            x = self.layer_norm(x)

        return {
            "encoder_out": [x],
            "encoder_padding_mask": [padding],
            "encoder_embedding": [embedding],
            "encoder_states": states,
            "fc_results": [],
            "src_tokens": [],
            "src_lengths": [(~padding).sum(dim=1, keepdim=True).int()],
        }


class EATransformerDecoder(TransformerDecoderBase):
    """fairseq's Transformer decoder, which threads the attention maps from layer to layer."""

    layer_class = EADecoderLayer

    def __init__(self, cfg: Any, *args: Any, **kwargs: Any):
        self._layers_built = 0
        super().__init__(cfg, *args, **kwargs)
        settings = Settings.of(cfg)
        self.self_attention_evolves = settings.evolves(Geometry.DECODER_SELF)
        #: whether a search on a GPU may replay CUDA graphs, see decoding.py
        self.graphs = True
        adopt_dropout(self, settings)
        self.embed_positions: Any = RecordablePositions.instead_of(self.embed_positions)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> nn.Module:
        self._layers_built += 1
        return _wrapped(self.layer_class(cfg, no_encoder_attn, first=self._layers_built == 1), cfg)

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None = None,
        incremental_state: IncrementalState | None = None,
        *more: Any,
        **options: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """As fairseq's; the steps of a search may be one CUDA graph."""
        state, asks_for_more = incremental_state, bool(more or options)
        stepped = decoding.next_step(self, prev_output_tokens, encoder_out, state, asks_for_more)
        return stepped or super().forward(prev_output_tokens, encoder_out, incremental_state, *more, **options)

    def extract_features_scriptable(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: IncrementalState | None = None,
        full_context_alignment: bool = False,
        alignment_layer: int | None = None,
        alignment_heads: int | None = None,
    ) -> tuple[Tensor, dict[str, Any]]:
        """As fairseq's, whose loop over the layers has no place for maps.

        Args:
            prev_output_tokens: B x T.
            encoder_out: of our encoder or fairseq's; None in a language model.
            incremental_state: of a search; only the last position is new.
            full_context_alignment: each position sees all others.
            alignment_layer: the layer whose weights are returned; the last by default.
            alignment_heads: only these first heads count in the weights.

        Returns:
            features, B x T x C; attn, whose one entry is B x T x S or None, and inner_states, T x B x C each.
        """
        source, source_padding = (
            next(iter((encoder_out or {}).get(name, [])), None) for name in ("encoder_out", "encoder_padding_mask")
        )
        x, padding = self._embedded(prev_output_tokens, incremental_state)
        any_padding = is_recorded() or bool(padding.any())
        sees_all = incremental_state is not None or full_context_alignment
        attended = self.num_layers - 1 if alignment_layer is None else alignment_layer
        attn, states, maps = None, [x], [None, None]
        # With LayerDrop, maps come from the last layer that ran.
        layers = list(self.layers)
        for number, layer in enumerate(layers):
            x, weights, *handed = layer(
                x,
                encoder_out=source,
                encoder_padding_mask=source_padding,
                incremental_state=incremental_state,
                self_attn_mask=None if sees_all else self.buffered_future_mask(x),
                self_attn_padding_mask=padding if any_padding else None,
                need_attn=number == attended,
                need_head_weights=number == attended,
                previous_self_map=maps[0],
                previous_cross_map=maps[1],
                keep_maps=number + 1 < len(layers),
            )
            maps = handed if len(handed) == 2 else maps  # experts (--base-layers) have none
            states.append(x)
            if weights is not None and number == attended:
                attn = weights.float().to(x)[:alignment_heads].mean(dim=0)  # K x B x T x S -> B x T x S
        return decoding.features(self, x), {"attn": [attn], "inner_states": states}

    def _embedded(self, tokens: Tensor, state: IncrementalState | None) -> tuple[Tensor, Tensor]:
        """The first layer's input, T x B x C, and padding, B x T; of the last position only where there is a state."""
        positions = None if self.embed_positions is None else self.embed_positions(tokens, incremental_state=state)
        if state is not None:
            tokens, positions = tokens[:, -1:], None if positions is None else positions[:, -1:]
        x = decoding.embed(self, tokens.contiguous(), positions)
        return self.dropout_module(x).transpose(0, 1), tokens.eq(self.padding_idx)

    def buffered_future_mask(self, tensor: Tensor) -> Tensor:
        """The future, T x T: bool where attention evolves, since a mask of floats would have to be searched.

        fairseq's is kept in the module, where a second thread may replace it; this one is not.

        Args:
            tensor: T x B x C.
        """
        length = tensor.size(0)
        if not self.self_attention_evolves:
            return tensor.new_full((length, length), -math.inf).triu(1)
        return torch.ones(length, length, dtype=torch.bool, device=tensor.device).triu(1)

    def reorder_incremental_state_scripting(self, incremental_state: IncrementalState, new_order: Tensor) -> None:
        """As fairseq's, which looks at every module of the model in every step for those that keep a state."""
        if decoding.reorder(incremental_state, new_order) or self._keeps_order(incremental_state, new_order):
            return
        numbers = None
        for layer in self.layers.children():
            for name in ("self_attn", "encoder_attn"):
                attention = getattr(layer, name, None)  # experts (--base-layers) have none
                if isinstance(attention, DecoderAttention) and attention.encoder_decoder_attention:
                    numbers = numbers or new_order.tolist()  # once for all layers
                    attention.reorder_incremental_state(incremental_state, new_order, numbers)
                elif attention is not None:
                    attention.reorder_incremental_state(incremental_state, new_order)

    def _keeps_order(self, incremental_state: Any, new_order: Tensor) -> bool:
        """Whether every hypothesis continues itself, as in greedy decoding. A GPU would have to be waited for."""
        attention = next((layer.self_attn for layer in self.layers.children() if hasattr(layer, "self_attn")), None)
        saved = {} if attention is None else attention._get_input_buffer(incremental_state)
        count = new_order.numel()
        if new_order.device.type != "cpu" or "prev_key" not in saved or saved["prev_key"].size(0) != count:
            return False
        return torch.equal(new_order, torch.arange(count, device=new_order.device))


def _wrapped(layer: nn.Module, cfg: Any) -> nn.Module:
    """Activation checkpointing and FSDP, as fairseq applies them to its layers."""
    # a language model's options set the latter alone
    recomputes = cfg.checkpoint_activations or cfg.offload_activations
    if recomputes:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if recomputes else cfg.min_params_to_wrap)


def without_first_layers_evolution(state: dict[str, Tensor], model: nn.Module, model_cfg: Any) -> dict[str, Tensor]:
    """A state dict without parameters that a side's first layer cannot use.

    --encoder-layers-to-keep or --decoder-layers-to-keep made it the first.

    No map is handed to the first layer, so under some rules it has neither convolution nor learnt shares; a later layer
    that becomes the first leaves them behind, as it does where LayerDrop leaves out all layers before it.
    """
    own = model.state_dict().keys()
    for side in ("encoder", "decoder"):
        if first := min(layers_to_keep(state, model_cfg, side), default=0):
            left = re.compile(rf"({side}\..*?layers\.){first}(\.\w+_attn\.evolution\..*)")
            state = {k: x for k, x in state.items() if not (m := left.fullmatch(k)) or f"{m[1]}0{m[2]}" in own}
    return state


class EvolvingModel(BaseFairseqModel):
    """The common part of all models with evolving attention. It stands before fairseq's class among the bases."""

    #: the sides that the model has
    SIDES: tuple[str, ...] = ("encoder", "decoder")
    #: whether alpha and beta are parameters
    learns_mix = False

    @classmethod
    def add_args(cls, parser: argparse.ArgumentParser) -> None:
        super().add_args(parser)
        add_options(parser)

    @classmethod
    def build_model(cls, args: argparse.Namespace, task: Any) -> "EvolvingModel":
        args = as_namespace(args)
        check_options(args, cls.SIDES)
        model = super().build_model(args, task)
        model.learns_mix = Settings.of(args).learn_mix
        return model

    def train(self, mode: bool = True) -> "EvolvingModel":
        """As PyTorch's. fairseq calls ``eval`` before each batch of a validation; then its log gets the learnt mixes.

        A ``forward`` for this would hide the names of fairseq's arguments, which torch.export reads.
        """
        if self.learns_mix and not mode:
            log_mixes(self)
        return super().train(mode)

    def load_state_dict(
        self, state_dict: dict[str, Tensor], strict: bool = True, model_cfg: Any = None, args: Any = None
    ) -> Any:
        """As fairseq's, and from a checkpoint of fairseq's own model, see from_plain.py.

        Mismatches are logged by name first, since fairseq's own message leaves them out.

        Raises:
            RuntimeError, ValueError: parameters that are missing, too many, of another shape, or of another meaning.
        """
        given = dict(state_dict)  # as it is now: fairseq gives old names of parameters new ones in place
        state_dict = without_first_layers_evolution(state_dict, self, model_cfg)
        accept = self.register_load_state_dict_post_hook(
            lambda model, keys: accept_first_model(model, given, model_cfg, keys)
        )
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        except (RuntimeError, ValueError) as error:
            logger.error(
                "This checkpoint does not fit the model that the command line describes. Compare its architecture, "
                "number of heads, --ea-kernel-size and betas: %s",
                error,
            )
            raise
        finally:
            accept.remove()


class EvolvingEncoderDecoderModel(EvolvingModel):
    """The common part of the models with an encoder and a decoder."""

    @classmethod
    def build_encoder(cls, args: Any, src_dict: Dictionary, embed_tokens: nn.Module) -> EATransformerEncoder:
        return EATransformerEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args: Any, tgt_dict: Dictionary, embed_tokens: nn.Module) -> EATransformerDecoder:
        cfg = TransformerConfig.from_namespace(args)
        return EATransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)


@register_model("ea_transformer")
class EATransformerModel(EvolvingEncoderDecoderModel, TransformerModel):
    """Evolving Attention Transformer, with fairseq's Transformer options and those of ``Settings``."""
