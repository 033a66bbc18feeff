"""The command behind the recipes in this folder; run those: data-prep/multi30k.sh --help."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from pathlib import Path

import recipes
import sample
from prep.recipe import Recipe
from prep.stages import NAMES

DATA = Path(__file__).resolve().parent.parent / "data"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


def common_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    group = parser.add_argument_group("options of every recipe")
    group.add_argument("--out", type=Path, metavar="DIR", help="the finished data folder (default: data/NAME)")
    group.add_argument(
        "--bpe", choices=["subword_nmt", "sentencepiece"], help="kind of subwords (default: subword_nmt)"
    )
    group.add_argument("--merges", type=positive, metavar="N", help="merges, or sentencepiece's number of pieces")
    group.add_argument(
        "--vocabulary-threshold", type=positive, metavar="N",
        help="split subwords again that occur fewer than N times on their side of the training text",
    )  # fmt: skip
    group.add_argument("--workers", type=positive, metavar="N", default=os.cpu_count(), help="processes (default: all)")
    group.add_argument(
        "--force", choices=NAMES, metavar="STAGE",
        help=f"make a finished stage again, and those after it: {', '.join(NAMES)}",
    )  # fmt: skip
    return parser


def parse() -> tuple[argparse.Namespace, Recipe, Path | None]:
    """The arguments, the recipe they amount to, and the folder with its raw text (None: to be downloaded)."""
    parser = argparse.ArgumentParser(prog="data-prep")
    common = common_options()
    commands = parser.add_subparsers(dest="recipe", required=True)

    def command(name: str, description: str) -> argparse.ArgumentParser:
        return commands.add_parser(
            name, prog=f"{name}.sh", parents=[common], description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip

    multi30k = command("multi30k", recipes.multi30k.__doc__)
    multi30k.add_argument("pair", choices=["de-en", "en-de", "en-fr"], help="source and target language")
    multi30k.add_argument("--raw", type=Path, metavar="DIR", help="folder with the raw files (.gz or plain)")
    made = command("sample", sample.__doc__.split("\n\n    python")[0] + "\n" + sample.__doc__.split("\n\n", 2)[2])
    made.add_argument("--train", type=positive, default=12_000, metavar="N", help="training pairs (default: 12000)")
    made.add_argument("--seed", type=int, default=1, metavar="N", help="(default: 1)")

    args = parser.parse_args()
    raw = getattr(args, "raw", None)
    recipe = recipes.multi30k(*args.pair.split("-")) if args.recipe == "multi30k" else recipes.sample()
    changes = {key: getattr(args, key) for key in ("bpe", "merges", "vocabulary_threshold") if getattr(args, key)}
    return args, dataclasses.replace(recipe, rules=dataclasses.replace(recipe.rules, **changes)), raw


def main() -> None:
    args, recipe, raw = parse()
    out = (args.out or DATA / recipe.name).resolve()
    # Only now, so that --help works before scripts/setup.sh has run.
    from prep.pipeline import Pipeline
    from prep.text import PrepError

    command = [f"data-prep/{args.recipe}.sh", *sys.argv[2:]]
    try:
        if args.recipe == "sample":
            raw = out.with_name(out.name + ".work") / "raw"
            sample.write(sample.corpus(args.train, 500, 500, args.seed), raw)
        Pipeline(recipe, raw, out, args.workers, command).run(args.force)
    except PrepError as error:
        sys.exit(f"{args.recipe}.sh: {error}")
    print(f"{out}: ready")


if __name__ == "__main__":
    main()
