"""The model of a run or of an export, and the flags of its search, which evaluate.sh and translate.sh share."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_artifacts.command import UserError, finite, listed, parse_flags, positive
from ea_artifacts.preparation import Preparation
from ea_tools.training.launch import Launch, choose_precision, gpus
from ea_tools.training.products import use_bf16_products

if TYPE_CHECKING:
    from ea_runtime.translator import Translator

#: Settings of the search that have a flag of ours before the --, whose value is recorded.
SETTLED = ("beam", "lenpen")
#: Flags after -- that are no settings of the search.
OF_THE_WORK = ("batch-size", "cpu", "seed")


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the search's own flags and --precision."""
    parser.add_argument("--beam", type=positive, default=5, help="(default: 5)")
    penalty = "length penalty; above 1 favours longer (default: 1)"
    parser.add_argument("--lenpen", type=finite, default=1.0, help=penalty)
    precision = "fp16: on a GPU; bf16: matrix products on a CPU that has units for it (default: fp32)"
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help=precision)


def parse_both(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> argparse.Namespace:
    """The flags of a command; `search_flags` are those behind -- , fairseq-generate's for the search.

    A flag of ``SETTLED`` among those is a usage error.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args = parser.parse_args(arguments[:end])
    try:
        args.search_flags = parse_flags(arguments[end + 1 :])
    except UserError as error:
        parser.error(f"-- {error}")
    for name in args.search_flags:
        if name in SETTLED:
            parser.error(f"-- --{name}: not allowed after --; give it before")
    return args


def whole(flags: dict[str, list[str]], name: str) -> int | None:
    """The value of one of ``OF_THE_WORK``, a whole number from 1 on; None where it is not given."""
    if name not in flags:
        return None
    value = listed(flags[name], " ")
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"-- --{name} {value}: expected a whole number from 1 on")
    return int(value)


def open_model(
    args: argparse.Namespace, checkpoints: Sequence[Path], data: Preparation | None
) -> tuple[Translator, Any]:
    """A run's checkpoints, or an export, in the precision of the command line; and the settings of its search.

    Args:
        checkpoints: none for an export.
        data: prepared data for the model, which must have been prepared like its own.

    Raises:
        UserError: a file cannot be used, or a flag has no effect.
    """
    translator = _of_run(args, checkpoints, data) if checkpoints else _of_export(args, data)
    return translator, _settings(args, translator)


def _of_export(args: argparse.Namespace, data: Preparation | None) -> Translator:
    from ea_runtime.onnx import OnnxTranslator

    chosen = [name for name in ("average", "best", "checkpoint") if getattr(args, name, None)]
    if given := chosen + ["precision"] * (args.precision != "fp32"):
        raise UserError(f"--{given[0]}: has no effect on {args.run}, an exported model; leave it out, or export anew")
    translator = OnnxTranslator(args.run)
    if data:
        translator.text.preparation.require_same(data, args.run)
    return translator


def _of_run(args: argparse.Namespace, checkpoints: Sequence[Path], data: Preparation | None) -> Translator:
    launch = Launch(gpus=0 if "cpu" in args.search_flags else gpus()[0])
    choose_precision(args.precision, launch)
    if args.precision == "bf16" and launch.gpus:
        raise UserError("--precision bf16: a GPU translates in fp32 and fp16; take fp16, or add -- --cpu")
    from ea_fairseq.translator import of_run

    translator = of_run(checkpoints, args.run, data)
    if args.precision == "fp16":
        translator.hub.half()
    elif args.precision == "bf16":
        use_bf16_products()
    if seed := whole(args.search_flags, "seed"):
        import torch

        torch.manual_seed(seed)
    return translator.to("cuda" if launch.gpus else "cpu")


def _settings(args: argparse.Namespace, translator: Translator) -> Any:
    """The settings of the search, those after -- among them.

    Raises:
        UserError: a flag that the search does not have, or another kind of value than it takes.
    """
    settings: dict[str, Any] = {"beam": args.beam, "lenpen": args.lenpen}
    expected = {bool: "no value", int: "a whole number", float: "a number"}
    for flag, values in args.search_flags.items():
        if flag in OF_THE_WORK:
            continue
        name = flag.replace("-", "_")
        kind = translator.kinds.get(name)
        if kind is None:
            known = listed(f"--{each.replace('_', '-')}" for each in translator.kinds if each not in settings)
            raise UserError(f"-- --{flag}: the search has no such flag; it has {known}")
        try:
            if len(values) != (kind is not bool):
                raise ValueError
            settings[name] = kind(*values) if values else True
        except ValueError:
            raise UserError(f"-- --{flag} {listed(values, ' ')}: expected {expected[kind]}") from None
    try:
        return translator.settings(settings)
    except ValueError as error:
        raise UserError(str(error)) from None
