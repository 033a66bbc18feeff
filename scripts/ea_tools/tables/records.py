"""Records: the small files of finished runs, kept in results/runs so that a fresh clone can write every table again.

results/runs/RECIPE/NAME/run.json            the training: recipe, command; commit, device, flags of every start
                         log.jsonl           losses and speeds
                         eval/SPLIT.json     metrics, and the paired tests against other runs
                         eval/SPLIT.hyp.txt.gz
"""

import gzip
import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from ea_tools.common import REPO, UserError, read_json, replacing, say, write_json
from ea_tools.metrics import DECIDED_BY_BLEU, compare
from ea_tools.text import digest
from ea_tools.training import logs, recipes

UNKNOWN = "not recorded"


def keep(run: Path, record: Path, subset: str, wanted: str) -> None:
    """Copy the small files of a run that was scored on `subset` to the records, without the repository's path.

    `wanted` are the table's settings of translation; an evaluation by others, made by hand, is not taken.
    """
    evaluation, last, target = (
        folder / "eval" / f"{name}.json"
        for folder, name in ((run, f"{subset}.{wanted}"), (run, subset), (record, subset))
    )
    if not evaluation.exists():
        if last.exists():
            say(f"note: {last} is by other settings than this table's, {wanted}: not taken; leave out --collect")
        return
    scored = json.loads(json.dumps(read_json(evaluation), ensure_ascii=False).replace(f"{REPO}/", ""))
    kept = read_json(target) if target.exists() else {}
    if kept and scored.get("unfinished") and not kept.get("unfinished"):
        say(f"note: {evaluation} is of a training that has not ended: not taken; {target} is of a finished one")
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    for name in ("run.json", "log.jsonl"):
        if (run / name).exists():
            with replacing(record / name) as temporary:
                shutil.copyfile(run / name, temporary)
    if {**kept, "paired": None} != {**scored, "paired": None}:
        translations = evaluation.with_suffix(".hyp.txt").read_bytes()
        with replacing(target.with_suffix(".hyp.txt.gz")) as temporary:
            temporary.write_bytes(gzip.compress(translations, mtime=0))  # no date: the same text makes the same file
        write_json(target, scored)


def read(record: Path, subset: str) -> dict | None:
    """The evaluation of a run on one split, with the tests of test_against(); None where there are none."""
    path = record / "eval" / f"{subset}.json"
    return read_json(path) if path.exists() else None


def translations(record: Path, subset: str) -> list[str] | None:
    """The translations of a run by its record, or None where it has none."""
    path = record / "eval" / f"{subset}.hyp.txt.gz"
    return gzip.decompress(path.read_bytes()).decode("utf-8").split("\n")[:-1] if path.exists() else None


def test_against(
    record: Path, baseline: Path, subset: str, references: list[str] | None, lowercase: bool
) -> dict | None:
    """The paired bootstrap test of two runs' translations, by sacreBLEU: {"difference", "p", "signature", ...}.

    It is computed once and kept in the record's JSON, so that it is there without `references`, too. A test of
    older translations is made again.
    """
    texts = [translations(folder, subset) for folder in (record, baseline)]
    if None in texts:
        return None
    scored, digests, name = read(record, subset), [digest(text) for text in texts], baseline.name
    kept = scored.get("paired", {}).get(name)
    if kept and kept["translations"] == digests:
        return kept
    if references is None or len(references) != len(texts[0]) or len(references) != len(texts[1]):
        return None
    system, other = texts
    tests = compare(
        system=system,
        baseline=other,
        references=references,
        lowercase=lowercase,
        tokenizer=scored["tokenizer"],
        kinds=["sacrebleu"],
    )
    kept = {"translations": digests, **tests["sacrebleu"]}
    write_json(record / "eval" / f"{subset}.json", {**scored, "paired": {**scored.get("paired", {}), name: kept}})
    return kept


# --- how a run was trained --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Training:
    """A run's training by run.json and log.jsonl; the first runs' records lack commits and devices."""

    recipe: str = UNKNOWN
    data: str = UNKNOWN  # the digest of the training data
    commits: tuple[str, ...] = ()  # of the code, one for each change of it
    devices: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()  # fp32, fp16, bf16 or bf16-products, one for each change of it
    hours: float | None = None
    command: str = UNKNOWN
    flags: tuple[dict[str, str], ...] = ()  # of fairseq-train, one for each change of them


def training(record: Path) -> Training:
    """The facts of a run's training."""
    path = record / "run.json"
    if not path.exists():
        return Training()
    written = read_json(path)
    starts = written["starts"]
    return Training(
        recipe=written["identity"]["recipe"],
        data=written["identity"]["data"],
        commits=_changes([start["commit"] or UNKNOWN for start in starts if "commit" in start]),
        devices=_changes([_device(start) for start in starts if "device" in start]),
        precisions=_changes([recipes.precision_of(start["flags"]) for start in starts]),
        hours=_hours(record),
        command=written["command"],
        flags=_changes([recipes.learning_flags(start["flags"]) for start in starts]),
    )


def _changes(values: list) -> tuple:
    """The values without those that repeat the one before."""
    return tuple(value for number, value in enumerate(values) if number == 0 or value != values[number - 1])


def _device(start: dict) -> str:
    several = f"{start['processes']} x " if start["processes"] > 1 else ""
    precision = recipes.precision_of(start["flags"])
    return f"{several}{start['device']}" + ("" if precision == "fp32" else f", {precision}")


def _hours(record: Path) -> float | None:
    """Wall-clock time of training by the speeds in the log."""
    try:
        _, hours = logs.read(record).clock
    except UserError:
        return None
    return float(hours[-1]) if len(hours) else None


def recipe_flags(recipe: recipes.Recipe, arch: str, given: recipes.Flags) -> dict[str, str]:
    """The learning flags of a run by a recipe, with the flags that were given besides."""
    left_out = {"without", *(name.removeprefix("--") for name in given.get("without", []))}
    chosen = {name: value for name, value in recipe.flags_for(arch).items() if name not in left_out}
    chosen |= {name: value for name, value in given.items() if name != "without"}
    if "eval-bleu" in given:
        chosen |= DECIDED_BY_BLEU
    words = recipes.parse_flags(recipes.spell_flags(chosen))
    flags = {"max-tokens": str(recipe.batch.tokens)} | {name: " ".join(values) for name, values in words.items()}
    # Without an --update-freq of the user's own, train.sh accumulates until an update has the recipe's tokens.
    batch = {} if "update-freq" in given else {recipes.BATCH: str(recipe.batch.total)}
    return recipes.learning_flags(flags) | batch


def differences(training: Training, wanted: dict[str, str]) -> list[str]:
    """The differences between a run's training and its recipe of today, in words."""
    different = []
    for flags in training.flags:
        for name in sorted(wanted.keys() | flags.keys()):
            if wanted.get(name) != flags.get(name):
                has, says = (recipes.said(values.get(name)) for values in (flags, wanted))
                different.append(f"{name} {has}, the recipe says {says}")
    return list(dict.fromkeys(different))
