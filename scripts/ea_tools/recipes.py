"""Recipes: the hyper-parameters of recipes/*.toml as flags of fairseq-train."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_tools.common import REPO, UserError

FOLDER = REPO / "recipes"


@dataclass(frozen=True)
class Batch:
    """What one update sees: `gpus` x `accumulation` batches of at most `tokens` tokens."""

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

    def flags_for(self, arch: str) -> dict[str, Any]:
        """The flags with the architecture's own in the place of the common ones; false leaves one out."""
        flags = {**self.flags, **self.architectures.get(arch, {})}
        return {name: value for name, value in flags.items() if value is not False}


def names() -> list[str]:
    """The recipes that have a data set, their own or an inherited one; the others are there to be inherited."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if "data" in _inherited(path))


def read(name: str) -> Recipe:
    """The recipe `name` of recipes/, or of a file of the user's own, together with what it inherits."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    if not path.is_file() or (path.parent == FOLDER and path.stem not in names()):
        raise UserError(f"there is no recipe {name!r}; there are: {', '.join(names())}")
    merged = _inherited(path)
    try:
        return Recipe(
            name=path.stem,
            data=REPO / merged["data"],
            source_lang=merged["source-lang"],
            target_lang=merged["target-lang"],
            batch=Batch(**merged["batch"]),
            flags=merged["flags"],
            architectures=merged.get("arch", {}),
        )
    except (KeyError, TypeError) as error:
        raise UserError(f"{path}: {error}") from None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: {error}") from None


def _inherited(path: Path) -> dict[str, Any]:
    own = _read(path)
    return _merge(_inherited(FOLDER / f"{own['inherit']}.toml"), own) if "inherit" in own else own


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `base`, table by table."""
    tables = {key: _merge(base[key], own[key]) for key in base.keys() & own.keys() if isinstance(base[key], dict)}
    return {**base, **own, **tables}


def parse_flags(words: Iterable[str]) -> dict[str, list[str]]:
    """["--lr", "0.1", "--fp16"] -> {"lr": ["0.1"], "fp16": []}: fairseq flags from a command line."""
    flags, name = {}, None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            flags[name] = [value] if equals else []
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


def flag_values(flags: Mapping[str, Any]) -> dict[str, list[str]]:
    """{"lr": 0.1, "fp16": True, "share": False} -> {"lr": ["0.1"], "fp16": []}: as `parse_flags` gives them."""
    given = {name: value for name, value in flags.items() if value is not False}
    return {
        name: [] if value is True else [str(word) for word in (value if isinstance(value, list) else [value])]
        for name, value in given.items()
    }
