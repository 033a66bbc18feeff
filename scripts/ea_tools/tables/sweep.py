"""Train every combination of some flags' values, and score each on the validation set.

The first value of each flag together make the baseline. All combinations are run with the first of --seeds; then the
baseline and the best two with the other seeds. The page is that of a table, results/sweep-NAME.md. The test set is
not used, so that it stays an independent check. Options of reproduce.sh and flags of fairseq-train may
follow: --max-update 1500
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

from ea_artifacts.command import Parser, UserError, listed, parse_flags, reporting
from ea_tools.tables import reproduce
from ea_tools.tables.page import gather
from ea_tools.tables.records import Records
from ea_tools.tables.table import METRICS, Row, Table, check_flags, file_name, slug
from ea_tools.training import recipes

CONFIRMED = 2  # this many of the best combinations are run with the other seeds


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: run the grid with one seed, then its best rows with the others."""
    with reporting("sweep"):
        args, extra = parse(arguments)
        table = grid(args, extra)
        first, *others = args.seeds
        failed = reproduce.fill(table, table.rows, [first], args)
        if others and args.dry_run:
            reproduce.say(f"and then the baseline and the best {CONFIRMED}, with --seeds {listed(others, ' ')}")
        elif others:
            failed += reproduce.fill(table, best(table, args), others, args)
    reproduce.end("sweep", failed)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and flags for every training run."""
    parser = Parser(
        prog="sweep.sh",
        usage="sweep.sh RECIPE ARCH --grid FLAG VALUE... [--grid FLAG VALUE...] [options] [fairseq-train flags]",
        description=__doc__,
        allow_abbrev=False,
        epilog="recipes: " + ", ".join(recipes.names()),
    )
    add = parser.add_argument
    add("recipe", metavar="RECIPE", help="one of the recipes below, or a .toml file of your own")
    add("arch", metavar="ARCH", help="ea_transformer_lite, ea_transformer_base, ...")
    values, pair = "a flag without dashes, its values", ("FLAG", "VALUE")
    add("--grid", action="append", nargs="+", required=True, metavar=pair, help=values)
    add("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N", help="(default: 1 2 3)")
    add("--metric", choices=METRICS, default="sacrebleu", help="what decides (default: sacrebleu)")
    add("--name", help="of the page (default: recipe, architecture and flags)")
    args, extra = reproduce.parse_with(parser, arguments, "sweep")
    try:
        names = [*parse_flags(extra), *(name for name, *_ in args.grid)]
        for name, *values in args.grid:
            if not values or names.count(name) > 1:
                raise UserError(f"--grid {name}: expected all the flag's values after it, and the flag nowhere else")
        check_flags("--grid ", names)
    except UserError as error:
        parser.error(str(error))
    return args, extra


def grid(args: argparse.Namespace, extra: Sequence[str]) -> Table:
    """The table of one column, with a row for each combination, and the same flags for all of them."""
    recipe, names = recipes.read(args.recipe), [name for name, *_ in args.grid]
    rows = []
    for values in itertools.product(*(values for _, *values in args.grid)):
        chosen = dict(zip(names, values, strict=True))
        label = ", ".join(f"{name} {value}" for name, value in chosen.items())
        rows.append({"label": label, "arch": args.arch, "flags": [*recipes.spell_flags(chosen), *extra]})
    for row in rows[1:]:
        row["baseline"] = rows[0]["label"]
    given = {name: values for name, values in parse_flags(extra).items() if name not in recipes.LAUNCH}
    words = f", all with {' '.join(recipes.spell_flags(given))}" if given else ""
    name = f"sweep-{args.name}" if args.name else file_name(["sweep", recipe.name, args.arch, *names])
    content = {
        "name": file_name([name, *slug(given)]),
        "title": f"{args.arch} on {recipe.name}'s validation set: {' x '.join(names)}{words}",
        "column": [{"recipe": args.recipe, "label": recipe.name, "metric": args.metric, "subset": "valid"}],
        "row": rows,
        "seeds": args.seeds,
    }
    return Table.filled(content, "--grid")


def best(table: Table, args: argparse.Namespace) -> list[Row]:
    """The rows to confirm: the baseline, and those with the highest metric by the first seed."""
    entries = gather(table, Records(args.results), args.seeds[:1], args.average)
    scored = {row.label: entries[row.label, table.columns[0].label].values for row in table.rows}
    ranked = sorted((label for label, values in scored.items() if values), key=scored.__getitem__, reverse=True)
    return [row for row in table.rows if row is table.rows[0] or row.label in ranked[:CONFIRMED]]
