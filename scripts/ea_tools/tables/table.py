"""Tables to reproduce: recipes/tables/*.toml, or a file of the user's own of the same form.

title = "..."
seeds = [1, 2, 3]    of every run, where --seeds does not say otherwise (default: [1])
[[column]]    recipe, label, metric (see TABLED), subset (default: "test")
[[row]]       label, arch, flags (of fairseq-train), baseline (another row's label),
              paper ({recipe: number} for its test, {recipe/subset: number} for another split)
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from pydantic import Field

from ea_artifacts.command import Flags, UserError, parse_flags
from ea_artifacts.preparation import Preparation
from ea_data.languages import base_language
from ea_tools.forms import Form
from ea_tools.metrics import LABELS
from ea_tools.training import flag_faults, recipes

FOLDER = recipes.FOLDER / "tables"
TABLED = tuple(name for name in LABELS if name not in ("comet", "exact_match"))  # these are for evaluate.sh alone
# As flags for every run of a table or a sweep these would misdirect each.
ELSEWHERE = {
    "seed": "use --seeds",
    "run": "use --runs",
    "save-dir": "use --runs",
    "data": "name it in a recipe of your own",
    "arch": "a table's rows name it, and ARCH of a sweep",
    "restore-file": "a run goes on from its own checkpoints; use --finetune-from-model to start from another's",
}


class Column(Form):
    """One metric of one split of a recipe's data."""

    recipe: str
    label: str
    metric: str
    subset: str = "test"

    @property
    def key(self) -> str:
        """Its name among the published numbers of a row."""
        return self.recipe if self.subset == "test" else f"{self.recipe}/{self.subset}"


class Row(Form):
    """One model: an architecture with flags of fairseq-train."""

    label: str
    arch: str
    flags: list[str] = Field(default_factory=list)
    baseline: str | None = None
    paper: dict[str, float] = Field(default_factory=dict)

    def published(self, column: Column) -> float | None:
        """The paper's number for this row and column, or None."""
        return self.paper.get(column.key)


class Table(Form):
    """Rows and columns to fill."""

    name: str
    title: str
    columns: list[Column] = Field(alias="column", min_length=1)
    rows: list[Row] = Field(alias="row", min_length=1)
    seeds: list[int] = Field(default_factory=lambda: [1])
    extra: list[str] = Field(default_factory=list)  # flags of train.sh for every row

    @property
    def recipes(self) -> list[str]:
        """The recipes of the columns, each once."""
        return list(dict.fromkeys(column.recipe for column in self.columns))

    def subsets(self, recipe: str) -> list[str]:
        """The splits of a recipe that this table has columns for."""
        return list(dict.fromkeys(column.subset for column in self.columns if column.recipe == recipe))

    def run(self, row: Row, recipe: str, seed: int) -> str:
        """The name of a run, RECIPE/NAME. It describes the model, so that tables share runs."""
        return f"{recipes.read(recipe).name}/{file_name([row.arch, *_slug(self.learnt_by(row))])}-seed{seed}"

    def learnt_by(self, row: Row) -> Flags:
        """The settings of the model in a row's flags and in those of all rows.

        A row that asks for a precision is there to compare it.
        """
        return learning([*row.flags, *recipes.spell_flags(learning(self.extra))], recipes.LAUNCH - {"precision"})

    def with_flags(self, extra: list[str]) -> Table:
        """The table of runs that have these flags besides their own, which has its own page and a title that says so.

        Flags by which no other model is learnt change neither. Flags by which two rows become one model are refused.
        """
        table, given = self.model_copy(update={"extra": extra}), learning(extra)
        if not given:
            return table
        words = " ".join(recipes.spell_flags(given))
        check_apart(f"{self.name} with {words}", table)
        name = file_name([self.name, *_slug(given)])
        return table.model_copy(update={"name": name, "title": f"{self.title}, all with {words}"})

    def flags(self, row: Row, recipe: str, seed: int = 1) -> dict[str, str]:
        """The flags by which train.sh trains a run, but for those of the launch; the batch as tokens an update."""
        given = parse_flags([*row.flags, *self.extra, "--seed", str(seed)])
        return recipes.flags_of(recipes.read(recipe), row.arch, given)


def learning(words: Iterable[str], launch: Iterable[str] = recipes.LAUNCH) -> Flags:
    """The words about the model and its learning, without those of `launch`."""
    return {name: values for name, values in parse_flags(words).items() if name not in launch}


def _slug(flags: Flags) -> list[str]:
    """ "--ea-alpha 0 --lr 5e-3 --update-freq 1,2" -> "ea-alpha0", "lr5e-3", "update-freq1_2"."""
    return [name + re.sub(r"[^\w.+-]+", "_", " ".join(values)).strip("_") for name, values in flags.items()]


def file_name(parts: Iterable[str]) -> str:
    """The parts with dashes between them. A digest shortens a name that a disk would not take."""
    name = "-".join(parts)
    if len(name.encode()) <= 200:
        return name
    return f"{name.encode()[:150].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def names() -> list[str]:
    """The tables of translations in recipes/tables."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if "column" in recipes.read_toml(path))


def read(name: str) -> Table:
    """A table by its name in recipes/tables, or by its path."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise UserError(f"{name}: no such table; expected {', '.join(names())}, or a .toml file of your own")
    table = Table.filled({"name": path.stem, **recipes.read_toml(path)}, str(path))
    check_seeds(f"{path}: seeds", table.seeds)
    check(str(path), table)
    return table


def check(where: str, table: Table) -> None:
    """Refuse a table that would fail only when it is trained, or when its page is written."""
    labels = [row.label for row in table.rows]
    for row in table.rows:
        flag_faults.check_architecture(row.arch, f"{where}: {row.label}: arch ")
        check_flags(f"{where}: {row.label}: flags: --", parse_flags(row.flags))
        if unknown := row.paper.keys() - {column.key for column in table.columns}:
            raise UserError(f"{where}: {row.label}: paper: {min(unknown)} is no column")
        if row.baseline and row.baseline not in labels:
            raise UserError(
                f"{where}: the baseline {row.baseline!r} of {row.label!r} is no row; available: {', '.join(labels)}"
            )
    check_apart(where, table)
    for its_labels in (labels, [column.label for column in table.columns]):
        if twice := next((label for label in its_labels if its_labels.count(label) > 1), None):
            raise UserError(f"{where}: the label {twice!r} is there twice; give each a different one")
    for column in table.columns:
        recipe = recipes.read(column.recipe)
        check_metric(f"{where}: {column.label}: metric", column.metric, recipe)
        texts = sorted(text.stem for text in (recipe.data / "raw").glob(f"*.{recipe.target_lang}"))
        if texts and column.subset not in texts:
            raise UserError(
                f"{where}: {column.label}: subset {column.subset!r} is not in {recipe.data}; available: "
                f"{', '.join(texts)}"
            )


def check_apart(where: str, table: Table) -> None:
    """Refuse rows that would share one run."""
    learnt: dict[tuple, Row] = {}
    for row in table.rows:
        flags = table.learnt_by(row).items()
        model = (row.arch, *((name, *map(recipes.plain, values)) for name, values in flags))
        other = learnt.setdefault(model, row)
        if other is not row:
            raise UserError(
                f"{where}: the rows {other.label!r} and {row.label!r} would share one run: they have the same "
                "architecture and flags"
            )


def check_flags(where: str, names: Iterable[str]) -> None:
    """Refuse flags for all runs of a table or a sweep that would misdirect them."""
    for name in names:
        if name in ELSEWHERE:
            raise UserError(f"{where}{name}: {ELSEWHERE[name]}")


def check_seeds(where: str, seeds: Sequence[int]) -> None:
    """Refuse a seed that is given twice: two runs would train it in one folder."""
    if not seeds or len(set(seeds)) < len(seeds):
        raise UserError(f"{where} {' '.join(map(str, seeds))}: expected different whole numbers")


def check_metric(where: str, metric: str, recipe: recipes.Recipe) -> None:
    """Refuse a metric that evaluate.sh does not compute for this recipe's text."""
    languages, raw = (recipe.source_lang, recipe.target_lang), False
    with contextlib.suppress(UserError):  # the data need not be prepared yet
        raw = Preparation.at(recipe.data).tokenizer == "none"
    if metric not in TABLED:
        raise UserError(f"{where} {metric!r} is not one of {', '.join(TABLED)}")
    if metric == "compound_split_bleu" and tuple(map(base_language, languages)) != ("en", "de"):
        raise UserError(f"{where} {metric}: is computed for en-de alone, and {recipe.name} is {'-'.join(languages)}")
    if metric in ("tokenised_bleu", "compound_split_bleu") and raw:
        raise UserError(f"{where} {metric}: needs text in tokens, and {recipe.data} is raw text; choose sacrebleu")
