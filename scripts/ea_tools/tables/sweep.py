"""Train every combination of some flags' values, and score each on the validation set; scripts/sweep.sh calls this.

The grid is run with the first of --seeds. Then the best cells and the default one are run with the other seeds, and
only then is one of them called the best. The test set has no part in this: a choice by test scores is fitted to the
test set. Finished runs stay, interrupted ones go on, and a cell that fails stops no other. Flags
of fairseq-train go to every run: --max-update 1500
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import pairwise

from ea_data.command_line import Parser
from ea_tools.common import UserError, listed, portable, positive, reporting
from ea_tools.metrics import LABELS
from ea_tools.tables.sweep_grid import Sweep, candidates, gather, scores_of
from ea_tools.tables.sweep_report import write
from ea_tools.tables.table import check_flags, check_seeds
from ea_tools.text import read_prep
from ea_tools.training import cells, recipes

GRID = "the flag's name without dashes is wanted, then its values"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: run the grid, confirm the best cells, write the report."""
    with reporting("sweep"):
        args, flags = parse(arguments)
        sweep = Sweep.of(args, flags)
        failed = [] if args.collect else run(sweep, args)
        if args.dry_run:
            return
        write(sweep, args)
    if failed:
        sys.exit("sweep: these failed; run the same command again, it goes on:\n  " + "\n  ".join(failed))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and flags for every training run."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="sweep.sh",
        usage="sweep.sh RECIPE ARCH --grid FLAG VALUE... [--grid FLAG VALUE...] [options] [fairseq-train flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="recipes: " + ", ".join(recipes.names()),
    )
    parser.add_argument("recipe", metavar="RECIPE", help="one of the recipes below, or a .toml file of your own")
    parser.add_argument("arch", metavar="ARCH", help="ea_transformer_lite, ea_transformer_base, ...")
    grid = {"action": "append", "nargs": "+", "required": True, "metavar": ("FLAG", "VALUE")}
    parser.add_argument("--grid", **grid, help="a flag without its dashes, and its values; once for each flag")
    seeds = {"type": int, "nargs": "+", "default": [1, 2, 3], "metavar": "N"}
    parser.add_argument("--seeds", **seeds, help="of the grid, then those that confirm the best (default: 1 2 3)")
    parser.add_argument("--confirm", type=positive, default=2, metavar="N", help="cells to confirm (default: 2)")
    parser.add_argument("--score", choices=LABELS, default="sacrebleu", help="what decides (default: sacrebleu)")
    parser.add_argument("--name", help="results/sweep-NAME (default: recipe, architecture and flags)")
    cells.add_run_options(parser, "sweep")
    if {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-"):
        parser.error(
            "RECIPE and ARCH come first; for data of your own RECIPE is a copy of the recipe.toml that a run by "
            "train.sh --data keeps in its folder"
        )
    for before, word in pairwise(arguments):
        if before == "--grid" and word.startswith("-"):
            parser.error(f"--grid {word}: {GRID}, such as --grid ea-alpha 0 0.1")
    args, flags = parser.parse_known_args(arguments)
    args.command = portable(["scripts/sweep.sh", *arguments])
    try:
        recipes.refuse_as_architecture(args.arch)
        check(args.grid, args.seeds, recipes.parse_flags(flags))
    except UserError as error:
        parser.error(str(error))
    return args, flags


def check(grid: Sequence[Sequence[str]], seeds: Sequence[int], flags: Mapping[str, list[str]]) -> None:
    """Refuse a grid that contradicts itself or the rest of the command line."""
    names = [name for name, *_ in grid]
    for name, *values in grid:
        if not values:
            raise UserError(f"--grid {name}: {GRID}")
        if name in flags:
            raise UserError(f"--{name}: is in the grid; it cannot be given to every run as well")
        if names.count(name) > 1:
            raise UserError(f"--grid {name}: given twice")
    check_flags("--grid ", names)
    check_flags("--", flags)
    check_seeds("--seeds", seeds)


def run(sweep: Sweep, args: argparse.Namespace) -> list[str]:
    """Run the missing cells of the grid, then its best cells with the other seeds; returns the failed cells as text."""
    if not args.dry_run:
        read_prep(recipes.read(sweep.recipe).data)
    first, *others = sweep.seeds
    failed = cells.run_missing(sweep.table, sweep.cells(sweep.rows, [first]), args, sweep.flags)
    scores = scores_of(sweep, gather(sweep))
    if args.dry_run and others and any(first not in of_cell for of_cell in scores.values()):
        cells.say(f"and then the best {sweep.confirm} of them, and the default one, with --seeds {listed(others, ' ')}")
        return failed
    confirming = sweep.cells(candidates(sweep, scores), others)
    return failed + cells.run_missing(sweep.table, confirming, args, sweep.flags)


if __name__ == "__main__":
    main()
