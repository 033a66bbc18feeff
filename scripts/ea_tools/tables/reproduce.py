"""Fill a table: train and evaluate the models that are missing, then write results/TABLE.md and .png.

scripts/reproduce.sh is how it is called. Finished runs stay; interrupted ones go on. Cells without a run
say "not run". Flags of fairseq-train go to every training run, whose table is then another page:
--max-update 300 writes results/TABLE-max-update300.md.

Without a GPU as many runs go at once as there are cores, each on one thread. The small files of a finished run are kept
in results/runs, from which --collect writes the table, on a fresh clone, too. A run that was made elsewhere is brought
in by putting its files there.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ea_data.command_line import Parser
from ea_tools.common import UserError, reporting
from ea_tools.tables import records
from ea_tools.tables import table as tables
from ea_tools.tables.report import gather, write
from ea_tools.tables.table import Cell, Table
from ea_tools.training import cells, flag_faults, recipes


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: run the missing cells, one after another or on the GPUs that are free, then collect."""
    with reporting("reproduce"):
        args, extra = parse(arguments)
        table = tables.read(args.table).with_flags(extra)
        args.seeds = args.seeds or table.seeds
        chosen = wanted(table, args, extra)
        if not args.collect:
            by_user = bool(extra) or args.table.endswith(".toml")
            cells.check_flags(chosen, extra, by_user, args.own_flags)
        failed = [] if args.collect else cells.run_missing(table, chosen, args, extra)
        if args.dry_run:
            return
        keep(table, chosen, args)
        seeds = list(dict.fromkeys([*table.seeds, *args.seeds]))  # --seeds chooses the runs, and hides no other seed
        write(table, gather(table, args.results / "runs", seeds, extra), args.results, extra)
    if failed:
        sys.exit("reproduce: these failed; run the same command again, it goes on:\n  " + "\n  ".join(failed))


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and flags for every training run."""
    parser = Parser(
        prog="reproduce.sh",
        usage="reproduce.sh TABLE [options] [fairseq-train flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("table", metavar="TABLE", help=f"{', '.join(tables.names())}, or a .toml file of your own")
    parser.add_argument(
        "--seeds", type=int, nargs="+", metavar="N", help="to run (default: the table's, which are always shown)"
    )
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these recipes' columns")
    parser.add_argument("--rows", nargs="+", metavar="LABEL", help="only rows with one of these words in the label")
    cells.add_run_options(parser, "reproduce")
    args, extra = parser.parse_known_args(arguments)
    args.own_flags = flag_faults.flags_of(parser)
    try:
        tables.check_flags("--", recipes.parse_flags(extra))
        if args.seeds:
            tables.check_seeds("--seeds", args.seeds)
    except UserError as error:
        parser.error(str(error))
    return args, extra


def wanted(table: Table, args: argparse.Namespace, extra: list[str]) -> list[Cell]:
    """The cells that the command line asks for, a whole seed before the next one."""
    names = list(dict.fromkeys(column.recipe for column in table.columns))
    if args.recipes and (unknown := set(args.recipes) - set(names)):
        raise UserError(f"--recipes {' '.join(sorted(unknown))}: the table has {', '.join(names)}")
    rows = [row for row in table.rows if not args.rows or any(word in row.label for word in args.rows)]
    if not rows:
        raise UserError(f"--rows {' '.join(args.rows)}: the table has {', '.join(row.label for row in table.rows)}")
    names = [name for name in names if not args.recipes or name in args.recipes]
    return [table.cell(row, name, seed, args.runs, extra) for seed in args.seeds for name in names for row in rows]


def keep(table: Table, finished: list[Cell], args: argparse.Namespace) -> None:
    """Copy the small files of the cells that are finished to results/runs."""
    for cell in finished:
        for subset in table.subsets(cell.recipe):
            records.keep(cell.folder, cells.record(cell, args), subset, cells.settings(args))


if __name__ == "__main__":
    main()
