"""The page of a table, results/TABLE.md and .png: its numbers, and the source of each. Also tables between marks."""

from __future__ import annotations

import contextlib
import functools
import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ea_artifacts.command import REPO, UserError, quiet
from ea_artifacts.files import replacing
from ea_tools.figures import style
from ea_tools.metrics import LABELS
from ea_tools.profile_model import profile
from ea_tools.tables.records import UNKNOWN, Records, Score, Text, Training, text_of
from ea_tools.tables.table import Column, Row, Table, settings
from ea_tools.training import recipes, train

SIGNIFICANT = 0.05

Entries = dict[tuple[str, str], "Entry"]  # by the labels of row and column


@dataclass
class Entry:
    """One row and column of a table: a score for each seed, and its difference from the baseline's."""

    metric: str
    paper: float | None
    scores: dict[int, Score]
    differences: dict[int, float] = field(default_factory=dict)  # of the seeds that the baseline has, too
    p: dict[int, float] = field(default_factory=dict)  # of the differences that were tested

    @property
    def values(self) -> list[float]:
        """The score of each seed."""
        return [score["scores"][self.metric]["score"] for score in self.scores.values()]

    def compare(self, baseline: Entry, records: Records, text: Text | None) -> None:
        """Find the differences from the baseline's row, and the p of each by a paired bootstrap test."""
        for seed in sorted(self.scores.keys() & baseline.scores.keys()):
            one, other = self.scores[seed], baseline.scores[seed]
            difference = one["scores"][self.metric]["score"] - other["scores"][self.metric]["score"]
            test = records.test_against(one, other, text)
            self.differences[seed] = difference
            # The test is of sacreBLEU, and holds for this metric only if the same model is the better one by both.
            if test and difference * test["difference"] >= 0:
                self.p[seed] = test["p"]

    def __str__(self) -> str:
        paper = f" [{self.paper:.2f}]" if self.paper is not None else ""
        if not self.scores:
            return "not run" + paper
        difference = ""
        if self.differences:
            difference = f", Δ {spread(self.differences.values(), '+z.2f')} ({self._significance()})"
        return spread(self.values) + difference + paper

    def _significance(self) -> str:
        """In how many of the tested seeds the difference is significant: in the mean's direction, and in the other."""
        mean = statistics.mean(self.differences.values())
        significant = [self.differences[seed] * mean > 0 for seed, p in self.p.items() if p < SIGNIFICANT]
        others = f", {significant.count(False)} the other way" if False in significant else ""
        return f"{significant.count(True)} of {len(self.p)}{others}" if self.p else "not tested"

    def of_seed(self, seed: int) -> str:
        """One seed's score, its sacreBLEU where that is another metric, and p."""
        scores = self.scores[seed]["scores"]
        notes = []
        if self.metric != "sacrebleu" and "sacrebleu" in scores:
            notes.append(f"sacreBLEU {scores['sacrebleu']['score']:.2f}")
        if seed in self.differences:
            notes.append(f"p {self.p[seed]:.3f}" if seed in self.p else "not tested")
        return f"{scores[self.metric]['score']:.2f}" + (f" ({', '.join(notes)})" if notes else "")


def spread(values: Iterable[float], form: str = ".2f") -> str:
    """Mean and deviation: 39.20 ± 0.85, or the value of a single seed."""
    values = list(values)
    return f"{statistics.mean(values):{form}}" + (f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else "")


def gather(table: Table, records: Records, seeds: Iterable[int], average: int | None = None) -> Entries:
    """The numbers of a table from the records. New paired tests go into the records."""
    entries: Entries = {}
    for row, column in itertools.product(table.rows, table.columns):
        runs = {seed: table.run(row, column.recipe, seed) for seed in seeds}
        key = column.subset, settings(table.averaged(row, average))
        scored = {seed: records.rows.get((run, *key)) for seed, run in runs.items()}
        scores = {seed: one for seed, one in scored.items() if one and column.metric in one["scores"]}
        entries[row.label, column.label] = Entry(column.metric, row.paper.get(column.key), scores)
    for column in table.columns:
        text = None
        with contextlib.suppress(UserError):  # the data are not prepared
            text = text_of(recipes.read(column.recipe).data, column.subset)
        for row in table.rows:
            if row.baseline:
                entries[row.label, column.label].compare(entries[row.baseline, column.label], records, text)
    return entries


def write(table: Table, entries: Entries, folder: Path) -> None:
    """FOLDER/TABLE.md and, if there is anything to show, TABLE.png; and the table in the pages that show it."""
    picture = any(entry.scores for entry in entries.values())
    text = markdown(table, entries, picture)
    with replacing(folder / f"{table.name}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    if picture:
        with replacing(folder / f"{table.name}.png") as temporary:
            draw(table, entries, temporary)
    early = _early(table, entries)
    shown = [*_model_rows(table, entries), *(["", *early[:-1]] if early else [])]
    changed = [page for page in pages(folder) if show_in(page, table.name, shown)]
    print(text)  # last: it fails where the reader has gone
    print(f"written: {folder / table.name}.md" + (", .png" if picture else ""))
    for page in changed:
        print(f"brought up to date: {page}")


def pages(folder: Path) -> list[Path]:
    """The pages that show tables of a folder of results: README.md and docs/ show the repository's own alone."""
    own = [REPO / "README.md", *sorted((REPO / "docs").glob("*.md"))] if folder.resolve() == REPO / "results" else []
    return [page for page in (folder / "README.md", *own) if page.exists()]


def show_in(page: Path, name: str, lines: Sequence[str]) -> bool:
    """Put lines between a page's comments <!-- NAME --> and <!-- end of NAME -->; says whether the page changed."""
    shown = "\n".join(lines)
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, has_begin, rest = page.read_text(encoding="utf-8").partition(begin)
    old, has_end, after = rest.partition(end)
    if not has_begin or not has_end or old == f"{shown}\n":
        return False
    with replacing(page) as temporary:
        temporary.write_text(f"{before}{begin}{shown}\n{end}{after}", encoding="utf-8")
    return True


def markdown(table: Table, entries: Entries, picture: bool) -> str:
    """The table, its legend, and the source of each number."""
    metrics = ", ".join(dict.fromkeys(LABELS[column.metric] for column in table.columns))
    lines = [f"# {table.title}", "", *_model_rows(table, entries, sizes=True), ""]
    lines += [
        f"Scores: {metrics}. Mean ± standard deviation over the seeds, where there are several. In square brackets: "
        'the published number. "not run": no run yet. Parameters: without embeddings and output projection. FLOPs: '
        "30 source and 30 target tokens.",
        "",
        "Δ: the difference over the seeds that both models have; behind it, in how many of the tested seeds it is "
        f"significant, p < {SIGNIFICANT} by sacreBLEU's paired bootstrap test on detokenised text. The test resamples "
        "a test set's sentences, and says nothing of other seeds.",
        "",
    ]
    lines += _early(table, entries)
    if picture:
        lines += [f"![{table.title}]({table.name}.png)", ""]
    return "\n".join([*lines, *provenance(table, entries)]) + "\n"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table whose first `left` columns are aligned to the left."""
    line = ["---"] * left + ["---:"] * (len(head) - left)
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |" for cells in (head, line, *rows)]


def _model_rows(table: Table, entries: Entries, sizes: bool = False) -> list[str]:
    """The table itself, a line for each row; where asked for with parameters and FLOPs."""
    head = ["Model", "Δ from", *(["Parameters", "FLOPs"] * sizes), *(column.label for column in table.columns)]
    rows = []
    for row in table.rows:
        flags = table.flags(row, table.recipes[0])
        model = {name: value or True for name, value in flags.items() if name.startswith(train.IDENTITY)}
        size = _size(row.arch, *recipes.spell_flags(model)) if sizes else ()
        scores = (str(entries[row.label, column.label]) for column in table.columns)
        rows.append([row.label, row.baseline or "", *size, *scores])
    return markdown_table(head, rows, left=2)


@functools.cache
def _size(arch: str, *flags: str) -> tuple[str, str]:
    quiet()
    size = profile(arch, flags)
    return f"{size['parameters']:,}", f"{size['flops'] / 1e6:,.1f} M"


def _early(table: Table, entries: Entries) -> list[str]:
    """The evaluations of trainings that had not ended."""
    early = {
        f"{row.label}, {Path(column.recipe).stem}, seed {seed} ({score['unfinished']})": None
        for row, column, seed, score in _scores(table, entries)
        if score.get("unfinished")
    }
    return [f"**Scored before the end of their training**: {'; '.join(early)}.", ""] if early else []


#: what should be alike in all runs of a column
ALIKE = ("Recipe", "Training data", "References", "Settings", "Precision", "Trained at")


def _scores(table: Table, entries: Entries) -> Iterator[tuple[Row, Column, int, Score]]:
    """Each row, column and seed that has a score."""
    for row, column in itertools.product(table.rows, table.columns):
        for seed, score in sorted(entries[row.label, column.label].scores.items()):
            yield row, column, seed, score


def provenance(table: Table, entries: Entries) -> list[str]:
    """The lines of a report that say of every number how and where it was made."""
    rows: list[dict[str, str]] = []
    signatures: dict[str, dict[str, None]] = {}
    commands: dict[str, None] = {}
    for row, column, seed, score in _scores(table, entries):
        trained = score.get("training", NOTHING)
        shown = entries[row.label, column.label].of_seed(seed)
        names = {"Model": row.label, "Column": column.label, "Seed": str(seed), "Score": shown}
        rows.append(names | _facts(score, trained, table.flags(row, column.recipe, seed)))
        for name, metric in score["scores"].items():
            signatures.setdefault(LABELS[name], {})[f"`{metric['signature']}`"] = None
        commands |= dict.fromkeys([trained["command"], score["command"]])
    title = ["## Where the numbers come from", ""]
    if not rows:
        return [*title, "Nothing has been run yet."]
    unlike = []
    for fact in ALIKE:
        values = {one.label: {row[fact] for row in rows if row["Column"] == one.label} for one in table.columns}
        if differing := [label for label, its in values.items() if len(its) > 1 or UNKNOWN in its]:
            unlike.append(f"{fact} ({', '.join(differing)})")
    return [
        *title,
        f"**The runs of a column are not alike in everything**: {'; '.join(unlike)}."
        if unlike
        else f"Alike in all runs of a column: {', '.join(ALIKE)}.",
        "",
        *markdown_table(list(rows[0]), [list(row.values()) for row in rows], left=len(rows[0])),
        "",
        "Hours: wall-clock time by the speeds in the log; a run may have waited for other work on the machine.",
        "",
        *(f"- {name}: {', '.join(its)}" for name, its in signatures.items()),
        "",
        *(f"- `{command}`" for command in commands),
    ]


#: of a score without a training's record
NOTHING = Training(
    recipe=UNKNOWN, data=UNKNOWN, commits=[], devices=[], precisions=[], hours=None, command=UNKNOWN, flags=[]
)


def _facts(score: Score, trained: Training, wanted: Mapping[str, str]) -> dict[str, str]:
    """The origin of a score. Several starts of a training stand one after the other.

    Args:
        wanted: the learning flags that the table asks for.
    """
    others = [one for flags in trained["flags"] for one in recipes.differences(flags, wanted)]
    return {
        "Updates": f"{score['updates']:,}" if score["updates"] else UNKNOWN,
        "Averaged": str(len(score["averaged"]) or 1),
        "Hours": f"{trained['hours']:.2f}" if trained["hours"] else UNKNOWN,
        "Recipe": "; ".join(dict.fromkeys([trained["recipe"], *others])),
        "Training data": trained["data"],
        "References": score["references"],
        "Settings": score["settings_name"],
        "Precision": _then(trained["precisions"]),
        "Trained on": _then(trained["devices"] or [f"{UNKNOWN}; scored on {score['device']}"]),
        "Trained at": _then(map(_short, trained["commits"])),
        "Scored at": f"{_short(score['commit'] or UNKNOWN)}, {score['date'][:10]}",
    }


def _then(values: Iterable[str]) -> str:
    return ", then ".join(values) or UNKNOWN


def _short(commit: str) -> str:
    """The first ten digits of a commit, and the words after it."""
    first, _, rest = commit.partition(" ")
    return f"{first[:10]} {rest}".strip()


def draw(table: Table, entries: Mapping[tuple[str, str], Entry], path: Path) -> None:
    """A panel for each column: points with the deviation over seeds; a diamond is the paper's number."""
    count, labels = len(table.columns), [row.label for row in table.rows]
    figure, panels = style.panels(1, count, (2.2 + 2.4 * count, 1.2 + 0.35 * len(labels)), sharey=True)
    for panel, column in zip(panels[0], table.columns, strict=True):
        for height, label in enumerate(labels):
            entry = entries[label, column.label]
            if entry.scores:
                deviation = statistics.stdev(entry.values) if len(entry.values) > 1 else None
                mean = statistics.mean(entry.values)
                panel.errorbar(mean, height, xerr=deviation, fmt="o", color=style.COLOURS[0], capsize=3)
            if entry.paper is not None:
                panel.plot(entry.paper, height, "D", color=style.COLOURS[1], fillstyle="none")
        if not panel.has_data():
            panel.text(0.5, 0.5, "not run", ha="center", va="center", color="grey", transform=panel.transAxes)
            panel.set_xticks([])
        panel.set_yticks(range(len(labels)), labels)
        panel.set_ylim(len(labels) - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
        panel.set_title(column.label)
        panel.set_xlabel(LABELS[column.metric])
    published = any(entry.paper is not None for entry in entries.values())
    figure.suptitle("dot: measured here" + (", diamond: the paper" if published else ""), fontsize="small")
    style.save(figure, path, "png")
