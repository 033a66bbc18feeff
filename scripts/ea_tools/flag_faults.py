"""Faults in names, of architectures, keys and flags of fairseq-train, in one line each, before a run's folder is made.

fairseq's own parser decides what is a fault, but its answer to one is a usage of some hundred lines. Its import takes
seconds, and is saved where the user gave no flags and an architecture that is one of ours.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partialmethod
from pathlib import Path
from typing import NoReturn
from unittest import mock

from ea_tools.common import REPO, UserError

USAGE = ".venv/bin/fairseq-train --user-dir ea_fairseq --arch {arch} --help lists all flags"


def check(arch: str, command: Sequence[str], by_user: bool, others: Iterable[str] = ()) -> None:
    """Refuse an unknown architecture or flag, or a value that fairseq does not take.

    Args:
        command: the words after fairseq-train.
        by_user: whether some of them are the user's own, from the command line or from a recipe of theirs.
        others: flags that are not fairseq's, and may have been meant by an unknown one.
    """
    if arch in ours() and not by_user:
        return
    check_architecture(arch, "ARCH ")
    with _silence():
        import ea_fairseq  # noqa: F401  (registers the architectures)

        check_tokenizer(parse(command, others))


def check_tokenizer(args: argparse.Namespace) -> None:
    """Refuse a detokeniser for BLEU at validations that fairseq does not have, before it fails by a KeyError."""
    from fairseq.data.encoders import TOKENIZER_REGISTRY

    name = getattr(args, "eval_bleu_detok", "space")
    if name not in TOKENIZER_REGISTRY:
        raise UserError(
            f"--eval-bleu-detok {name}: there is no such tokeniser; there are: {', '.join(TOKENIZER_REGISTRY)}"
        )


def check_architecture(arch: str, where: str) -> None:
    """Refuse an architecture that neither ea_fairseq nor fairseq has; the message begins with `where`."""
    if arch in ours():
        return
    with _silence():
        from fairseq.models import ARCH_MODEL_REGISTRY

        import ea_fairseq  # noqa: F401  (registers the architectures)

    if arch not in ARCH_MODEL_REGISTRY:
        near = difflib.get_close_matches(arch, ARCH_MODEL_REGISTRY, n=3, cutoff=0.5) or sorted(ours())
        raise UserError(f"{where}{arch}: there is no such architecture; near it are: {', '.join(near)}")


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Inside, fairseq reports nothing of its own start."""
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check_keys(path: Path, given: Iterable[str], known: Collection[str], besides: str = "") -> None:
    """Refuse a key of a file that nobody reads; the message says which one was meant, maybe, or else what there are."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"is {near[0]} meant?" if near else f"there are: {', '.join(known)}{besides}"
            raise UserError(f"{path}: {key}: there is no such key here; {hint}")


def parse(command: Sequence[str], others: Iterable[str] = ()) -> argparse.Namespace:
    """What the words after fairseq-train say, or a UserError where fairseq's parser takes one of them for a fault."""
    from fairseq import options

    with mock.patch.object(argparse.ArgumentParser, "error", partialmethod(_raise, others)):
        return options.parse_args_and_arch(options.get_training_parser(), list(command))


def ours() -> set[str]:
    """The architectures that ea_fairseq registers, read from its text, and fairseq's Transformer."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(REPO / "ea_fairseq").glob("*.py"))
    return {"transformer", *re.findall(r'@register_model_architecture\("\w+", "(\w+)"\)', text)}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags that a parser's help names."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help()))


def _raise(parser: argparse.ArgumentParser, others: Iterable[str], message: str) -> NoReturn:
    """In the place of argparse's own end of a program: the fault in one line, and the flag that was meant, maybe."""
    arch = parser.get_default("arch") or "ARCH"
    message = message.replace("invalid <lambda> value:", "must be a number, or several with commas between them, not")
    if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
        flags = [word.partition("=")[0] for word in unknown[1].split() if word.startswith("--")]
        # Without their dashes, which all have in common.
        known = [flag.removeprefix("--") for flag in flags_of(parser).union(others)]
        near = {flag: difflib.get_close_matches(flag.removeprefix("--"), known, n=1, cutoff=0.7) for flag in flags}
        meant = [
            f"{flag}: there is no such flag" + (f"; is --{words[0]} meant?" if words else "")
            for flag, words in near.items()
        ]
        message = "; ".join(meant) or f"{unknown[1]!r} belongs to no flag"
    raise UserError(f"{message} ({USAGE.format(arch=arch)})")


def positive_number(flag: str, value: str) -> int:
    """The whole number after a flag; anything that is not at least 1 is refused."""
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"--{flag} {value}: must be a whole number of at least 1")
    return int(value)
