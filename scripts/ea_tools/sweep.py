"""Train every combination of some flags' values, and score each on the validation set; scripts/sweep.sh calls this.

The grid is run with the first of --seeds. Then the best cells and the default one are run with the other seeds, and
only then is one of them called the best. The test set has no part in this: a choice by test scores is fitted to the
test set. What is finished is not done again, what was interrupted goes on, and a cell that fails stops no other. Flags
of fairseq-train go to every run: --max-update 1500
"""

import argparse
import contextlib
import io
import itertools
import math
import shlex
import statistics
import sys
from dataclasses import dataclass

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from fairseq import options

from ea_tools import recipes, reproduce, table_report, train
from ea_tools.common import REPO, UserError, positive, replacing, reporting
from ea_tools.figures.style import COLOURS
from ea_tools.figures.style import LINES as STYLES
from ea_tools.scores import LABELS
from ea_tools.tables import Column, Row, Table
from ea_tools.text import read_prep


def main(arguments=None):
    """Command line: run the grid, confirm the best cells, write the report."""
    args, extra = parse(arguments)
    with reporting("sweep"):
        sweep = Sweep.of(args, extra)
        failed = [] if args.collect else run(sweep, args, extra)
        if args.dry_run:
            return
        write(sweep, args, extra)
    if failed:
        sys.exit("sweep: these failed; run the same command again, it goes on:\n  " + "\n  ".join(failed))


def parse(arguments):
    """Our own options, and flags for every training run."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = argparse.ArgumentParser(
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
    reproduce.add_run_options(parser, "sweep")
    if {"-h", "--help"} & set(arguments):
        parser.parse_args(["--help"])
    if len(arguments) < 2 or arguments[0].startswith("-") or arguments[1].startswith("-"):
        parser.error("RECIPE and ARCH come first")
    args, extra = parser.parse_known_args(arguments)
    args.command = shlex.join(["scripts/sweep.sh", *arguments]).replace(f"{REPO}/", "")
    try:
        check(args, recipes.parse_flags(extra))
    except UserError as error:
        parser.error(str(error))
    return args, extra


def check(args, extra):
    """Refuse a grid that contradicts itself or the rest of the command line."""
    names = [name for name, *_ in args.grid]
    for name, *values in args.grid:
        if name.startswith("-") or not values:
            raise UserError(f"--grid {name}: the flag's name without dashes is wanted, then its values")
        if name in extra:
            raise UserError(f"--{name}: is in the grid; it cannot be given to every run as well")
        if names.count(name) > 1:
            raise UserError(f"--grid {name}: given twice")
        if name == "seed":
            raise UserError("--grid seed: use --seeds")
    for name, instead in {
        "seed": "use --seeds",
        "run": "use --runs",
        "data": "name it in a recipe of your own",
    }.items():
        if name in extra:
            raise UserError(f"--{name}: {instead}")
    if len(set(args.seeds)) < len(args.seeds):
        raise UserError(f"--seeds {' '.join(map(str, args.seeds))}: given twice")


# --- the grid ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sweep:
    """A table of one column, whose rows are the combinations of the grid's values."""

    name: str
    grid: dict  # flag -> its values, as they were given
    rows: dict  # a value of each flag -> its row
    default: tuple | None  # the values that a run has without the grid's flags, where the grid holds them
    table: Table

    @classmethod
    def of(cls, args, extra):
        grid = {name: values for name, *values in args.grid}
        recipe = recipes.read(args.recipe)
        rows = {
            values: _row(args.arch, dict(zip(grid, values, strict=True)))
            for values in itertools.product(*grid.values())
        }
        column = Column(args.recipe, recipe.name, args.score, "valid")
        title = f"{args.arch} on {recipe.name}: {' x '.join(grid)}"
        table = Table("", title, [column], list(rows.values()))
        meanings = {values: meaning(recipe, args.arch, grid, [*row.flags, *extra]) for values, row in rows.items()}
        stock = meaning(recipe, args.arch, grid, extra)
        default = next((values for values, found in meanings.items() if found == stock), None)
        folders = {
            values: table.cell(row, args.recipe, args.seeds[0], args.runs, extra).folder for values, row in rows.items()
        }
        for other in (meanings, folders):
            if same := _same(other):
                raise UserError(
                    f"these cells of the grid are the same: {'; '.join(rows[values].label for values in same)}"
                )
        name = args.name or "-".join([recipe.name, args.arch, *grid])
        return cls(f"sweep-{name}", grid, rows, default, table)

    def cells(self, keys, seeds, args, extra):
        """Those rows with each seed, a whole seed before the next one."""
        return [self.table.cell(self.rows[key], args.recipe, seed, args.runs, extra) for seed in seeds for key in keys]


def _row(arch, chosen):
    label = ", ".join(f"{name} {value}" for name, value in chosen.items())
    return Row(label, arch, recipes.spell_flags(chosen))


def _same(mapping):
    """Two keys with the same value, or None."""
    return next(((a, b) for a, b in itertools.combinations(mapping, 2) if mapping[a] == mapping[b]), None)


def meaning(recipe, arch, names, words):
    """What fairseq-train takes these flags for: the values of `names`; or an error before anything is trained."""
    _, flags = train.parse([recipe.name, arch, "--data", "data", *words])  # the words for train.sh itself are left out
    known = recipes.spell_flags({**recipe.flags_for(arch), **flags})
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            args = options.parse_args_and_arch(options.get_training_parser(), ["data", "--arch", arch, *known])
    except SystemExit:
        raise UserError(said.getvalue().strip().rpartition("\n")[2]) from None
    return [getattr(args, name.replace("-", "_"), None) for name in names]


# --- running ----------------------------------------------------------------------------------------------------------


def run(sweep, args, extra):
    """Run what is missing of the grid, then of its best cells with the other seeds; the cells that failed, as text."""
    if not args.dry_run:
        read_prep(recipes.read(args.recipe).data)
    first, *others = args.seeds
    failed = reproduce.run_missing(sweep.table, sweep.cells(sweep.rows, [first], args, extra), args, extra)
    scores = scores_of(sweep, table_report.gather(sweep.table, args.runs, args.seeds, extra))
    if args.dry_run and others and any(first not in found for found in scores.values()):
        reproduce.say(
            f"and then the best {args.confirm} of them, and the default one, with --seeds {_list(others, ' ')}"
        )
        return failed
    confirming = sweep.cells(candidates(sweep, scores, args), others, args, extra)
    return failed + reproduce.run_missing(sweep.table, confirming, args, extra)


def scores_of(sweep, found):
    """{values: {seed: score}} of what has been run."""
    column = sweep.table.columns[0]
    return {
        key: {
            seed: one["scores"][column.score]["score"]
            for seed, one in found[row.label, column.label]["results"].items()
        }
        for key, row in sweep.rows.items()
    }


def candidates(sweep, scores, args):
    """The cells to confirm: the best --confirm by the first seed, best first, and the default one."""
    first = args.seeds[0]
    ranked = sorted((key for key in scores if first in scores[key]), key=lambda key: -scores[key][first])
    best = ranked[: args.confirm]
    return best + [sweep.default] * (sweep.default in ranked and sweep.default not in best)


# --- the report -------------------------------------------------------------------------------------------------------


def write(sweep, args, extra):
    """results/sweep-NAME.md and, where there is anything to show, .png."""
    found = table_report.gather(sweep.table, args.runs, args.seeds, extra)
    scores = scores_of(sweep, found)
    picture = any(scores.values())
    text = "\n".join(report(sweep, found, scores, args, extra, picture)) + "\n"
    with replacing(args.results / f"{sweep.name}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    if picture:
        with replacing(args.results / f"{sweep.name}.png") as temporary:
            draw(sweep, scores, args, temporary)
    print(text)
    print(f"written: {args.results / sweep.name}.md" + (", .png" if picture else ""))


def report(sweep, found, scores, args, extra, picture):
    """The lines of the report: the grid, the confirmation, what follows, where the numbers come from."""
    first = args.seeds[0]
    lines = [f"# {sweep.table.title}", "", f"{LABELS[args.score]} on the validation set, seed {first}:", ""]
    lines += [*grid_table(sweep, scores, first), "", *confirmation(sweep, scores, args), ""]
    if mixed := unlike(found):
        lines += [f"Beware: {mixed}", ""]
    if picture:
        lines += [f"![{sweep.table.title}]({sweep.name}.png)", ""]
    return [*lines, f"Made by `{args.command}`.", "", *table_report.provenance(sweep.table, found, extra)]


def grid_table(sweep, scores, seed):
    """The scores of one seed: two flags as rows and columns, else a cell a line. The highest is bold."""
    highest = max((found[seed] for found in scores.values() if seed in found), default=None)

    def cell(key):
        if seed not in scores[key]:
            return "not run"
        text = f"{scores[key][seed]:.2f}" + (" (default)" if key == sweep.default else "")
        return f"**{text}**" if scores[key][seed] == highest else text

    names = list(sweep.grid)
    if len(names) == 2:
        rows, columns = sweep.grid.values()
        head = [f"{names[0]} ↓, {names[1]} →", *columns]
        body = [[row, *(cell((row, column)) for column in columns)] for row in rows]
    else:
        head = [*names, "score"]
        body = [[*key, cell(key)] for key in sweep.rows]
    return [table_report.markdown_row(row) for row in [head, ["---:"] * len(head), *body]]


def confirmation(sweep, scores, args):
    """What the other seeds say about the cells that looked best: a table, and the conclusion in words."""
    keys, seeds = candidates(sweep, scores, args), args.seeds
    if not keys:
        return ["Nothing has been run yet."]
    labels = {key: sweep.rows[key].label + (" (default)" if key == sweep.default else "") for key in keys}
    missing = sum(seeds[0] not in found for found in scores.values())
    lines = (
        [f"{missing} of {len(scores)} cells have not been run; what follows is about the others.", ""]
        if missing
        else []
    )
    if len(seeds) == 1:
        return [
            *lines,
            f"{labels[keys[0]]} is highest with one seed, which does not make it the best: --seeds gives more.",
        ]
    head = ["", *(f"seed {seed}" for seed in seeds), "mean ± deviation"]
    lines += [table_report.markdown_row(head), table_report.markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for key in keys:
        found = [f"{scores[key][seed]:.2f}" if seed in scores[key] else "not run" for seed in seeds]
        lines.append(table_report.markdown_row([labels[key], *found, _mean(scores[key].values())]))
    unfinished = [labels[key] for key in keys if any(seed not in scores[key] for seed in seeds)]
    if unfinished:
        return [*lines, "", f"None is called the best yet: not run with every seed: {'; '.join(unfinished)}."]
    return [*lines, "", *verdict({key: [scores[key][seed] for seed in seeds] for key in keys}, labels, seeds)]


def _mean(values):
    values = list(values)
    return f"{statistics.mean(values):.2f}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def verdict(scores, labels, seeds):
    """Sentences: which cell has the highest mean, and from which of the others the seeds tell it apart."""
    means = {key: statistics.mean(found) for key, found in scores.items()}
    best = max(means, key=means.get)
    lines = [f"**{labels[best]}** has the highest mean, {_mean(scores[best])} over seeds {_list(seeds)}."]
    for key in (key for key in scores if key != best):
        difference = f"{means[best] - means[key]:.2f} above {labels[key]}: "
        if min(scores[best]) > max(scores[key]):
            lines.append(
                f"{difference}more than the spread between seeds, each of its seeds is above all of the other's."
            )
        else:
            lines.append(f"{difference}within the spread between seeds, which do not tell the two apart.")
    fresh = "; ".join(f"{labels[key]} {statistics.mean(found[1:]):.2f}" for key, found in scores.items())
    lines.append(
        f"Seed {seeds[0]} chose among the cells, which flatters some. Means over the other seeds alone: {fresh}."
    )
    lines.append("The test set had no part in the choice: score the chosen model on it once, with scripts/evaluate.sh.")
    return lines


def unlike(found):
    """In what the results are not comparable with each other, or ""."""
    results = [one for cell in found.values() for one in cell["results"].values()]
    of = {
        "numbers of averaged checkpoints": {len(one["averaged"]) for one in results},
        "beams": {one.get("beam") for one in results},
        "length penalties": {one.get("lenpen") for one in results},
        "reference texts": {one.get("references") for one in results},
    }
    different = [f"{name} ({_list(sorted(values, key=str))})" for name, values in of.items() if len(values) > 1]
    return f"the cells were scored with different {' and '.join(different)}." if different else ""


def _list(words, between=", "):
    return between.join(map(str, words))


# --- the picture ------------------------------------------------------------------------------------------------------


def draw(sweep, scores, args, path):
    """A heat-map where the grid has two flags, and for each flag the score against its values."""
    names, heat = list(sweep.grid), len(sweep.grid) == 2
    widths = [1.3] * heat + [1] * len(names)
    size = (1 + 4.2 * sum(widths), 4.6)
    figure, panels = plt.subplots(
        1, len(widths), figsize=size, squeeze=False, layout="constrained", width_ratios=widths
    )
    panels = list(panels[0])
    if heat:
        _heat_map(figure, panels.pop(0), sweep, scores, args.seeds)
    for panel, name in zip(panels, names, strict=True):
        _curves(panel, sweep, scores, args.seeds[0], name)
        if panel is not panels[0]:
            panel.sharey(panels[0])
            panel.tick_params(labelleft=False)
    panels[0].set_ylabel(f"validation {LABELS[args.score]}")
    confirmed = any(len(found) > 1 for found in scores.values())
    bars = "; bars: lowest to highest of its seeds" if confirmed else ""
    figure.suptitle(
        f"{sweep.table.title}: validation {LABELS[args.score]}, seed {args.seeds[0]}{bars}", fontsize="medium"
    )
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


def _heat_map(figure, panel, sweep, scores, seeds):
    """First flag downwards, second to the right; the colour is the first seed's score, a frame is round the highest."""
    (down, rows), (right, columns) = sweep.grid.items()
    grid = np.array([[scores[row, column].get(seeds[0], math.nan) for column in columns] for row in rows])
    colours = plt.get_cmap("cividis").with_extremes(bad="0.9")
    image = panel.imshow(grid, cmap=colours, aspect="auto")
    for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns)):
        found = scores[row, column]
        lines = [f"{grid[i, j]:.2f}" if seeds[0] in found else "not run"]
        if len(found) > 1:
            lines += [_mean(found.values()), f"{len(found)} seeds"]
        lines += ["default"] * ((row, column) == sweep.default)
        dark = seeds[0] in found and image.norm(grid[i, j]) < 0.5
        panel.text(j, i, "\n".join(lines), ha="center", va="center", color="white" if dark else "black")
    if not np.isnan(grid).all():
        i, j = np.unravel_index(np.nanargmax(grid), grid.shape)
        panel.add_patch(plt.Rectangle((j - 0.47, i - 0.47), 0.94, 0.94, fill=False, color=COLOURS[1], linewidth=3))
    panel.set_xticks(range(len(columns)), columns)
    panel.set_yticks(range(len(rows)), rows)
    panel.set_xlabel(right)
    panel.set_ylabel(down)
    figure.colorbar(image, ax=panel)


def _curves(panel, sweep, scores, seed, name):
    """Score against the values of one flag: a line for each value of the other; of several, through the highest."""
    place = list(sweep.grid).index(name)
    highest = max((key for key in scores if seed in scores[key]), key=lambda key: scores[key][seed], default=None)
    others = dict.fromkeys(key[:place] + key[place + 1 :] for key in sweep.rows)
    if len(sweep.grid) > 2:
        others = [highest[:place] + highest[place + 1 :]] if highest else []
    for number, fixed in enumerate(others):
        keys = [(*fixed[:place], value, *fixed[place:]) for value in sweep.grid[name]]
        found = [scores[key].get(seed, math.nan) for key in keys]
        colour, style = COLOURS[number % len(COLOURS)], STYLES[number % len(STYLES)]
        names = [other for other in sweep.grid if other != name]
        label = ", ".join(f"{other} {value}" for other, value in zip(names, fixed, strict=True))
        places = np.arange(len(keys)) + 0.02 * (number - (len(others) - 1) / 2)  # beside each other, not over
        panel.plot(places, found, style, marker="o", color=colour, label=label)
        for x, key in zip(places, keys, strict=True):
            if len(scores[key]) > 1:
                panel.vlines(
                    x, min(scores[key].values()), max(scores[key].values()), color=colour, linewidth=4, alpha=0.4
                )
    panel.set_xticks(range(len(sweep.grid[name])), sweep.grid[name])
    panel.set_xlabel(name)
    panel.grid(alpha=0.3)
    if len(sweep.grid) > 1:
        panel.legend(fontsize="small")


if __name__ == "__main__":
    main()
