"""Translate raw text with a trained run.

One line in, one line out: order and empty lines are kept. At a terminal each line is translated as it is typed.
With --output, translations are written as they come, to FILE.partial, which becomes FILE at the end; --resume continues
after an interruption. With --nbest each line gives several, in the form of Moses: NUMBER ||| TRANSLATION ||| SCORE.
Numbers count input lines from 0. A score is the natural log-probability over length.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import io
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, cast

from tqdm import tqdm

from ea_artifacts.command import Parser, UserError, positive, quiet, reporting, say
from ea_artifacts.files import batches, replaceable, replacing
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import Run
from ea_tools.translating.model import add_search, open_model, parse_both


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: raw text from --input or standard input, translations to --output or standard output."""
    args = parse(arguments)
    again = "run it again with --resume to go on" if args.output else "every line above is whole, the rest is missing"
    with reporting("translate", again):
        quiet()
        if _is_export(args):
            used = args.run / "model.json"  # it holds the digests of all files
        else:
            used = args.checkpoint = args.checkpoint or Run(args.run).choose(say)
        with _input(args) as file, _output(args, used, file) as (lines, write, done):
            translate(args, lines, write, done)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; those after -- are fairseq-interactive's for the search."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="translate.sh",
        description=__doc__,
        epilog="After -- stand fairseq-interactive's flags of the search, --seed or --cpu: -- --max-len-b 50",
    )
    add = parser.add_argument
    add("--run", type=Path, metavar="DIR", help="a run, whose model.json names the checkpoint; or an export")
    add("--checkpoint", type=Path, metavar="FILE", help="this checkpoint instead")
    add("--data", type=Path, metavar="DIR", help="prepared data (default: the run's copy, which they must match)")
    add("--input", type=Path, metavar="FILE", help="raw text, UTF-8 (default: standard input)")
    add("--output", type=Path, metavar="FILE", help="(default: standard output)")
    add_search(parser)
    add("--nbest", type=positive, metavar="N", help="the N best translations of a line, with scores")
    add("--batch-size", type=positive, metavar="N", help="sentences at once (default: 32, or 12,000 tokens on a GPU)")
    add("--resume", action="store_true", help="go on with the --output of a run that was interrupted")
    add("--buffer", type=positive, metavar="N", help="lines to sort and batch (default: 1000; 1 at a terminal)")
    args = parse_both(parser, arguments)
    if not (args.run or args.checkpoint):
        parser.error("--run or --checkpoint is needed")
    if (args.nbest or 1) > args.beam:
        parser.error(f"--nbest {args.nbest}: is more than --beam {args.beam}")
    if args.resume and not args.output:
        parser.error("--resume goes on with an --output, and none is given")
    return args


def _is_export(args: argparse.Namespace) -> bool:
    return args.run is not None and Run(args.run).is_export


@contextlib.contextmanager
def _input(args: argparse.Namespace) -> Iterator[IO[bytes]]:
    """The lines of --input, or of standard input, as bytes; an --output that is the same file is refused."""
    if args.input and not args.input.exists():
        raise UserError(f"--input {args.input}: no such file; give a text file")
    if args.input is None and sys.stdin is None:
        raise UserError("standard input is closed; give --input FILE")
    # Not sys.stdin: Python aborts where it ends while a thread waits in that object, as at Ctrl-C.
    source = args.input or sys.stdin.fileno()
    with open(source, "rb", closefd=args.input is not None) as file:
        output = args.output
        if output and output.exists() and os.path.samestat(os.fstat(file.fileno()), output.stat()):
            raise UserError(f"--output {output}: is the input, which would be lost; give it another name")
        yield file


@contextlib.contextmanager
def _output(
    args: argparse.Namespace, checkpoint: Path, lines: Iterable[bytes]
) -> Iterator[tuple[Iterable[bytes], Callable[[str], None], int]]:
    """The input's lines, a function that writes one line, and how many input lines have been translated before.

    A file is first FILE.partial, and FILE when it is complete. FILE.partial.jsonl beside it has the settings in its
    first line, then a digest of each input line, as they are read.
    """
    if args.output is None:
        if sys.stdout is None:
            raise UserError("standard output is closed; give --output FILE")
        cast(io.TextIOWrapper, sys.stdout).reconfigure(encoding="utf-8")
        yield lines, lambda line: print(line, flush=True), 0
        return
    output = replaceable(args.output, "--output ")
    if not args.output.parent.is_dir():
        raise UserError(f"--output {args.output}: there is no folder {args.output.parent}; make it first")
    if output is None:  # a pipe or a device, which keeps nothing to go on with
        if args.resume:
            raise UserError(f"--resume: --output {args.output} is not a file")
        with args.output.open("w", encoding="utf-8") as stream:
            yield lines, lambda line: print(line, file=stream, flush=True), 0
        return
    partial, record = (output.with_name(output.name + end) for end in (".partial", ".partial.jsonl"))
    with checkpoint.open("rb") as weights:
        digest = hashlib.file_digest(weights, "sha256").hexdigest()[:16]
    used = {
        "checkpoint": f"{checkpoint.resolve()} (sha256 {digest})",
        **{name: getattr(args, name) for name in ("beam", "lenpen", "nbest", "precision", "search_flags")},
    }
    with partial.open("a+b") as file:

        def write(line: str) -> None:
            file.write(f"{line}\n".encode())
            file.flush()

        _lock(file, partial)
        try:
            before = _translated_before(file, partial, record, used, args)
            with replacing(record) as temporary:
                temporary.write_text("".join(f"{json.dumps(entry)}\n" for entry in (used, *before)), encoding="utf-8")
            with record.open("a", encoding="utf-8") as notes:
                yield _noted(lines, before, notes, partial), write, len(before)
            partial.replace(output)
            record.unlink()
        finally:
            if partial.exists() and not partial.stat().st_size:  # a mistake ended it before the first line
                partial.unlink()
                record.unlink(missing_ok=True)


def _lock(file: IO[bytes], partial: Path) -> None:
    """Keep a second process out of FILE.partial for as long as this one has it open."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = partial.exists() and os.path.samestat(os.fstat(file.fileno()), partial.stat())  # not FILE by now
    except (BlockingIOError, PermissionError):
        free = False
    if not free:
        raise UserError(f"{partial}: another process writes this file; let it end, or choose another --output")


def _translated_before(
    file: IO[bytes], partial: Path, record: Path, used: dict[str, Any], args: argparse.Namespace
) -> list[str]:
    """Digests of the input lines that an interrupted run has translated; an incomplete translation is cut off."""
    file.seek(0)
    lines = file.read().split(b"\n")[:-1]
    each = args.nbest or 1
    done = len(lines) // each
    if done and not args.resume:
        raise UserError(f"{partial}: holds {done:,} lines of an interrupted run; go on with --resume, or remove it")
    noted = record.read_text(encoding="utf-8").split("\n")[:-1] if done and record.exists() else []
    before, *digests = map(json.loads, noted or ["{}"])
    for name, value in used.items():
        if done and before.get(name) != value:
            raise UserError(f"--resume: {partial} was made with {name} {before.get(name)}, and now it is {value}")
    digests = digests[:done]
    file.truncate(sum(len(line) + 1 for line in lines[: len(digests) * each]))
    return digests


def _noted(lines: Iterable[bytes], before: Sequence[str], notes: IO[str], partial: Path) -> Iterator[bytes]:
    """The input's lines, whose digests go to `notes`; the first ones must be those whose digests are `before`."""
    number = 0
    for number, line in enumerate(lines, 1):
        digest = hashlib.sha256(line.rstrip(b"\r\n")).hexdigest()[:16]
        if number > len(before):
            print(json.dumps(digest), file=notes, flush=True)
        elif digest != before[number - 1]:
            raise UserError(f"--resume: {partial} was made from another input: line {number:,} is not the same")
        yield line
    if number < len(before):
        raise UserError(f"--resume: {partial} holds {len(before):,} lines, and the input has only {number:,}")


def translate(args: argparse.Namespace, lines: Iterable[bytes], write: Callable[[str], None], done: int = 0) -> None:
    """Give the translations of `lines` (bytes) to `write`, in their order; the first `done` of them are left out."""
    if "batch-size" in args.search_flags:
        raise UserError("-- --batch-size: has no effect here; see --batch-size in --help")
    data = Preparation.at(args.data) if args.data else None
    translator, settings = open_model(args, [] if _is_export(args) else [args.checkpoint], data)
    at_terminal = args.input is None and sys.stdin.isatty()
    size = args.buffer or (1 if at_terminal else max(1000, args.batch_size or 1))
    prompt = _prompt if at_terminal else lambda text="": None
    prompt(f"Type a sentence in {translator.text.preparation.source_lang} and press Return; Ctrl-D ends.\n")
    with tqdm(unit=" lines", initial=done, disable=at_terminal or not args.output, mininterval=1) as progress:
        for first, sentences in batches(lines, args.input or "standard input", size, done):
            try:
                sources = translator.sources(sentences, first)
                translations = translator.scored_ids(sources, settings, args.nbest or 1, args.batch_size)
            except ValueError as error:  # settings that do not go together
                raise UserError(str(error)) from None
            for number, hypotheses in enumerate(translations, first - 1):
                for line in _written(number, hypotheses, args.nbest):
                    write(line)
            progress.update(len(sentences))
            prompt()


def _prompt(text: str = "") -> None:
    print(text + "> ", end="", file=sys.stderr, flush=True)


def _written(number: int, hypotheses: Sequence[tuple[str, float]], nbest: int | None) -> list[str]:
    """The output lines of input line `number`, whose translations and scores are `hypotheses`."""
    if not nbest:
        return [hypotheses[0][0]]
    return [f"{number} ||| {text} ||| {score}" for text, score in hypotheses]
