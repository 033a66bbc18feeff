"""The flags of evolving attention: their meaning, their checks, and the arguments of a layer.

They are the same for every model. A model with one side only has no use for the flags of the other side's attention,
and ``check_options`` does not ask it for that side's sizes.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any

from fairseq import options as fairseq_options
from omegaconf import OmegaConf

from ea_artifacts.command import hint
from evolving_attention.evolution import CONVOLUTIONS, RULES, Geometry
from evolving_attention.scores import SCORES

Parse = Callable[[Any], Any]
#: the values by which ``without_effect`` looks whether a setting matters
PROBES: dict[Parse, tuple[Any, ...]] = {}


def _parser(kind: type, accepts: Callable[[Any], bool], expected: str, *probes: Any) -> Parse:
    """A function that reads one value, of the command line or of a checkpoint; at least two values that it takes."""

    def parse(value: Any) -> Any:
        try:
            read = kind(value)
            fits = accepts(read) and (kind is str or read == float(value))
        except (TypeError, ValueError):
            fits = False
        if not fits:
            raise argparse.ArgumentTypeError(f"must be {expected}, not {value}")
        return read

    PROBES[parse] = probes
    return parse


_fraction = _parser(float, lambda x: 0 <= x <= 1, "a number from 0 to 1", 0.0, 0.25, 0.75)  # not NaN either
_odd = _parser(int, lambda x: x > 0 and x % 2 == 1, "a positive odd number", 1, 3)
_few = _parser(int, lambda x: x in (1, 2, 3), "1, 2 or 3", 1, 2)
_positive = _parser(int, lambda x: x >= 1, "a whole number from 1 on", 1, 2)
_rule = _parser(str, RULES.__contains__, f"one of {', '.join(RULES)}", *RULES)
_convolution = _parser(str, CONVOLUTIONS.__contains__, f"one of {', '.join(CONVOLUTIONS)}", *CONVOLUTIONS)
_score = _parser(str, SCORES.__contains__, f"one of {', '.join(SCORES)}", *SCORES)


def _switch(value: Any) -> bool:
    """A switch: on a command line a flag without a value; Hydra and --model-overrides may give anything."""
    if not isinstance(value, bool):
        raise argparse.ArgumentTypeError(f"must be true or false, not {value}")
    return value


PROBES[_switch] = (False, True)


#: how flags, logs and tables name the kinds of attention
KINDS = {Geometry.ENCODER_SELF: "encoder", Geometry.DECODER_SELF: "decoder", Geometry.ENCODER_DECODER: "cross"}


def _option(default: Any, parse: Parse, text: str) -> Any:
    """A field that is a flag."""
    return dataclasses.field(default=default, metadata={"parse": parse, "help": text})


@dataclass(frozen=True)
class Settings:
    """The values of the flags. ``kernel_size`` is the flag --ea-kernel-size, and ``ea_kernel_size`` in checkpoints.

    A default counts where neither the command line, nor a preset, nor an older checkpoint says anything.
    """

    alpha: float = _option(
        0.1,
        _fraction,
        "share of the previous layer's attention map in each encoder layer from the second on; with --ea-rule "
        "predictive the convolution's share (the authors' code for images calls this one beta)",
    )
    decoder_alpha: float = _option(
        0.0,
        _fraction,
        "share of the previous layer's map in decoder self-attention from the second layer on, or as --ea-alpha the "
        "convolution's; the papers have none",
    )
    cross_alpha: float = _option(0.0, _fraction, "likewise in encoder-decoder attention")
    beta: float = _option(
        0.1,
        _fraction,
        "share of the convolution in the maps of all three kinds of attention; 0: none (the authors' code for images "
        "calls this one alpha)",
    )
    encoder_beta: float | None = _option(None, _fraction, "in place of --ea-beta in encoder self-attention")
    decoder_beta: float | None = _option(None, _fraction, "in place of --ea-beta in decoder self-attention")
    cross_beta: float | None = _option(None, _fraction, "in place of --ea-beta in encoder-decoder attention")
    kernel_size: int = _option(3, _odd, "the convolutions' kernel is as wide and as high as this odd number")
    rule: str = _option("evolving", _rule, f"how maps evolve: {', '.join(RULES)}")
    conv_layers: int = _option(1, _few, "with --ea-rule predictive: 1 to 3 convolutions in encoders, one by one")
    conv: str = _option("dense", _convolution, f"the kind of the convolutions: {', '.join(CONVOLUTIONS)}")
    learn_mix: bool = _option(
        False, _switch, "make alpha and beta parameters of each layer, which start at the values given"
    )
    score: str = _option(
        "dot", _score, f"how queries and keys give logits, in all three kinds of attention: {', '.join(SCORES)}"
    )
    relative_positions: int | None = _option(
        None,
        _positive,
        "add relative positions to the logits of both kinds of self-attention (Shaw et al. 2018); distances beyond "
        "this one count as this one. Absolute positions stay unless --no-token-positional-embeddings is given",
    )
    conv_branch: bool = _option(
        False, _switch, "in the encoder, self-attention and a convolution over time give half of the width each"
    )
    plain: bool = _option(
        False, _switch, "maps by PyTorch's own operations one by one: slower, for comparison with the kernels"
    )

    @classmethod
    def of(cls, cfg: Any) -> "Settings":
        """The settings that a command line, a checkpoint (perhaps older than some flags) or a configuration has."""
        values: dict[str, Any] = {f.name: getattr(cfg, f"ea_{f.name}", f.default) for f in dataclasses.fields(cls)}
        return cls(**values)

    def beta_of(self, geometry: Geometry) -> float:
        """The beta of this kind of attention."""
        own = getattr(self, f"{KINDS[geometry]}_beta")
        return self.beta if own is None else own

    def alpha_of(self, geometry: Geometry) -> float:
        """The alpha of this kind of attention."""
        return self.alpha if geometry == Geometry.ENCODER_SELF else getattr(self, f"{KINDS[geometry]}_alpha")

    def evolves(self, geometry: Geometry) -> bool:
        """Whether this kind of attention has to be ours; if not, fairseq's own module is built."""
        plain = Settings(alpha=0.0, beta=0.0).function(geometry)
        return any(self.function(geometry, first) != plain for first in (True, False))

    def _relative_positions_in(self, geometry: Geometry) -> int:
        """Distances between source and target positions mean nothing: encoder-decoder attention has none."""
        return 0 if geometry == Geometry.ENCODER_DECODER else self.relative_positions or 0

    def hands_on_maps(self, geometry: Geometry) -> bool:
        """Whether an attention of this kind may have any use for the map of the layer before."""
        shares = (1.0, 1.0) if self.learn_mix else (self.alpha_of(geometry), self.beta_of(geometry))
        return self._takes_map(geometry) and RULES[self.rule].uses_previous(*shares, geometry)

    def _takes_map(self, geometry: Geometry, first: bool = False) -> bool:
        """Whether a layer before hands on a map. In decoders no alpha is learnt that would start at 0."""
        return not first and (geometry == Geometry.ENCODER_SELF or self.alpha_of(geometry) > 0)

    def function(self, geometry: Geometry, first: bool = False) -> Hashable:
        """The function that an attention of this kind computes, to be compared; settings without effect leave it as is.

        Args:
            geometry: the kind of attention.
            first: no layer before hands on a map.
        """
        rule, takes_map = RULES[self.rule], self._takes_map(geometry, first)
        learnt = rule.depends_on(takes_map, geometry) if self.learn_mix else (False, False)
        coefficients = rule.coefficients(self.alpha_of(geometry), self.beta_of(geometry), takes_map, geometry)
        widest = rule.coefficients(1.0, 1.0, takes_map, geometry) if self.learn_mix else coefficients
        branch = self.conv_branch and geometry == Geometry.ENCODER_SELF
        others = (learnt, self.score, self._relative_positions_in(geometry), branch)
        if widest.c == 0:  # no convolution reads a and b
            return coefficients[3:], others
        return coefficients, others, self.kernel_size, self._conv_layers_in(geometry), self.conv

    def _conv_layers_in(self, geometry: Geometry) -> int:
        return self.conv_layers if geometry == Geometry.ENCODER_SELF else 1

    def attention(self, geometry: Geometry, first: bool = False) -> dict[str, Any]:
        """The keyword arguments of an attention of this kind. first: no layer before hands on a map."""
        same = ("kernel_size", "rule", "conv", "learn_mix", "score", "plain")
        return {
            **{name: getattr(self, name) for name in same},
            "alpha": self.alpha_of(geometry),
            "beta": self.beta_of(geometry),
            "first": not self._takes_map(geometry, first),
            "conv_layers": self._conv_layers_in(geometry),
            "relative_positions": self._relative_positions_in(geometry),
        }


DEFAULTS: dict[str, Any] = {f"ea_{f.name}": f.default for f in dataclasses.fields(Settings)}


def _flag(name: str) -> str:
    return "--ea-" + name.replace("_", "-")


def add_options(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """Add all flags to an argument parser or group; defaults are the architecture's to set."""
    for field in dataclasses.fields(Settings):
        parse = field.metadata["parse"]
        value: dict[str, Any] = {"action": "store_true"}
        if parse is not _switch:
            value = {"type": parse, "metavar": "NAME" if parse in (_rule, _convolution, _score) else "N"}
        parser.add_argument(_flag(field.name), default=argparse.SUPPRESS, help=field.metadata["help"], **value)


def show_options_in_help() -> None:
    """Have ``fairseq-train --help`` list our options: it ends before it asks the model for any."""
    if not {"-h", "--help"}.intersection(sys.argv):
        return
    add_model_args = fairseq_options.add_model_args

    def add_model_args_and_ours(parser: argparse.ArgumentParser) -> Any:
        title = "Evolving Attention (--arch ea_transformer_base, ea_roberta_base, ...)"
        optimizer = "--optimizer flat_adam is fairseq's adam in one call for all parameters; checkpoints fit both"
        add_options(parser.add_argument_group(title, optimizer))
        return add_model_args(parser)

    fairseq_options.add_model_args = add_model_args_and_ours


def as_namespace(args: Any) -> argparse.Namespace:
    """Hydra's configuration as a namespace: fairseq's ``TransformerConfig.from_namespace`` loses our settings of it."""
    return argparse.Namespace(**dict(args)) if OmegaConf.is_config(args) else args


def _read(args: Any) -> Settings:
    """The settings of a command line or a checkpoint, with values brought to their types in ``args``, too.

    Raises:
        ValueError: an unknown setting that begins with ea_, or a value of another kind.
    """
    for name in vars(args):
        if name.startswith("ea_") and name not in DEFAULTS:
            known = hint(name, DEFAULTS)
            raise ValueError(f"{name} {getattr(args, name)}: evolving attention has no such setting; {known}")
    for side in ("encoder", "decoder"):
        for name in dict(getattr(args, side, {})):  # as Hydra has +model.encoder.layers=2, which nothing reads
            raise ValueError(f"model.{side}.{name}: expected model.{side}_{name}")
    for field in dataclasses.fields(Settings):
        value, parse = getattr(args, f"ea_{field.name}", None), field.metadata["parse"]
        if value is None:
            continue
        try:
            setattr(args, f"ea_{field.name}", parse(value))
        except argparse.ArgumentTypeError as error:
            raise ValueError(f"{_flag(field.name)} {value}: {error}") from None
    return Settings.of(args)


def check_options(args: argparse.Namespace, sides: tuple[str, ...] = ("encoder", "decoder")) -> None:
    """Refuse what cannot work, naming flag and value.

    Args:
        args: the options of a command line or a checkpoint. Values are brought to their types.
        sides: the sides that the model has: "encoder", "decoder" or both.

    Raises:
        ValueError: a setting that is unknown, out of range or without effect, or does not go with the rule, the sizes
            or fairseq's other options.
    """
    settings = _read(args)
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
    _check_effects(args, sides)
    if getattr(args, "mha_heads_to_keep", -1) != -1 and settings.evolves(Geometry.ENCODER_SELF):
        raise ValueError(
            f"--mha-heads-to-keep {args.mha_heads_to_keep}: each layer would keep other heads, and hand their "
            "maps to others; leave the flag out"
        )
    if getattr(args, "cross_self_attention", False):
        raise ValueError(
            "--cross-self-attention: one map would be part encoder-decoder attention, whose neighbours lie on both "
            "sides, and part decoder self-attention, where those on the right are the future. The papers have no "
            "convolution for that; leave the flag out"
        )


def functions(settings: Settings, args: Any, sides: tuple[str, ...]) -> list[Hashable]:
    """The functions of all attentions of a model, to be compared.

    Args:
        settings: of evolving attention.
        args: the other options: how many layers each side has, and whether there is encoder-decoder attention.
        sides: the sides that the model has.
    """
    return [
        settings.function(geometry, first)
        for geometry in kinds(args, sides)
        for first in (True, False)
        if first or getattr(args, f"{_side(geometry)}_layers", 2) > 1
    ]


def kinds(args: Any, sides: tuple[str, ...]) -> list[Geometry]:
    """The kinds of attention that a model has. Arguments as ``functions``'."""
    crosses = len(sides) == 2 and not getattr(args, "no_cross_attention", False)
    return [x for x in KINDS if _side(x) in sides and (crosses or x != Geometry.ENCODER_DECODER)]


def _side(geometry: Geometry) -> str:
    return "encoder" if geometry == Geometry.ENCODER_SELF else "decoder"


def without_effect(args: Any, sides: tuple[str, ...]) -> list[str]:
    """The names of the settings that change nothing of this model, whatever their values are.

    Args:
        args: the options of a command line or a checkpoint.
        sides: the sides that the model has.
    """
    settings = Settings.of(args)
    now = functions(settings, args, sides)

    def matters(field: dataclasses.Field) -> bool:
        others = (replace(settings, **{field.name: value}) for value in PROBES[field.metadata["parse"]])
        return any(functions(other, args, sides) != now for other in others)

    fields = dataclasses.fields(Settings)
    return [field.name for field in fields if field.name != "plain" and not matters(field)]


def _check_effects(args: Any, sides: tuple[str, ...]) -> None:
    """Refuse a flag on this process's command line by which the model stays the same. Checkpoints may hold such."""
    words = (word.partition("=")[0].lstrip("+-").removeprefix("model.") for word in sys.argv)  # Hydra's, too
    given = {word.replace("-", "_") for word in words}
    if useless := [name for name in without_effect(args, sides) if f"ea_{name}" in given]:
        raise ValueError(no_effect(useless[0], args))


def no_effect(name: str, args: Any) -> str:
    """The message about a setting that changes nothing."""
    value = getattr(args, f"ea_{name}")
    shown = _flag(name) if value is True else f"{_flag(name)} {value}"
    return f"{shown}: changes nothing of this model, by its --ea-rule, betas and kinds of attention; leave it out"


def _check_branch(args: argparse.Namespace, sides: tuple[str, ...]) -> None:
    if "encoder" not in sides:
        raise ValueError("--ea-conv-branch: needs an encoder; this model has none")
    dim, heads = args.encoder_embed_dim, args.encoder_attention_heads
    if dim % (2 * heads):
        raise ValueError(
            f"--ea-conv-branch: half of --encoder-embed-dim {dim} does not divide into "
            f"--encoder-attention-heads {heads}; choose a multiple of {2 * heads}"
        )
