"""The page of a table: its numbers, and the source of each."""

import contextlib
import functools
import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ea_tools.bench.profile_model import profile
from ea_tools.common import REPO, UserError, quiet, replacing
from ea_tools.figures import style
from ea_tools.metrics import LABELS
from ea_tools.tables import records
from ea_tools.tables.table import Column, Row, Table
from ea_tools.text import digest, read_prep, references
from ea_tools.training import recipes, train


def gather(table: Table, runs: Path, seeds: list[int], extra: list[str]) -> dict[tuple[str, str], dict]:
    """{(row, column): {"results": {seed: evaluation}, "mean", "deviation", "differences", "p", "paper"}}, by labels."""
    summaries = {}
    for row, column in itertools.product(table.rows, table.columns):
        results = {}
        for seed in seeds:
            folder = table.cell(row, column.recipe, seed, runs, extra).folder
            if (one := records.read(folder, column.subset)) and column.metric in one["scores"]:
                results[seed] = {**one, "folder": folder}
        means = _mean([one["scores"][column.metric]["score"] for one in results.values()])
        summaries[row.label, column.label] = {"results": results, **means, "paper": row.published(column)}
    for row, column in itertools.product(table.rows, table.columns):
        if row.baseline:
            cell, baseline = summaries[row.label, column.label], summaries[row.baseline, column.label]
            cell.update(_against(cell["results"], baseline["results"], column))
    return summaries


def _mean(values: list[float]) -> dict[str, float | None]:
    return {
        "mean": statistics.mean(values) if values else None,
        "deviation": statistics.stdev(values) if len(values) > 1 else None,
    }


def _against(results: dict[int, dict], baseline: dict[int, dict], column: Column) -> dict:
    """Differences from the baseline for the seeds that both have, and the p of each seed's paired bootstrap test."""
    seeds = sorted(results.keys() & baseline.keys())
    if not seeds:
        return {}
    texts, lowercase = None, True
    with contextlib.suppress(UserError):  # without the data there are no references; records keep the earlier tests
        data = recipes.read(column.recipe).data
        prep = read_prep(data)
        texts, _ = references(data / "raw" / f"{column.subset}.{prep['target_lang']}", prep)
        lowercase = prep["lowercase"]
    differences, p = {}, {}
    for seed in seeds:
        one, other = results[seed], baseline[seed]
        differences[seed] = one["scores"][column.metric]["score"] - other["scores"][column.metric]["score"]
        same = texts if texts and one.get("references") == other.get("references") == digest(texts) else None
        test = records.test_against(one["folder"], other["folder"], column.subset, same, lowercase)
        # The test is of sacreBLEU, and holds for this metric only if the same model is the better one by both.
        if test and differences[seed] * test["difference"] >= 0:
            p[seed] = test["p"]
    return {"differences": differences, "difference": _mean(list(differences.values())), "p": p}


def write(table: Table, summaries: dict, folder: Path, extra: list[str]) -> None:
    """results/TABLE.md and, if there is anything to show, TABLE.png; and the table in the pages that show it.

    README.md and docs/ show the repository's own results only.
    """
    picture = any(cell["mean"] is not None for cell in summaries.values())
    text = markdown(table, summaries, f"{table.name}.png" if picture else None, extra)
    with replacing(folder / f"{table.name}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    if picture:
        with replacing(folder / f"{table.name}.png") as temporary:
            draw(table, summaries, temporary)
    pages = [folder / "README.md"]
    if folder.resolve() == (REPO / "results").resolve():
        pages += [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))]
    changed = [page for page in pages if page.exists() and show_in(page, table, summaries)]
    print(text)  # last: it fails where the reader has gone
    print(f"written: {folder / table.name}.md" + (", .png" if picture else ""))
    for page in changed:
        print(f"brought up to date: {page}")


def show_in(page: Path, table: Table, summaries: dict) -> bool:
    """Put the rows between a page's comments <!-- TABLE --> and <!-- end of TABLE -->; says whether it has them."""
    begin, end = f"<!-- {table.name} -->\n", f"<!-- end of {table.name} -->"
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    _, has_end, after = rest.partition(end)
    if not (has_begin and has_end):
        return False
    shown = "\n".join([*_model_rows(table, summaries), "", *_early(table, summaries)]).rstrip() + "\n"
    with replacing(page) as temporary:
        temporary.write_text(f"{before}{begin}\n{shown}\n{end}{after}", encoding="utf-8")
    return True


def markdown(table: Table, summaries: dict, picture: str | None, extra: list[str]) -> str:
    """The table, its legend, and the source of each number."""
    metrics = ", ".join(dict.fromkeys(LABELS[column.metric] for column in table.columns))
    sizes_of = {row.label: _size(table, row, extra) for row in table.rows}
    lines = [f"# {table.title}", "", *_model_rows(table, summaries, sizes_of), ""]
    lines += [
        f"Scores: {metrics}. Mean ± standard deviation over the seeds, where there are several. In square brackets: "
        'the published number. "not run": no run yet. Parameters: without embeddings and output projection. FLOPs: '
        "30 source and 30 target tokens.",
        "",
        "Δ: the difference over the seeds that both models have; behind it, in how many of the tested seeds it is "
        f"significant, p < {SIGNIFICANT} by sacreBLEU's paired bootstrap test on detokenised text. The test resamples "
        "a test set's sentences, and says nothing of other seeds.",
        "",
        *_early(table, summaries),
    ]
    if picture:
        lines += [f"![{table.title}]({picture})", ""]
    return "\n".join([*lines, *provenance(table, summaries, extra)]) + "\n"


def _model_rows(table: Table, summaries: dict, sizes_of: dict[str, list[str]] | None = None) -> list[str]:
    """The table itself, a line for each row, with parameters and FLOPs where these are given by the row's label."""
    sizes = ["Parameters", "FLOPs"] * bool(sizes_of)
    head = ["Model", "Δ from", *sizes, *(column.label for column in table.columns)]
    lines = [markdown_row(head), markdown_row(["---", "---"] + ["---:"] * (len(head) - 2))]
    for row in table.rows:
        counts = sizes_of[row.label] if sizes_of else []
        cells = [_cell(summaries[row.label, column.label]) for column in table.columns]
        lines.append(markdown_row([row.label, row.baseline or "", *counts, *cells]))
    return lines


def _size(table: Table, row: Row, extra: list[str]) -> list[str]:
    """Parameters and FLOPs of a row's model, whose sizes may be in the recipe, in the row or in the flags for all."""
    args, flags = train.parse(["RECIPE", row.arch, "--data", "data", *row.flags, *extra])  # what train.sh hands on
    model = {
        name: value
        for name, value in recipes.read(table.columns[0].recipe).flags_for(row.arch).items()
        if name.startswith(("ea-", "encoder-", "decoder-")) and name not in args.without
    }
    given = {name: value for name, value in flags.items() if name not in recipes.LAUNCH}
    return list(_size_of(row.arch, tuple(recipes.spell_flags(model | given))))


@functools.cache
def _size_of(arch: str, flags: tuple[str, ...]) -> tuple[str, str]:
    quiet()
    size = profile(arch, flags)
    return f"{size['parameters']:,}", f"{size['flops'] / 1e6:,.1f} M"


def markdown_row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _cell(cell: dict) -> str:
    paper = f" [{cell['paper']:.2f}]" if cell["paper"] is not None else ""
    if cell["mean"] is None:
        return "not run" + paper
    difference = ""
    if cell.get("difference"):
        difference = f", Δ {_spread(cell['difference'], '+.2f')} ({_significance(cell)})"
    return _spread(cell) + difference + paper


def _spread(values: dict, form: str = ".2f") -> str:
    """Mean and deviation: 39.20 ± 0.85, or the mean of a single seed."""
    return f"{values['mean']:{form}}" + (f" ± {values['deviation']:.2f}" if values["deviation"] is not None else "")


SIGNIFICANT = 0.05


def _significance(cell: dict) -> str:
    """In how many of the tested seeds the difference is significant: in the mean's direction, and in the other."""
    if not cell["p"]:
        return "not tested"
    significant = [cell["differences"][seed] for seed, p in cell["p"].items() if p < SIGNIFICANT]
    alike = sum(value * cell["difference"]["mean"] > 0 for value in significant)
    others = len(significant) - alike
    return f"{alike} of {len(cell['p'])}" + (f", {others} the other way" if others else "")


def _early(table: Table, summaries: dict) -> list[str]:
    """The evaluations of trainings that had not ended."""
    early = {}
    for row, column in itertools.product(table.rows, table.columns):
        for seed, one in summaries[row.label, column.label]["results"].items():
            if one.get("unfinished"):
                early[f"{row.label}, {Path(column.recipe).stem}, seed {seed} ({one['unfinished']})"] = None
    return [f"**Scored before the end of their training**: {'; '.join(early)}.", ""] if early else []


# --- where the numbers come from --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """A run that the table shows: its cell, its training, and its evaluations by split."""

    row: Row
    recipe: str
    seed: int
    training: records.Training
    evaluations: dict[str, dict]

    def __str__(self) -> str:
        return f"{self.row.label}, {Path(self.recipe).stem}, seed {self.seed}"


def provenance(table: Table, summaries: dict, extra: list[str]) -> list[str]:
    """The lines of a report that say of every number how and where it was made."""
    runs = {}
    for row, column in itertools.product(table.rows, table.columns):
        for seed, one in summaries[row.label, column.label]["results"].items():
            new = Run(row, column.recipe, seed, records.training(one["folder"]), {})
            runs.setdefault((row.label, column.recipe, seed), new).evaluations[column.subset] = one
    runs = list(runs.values())
    if not runs:
        return ["## Where the numbers come from", "", "Nothing has been run yet."]
    lines = ["## Each seed", "", *_seed_rows(table, summaries), "", "## Where the numbers come from", ""]
    lines += [*unlike(runs, extra), "", *_run_rows(runs), "", *_signatures(runs), ""]
    for run in runs:
        commands = [run.training.command, *(one["command"] for one in run.evaluations.values())]
        lines.append(f"- {run}: {', then '.join(f'`{command}`' for command in commands)}")
    return lines


def _seed_rows(table: Table, summaries: dict) -> list[str]:
    """A line for each row and seed: the column's metric, sacreBLEU, and p against the baseline."""
    head = ["Model", "Seed", *(column.label for column in table.columns)]
    lines = [markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for row in table.rows:
        cells = [summaries[row.label, column.label] for column in table.columns]
        for seed in sorted({seed for cell in cells for seed in cell["results"]}):
            numbers = [_seed_cell(cell, column, seed) for cell, column in zip(cells, table.columns, strict=True)]
            lines.append(markdown_row([row.label, str(seed), *numbers]))
    return lines


def _seed_cell(cell: dict, column: Column, seed: int) -> str:
    if seed not in cell["results"]:
        return "not run"
    metrics = cell["results"][seed]["scores"]
    others = [] if column.metric == "sacrebleu" else [f"sacreBLEU {metrics['sacrebleu']['score']:.2f}"]
    if seed in cell.get("differences", {}):
        others.append(f"p {cell['p'][seed]:.3f}" if seed in cell["p"] else "not tested")
    return f"{metrics[column.metric]['score']:.2f}" + (f" ({', '.join(others)})" if others else "")


def unlike(runs: list[Run], extra: list[str]) -> list[str]:
    """The differences of the runs in recipe, flags, data, references, settings, precision and commit."""
    lines, by_others = [], {}
    for run in runs:
        recipe = recipes.read(run.recipe)
        given = {**recipes.parse_flags([*run.row.flags, *extra]), "seed": [str(run.seed)]}
        if others := records.differences(run.training, records.recipe_flags(recipe, run.row.arch, given)):
            lines.append(f"- **{run}** was not trained by this table's recipe: {'; '.join(others)}.")
        elif run.training.recipe not in (recipe.name, records.UNKNOWN):
            by_others.setdefault((run.training.recipe, recipe.name), []).append(str(run))
    for (given, expected), names in by_others.items():
        lines.append(
            f"- Trained by the recipe {given} with flags on the command line that come to the same as {expected}: "
            f"{'; '.join(names)}."
        )
    for recipe in dict.fromkeys(run.recipe for run in runs):
        same = [run for run in runs if run.recipe == recipe]
        lines += _kinds(f"Training data of {recipe}", {str(run): run.training.data for run in same})
        for subset in dict.fromkeys(subset for run in same for subset in run.evaluations):
            evaluated = {str(run): run.evaluations[subset] for run in same if subset in run.evaluations}
            texts = {run: one.get("references") for run, one in evaluated.items()}
            lines += _kinds(f"References of {recipe}, {subset}", texts)
            by = {run: one["settings_name"] for run, one in evaluated.items()}
            lines += _kinds(f"Beam and averaged checkpoints of the scores of {recipe}, {subset}", by)
    # Rows that ask for a precision compare it. A run without a record of its starts is named below, for its commit.
    precisions = {
        str(run): " and then ".join(run.training.precisions)
        for run in runs
        if run.training.precisions
        and not {"precision", *recipes.PRECISIONS} & recipes.parse_flags(run.row.flags).keys()
    }
    lines += _kinds("Precision of training", precisions)
    commits = {str(run): " and then ".join(map(short_commit, run.training.commits)) or None for run in runs}
    lines += _kinds("Commit of the code in training", commits)
    if lines:
        return ["**The runs of this table are not alike in everything:**", "", *lines]
    return ["All runs of a column have the same recipe, training data and references; all were trained at one commit."]


def _kinds(what: str, values: dict[str, str | None]) -> list[str]:
    """A line that says which runs have which value, where one is not recorded or they do not all have the same."""
    if None not in values.values() and len(set(values.values())) < 2:
        return []
    groups = {value: [name for name, other in values.items() if other == value] for value in values.values()}
    said = ". ".join(f"{value or records.UNKNOWN}: {'; '.join(names)}" for value, names in groups.items())
    return [f"- {what} differs or is not known. {said}."]


def short_commit(commit: str | None) -> str:
    """The first ten digits of a commit, and the words after it."""
    first, _, rest = (commit or records.UNKNOWN).partition(" ")
    return f"{first[:10]} {rest}".strip()


def _run_rows(runs: list[Run]) -> list[str]:
    """A line for each run: its length, time and device, and the commits of its training and its evaluations."""
    head = ["Run", "Updates", "Averaged", "Hours", "Trained on", "Trained at", "Scored at"]
    lines = [markdown_row(head), markdown_row(["---", "---:", "---:", "---:", "---", "---", "---"])]
    for run in runs:
        evaluations = list(run.evaluations.values())
        training = run.training
        machines = _all(one["device"] for one in evaluations)
        lines.append(
            markdown_row(
                [
                    str(run),
                    _all(f"{one['updates']:,}" if one.get("updates") else records.UNKNOWN for one in evaluations),
                    _all(str(len(one["averaged"]) or 1) for one in evaluations),
                    f"{training.hours:.2f}" if training.hours else records.UNKNOWN,
                    _all(training.devices) or f"{records.UNKNOWN}; scored on {machines}",
                    _all(map(short_commit, training.commits)) or records.UNKNOWN,
                    _all(f"{short_commit(one['commit'])}, {one['date'][:10]}" for one in evaluations),
                ]
            )
        )
    lines += [
        "",
        "Hours of training are wall-clock time by the speeds in the log, in which a run may have waited for other work "
        "on the machine.",
    ]
    return lines


def _all(values: Iterable[str]) -> str:
    """The different values, in their order."""
    return ", then ".join(dict.fromkeys(values))


def _signatures(runs: list[Run]) -> list[str]:
    """Each metric with its signatures by sacreBLEU."""
    kinds = {}
    for one in (one for run in runs for one in run.evaluations.values()):
        for name, metric in one["scores"].items():
            kinds.setdefault(LABELS[name], {})[metric["signature"]] = None
    return [f"- {name}: {', '.join(f'`{signature}`' for signature in kinds[name])}" for name in kinds]


def draw(table: Table, summaries: dict, path: Path) -> None:
    """A panel for each column: points with the deviation over seeds; a diamond is the paper's number."""
    count, labels = len(table.columns), [row.label for row in table.rows]
    size = (2.2 + 2.4 * count, 1.2 + 0.35 * len(labels))
    figure, panels = style.panels(1, count, size, sharey=True)
    for panel, column in zip(panels[0], table.columns, strict=True):
        for height, label in enumerate(labels):
            cell = summaries[label, column.label]
            if cell["mean"] is not None:
                panel.errorbar(cell["mean"], height, xerr=cell["deviation"], fmt="o", color=style.COLOURS[0], capsize=3)
            if cell["paper"] is not None:
                panel.plot(cell["paper"], height, "D", color=style.COLOURS[1], fillstyle="none")
        if not panel.has_data():
            panel.text(0.5, 0.5, "not run", ha="center", va="center", color="grey", transform=panel.transAxes)
            panel.set_xticks([])
        panel.set_yticks(range(len(labels)), labels)
        panel.set_ylim(len(labels) - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
        panel.set_title(column.label)
        panel.set_xlabel(LABELS[column.metric])
    published = any(cell["paper"] is not None for cell in summaries.values())
    figure.suptitle("dot: measured here" + (", diamond: the paper" if published else ""), fontsize="small")
    style.save(figure, path, "png")
