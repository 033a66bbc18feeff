"""Mistakes in architectures and flags of fairseq-train, each told in one line before a run's folder is made.

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
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from ea_tools.common import REPO, UserError

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
    check_architecture(arch, "ARCH ")
    with _silence():
        args, left_out = parse_without(command, optional, others)
        check_tokenizer(args)
    return left_out


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


def parse(command: Sequence[str]) -> argparse.Namespace:
    """The parsed words after fairseq-train, or a UserError where fairseq's parser refuses them."""
    return parse_without(command)[0]


def parse_without(
    command: Sequence[str], optional: Collection[str] = (), others: Iterable[str] = ()
) -> tuple[argparse.Namespace, list[str]]:
    """What the words after fairseq-train say, and which of the `optional` flags had to be left out of them."""
    import ea_fairseq  # noqa: F401  (registers the architectures)

    if "--arch" in command:
        check_architecture(command[list(command).index("--arch") + 1], "ARCH ")
    _, args, rest = _parse_known(command)
    known = of_any_part() if rest else set()
    left_out = [name for name in optional if f"--{name}" in known.intersection(rest)]
    if rest:
        parser, args, rest = _parse_known(_without(command, left_out))
    if rest:
        raise UserError(f"{_unknown(rest, flags_of(parser).union(others))} ({USAGE})")
    return args, left_out


def _parse_known(command: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace, list[str]]:
    """fairseq's parser, its result, and the words that it does not know."""
    from fairseq import options

    parser = options.get_training_parser()
    with in_one_line(USAGE):
        return parser, *options.parse_args_and_arch(parser, list(command), parse_known=True)


@contextlib.contextmanager
def in_one_line(usage: str) -> Iterator[None]:
    """Inside, a parser of fairseq's that refuses its words raises a UserError instead of printing all its flags."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            yield
    except SystemExit:
        reason = said.getvalue().rpartition("error: ")[2].strip()
        reason = reason.replace("invalid <lambda> value:", "must be a number, or several with commas between them, not")
        raise UserError(f"{reason} ({usage})") from None


def of_any_part() -> set[str]:
    """The flags of every model, task, criterion, optimizer and scheduler of fairseq's."""
    from fairseq.dataclass.utils import gen_parser_from_dataclass
    from fairseq.models import MODEL_REGISTRY
    from fairseq.registry import REGISTRIES
    from fairseq.tasks import TASK_REGISTRY

    parser = argparse.ArgumentParser(allow_abbrev=False, conflict_handler="resolve")
    parts = [*MODEL_REGISTRY.values(), *TASK_REGISTRY.values()]
    parts += [part for registry in REGISTRIES.values() for part in registry["registry"].values()]
    for part in parts:
        if hasattr(part, "add_args"):
            part.add_args(parser)
        elif hasattr(part, "__dataclass"):
            gen_parser_from_dataclass(parser, part.__dataclass())
    return set(parser._option_string_actions)


def _without(command: Sequence[str], names: Collection[str]) -> list[str]:
    """The words of a command but for these flags and their values."""
    kept, keeps = [], True
    for word in command:
        if word.startswith("--"):
            keeps = word.removeprefix("--") not in names
        if keeps:
            kept.append(word)
    return kept


def _unknown(words: Sequence[str], known: Collection[str]) -> str:
    """A message for words that fairseq does not know, with the nearest of the `known` flags."""
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    faults = []
    for flag in flags:
        near = difflib.get_close_matches(flag, known, n=1, cutoff=0.75)
        faults.append(f"{flag}: there is no such flag" + (f"; is {near[0]} meant?" if near else ""))
    return "; ".join(faults) or f"{' '.join(words)!r} belongs to no flag"


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
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def check_keys(path: Path, given: Iterable[str], known: Collection[str], besides: str = "") -> None:
    """Refuse a key of a file that has no meaning there; the message names the nearest key, or all that there are."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"is {near[0]} meant?" if near else f"there are: {', '.join(known)}{besides}"
            raise UserError(f"{path}: {key}: there is no such key here; {hint}")


def positive_number(flag: str, value: str) -> int:
    """The whole number after a flag; anything that is not at least 1 is refused."""
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"--{flag} {value}: must be a whole number of at least 1")
    return int(value)
