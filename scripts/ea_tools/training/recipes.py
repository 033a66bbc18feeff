"""Recipes: the hyper-parameters of recipes/*.toml as flags of fairseq-train."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PositiveInt

from ea_artifacts.command import REPO, Flags, UserError, hint
from ea_artifacts.preparation import FILE, Preparation
from ea_tools.forms import Form
from ea_tools.metrics import DECIDED_BY_BLEU
from ea_tools.training import flag_faults

FOLDER = REPO / "recipes"

#: Flags of the launch, which make no other model.
LAUNCH = {"gpus", "nodes", "node-rank", "master", "precision", "no-tensorboard"}
LAUNCH |= {"wandb-project", "tensorboard-logdir", "num-workers", "log-interval", "log-format", "max-tokens-valid"}
#: fairseq-train's flags of a precision; the first is that of ea_tools.training.fairseq_train
PRECISIONS = ("bf16-products", "amp", "bf16", "fp16", "memory-efficient-bf16", "memory-efficient-fp16")
#: Flags that change nothing in the learning. Precision and batch are reported by themselves.
NOT_LEARNING = LAUNCH.union(PRECISIONS) | {
    "arch", "user-dir", "save-dir", "source-lang", "target-lang", "run", "data", "cpu", "max-tokens", "update-freq",
    "ddp-backend", "distributed-world-size",
    "distributed-backend", "distributed-no-spawn", "distributed-rank", "distributed-init-method",
    "eval-bleu", "eval-bleu-args", "eval-bleu-detok", "eval-bleu-detok-args", "eval-bleu-remove-bpe",
    "eval-bleu-print-samples", "eval-tokenized-bleu",
}  # fmt: skip
BATCH = "tokens an update"


class Batch(Form):
    """The batch of one update: `gpus` x `accumulation` batches of at most `tokens` tokens."""

    tokens: PositiveInt
    gpus: PositiveInt
    accumulation: PositiveInt

    @property
    def total(self) -> int:
        """Tokens of one update, at most."""
        return self.tokens * self.gpus * self.accumulation

    def __str__(self) -> str:
        return f"{self.gpus} GPU x {self.accumulation} accumulation x {self.tokens:,} tokens"


class Recipe(Form):
    """One task: the place of its data, its batch, its flags. The keys of a recipe's file are these fields."""

    name: str
    data: Annotated[Path, BeforeValidator(lambda path: REPO / path if isinstance(path, str) else path)]
    source_lang: str
    target_lang: str
    batch: Batch
    flags: dict[str, Any]
    arch: dict[str, dict[str, Any]] = Field(default_factory=dict)  # flags of single architectures
    eval_bleu: bool = False  # BLEU and sample translations at each validation, where the text is small enough for it

    def flags_for(self, arch: str) -> dict[str, Any]:
        """The flags with the architecture's own in the place of the common ones; false leaves one out."""
        flags = {**self.flags, **self.arch.get(arch, {})}
        return {name: value for name, value in flags.items() if value is not False}


def names() -> list[str]:
    """The recipes that have a data set, their own or an inherited one; the others are there to be inherited."""
    return sorted(path.stem for path in FOLDER.glob("*.toml") if "data" in _inherited(path))


def common_flags() -> set[str]:
    """The flags of the recipes here. Some do not fit a part that the user replaced."""
    return {name for path in FOLDER.glob("*.toml") for name in read_toml(path).get("flags", {})}


def plain(value: str) -> str:
    """A flag's value, numbers spelt in one way: 2e-3 is 0.002. Values that differ within 15 digits stay apart."""
    try:
        return f"{float(value):.15g}"
    except ValueError:
        return value


def said(value: str | None) -> str:
    """A flag's value as a message has it."""
    return "not given" if value is None else value or "given"


def read(name: str) -> Recipe:
    """The recipe `name` of recipes/, or of a file of the user's own, together with its ancestors."""
    path = Path(name) if name.endswith(".toml") else FOLDER / f"{name}.toml"
    merged = _inherited(path) if path.is_file() else {}
    if not path.is_file() or (path.parent == FOLDER and "data" not in merged):
        raise UserError(f"there is no recipe {name!r}; {hint(name, names())}; recipes may also be .toml files")
    return _recipe(path, merged)


def _recipe(path: Path, merged: dict[str, Any]) -> Recipe:
    content = {name: value for name, value in merged.items() if name != "inherit"}
    recipe = Recipe.filled({"name": path.stem, **content}, str(path))
    if path.parent != FOLDER:  # those in recipes/ have a test, and may name what only fairseq's slow import knows
        for arch in recipe.arch:
            flag_faults.check_architecture(arch, f"{path}: arch.")
    return recipe


#: For a corpus of one's own: up to so many training pairs, what differs from recipes/base.toml. Our choice, between the
#: recipes for sample, Multi30k, IWSLT'14 and WMT'14: small text wants dropout and patience, large text large batches.
FOR_SIZE = {  # -> tokens, accumulation, warm-up, dropout, patience, epochs
    5_000: (1000, 1, 400, 0.3, 10, 100),
    50_000: (4096, 1, 2000, 0.3, 10, 100),
    1_000_000: (4096, 1, 4000, 0.2, 5, 100),
    math.inf: (4096, 16, 4000, 0.1, 5, 50),
}
SMALL = 50_000  # pairs, of which validations show translations and BLEU


def for_data(data: Path) -> tuple[Recipe, str]:
    """A recipe for a prepared corpus by the number of its training pairs, and the same as TOML, to be kept."""
    preparation = Preparation.at(data)
    pairs, separate = preparation.pairs, preparation.separate_dictionaries
    if not isinstance(pairs, int):
        raise UserError(f"{data / FILE}: does not say how many training pairs there are; give a RECIPE")
    row = next(row for most, row in FOR_SIZE.items() if pairs <= most)
    tokens, accumulation, warmup, dropout, patience, epochs = row
    folder = data.resolve()
    place = folder.relative_to(REPO) if folder.is_relative_to(REPO) else folder
    toml = "\n".join(
        [
            f"# For a corpus of {pairs:,} pairs, by its size. Change it as you like, and give it as RECIPE.",
            'inherit = "base"',
            f"data = {json.dumps(str(place), ensure_ascii=False)}",
            *(["eval-bleu = true"] if pairs <= SMALL else []),
            f'source-lang = "{preparation.source_lang}"',
            f'target-lang = "{preparation.target_lang}"',
            f"\n[batch]\ntokens = {tokens}\ngpus = 1\naccumulation = {accumulation}",
            f"\n[flags]\nwarmup-updates = {warmup}\ndropout = {dropout}\npatience = {patience}\nmax-epoch = {epochs}",
            "max-tokens-valid = 4096",
            *(["share-all-embeddings = false", "share-decoder-input-output-embed = true"] * separate),
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
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))  # some editors begin with a byte-order mark
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None


def _inherited(path: Path) -> dict[str, Any]:
    own = read_toml(path)
    if "inherit" not in own:
        return own
    base = FOLDER / f"{own['inherit']}.toml"
    if not base.is_file():
        there = ", ".join(sorted(other.stem for other in FOLDER.glob("*.toml")))
        raise UserError(f"{path}: inherit = {own['inherit']!r}: there is no such recipe; available: {there}")
    return _merge(_inherited(base), own)


def _merge(base: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """`own` over `base`, table by table."""
    tables = [key for key in base.keys() & own.keys() if isinstance(base[key], dict) and isinstance(own[key], dict)]
    return {**base, **own, **{key: _merge(base[key], own[key]) for key in tables}}


def precision_of(flags: Iterable[str]) -> str:
    """The precision of a training by fairseq-train with these flags."""
    return next((name for name in PRECISIONS if name in flags), "fp32")


def learning_flags(flags: dict[str, str]) -> dict[str, str]:
    """Flags of fairseq-train, without those of the launch; the batch as tokens an update, however it was shared out."""
    learning = {name: plain(value) for name, value in flags.items() if name not in NOT_LEARNING}
    if "max-tokens" in flags:
        tokens = int(flags["max-tokens"]) * int(flags.get("distributed-world-size", 1))
        frequencies = flags.get("update-freq", "1").split(",")  # one for each of the first epochs
        learning[BATCH] = ",".join(str(tokens * int(frequency)) for frequency in frequencies)
    return learning


def flags_of(recipe: Recipe, arch: str, given: Flags) -> dict[str, str]:
    """The learning flags of a training by a recipe, and by the flags that train.sh was given besides."""
    left_out = {"without", *(name.removeprefix("--") for name in given.get("without", []))}
    chosen = {name: value for name, value in recipe.flags_for(arch).items() if name not in left_out}
    chosen |= DECIDED_BY_BLEU if "eval-bleu" in given else {}
    chosen |= {name: values or True for name, values in given.items() if name != "without"}
    flags = {"max-tokens": str(recipe.batch.tokens)}
    flags |= {name: " ".join(values) for name, values in flag_values(chosen).items()}
    # Without an --update-freq of the user's own, train.sh accumulates until an update has the recipe's tokens.
    batch = {} if "update-freq" in given else {BATCH: str(recipe.batch.total)}
    return learning_flags(flags) | batch


def differences(flags: Mapping[str, str], wanted: Mapping[str, str]) -> list[str]:
    """The differences between the learning flags of a training and those of its recipe, in words."""
    return [
        f"{name} {said(flags.get(name))}, the recipe says {said(wanted.get(name))}"
        for name in sorted(wanted.keys() | flags.keys())
        if wanted.get(name) != flags.get(name)
    ]


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
