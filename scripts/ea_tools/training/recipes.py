"""Recipes: the hyper-parameters of recipes/*.toml as flags of fairseq-train."""

from __future__ import annotations

import contextlib
import difflib
import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_tools.common import REPO, UserError
from ea_tools.text import read_prep
from ea_tools.training import flag_faults

FOLDER = REPO / "recipes"
KEYS = ("inherit", "data", "source-lang", "target-lang", "eval-bleu", "batch", "flags", "arch")  # of a recipe's file

Flags = dict[str, list[str]]  # of fairseq-train: name -> the words after it


@dataclass(frozen=True)
class Batch:
    """The batch of one update: `gpus` x `accumulation` batches of at most `tokens` tokens."""

    tokens: int
    gpus: int
    accumulation: int

    @property
    def total(self) -> int:
        """Tokens of one update, at most."""
        return self.tokens * self.gpus * self.accumulation

    def __str__(self) -> str:
        return f"{self.gpus} GPU x {self.accumulation} accumulation x {self.tokens:,} tokens"


@dataclass(frozen=True)
class Recipe:
    """One task: where its data are, its batch, its flags."""

    name: str
    data: Path
    source_lang: str
    target_lang: str
    batch: Batch
    flags: dict[str, Any]
    architectures: dict[str, dict[str, Any]]
    eval_bleu: bool = False  # BLEU and sample translations at each validation, where the text is small enough for it

    def flags_for(self, arch: str) -> dict[str, Any]:
        """The flags with the architecture's own in the place of the common ones; false leaves one out."""
        flags = {**self.flags, **self.architectures.get(arch, {})}
        return {name: value for name, value in flags.items() if value is not False}


def names() -> list[str]:
    """The recipes that have a data set, their own or an inherited one; the others are there to be inherited.

    One that cannot be read, for somebody is writing it, maybe, is left out: it must not stop what needs another.
    """
    found = []
    for path in FOLDER.glob("*.toml"):
        with contextlib.suppress(UserError, OSError):
            if "data" in _inherited(path):
                found.append(path.stem)
    return sorted(found)


def plain(value: str) -> str:
    """A flag's value, numbers spelt in one way: 2e-3 is 0.002. Values that differ within 15 digits stay apart."""
    try:
        return f"{float(value):.15g}"
    except ValueError:
        return value


def said(value: str | None) -> str:
    """A flag's value as a message has it."""
    return "not given" if value is None else value or "given"


def refuse_as_architecture(word: str) -> None:
    """Refuse a recipe's name in the place of an architecture's: the two were given in the wrong order."""
    if (FOLDER / f"{word}.toml").is_file() and word in names():  # most are none: names() reads every recipe
        raise UserError(
            f"{word} is a recipe, and stands where an architecture is wanted: RECIPE comes first, then ARCH"
        )


def read(name: str) -> Recipe:
    """The recipe `name` of recipes/, or of a file of the user's own, together with its ancestors."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    merged = _inherited(path) if path.is_file() else {}
    if not path.is_file() or (path.parent == FOLDER and "data" not in merged):
        if name.endswith(".toml"):
            raise UserError(f"{name}: no such file; a recipe of your own is wanted, or the name of one of those here")
        near = difflib.get_close_matches(name, names(), n=1)
        meant = f" (is {near[0]} meant?)" if near else ""
        raise UserError(f"there is no recipe {name!r}{meant}; there are: {', '.join(names())}")
    return _recipe(path, merged)


def _recipe(path: Path, merged: dict[str, Any]) -> Recipe:
    try:
        return Recipe(
            name=path.stem,
            data=REPO / merged["data"],
            source_lang=merged["source-lang"],
            target_lang=merged["target-lang"],
            batch=Batch(**merged["batch"]),
            flags=merged["flags"],
            architectures=merged.get("arch", {}),
            eval_bleu=merged.get("eval-bleu", False),
        )
    except KeyError as error:
        raise UserError(f"{path}: {error.args[0]} is missing") from None
    except TypeError as error:
        raise UserError(f"{path}: {error}") from None


#: For a corpus of one's own: up to so many training pairs, what differs from recipes/base.toml. Our choice, between the
#: recipes for sample, Multi30k, IWSLT'14 and WMT'14: small text wants dropout and patience, large text large batches.
FOR_SIZE = (
    (5_000, 1000, 1, {"warmup-updates": 400, "dropout": 0.3, "patience": 10, "max-epoch": 100}),
    (50_000, 4096, 1, {"warmup-updates": 2000, "dropout": 0.3, "patience": 10, "max-epoch": 100}),
    (1_000_000, 4096, 1, {"warmup-updates": 4000, "dropout": 0.2, "patience": 5, "max-epoch": 100}),
    (float("inf"), 4096, 16, {"warmup-updates": 4000, "dropout": 0.1, "patience": 5, "max-epoch": 50}),
)


def for_data(data: Path) -> tuple[Recipe, str]:
    """A recipe for a prepared corpus by the number of its training pairs, and the same as TOML, to be kept."""
    prep = read_prep(data)
    pairs = prep.get("splits", {}).get("train", {}).get("pairs")
    if not isinstance(pairs, int):
        raise UserError(f"{data / 'PREP.json'}: does not say how many training pairs there are; give a RECIPE")
    _, tokens, accumulation, flags = next(row for row in FOR_SIZE if pairs <= row[0])
    folder = data.resolve()
    place = folder.relative_to(REPO) if folder.is_relative_to(REPO) else folder
    toml = "\n".join(
        [
            f"# For a corpus of {pairs:,} pairs, by its size. Change it as you like, and give it as RECIPE.",
            'inherit = "base"',
            f"data = {json.dumps(str(place))}",
            *(["eval-bleu = true"] if pairs <= FOR_SIZE[1][0] else []),
            *(f'{side}-lang = "{prep[f"{side}_lang"]}"' for side in ("source", "target")),
            f"\n[batch]\ntokens = {tokens}\ngpus = 1\naccumulation = {accumulation}",
            "\n[flags]",
            *(f"{name} = {value}" for name, value in flags.items()),
            "",
        ]
    )
    return _recipe(data, _merge(_inherited(FOLDER / "base.toml"), tomllib.loads(toml))), toml


def read_toml(path: Path) -> dict[str, Any]:
    """The content of a TOML file.

    Raises:
        UserError: it is no TOML, or no UTF-8; the message names it.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    content = read_toml(path)
    flag_faults.check_keys(path, content, KEYS, "; flags of fairseq-train stand below a line [flags]")
    _check_tables(path, content)
    if path.parent != FOLDER:  # those in recipes/ have a test, and may name what only fairseq's slow import knows
        for arch in content.get("arch", {}):
            flag_faults.check_architecture(arch, f"{path}: arch.")
    return content


def _check_tables(path: Path, content: dict[str, Any]) -> None:
    """Refuse another value where a recipe has a table, and numbers of the batch that cannot be."""
    tables = {name: content[name] for name in ("batch", "flags", "arch") if name in content}
    if isinstance(tables.get("arch"), dict):
        tables |= {f"arch.{name}": own for name, own in tables["arch"].items()}
    for name, table in tables.items():
        if not isinstance(table, dict):
            raise UserError(f"{path}: {name} = {table!r}: must be a table, which begins with a line [{name}]")
    for name, number in tables.get("batch", {}).items():
        if type(number) is not int or number < 1:
            raise UserError(f"{path}: {name} = {number!r} in [batch]: must be a whole number of at least 1")


def _inherited(path: Path, heirs: tuple[Path, ...] = ()) -> dict[str, Any]:
    if path in heirs:
        circle = " from ".join(heir.stem for heir in (*heirs[heirs.index(path) :], path))
        raise UserError(f"{path}: inherits in a circle, {circle}; take one inherit out")
    own = _read(path)
    if "inherit" not in own:
        return own
    base = FOLDER / f"{own['inherit']}.toml"
    if not base.is_file():
        there = ", ".join(sorted(other.stem for other in FOLDER.glob("*.toml")))
        raise UserError(f"{path}: inherit = {own['inherit']!r}: there is no such recipe; there are: {there}")
    return _merge(_inherited(base, (*heirs, path)), own)


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `base`, table by table."""
    tables = {key: _merge(base[key], own[key]) for key in base.keys() & own.keys() if isinstance(base[key], dict)}
    return {**base, **own, **tables}


def parse_flags(words: Iterable[str]) -> Flags:
    """["--lr", "0.1", "--fp16"] -> {"lr": ["0.1"], "fp16": []}: fairseq flags from a command line.

    The last of several counts, but each --without of train.sh names one flag more.
    """
    flags, name = {}, None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [*(flags.get(name, []) if name == "without" else []), *([value] if equals else [])]
        elif len(word) == 2 and word[0] == "-" and word[1].isalpha():
            raise UserError(f"{word}: flags of fairseq-train are wanted in full, as in --source-lang")
        elif name is None:
            raise UserError(f"{word!r} stands where a flag of fairseq-train is expected")
        else:
            flags[name].append(word)
    return flags


def spell_flags(flags: Mapping[str, Any]) -> list[str]:
    """{"lr": 0.1, "fp16": True, "share": False} -> ["--lr", "0.1", "--fp16"], in order."""
    return [word for name, values in flag_values(flags).items() for word in (f"--{name}", *values)]


def flag_values(flags: Mapping[str, Any]) -> Flags:
    """{"lr": 0.1, "fp16": True, "share": False} -> {"lr": ["0.1"], "fp16": []}: as `parse_flags` gives them."""
    given = {name: value for name, value in flags.items() if value is not False}
    return {
        name: [] if value is True else [str(word) for word in (value if isinstance(value, list) else [value])]
        for name, value in given.items()
    }
