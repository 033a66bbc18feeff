"""Fill a table: train and evaluate the models that are missing, then write results/TABLE.md and .png.

Finished runs stay; interrupted ones go on. Cells without a run say "not run". Flags of fairseq-train go to every
training run, whose table is then another page: --max-update 300 writes results/TABLE-max-update300.md.

Without a GPU, each core trains one run, on one thread. The scores of finished runs are kept in results/scores.jsonl,
from which --collect writes the table, on a fresh clone, too. A run that was made elsewhere is brought in by putting
its run.json, log.jsonl and eval/ into its folder below --runs, before --collect. The TABLE "pages" stands for the
tables of speed and of scores that README.md and docs/ show besides.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from ea_artifacts.command import Parser, UserError, reporting
from ea_tools.tables import cells, shown
from ea_tools.tables import table as tables


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: run the missing cells, one after another or on the GPUs that are free, then collect."""
    with reporting("reproduce"):
        args, extra = parse(arguments)
        if args.table == "pages":
            shown.write(args.results)
            return
        table = tables.read(args.table)
        rows = [row for row in table.rows if not args.rows or any(word in row.label for word in args.rows)]
        if not rows:
            raise UserError(f"--rows {' '.join(args.rows)}: the table has {', '.join(row.label for row in table.rows)}")
        if unknown := set(args.recipes) - set(table.recipes):
            raise UserError(f"--recipes {' '.join(sorted(unknown))}: the table has {', '.join(table.recipes)}")
        failed = cells.fill(table.with_flags(extra), rows, args.seeds or table.seeds, args, args.recipes)
    cells.end("reproduce", failed)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and flags for every training run."""
    parser = Parser(
        prog="reproduce.sh",
        usage="reproduce.sh TABLE [options] [fairseq-train flags]",
        description=__doc__,
        allow_abbrev=False,
    )
    parser.add_argument(
        "table", metavar="TABLE", help=f"{', '.join(tables.names())}, pages, or a .toml file of your own"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", metavar="N", help="to run (default: the table's, which are always shown)"
    )
    parser.add_argument("--recipes", nargs="+", default=[], metavar="NAME", help="only these recipes' columns")
    parser.add_argument("--rows", nargs="+", metavar="LABEL", help="only rows with one of these words in the label")
    return cells.parse(parser, arguments, "reproduce")


if __name__ == "__main__":
    main()
