"""Faults in names, of architectures, keys and flags of fairseq-train, in one line each, before a run's folder is made.

fairseq's own parser decides what is a fault, but its answer to one is a usage of some hundred lines. Its import takes
seconds, and is saved where the user gave no flags and an architecture that is one of ours. It is also saved for a flag
that stands nowhere in fairseq's text.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import partialmethod
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import NoReturn
from unittest import mock

from ea_tools.common import REPO, UserError

#: A flag is spelt out, or made of the name of a dataclass's field.
FLAG_IN_TEXT = re.compile(r"""["']--([a-zA-Z][\w-]*)|^    ([a-zA-Z]\w*): (?!.*,$).*(?:=|\[$)""", re.MULTILINE)
USAGE = ".venv/bin/fairseq-train --user-dir ea_fairseq --arch ARCH --help lists all flags"


def check(
    arch: str, command: Sequence[str], by_user: bool, others: Iterable[str] = (), optional: Collection[str] = ()
) -> list[str]:
    """Refuse an unknown architecture or flag, or a value that fairseq does not take.

    Args:
        command: the words after fairseq-train.
        by_user: whether some of them are the user's own, from the command line or from a recipe of theirs.
        others: flags that are not fairseq's, and may have been meant by an unknown one.
        optional: names of flags that may be left out of the command.

    Returns:
        The names among `optional` that belong to another architecture, task, criterion, optimizer or scheduler.
    """
    if arch in ours() and not by_user:
        return []
    check_spelling(command, others)
    check_architecture(arch, "ARCH ")
    with _silence():
        import ea_fairseq  # noqa: F401  (registers the architectures)

        left_out = not_taken(command, optional, others)
        check_tokenizer(parse(without(command, left_out), others))
    return left_out


def check_tokenizer(args: argparse.Namespace) -> None:
    """Refuse a detokeniser for BLEU at validations that fairseq does not have, before it fails by a KeyError."""
    from fairseq.data.encoders import TOKENIZER_REGISTRY

    name = getattr(args, "eval_bleu_detok", "space")
    if name not in TOKENIZER_REGISTRY:
        raise UserError(
            f"--eval-bleu-detok {name}: there is no such tokeniser; there are: {', '.join(TOKENIZER_REGISTRY)}"
        )


def check_spelling(command: Sequence[str], others: Iterable[str] = ()) -> None:
    """Refuse a flag that stands nowhere in the text of fairseq, of ea_fairseq or of the command's --user-dir."""
    own = [Path(folder) for word, folder in pairwise(command) if word == "--user-dir"]
    fairseq = find_spec("fairseq").submodule_search_locations
    known = set()
    for folder in map(Path, (*fairseq, REPO / "ea_fairseq", *own)):
        for path in folder.rglob("*.py"):
            if "examples" in path.relative_to(folder).parts:  # of fairseq: programs with flags of their own
                continue
            words = FLAG_IN_TEXT.findall(path.read_text(encoding="utf-8"))
            known.update((spelt or field).replace("_", "-") for spelt, field in words)
    unknown = []
    for word in command:
        name = word.removeprefix("--").replace("_", "-")
        # An encoder and a decoder have the fields of one dataclass, with these words in front.
        if word.startswith("--") and not {name, re.sub("^(encoder|decoder|quant-noise)-", "", name)} & known:
            unknown.append(word)
    if unknown:
        meant = known.union(other.removeprefix("--") for other in others)
        raise UserError(f"{_unknown(unknown, meant)} ({USAGE})")


def not_taken(command: Sequence[str], optional: Collection[str], others: Iterable[str] = ()) -> list[str]:
    """The names among `optional` of flags that the parts which a command of fairseq-train chooses do not take."""
    from fairseq import options

    with _refusing(others):
        _, rest = options.parse_args_and_arch(options.get_training_parser(), list(command), parse_known=True)
    return [name for name in optional if f"--{name}" in rest]


def without(command: Sequence[str], names: Collection[str]) -> list[str]:
    """The words of a command but for these flags and their values."""
    kept, keeps = [], True
    for word in command:
        if word.startswith("--"):
            keeps = word.removeprefix("--") not in names
        if keeps:
            kept.append(word)
    return kept


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

    with _refusing(others):
        return options.parse_args_and_arch(options.get_training_parser(), list(command))


def ours() -> set[str]:
    """The architectures that ea_fairseq registers, read from its text, and fairseq's Transformer."""
    text = "".join(path.read_text(encoding="utf-8") for path in Path(REPO / "ea_fairseq").glob("*.py"))
    return {"transformer", *re.findall(r'@register_model_architecture\("\w+", "(\w+)"\)', text)}


def flags_of(parser: argparse.ArgumentParser) -> set[str]:
    """The flags that a parser's help names."""
    return set(re.findall(r"(?<![\w-])--[a-z][\w-]*", parser.format_help()))


@contextlib.contextmanager
def _refusing(others: Iterable[str]) -> Iterator[None]:
    """Inside, a parser that finds a fault raises a UserError; `others` are flags that may have been meant."""
    with mock.patch.object(argparse.ArgumentParser, "error", partialmethod(_raise, others)):
        yield


def _raise(parser: argparse.ArgumentParser, others: Iterable[str], message: str) -> NoReturn:
    """In the place of argparse's own end of a program: the fault in one line, and the flag that was meant, maybe."""
    message = message.replace("invalid <lambda> value:", "must be a number, or several with commas between them, not")
    if unknown := re.fullmatch(r"unrecognized arguments: (.*)", message):
        flags = [word.partition("=")[0] for word in unknown[1].split() if word.startswith("--")]
        known = {flag.removeprefix("--") for flag in flags_of(parser).union(others)}
        message = _unknown(flags, known) if flags else f"{unknown[1]!r} belongs to no flag"
    raise UserError(f"{message} ({USAGE})")


def _unknown(flags: Iterable[str], known: Collection[str]) -> str:
    """A message for unknown flags, with the nearest of `known`, which are names without dashes."""
    faults = []
    for flag in flags:
        near = difflib.get_close_matches(flag.removeprefix("--"), known, n=1, cutoff=0.75)
        faults.append(f"{flag}: there is no such flag" + (f"; is --{near[0]} meant?" if near else ""))
    return "; ".join(faults)


def positive_number(flag: str, value: str) -> int:
    """The whole number after a flag; anything that is not at least 1 is refused."""
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"--{flag} {value}: must be a whole number of at least 1")
    return int(value)
