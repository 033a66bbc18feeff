"""`python -m ea_runtime DIR < text`: translate standard input, a sentence a line, or score it by a language model."""

from __future__ import annotations

import argparse
import io
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from ea_runtime import __version__

# Packages are imported where they are used: Ctrl-C during their second ends the command as it does later.


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ea_runtime", description=__doc__)
    parser.add_argument("--version", action="version", version=f"ea_runtime {__version__}")
    parser.add_argument("folder", metavar="DIR", help="what scripts/export.sh wrote")
    parser.add_argument("--beam", type=int, metavar="N", help="width of the search (default: the export's)")
    parser.add_argument("--lenpen", type=float, metavar="X", help="length penalty (default: the export's)")
    parser.add_argument("--n-best", type=int, default=1, metavar="N", help="above 1: score, tab, text; N lines each")
    batch = "sentences at once (default: 32); four batches are read and printed together, at a terminal each line"
    parser.add_argument("--batch", type=int, default=32, metavar="N", help=batch)
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--serve", metavar="[HOST:]PORT", help="answer over HTTP; without HOST, to this machine alone")
    args = parser.parse_args()
    try:
        _run(args)
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


def _run(args: argparse.Namespace) -> None:
    from ea_artifacts.command import UserError
    from ea_runtime import LanguageModel
    from ea_runtime.folder import Export
    from ea_runtime.search import check_whole

    try:
        check_whole("--batch", args.batch)
        for name in ("stdout",) if args.serve is not None else ("stdin", "stdout"):
            if getattr(sys, name) is None:
                raise ValueError(f"{name} is closed; give it a file, a pipe or a terminal")
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(encoding="utf-8")
        if args.serve is not None:
            return _serve(args)
        is_language = Export(Path(args.folder)).task == LanguageModel.TASK
        for line in (_score if is_language else _translate)(args):
            _print(line)
    except (UserError, ValueError) as error:
        sys.exit(f"ea_runtime: {error}")
    except OSError as error:
        sys.exit(f"ea_runtime: {error.filename or 'standard input'}: {error.strerror}")


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError as error:
        sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115  (for what Python writes at its end)
        # who reads the output may have enough of it, as head has
        broken = isinstance(error, BrokenPipeError)
        sys.exit(128 + signal.SIGPIPE if broken else f"ea_runtime: standard output: {error.strerror}")


def _translate(args: argparse.Namespace) -> Iterator[str]:
    """The translations of standard input."""
    from ea_runtime import Translator

    translator = Translator(args.folder, args.threads)
    for first, lines in _parts(args.batch):
        translations = translator.scored(lines, args.beam, args.lenpen, args.n_best, args.batch, first=first)
        for hypotheses in translations:
            for text, score in hypotheses:
                yield text if args.n_best == 1 else f"{score:.4f}\t{text}"


def _score(args: argparse.Namespace) -> Iterator[str]:
    """Each line's log-probability and number of tokens; then the perplexity of all, to standard error."""
    from ea_runtime import LanguageModel

    _refuse_search(args, "a language model scores lines, and")
    model, total, count = LanguageModel(args.folder, args.threads), 0.0, 0
    for first, lines in _parts(args.batch):
        for score, tokens in model.score(lines, args.batch, first):
            total, count = total + score, count + tokens
            yield f"{score:.4f}\t{tokens}"
    if count:
        print(f"perplexity {math.exp(-total / count):.2f} of {count} tokens", file=sys.stderr)


def _refuse_search(args: argparse.Namespace, who: str) -> None:
    if (args.beam, args.lenpen, args.n_best) != (None, None, 1):
        raise ValueError(f"{who} takes no --beam, --lenpen and --n-best")


def _serve(args: argparse.Namespace) -> None:
    from ea_runtime import Translator

    _refuse_search(args, "--serve, where each request sets its own,")
    translator = Translator(args.folder, args.threads)
    try:
        from ea_runtime.serve import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"--serve needs {error.name}: pip install fastapi uvicorn") from None
    serve(translator, args.serve, batch=args.batch, started=_print)


def _parts(batch: int) -> Iterator[tuple[int, list[str]]]:
    """Lines of standard input, some at a time, with the number of the first; those before a bad one, too.

    Progress goes to a terminal on which no translations appear.
    """
    from ea_artifacts.files import batches

    begin, done = time.monotonic(), 0
    size = 1 if sys.stdin.isatty() else 4 * batch
    shown = sys.stderr is not None and sys.stderr.isatty() and not sys.stdout.isatty()
    for first, lines in batches(sys.stdin.buffer, "standard input", size):
        yield first, lines
        done += len(lines)
        if shown:
            speed = done / (time.monotonic() - begin)
            print(f"{done:,} lines, {speed:.1f} a second", end="\r", file=sys.stderr, flush=True)
    print(end="\n" if shown else "", file=sys.stderr)


if __name__ == "__main__":
    main()
