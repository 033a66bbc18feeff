"""Mistakes in architectures and flags of fairseq-train, each named in one line before a run's folder is made.

fairseq's own parser finds the mistakes. Its import takes seconds: a command without flags of the user's own does
without it.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import re
import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from ea_artifacts.command import REPO, UserError

USAGE = ".venv/bin/fairseq-train --user-dir ea_fairseq --arch ARCH --help lists the common flags and --ea-*"


def parse(
    command: Sequence[str], others: Iterable[str] = (), optional: Collection[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """The parsed words after fairseq-train, or a UserError where fairseq does not take them.

    Args:
        others: our own flags, which a misspelt word may mean.
        optional: names of flags that may be left out.

    Returns:
        The values, and the names among `optional` that the chosen architecture, task or optimizer does not take.
    """
    with _silence():
        parser, args, unknown = _parsed(command)
        left_out = [name for name in optional if f"--{name}" in unknown]
        if left_out:
            parser, args, unknown = _parsed(_without(command, left_out))
    faults = []
    for word in unknown:
        if word.startswith("--"):
            flag = word.partition("=")[0]
            known = flags_of(parser).union(others)
            near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
            near = near or sorted(other for other in known if other.startswith(flag))
            faults.append(f"{flag}: there is no such flag" + (f"; did you mean {near[0]}?" if near else ""))
    if unknown:
        raise UserError(f"{'; '.join(faults) or f'{unknown[0]!r} belongs to no flag'} ({USAGE})")
    _check_values(parser, args)
    return args, left_out


def _check_values(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse a value, or its absence, that fairseq's configuration refuses once it starts; and numbers below 0.

    fairseq would train a model without layers for --encoder-layers -1. Where -1 means something, it is the default.
    """
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from hydra.errors import ConfigCompositionException

    try:
        with _silence(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Hydra, about fairseq
            convert_namespace_to_omegaconf(args)
    except ConfigCompositionException as error:
        if not (found := re.match(r"Error merging override (?:\w+\.)*(\w+)=(.*)", str(error))):
            raise
        flag, value = f"--{found[1].replace('_', '-')}", found[2]
        message = f"{flag}: must be given" if value == "null" else f"{flag} {value}: is no value for it"
        raise UserError(f"{message} ({USAGE})") from None
    for option in parser._actions:
        given = getattr(args, option.dest, None)
        for number in given if isinstance(given, list) else [given]:
            if isinstance(number, (int, float)) and number < 0 and number != option.default:
                raise UserError(f"{option.option_strings[0]} {number}: expected a number from 0 on ({USAGE})")


def useless(parsed: argparse.Namespace) -> dict[str, str]:
    """The flags of evolving attention that change nothing of the model -> a message that says so."""
    from fairseq.models import ARCH_MODEL_REGISTRY

    from ea_fairseq.options import no_effect, without_effect

    sides = getattr(ARCH_MODEL_REGISTRY[parsed.arch], "SIDES", None)
    names = without_effect(parsed, sides) if sides else []
    return {f"ea-{name.replace('_', '-')}": no_effect(name, parsed) for name in names}


def check_architecture(arch: str, where: str, translates: bool = True) -> None:
    """Refuse an architecture that neither ea_fairseq nor fairseq has, or that does not translate where it must.

    The message begins with `where`.
    """
    if arch in ours():
        return
    with _silence():
        import ea_fairseq  # noqa: F401  (registers the architectures)

        # isort: split
        from fairseq.models import ARCH_MODEL_REGISTRY, FairseqEncoderDecoderModel, FairseqMultiModel

    if arch not in ARCH_MODEL_REGISTRY:
        near = difflib.get_close_matches(arch, ARCH_MODEL_REGISTRY, n=3, cutoff=0.5) or sorted(ours())
        raise UserError(f"{where}{arch}: there is no such architecture; near it are: {', '.join(near)}")
    if translates and not issubclass(ARCH_MODEL_REGISTRY[arch], (FairseqEncoderDecoderModel, FairseqMultiModel)):
        raise UserError(
            f"{where}{arch}: does not translate, which needs an encoder and a decoder; docs/pretrained.md trains "
            "language models and RoBERTa by fairseq-train"
        )


def _parsed(command: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """fairseq's parser, its result, and the words that it does not know."""
    import ea_fairseq  # noqa: F401  (registers the architectures)

    # isort: split
    from fairseq import options

    parser, printed = options.get_training_parser(), io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):  # a refusal comes behind all flags
            return parser, *options.parse_args_and_arch(parser, list(command), parse_known=True)
    except SystemExit:
        reason = printed.getvalue().rpartition("error: ")[2].strip()
        reason = reason.replace("invalid <lambda> value:", "must be a number, or several with commas between them, not")
        raise UserError(f"{reason} ({USAGE})") from None


def _without(command: Sequence[str], names: Collection[str]) -> list[str]:
    """The words of a command but for these flags and their values."""
    kept, keeps = [], True
    for word in command:
        if word.startswith("--"):
            keeps = word.removeprefix("--") not in names
        if keeps:
            kept.append(word)
    return kept


def ours() -> set[str]:
    """The architectures that ea_fairseq registers, read from its text, and fairseq's Transformer."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(REPO / "ea_fairseq").glob("*.py"))
    return {"transformer", *re.findall(r'@register_model_architecture\("\w+", "(\w+)"\)', text)}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags that a parser's help names."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help()))


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, fairseq reports nothing of its start."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)
