"""Tables to reproduce: recipes/tables/*.toml, or a file of the user's own of the same form.

title = "..."
seeds = [1, 2, 3]    of every run, where --seeds does not say otherwise (default: [1])
average = 10         checkpoints averaged, where --average does not say otherwise (default: 10)
[[column]]    recipe, label, metric (see Metric), subset (default: "test")
[[row]]       label, arch, flags (of fairseq-train), baseline (another row's label), average (default: the table's),
              paper ({recipe: number} for its test, {recipe/subset: number} for another split)
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Self, get_args

from pydantic import Field, PositiveInt, model_validator

from ea_artifacts.command import Flags, UserError, hint, parse_flags
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import AVERAGED
from ea_data.languages import base_language
from ea_tools.forms import Form
from ea_tools.training import flag_faults, recipes

FOLDER = recipes.FOLDER / "tables"
Metric = Literal["sacrebleu", "chrf", "tokenised_bleu", "compound_split_bleu"]  # the others are for evaluate.sh alone
METRICS = get_args(Metric)
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
    metric: Metric
    subset: str = "test"

    @property
    def key(self) -> str:
        """Its name among the published numbers of a row."""
        return self.recipe if self.subset == "test" else f"{self.recipe}/{self.subset}"

    @model_validator(mode="after")
    def _is_scored(self) -> Self:
        """Refuse a split that is not there, and a metric that evaluate.sh does not compute for this text."""
        recipe = recipes.read(self.recipe)
        texts = sorted(text.stem for text in (recipe.data / "raw").glob(f"*.{recipe.target_lang}"))
        if texts and self.subset not in texts:
            raise UserError(f"{self.label}: subset {self.subset!r}: {recipe.data} has {', '.join(texts)}")
        pair, raw = (recipe.source_lang, recipe.target_lang), False
        with contextlib.suppress(UserError):  # the data need not be prepared yet
            raw = Preparation.at(recipe.data).tokenizer == "none"
        if self.metric == "compound_split_bleu" and tuple(map(base_language, pair)) != ("en", "de"):
            raise UserError(f"{self.label}: metric {self.metric}: is of en-de alone, {recipe.name} is {'-'.join(pair)}")
        if self.metric in ("tokenised_bleu", "compound_split_bleu") and raw:
            raise UserError(f"{self.label}: metric {self.metric}: needs tokens, {recipe.data} is raw; use sacrebleu")
        return self


class Row(Form):
    """One model: an architecture with flags of fairseq-train."""

    label: str
    arch: str
    flags: list[str] = Field(default_factory=list)
    baseline: str | None = None
    average: PositiveInt | None = None
    paper: dict[str, float] = Field(default_factory=dict)

    @property
    def learnt(self) -> Flags:
        """The flags by which another model is learnt. A row that asks for a precision is there to compare it."""
        launch = recipes.LAUNCH - {"precision"}
        return {name: values for name, values in parse_flags(self.flags).items() if name not in launch}

    @model_validator(mode="after")
    def _can_be_trained(self) -> Self:
        flag_faults.check_architecture(self.arch, f"{self.label}: arch ")
        check_flags(f"{self.label}: flags: --", parse_flags(self.flags))
        return self


class Table(Form):
    """Rows and columns to fill."""

    name: str
    title: str
    columns: list[Column] = Field(alias="column", min_length=1)
    rows: list[Row] = Field(alias="row", min_length=1)
    seeds: list[int] = Field(default_factory=lambda: [1], min_length=1)
    average: PositiveInt = AVERAGED

    @model_validator(mode="after")
    def _has_names_once(self) -> Self:
        labels = [row.label for row in self.rows]
        stems = [Path(name).stem for name in self.recipes]  # files in two folders would share their runs
        for kind, names in (("row", labels), ("column", [column.label for column in self.columns]), ("recipe", stems)):
            if twice := [label for label in names if names.count(label) > 1]:
                raise UserError(f"{kind}: {twice[0]!r} is there twice; give each a different name")
        for row in self.rows:
            if unknown := row.paper.keys() - {column.key for column in self.columns}:
                raise UserError(f"{row.label}: paper: {min(unknown)} is no column")
            if row.baseline and row.baseline not in labels:
                raise UserError(f"{row.label}: baseline {row.baseline!r} is no row; {hint(row.baseline, labels)}")
        return self

    @property
    def recipes(self) -> list[str]:
        """The recipes of the columns, each once."""
        return list(dict.fromkeys(column.recipe for column in self.columns))

    def subsets(self, recipe: str) -> list[str]:
        """The splits of a recipe that this table has columns for."""
        return list(dict.fromkeys(column.subset for column in self.columns if column.recipe == recipe))

    def run(self, row: Row, recipe: str, seed: int) -> str:
        """The name of a run, RECIPE/NAME. It describes the model, so that tables share runs."""
        return f"{recipes.read(recipe).name}/{file_name([row.arch, *slug(row.learnt)])}-seed{seed}"

    def averaged(self, row: Row, average: int | None) -> int:
        """The number of checkpoints to average of a row's runs; `average` overrules the file."""
        return average or row.average or self.average

    def flags(self, row: Row, recipe: str, seed: int = 1) -> dict[str, str]:
        """The flags by which train.sh trains a run, but for those of the launch; the batch as tokens an update."""
        return recipes.flags_of(recipes.read(recipe), row.arch, parse_flags([*row.flags, "--seed", str(seed)]))


def settings(average: int) -> str:
    """The name that evaluate.sh gives to its default beam and this average."""
    return f"beam5.average{average}"


def slug(flags: Flags) -> list[str]:
    """ "--ea-alpha 0 --lr 5e-3 --update-freq 1,2" -> "ea-alpha0", "lr5e-3", "update-freq1_2"."""
    return [name + re.sub(r"[^\w.+-]+", "_", " ".join(values)).strip("_") for name, values in flags.items()]


def file_name(parts: Iterable[str]) -> str:
    """The parts with dashes between them. A digest shortens a name that a disk would not take."""
    name = "-".join(parts)
    if len(name.encode()) <= 200:
        return name
    return f"{name.encode()[:150].decode(errors='ignore')}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def names() -> list[str]:
    """The tables in recipes/tables."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> Table:
    """A table by its name in recipes/tables, or by its path."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file():
        raise UserError(f"{name}: no such table; expected {', '.join(names())}, or a .toml file of your own")
    return Table.filled({"name": path.stem, **recipes.read_toml(path)}, str(path))


def check_flags(where: str, names: Iterable[str]) -> None:
    """Refuse flags for all runs of a table or a sweep that would misdirect them."""
    for name in names:
        if name in ELSEWHERE:
            raise UserError(f"{where}{name}: {ELSEWHERE[name]}")
