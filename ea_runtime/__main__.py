"""`python -m ea_runtime DIR < text`: translate standard input, a sentence a line, with an exported model."""

from __future__ import annotations

import argparse
import itertools
import sys

from ea_runtime import ExportError, Translator


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m ea_runtime", description=__doc__)
    parser.add_argument("folder", metavar="DIR", help="what scripts/export.sh wrote")
    parser.add_argument("--beam", type=int, metavar="N", help="width of the search (default: the export's)")
    parser.add_argument("--lenpen", type=float, metavar="X", help="length penalty (default: the export's)")
    parser.add_argument("--n-best", type=int, default=1, metavar="N", help="above 1: score, tab, text; N lines each")
    parser.add_argument("--batch", type=int, default=32, metavar="N", help="sentences at once (default: 32)")
    parser.add_argument(
        "--buffer", type=int, default=1000, metavar="N", help="lines read before the first is translated"
    )
    parser.add_argument("--threads", type=int, metavar="N", help="default: one for each core")
    parser.add_argument("--serve", metavar="[HOST:]PORT", help="answer over HTTP; without HOST, to this machine alone")
    args = parser.parse_args()
    try:
        if args.serve:
            return _serve(args)
        translator = Translator(args.folder, args.threads)
        lines = _lines()
        while part := list(itertools.islice(lines, args.buffer)):
            for translation in translator.translate(part, args.beam, args.lenpen, args.n_best, args.batch):
                hypotheses = [translation] if args.n_best == 1 else [f"{score:.4f}\t{x}" for x, score in translation]
                print(*hypotheses, sep="\n")
            sys.stdout.flush()
    except (ExportError, ValueError) as error:
        sys.exit(f"ea_runtime: {error}")


def _serve(args: argparse.Namespace) -> None:
    if (args.beam, args.lenpen, args.n_best) != (None, None, 1):
        raise ValueError("--serve takes no --beam, --lenpen and --n-best: each request sets its own")
    try:
        from ea_runtime.serve import serve
    except ModuleNotFoundError as error:
        raise ValueError(f"--serve needs {error.name}: pip install '.[serve]'") from None
    serve(Translator(args.folder, args.threads), args.serve, batch=args.batch)


def _lines() -> itertools.chain[str]:
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            yield line.decode("utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input, line {number}: no UTF-8 ({error.reason}); convert it first") from None


if __name__ == "__main__":
    main()
