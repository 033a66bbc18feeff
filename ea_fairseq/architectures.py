"""The papers' architectures. Presets set only what differs from the base.

Evolving Attention: ICML 2021, section 4.3 and table 10. The others: the draft "Predictive Attention Transformer",
tables 1 and 5, whose models for translation have the same sizes.
"""

import argparse
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_INV_REGISTRY, register_model_architecture
from fairseq.models.transformer.transformer_legacy import base_architecture
from fairseq.models.transformer_lm import TransformerLanguageModelConfig, base_lm_architecture

from .options import DEFAULTS

BASE = {"ea_alpha": 0.5}  # table 10; beta is 0.1, as everywhere


def _default(args: argparse.Namespace, **values: Any) -> None:
    """Set what neither the command line nor a more special preset has set."""
    for name, value in values.items():
        if not hasattr(args, name):
            setattr(args, name, value)


def _bf16_needs_no_tpu(args: argparse.Namespace) -> None:
    """fairseq takes --bf16 for a TPU and ends where there is none; GPUs and CPUs compute in bf16 as well."""
    if getattr(args, "bf16", False) and find_spec("torch_xla") is None:
        args.tpu = False


@register_model_architecture("ea_transformer", "ea_transformer_base")
def ea_transformer_base(args: argparse.Namespace) -> None:
    """fairseq's ``transformer`` (512 / 2048 / 8 heads / 6+6 layers) with evolving attention."""
    _with_evolving_attention(base_architecture, **BASE)(args)


@register_model_architecture("ea_transformer", "ea_transformer_lite")
def ea_transformer_lite(args: argparse.Namespace) -> None:
    """``transformer_lite`` with evolving attention."""
    _default(args, ea_alpha=0.1)  # table 10
    _lite(args)
    ea_transformer_base(args)


@register_model_architecture("ea_transformer", "pa_transformer_lite")
def pa_transformer_lite(args: argparse.Namespace) -> None:
    """``transformer_lite`` whose encoder predicts each layer's maps from the maps of the layer before."""
    _default(args, ea_rule="predictive", ea_alpha=0.1)  # the draft, section 4.1.1
    ea_transformer_lite(args)


@register_model_architecture("ea_transformer", "res_transformer_lite")
def res_transformer_lite(args: argparse.Namespace) -> None:
    """``transformer_lite`` whose encoder adds each layer's maps to those of the next, without a convolution."""
    _default(args, ea_rule="residual", ea_alpha=0.1)  # the draft, table 5
    ea_transformer_lite(args)


@register_model_architecture("ea_transformer", "conv_transformer_lite")
def conv_transformer_lite(args: argparse.Namespace) -> None:
    """``transformer_lite`` with a convolution beside the encoder's self-attention; its maps do not evolve."""
    if not hasattr(args, "ea_rule"):  # a named rule stays
        _default(args, ea_alpha=0.0, ea_beta=0.0)
    _default(args, ea_conv_branch=True)
    ea_transformer_lite(args)


@register_model_architecture("ea_transformer", "ea_conv_transformer_lite")
def ea_conv_transformer_lite(args: argparse.Namespace) -> None:
    """``ea_transformer_lite`` with a convolution beside the encoder's self-attention."""
    _default(args, ea_conv_branch=True)
    ea_transformer_lite(args)


@register_model_architecture("ea_transformer", "pa_conv_transformer_lite")
def pa_conv_transformer_lite(args: argparse.Namespace) -> None:
    """``pa_transformer_lite`` with a convolution beside the encoder's self-attention."""
    _default(args, ea_conv_branch=True)
    pa_transformer_lite(args)


@register_model_architecture("transformer", "transformer_lite")
def transformer_lite(args: argparse.Namespace) -> None:
    """The baseline: a plain Transformer, all of whose dimensions are 160 (Wu et al., 2020; section 4.3)."""
    _lite(args)
    _bf16_needs_no_tpu(args)
    base_architecture(args)


def _lite(args: argparse.Namespace) -> None:
    _default(args, encoder_embed_dim=160, encoder_ffn_embed_dim=160, encoder_attention_heads=4)
    _default(args, decoder_attention_heads=4)


def _with_evolving_attention(fairseqs: Callable[[Any], None], **own: float) -> Callable[[Any], None]:
    """The preset that adds evolving attention to one of fairseq's own; `own`: other values than the defaults."""

    def preset(args: argparse.Namespace) -> None:
        _default(args, **{**DEFAULTS, **own})
        _bf16_needs_no_tpu(args)
        fairseqs(args)

    return preset


def _language_model(fairseqs: Callable[[Any], None]) -> Callable[[Any], None]:
    """A preset of language models, filled up with the defaults that fairseq keeps in a dataclass."""

    def preset(args: argparse.Namespace) -> None:
        fairseqs(args)
        config = TransformerLanguageModelConfig()
        defaults = {name: getattr(config, name) for name in config._get_all_attributes()}
        # A value ${...} stands for an option of the task, or of fairseq-train.
        _default(args, **{name: value for name, value in defaults.items() if not str(value).startswith("${")})

    return preset


# Each of fairseq's presets of these models has a twin of evolving attention, of the same name with ea_ before it.
for _model in ("roberta", "bart", "transformer_lm", "cmlm_transformer"):
    for _name in ARCH_MODEL_INV_REGISTRY[_model]:
        _preset = ARCH_CONFIG_REGISTRY[_name]
        if _model == "transformer_lm":
            _preset = _language_model(_preset)
        register_model_architecture(f"ea_{_model}", f"ea_{_name}")(_with_evolving_attention(_preset))

for _name in ARCH_MODEL_INV_REGISTRY["transformer"]:
    if _name not in ("transformer", "transformer_lite"):  # whose twins are ea_transformer_base and ea_transformer_lite
        _preset = _with_evolving_attention(ARCH_CONFIG_REGISTRY[_name], **BASE)
        register_model_architecture("ea_transformer", f"ea_{_name}")(_preset)

register_model_architecture("ea_bart", "ea_bart")(ARCH_CONFIG_REGISTRY["ea_bart_base"])
# fairseq's transformer_lm normalises after each block, and all its named presets before, as this one does.
register_model_architecture("ea_transformer_lm", "ea_transformer_lm_base")(
    _with_evolving_attention(_language_model(base_lm_architecture))
)
