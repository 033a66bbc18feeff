"""The grid of a sweep: its cells, their results, and those that are worth more seeds."""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ea_tools.common import UserError
from ea_tools.tables import report as table_report
from ea_tools.tables.table import Cell, Column, Row, Table, check_score, file_name
from ea_tools.training import fairseq_flags, recipes, train
from ea_tools.training.cells import training_flags

Values = tuple[str, ...]  # one value of each flag of the grid: the place of a cell in it
Scores = dict[Values, dict[int, float]]  # the score of each cell with each seed


@dataclass(frozen=True)
class Sweep:
    """A table of one column, whose rows are the combinations of the grid's values."""

    name: str
    recipe: str
    grid: dict[str, list[str]]  # flag -> its values, as they were given
    rows: dict[Values, Row]
    default: Values | None  # the values that a run has without the grid's flags, where the grid holds them
    seeds: Sequence[int]  # the first one's runs choose, the others' confirm
    confirm: int  # how many of the best cells are run with the other seeds
    score: str  # what decides, a key of LABELS
    runs: Path  # the runs' folders are below it
    flags: list[str]  # of train.sh, for every run
    table: Table

    @classmethod
    def of(cls, args: argparse.Namespace, flags: list[str]) -> Sweep:
        """The sweep that the command line describes, or an error before anything is trained."""
        grid = {name: values for name, *values in args.grid}
        recipe = recipes.read(args.recipe)
        check_score("--score", args.score, recipe)
        combinations = itertools.product(*grid.values())
        rows = {values: _row(args.arch, dict(zip(grid, values, strict=True))) for values in combinations}
        column = Column(args.recipe, recipe.name, args.score, "valid")
        title = f"{args.arch} on {recipe.name}: {' x '.join(grid)}"
        table = Table("", title, [column], list(rows.values()))
        lines = [training_flags(recipe, args.arch, [*row.flags, *flags]) for row in rows.values()]
        *of_rows, stock = fairseq_flags.values(list(grid), [*lines, training_flags(recipe, args.arch, flags)])
        own = [own_options(list(grid), row.flags) for row in rows.values()]
        meanings = dict(zip(rows, zip(of_rows, own, strict=True), strict=True))
        as_stock = (stock, own_options(list(grid), flags))
        default = None
        # train.sh chooses these two by the recipe's batch and the machine: no value of theirs is the default one
        if not {"update-freq", "max-tokens"} & grid.keys():
            default = next((values for values, meaning in meanings.items() if meaning == as_stock), None)
        folders = {
            values: table.cell(row, args.recipe, args.seeds[0], args.runs, flags).folder for values, row in rows.items()
        }
        for what in (meanings, folders):
            if same := _same(what):
                raise UserError(
                    f"these cells of the grid are the same: {'; '.join(rows[values].label for values in same)}"
                )
        name = f"sweep-{args.name or file_name([recipe.name, args.arch, *grid])}"
        shown = replace(table, name=name).with_flags(flags)
        return cls(
            name if args.name else shown.name,
            args.recipe,
            grid,
            rows,
            default,
            args.seeds,
            args.confirm,
            args.score,
            args.runs,
            flags,
            replace(table, title=shown.title),
        )

    def cells(self, keys: Iterable[Values], seeds: Sequence[int]) -> list[Cell]:
        """Those rows with each seed, a whole seed before the next one."""
        rows = [self.rows[key] for key in keys]
        return [self.table.cell(row, self.recipe, seed, self.runs, self.flags) for seed in seeds for row in rows]

    def label(self, key: Values) -> str:
        """The name of a cell in the report."""
        return self.rows[key].label + (" (default)" if key == self.default else "")


def _row(arch: str, chosen: dict[str, str]) -> Row:
    label = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return Row(label, arch, recipes.spell_flags(chosen))


def _same(mapping: Mapping[Values, Any]) -> tuple[Values, Values] | None:
    """Two keys with the same value, or None."""
    return next(((a, b) for a, b in itertools.combinations(mapping, 2) if mapping[a] == mapping[b]), None)


def own_options(names: Sequence[str], words: Sequence[str]) -> list[Any]:
    """The values of the flags called `names` that train.sh takes itself, None for those that it hands on."""
    args, _ = train.parse(["RECIPE", "ARCH", "--data", "data", *words])
    return [getattr(args, name.replace("-", "_"), None) for name in names]


def gather(sweep: Sweep) -> dict[tuple[str, str], dict]:
    """The results of the runs of all cells."""
    return table_report.gather(sweep.table, sweep.runs, sweep.seeds, sweep.flags)


def scores_of(sweep: Sweep, summaries: dict[tuple[str, str], dict]) -> Scores:
    """The finished runs."""
    column = sweep.table.columns[0]
    return {
        key: {
            seed: record["scores"][column.score]["score"]
            for seed, record in summaries[row.label, column.label]["results"].items()
        }
        for key, row in sweep.rows.items()
    }


def candidates(sweep: Sweep, scores: Scores) -> list[Values]:
    """The cells to confirm: the best `sweep.confirm` by the first seed, best first, and the default one."""
    first = sweep.seeds[0]
    ranked = sorted((key for key in scores if first in scores[key]), key=lambda key: -scores[key][first])
    best = ranked[: sweep.confirm]
    return best + [sweep.default] * (sweep.default in ranked and sweep.default not in best)
