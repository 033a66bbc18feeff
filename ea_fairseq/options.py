"""The flags of evolving attention: what they mean, what is refused, and what a layer is built from.

They are the same for every model. A model with one side only has no use for the flags of the other side's attention,
and ``check_options`` does not ask it for that side's sizes.
"""

import argparse
import difflib
import logging
import sys
from dataclasses import dataclass
from typing import Any

from fairseq import options as fairseq_options

from evolving_attention.evolution import RULES, Geometry
from evolving_attention.scores import SCORES

logger = logging.getLogger(__name__)


def fraction(value: Any) -> float:
    """A number from 0 to 1, from the command line or from a checkpoint."""
    number = float(value)
    if not 0 <= number <= 1:  # also refuses NaN
        raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, not {value}")
    return number


def kernel_size(value: Any) -> int:
    """A positive odd number."""
    number = int(value)
    if number != float(value) or number < 1 or number % 2 == 0:
        raise argparse.ArgumentTypeError(f"must be a positive odd number, not {value}")
    return number


def rule(value: Any) -> str:
    """The name of a rule."""
    if value not in RULES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(RULES)}, not {value}")
    return value


def conv_layers(value: Any) -> int:
    """1, 2 or 3."""
    number = int(value)
    if number != float(value) or number not in (1, 2, 3):
        raise argparse.ArgumentTypeError(f"must be 1, 2 or 3, not {value}")
    return number


def score(value: Any) -> str:
    """The name of a score."""
    if value not in SCORES:
        raise argparse.ArgumentTypeError(f"must be one of {', '.join(SCORES)}, not {value}")
    return value


def distance(value: Any) -> int:
    """A positive whole number."""
    number = int(value)
    if number != float(value) or number < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 on, not {value}")
    return number


#: flag -> (type, help). None stands for "not given" where one flag replaces another.
OPTIONS = {
    "--ea-alpha": (
        fraction,
        "share of the previous layer's attention map in each encoder layer from the second on; with --ea-rule "
        "predictive the convolution's share (the authors' code for images calls this one beta)",
    ),
    "--ea-beta": (
        fraction,
        "share of the convolution in the maps of all three kinds of attention; 0: none (the authors' code for images "
        "calls this one alpha)",
    ),
    "--ea-encoder-beta": (fraction, "in place of --ea-beta in encoder self-attention"),
    "--ea-decoder-beta": (fraction, "in place of --ea-beta in decoder self-attention"),
    "--ea-cross-beta": (fraction, "in place of --ea-beta in encoder-decoder attention"),
    "--ea-kernel-size": (kernel_size, "the convolutions' kernel is as wide and as high as this odd number"),
    "--ea-rule": (rule, f"how maps evolve: {', '.join(RULES)}"),
    "--ea-conv-layers": (conv_layers, "with --ea-rule predictive: 1 to 3 convolutions, one after the other"),
    "--ea-score": (score, f"how queries and keys give logits, in all three kinds of attention: {', '.join(SCORES)}"),
    "--ea-relative-positions": (
        distance,
        "add relative positions to the logits of both kinds of self-attention (Shaw et al. 2018); distances beyond "
        "this one count as this one. Absolute positions stay unless --no-token-positional-embeddings is given",
    ),
}

#: flag -> help, for those that take no value
SWITCHES = {
    "--ea-learn-mix": "make alpha and beta parameters of each layer, which start at the values given",
    "--ea-conv-branch": "in the encoder, self-attention and a convolution over time give half of the width each",
    "--ea-plain": "maps by PyTorch's own operations one by one: slower, for comparison with the kernels",
}

#: What a flag is where neither the command line, nor a preset, nor an older checkpoint says anything.
DEFAULTS: dict[str, Any] = {
    **{"ea_alpha": 0.1, "ea_beta": 0.1, "ea_encoder_beta": None, "ea_decoder_beta": None, "ea_cross_beta": None},
    **{"ea_kernel_size": 3, "ea_rule": "evolving", "ea_conv_layers": 1, "ea_learn_mix": False, "ea_plain": False},
    **{"ea_score": "dot", "ea_relative_positions": None, "ea_conv_branch": False},
}


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add all flags to an argument parser or group; defaults are the architecture's to set."""
    for flag, (parse, text) in OPTIONS.items():
        named = parse in (rule, score)
        parser.add_argument(flag, type=parse, default=argparse.SUPPRESS, metavar="NAME" if named else "N", help=text)
    for flag, text in SWITCHES.items():
        parser.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=text)


def show_options_in_help() -> None:
    """Have ``fairseq-train --help`` list our options: by itself it ends before it asks the model for any."""
    if not {"-h", "--help"}.intersection(sys.argv):
        return
    add_model_args = fairseq_options.add_model_args

    def add_model_args_and_ours(parser: argparse.ArgumentParser) -> Any:
        add_options(parser.add_argument_group("Evolving Attention (--arch ea_transformer_base, ea_roberta_base, ...)"))
        return add_model_args(parser)

    fairseq_options.add_model_args = add_model_args_and_ours


def _attribute(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def check_options(args: argparse.Namespace, sides: tuple[str, ...] = ("encoder", "decoder")) -> None:
    """Refuse what cannot work, naming flag and value.

    Args:
        args: what the command line or a checkpoint says. Values are brought to their types.
        sides: the sides that the model has: "encoder", "decoder" or both.

    Raises:
        ValueError: an unknown setting that begins with ea_, alpha or beta outside of [0, 1], an even kernel, an unknown
            rule or score, relative positions below 1, options that a rule does not have (several convolutions, anything
            to learn), heads that do not divide the dimension or half of it, --ea-conv-branch without an encoder,
            --cross-self-attention, and --mha-heads-to-keep where the encoder's maps evolve.
    """
    for name in vars(args) if isinstance(args, argparse.Namespace) else args:  # else of Hydra
        if name.startswith("ea_") and name not in DEFAULTS:
            near = difflib.get_close_matches(name, DEFAULTS, n=1)
            hint = f"is {near[0]} meant?" if near else f"there are: {', '.join(DEFAULTS)}"
            raise ValueError(f"{name} {getattr(args, name)}: evolving attention has no such setting; {hint}")
    for flag, (parse, _) in OPTIONS.items():
        value = getattr(args, _attribute(flag), None)
        if value is None:
            continue
        try:
            setattr(args, _attribute(flag), parse(value))
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            raise ValueError(f"{flag} {value}: {error}") from None
    settings = Settings.of(args)
    chosen = RULES[settings.rule]
    if settings.conv_layers > 1 and not chosen.stackable:
        stackable = ", ".join(name for name, other in RULES.items() if other.stackable)
        raise ValueError(
            f"--ea-conv-layers {settings.conv_layers}: --ea-rule {settings.rule} has one convolution or none; "
            f"several are for --ea-rule {stackable}"
        )
    if settings.learn_mix and not any(chosen.depends_on(True)):
        raise ValueError(f"--ea-learn-mix: --ea-rule {settings.rule} has neither alpha nor beta to learn")
    for side in sides:
        dim, heads = getattr(args, f"{side}_embed_dim"), getattr(args, f"{side}_attention_heads")
        if heads < 1 or dim % heads:
            raise ValueError(f"--{side}-attention-heads {heads} does not divide --{side}-embed-dim {dim}")
    if settings.conv_branch:
        _check_branch(args, sides)
    _note_unused_betas(args, sides)
    if getattr(args, "mha_heads_to_keep", -1) != -1 and settings.evolves(Geometry.ENCODER_SELF):
        raise ValueError(
            f"--mha-heads-to-keep {args.mha_heads_to_keep}: each layer would keep heads of its own, and hand their "
            "maps to others; leave the flag out"
        )
    if getattr(args, "cross_self_attention", False):
        raise ValueError(
            "--cross-self-attention: one map would be part encoder-decoder attention, whose neighbours lie on both "
            "sides, and part decoder self-attention, where those on the right are the future. The papers have no "
            "convolution for that; leave the flag out"
        )


def _note_unused_betas(args: argparse.Namespace, sides: tuple[str, ...]) -> None:
    """Log what was given for a kind of attention and changes nothing. It is in older checkpoints, so not refused."""
    there = {"encoder": "encoder" in sides, "decoder": "decoder" in sides}
    there["cross"] = all(there.values()) and not getattr(args, "no_cross_attention", False)
    rule_name = Settings.of(args).rule
    chosen = RULES[rule_name]
    has_beta = any(chosen.depends_on(has_previous)[1] for has_previous in (False, True))
    for kind, is_there in there.items():
        value = getattr(args, f"ea_{kind}_beta", None)
        if value is None or (is_there and has_beta and (kind == "encoder" or chosen.in_decoders)):
            continue
        why = f"--ea-rule {rule_name} has no beta there" if is_there else "this model has no such attention"
        logger.warning("--ea-%s-beta %s changes nothing: %s", kind, value, why)


def _check_branch(args: argparse.Namespace, sides: tuple[str, ...]) -> None:
    if "encoder" not in sides:
        raise ValueError("--ea-conv-branch: it stands beside an encoder's self-attention, and here is no encoder")
    dim, heads = args.encoder_embed_dim, args.encoder_attention_heads
    if dim % (2 * heads):
        raise ValueError(
            f"--ea-conv-branch: half of --encoder-embed-dim {dim} does not divide into "
            f"--encoder-attention-heads {heads}; choose a multiple of {2 * heads}"
        )


@dataclass(frozen=True)
class Settings:
    """What the flags say, for building layers."""

    alpha: float
    betas: dict[Geometry, float]  # of each kind of attention
    kernel_size: int
    rule: str
    conv_layers: int
    learn_mix: bool
    score: str
    relative_positions: int  # 0: none
    conv_branch: bool
    plain: bool

    @classmethod
    def of(cls, cfg: Any) -> "Settings":
        """The settings that a command line, a checkpoint (perhaps older than some flags) or a configuration has."""
        values = {name: getattr(cfg, name, default) for name, default in DEFAULTS.items()}

        def beta(kind: str) -> float:
            own = values[f"ea_{kind}_beta"]
            return values["ea_beta"] if own is None else own

        return cls(
            alpha=values["ea_alpha"],
            betas={
                Geometry.ENCODER_SELF: beta("encoder"),
                Geometry.DECODER_SELF: beta("decoder"),
                Geometry.ENCODER_DECODER: beta("cross"),
            },
            kernel_size=values["ea_kernel_size"],
            rule=values["ea_rule"],
            conv_layers=values["ea_conv_layers"],
            learn_mix=values["ea_learn_mix"],
            score=values["ea_score"],
            relative_positions=values["ea_relative_positions"] or 0,
            conv_branch=values["ea_conv_branch"],
            plain=values["ea_plain"],
        )

    def evolves(self, geometry: Geometry) -> bool:
        """Whether this kind of attention has to be ours; if not, fairseq's own module is built.

        It has to be where its maps evolve, where its logits are no scaled dot products, and where a convolution is
        beside it.
        """
        if self.score != "dot" or self._relative_positions_in(geometry):
            return True
        if self.conv_branch and geometry == Geometry.ENCODER_SELF:
            return True
        chosen, alpha, beta = RULES[self.rule], self.alpha, self.betas[geometry]
        if geometry == Geometry.ENCODER_SELF:
            return self.learn_mix or any(chosen.changes(alpha, beta, has_previous) for has_previous in (False, True))
        return chosen.in_decoders and (self.learn_mix or chosen.changes(alpha, beta, False))

    def _relative_positions_in(self, geometry: Geometry) -> int:
        """Distances between source and target positions mean nothing: encoder-decoder attention has none."""
        return 0 if geometry == Geometry.ENCODER_DECODER else self.relative_positions

    @property
    def hands_on_maps(self) -> bool:
        """Whether an encoder layer has any use for the map of the layer before."""
        alpha, beta = (1.0, 1.0) if self.learn_mix else (self.alpha, self.betas[Geometry.ENCODER_SELF])
        return RULES[self.rule].uses_previous(alpha, beta)

    def attention(self, geometry: Geometry, first: bool = False) -> dict[str, Any]:
        """The keyword arguments of an ``EvolvingAttention`` of this kind. first: no layer before hands on a map."""
        return {
            "alpha": self.alpha,
            "beta": self.betas[geometry],
            "kernel_size": self.kernel_size,
            "rule": self.rule,
            "first": first,
            "conv_layers": self.conv_layers,
            "learn_mix": self.learn_mix,
            "score": self.score,
            "relative_positions": self._relative_positions_in(geometry),
            "plain": self.plain,
        }
