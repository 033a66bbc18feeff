"""The Evolving Attention Transformer for translation: encoder, decoder, model and its options."""

import argparse
import logging
import sys

from fairseq import options
from fairseq.distributed import fsdp_wrap
from fairseq.models import register_model
from fairseq.models.transformer import (
    TransformerConfig,
    TransformerDecoderBase,
    TransformerEncoderBase,
    TransformerModel,
)
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from torch import Tensor, nn

from .layers import EADecoderLayer, EAEncoderLayer

logger = logging.getLogger(__name__)


class EATransformerEncoder(TransformerEncoderBase):
    """fairseq's Transformer encoder, which threads the attention maps from layer to layer."""

    def build_encoder_layer(self, cfg):
        return _wrapped(EAEncoderLayer(cfg), cfg)

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
            B x S, encoder_embedding B x S x C, src_lengths B x 1, and encoder_states, S x B x C each.
        """
        padding = src_tokens.eq(self.padding_idx)
        any_padding = bool(padding.any())
        x, embedding = self.forward_embedding(src_tokens, token_embeddings)
        if any_padding:
            x = x.masked_fill(padding.unsqueeze(-1), 0)
        x = x.transpose(0, 1)  # S x B x C

        states = [x] if return_all_hiddens else []
        # With LayerDrop, the map comes from the last layer that ran.
        evolved = None
        for layer in self.layers:
            x, evolved = layer(x, padding if any_padding else None, previous_map=evolved)
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
    """fairseq's Transformer decoder with evolving attention in its layers."""

    def build_decoder_layer(self, cfg, no_encoder_attn=False):
        return _wrapped(EADecoderLayer(cfg, no_encoder_attn), cfg)

    def reorder_incremental_state_scripting(self, incremental_state, new_order: Tensor) -> None:
        """As fairseq's, which looks at every module of the model in every step for those that keep a state."""
        for layer in self.layers.children():
            for attention in (layer.self_attn, layer.encoder_attn):
                if attention is not None:
                    attention.reorder_incremental_state(incremental_state, new_order)


def _wrapped(layer: nn.Module, cfg) -> nn.Module:
    """Activation checkpointing and FSDP, as fairseq applies them to a layer of its own."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)


def fraction(value) -> float:
    """A number from 0 to 1, from the command line or from a checkpoint."""
    number = float(value)
    if not 0 <= number <= 1:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {value}")
    return number


def kernel_size(value) -> int:
    """A positive odd number."""
    number = int(value)
    if number != float(value) or number < 1 or number % 2 == 0:
        raise argparse.ArgumentTypeError(f"must be a positive odd number, not {value}")
    return number


#: flag -> (type, help)
OPTIONS = {
    "--ea-alpha": (fraction, "share of the previous layer's attention map in each encoder layer from the second on"),
    "--ea-beta": (fraction, "share of the convolution in the maps of all three kinds of attention; 0: none"),
    "--ea-encoder-beta": (fraction, "in place of --ea-beta in encoder self-attention"),
    "--ea-decoder-beta": (fraction, "in place of --ea-beta in decoder self-attention"),
    "--ea-cross-beta": (fraction, "in place of --ea-beta in encoder-decoder attention"),
    "--ea-kernel-size": (kernel_size, "the convolutions' kernel is as wide and as high as this odd number"),
}


def add_options(parser) -> None:
    """Add ``OPTIONS`` to an argument parser or group; defaults are the architecture's to set."""
    for flag, (parse, text) in OPTIONS.items():
        parser.add_argument(flag, type=parse, default=argparse.SUPPRESS, metavar="N", help=text)
    parser.add_argument(
        "--ea-plain",
        action="store_true",
        default=argparse.SUPPRESS,
        help="maps by PyTorch's own operations one by one: slower, for comparison with the kernels",
    )


def show_options_in_help() -> None:
    """Have ``fairseq-train --help`` list our options: by itself it ends before it asks the model for any."""
    if not {"-h", "--help"}.intersection(sys.argv):
        return
    add_model_args = options.add_model_args

    def add_model_args_and_ours(parser):
        add_options(parser.add_argument_group("Evolving Attention (--arch ea_transformer_base, ea_transformer_lite)"))
        return add_model_args(parser)

    options.add_model_args = add_model_args_and_ours


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def check_options(args) -> None:
    """Refuse what cannot work, naming flag and value.

    Raises:
        ValueError: alpha or beta outside of [0, 1], an even kernel, heads that do not divide the dimension.
    """
    for flag, (parse, _) in OPTIONS.items():
        value = getattr(args, _attribute(flag), None)
        if value is None:
            continue
        try:
            setattr(args, _attribute(flag), parse(value))
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            raise ValueError(f"{flag} {value}: {error}") from None
    for side in ("encoder", "decoder"):
        dim, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
        if heads < 1 or dim % heads:
            raise ValueError(f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {dim}")
    if getattr(args, "cross_self_attention", False):
        raise ValueError("--cross-self-attention has no map geometry of its own in the paper; leave it out")


@register_model("ea_transformer")
class EATransformerModel(TransformerModel):
    """Evolving Attention Transformer, with fairseq's Transformer options and those of ``OPTIONS``."""

    @classmethod
    def hub_models(cls):
        return {}  # none published; the parent's are plain Transformers

    @classmethod
    def add_args(cls, parser):
        super().add_args(parser)
        add_options(parser)

    @classmethod
    def build_model(cls, args, task):
        check_options(args)
        return super().build_model(args, task)

    @classmethod
    def build_encoder(cls, args, src_dict, embed_tokens):
        return EATransformerEncoder(TransformerConfig.from_namespace(args), src_dict, embed_tokens)

    @classmethod
    def build_decoder(cls, args, tgt_dict, embed_tokens):
        cfg = TransformerConfig.from_namespace(args)
        return EATransformerDecoder(cfg, tgt_dict, embed_tokens, no_encoder_attn=cfg.no_cross_attention)

    def load_state_dict(self, state_dict, strict=True, model_cfg=None, args=None):
        """As fairseq's; what does not fit is logged by name first, for fairseq's own message leaves it out.

        Raises:
            RuntimeError: parameters that are missing, too many, or of another shape.
        """
        try:
            return super().load_state_dict(state_dict, strict, model_cfg, args)
        except RuntimeError as error:
            logger.error(
                "This checkpoint does not fit the model that the command line describes. Compare its architecture, "
                "number of heads, --ea-kernel-size and betas: %s",
                error,
            )
            raise
