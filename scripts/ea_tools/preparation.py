"""The part of its data's preparation that a run keeps, so that its model works when the data have moved or changed.

RUN/prepared holds the dictionaries, the codes that split words into subwords, PREP.json and a digest of all these.
The tools read them there, and refuse data that were prepared in another way.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ea_data.preparation import SIDES, Preparation
from ea_runtime.kept import DIGEST, KEPT
from ea_tools.checkpoints import check_dictionaries, task_of, trained_on
from ea_tools.common import UserError, read_json
from ea_tools.text import read_lines

# Settings in PREP.json for the way from text to subwords.
_SETTINGS = (*SIDES, "tokenizer", "escape", "unicode", "lowercase", "bpe")
# Rules that choose sentences, or whose effect is in the codes or in a setting: two corpora may differ in them.
_NOT_COMPARED = {"filter_on", "max_ratio", "max_length", "valid_every", "drop_test_overlap"}
_NOT_COMPARED |= {"merges", "vocabulary_threshold", "nfc"}


def settings(preparation: Preparation) -> dict[str, Any]:
    """The settings and rules of two preparations that must agree, by name."""
    prep = preparation.prep
    rules = {name: value for name, value in prep.get("rules", {}).items() if name not in _NOT_COMPARED}
    moses = {} if prep["tokenizer"] == "none" else {"languages": preparation.moses_languages}
    return {**rules, **moses, **{name: prep[name] for name in _SETTINGS if name in prep}}


def fingerprint(data: Path) -> str:
    """A digest of the training data: the dictionaries, and the index of the binary text."""
    digest = hashlib.sha256()
    for path in sorted([*data.glob("dict.*.txt"), *data.glob("train.*.idx")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def keep(run: Path, data: Path) -> None:
    """Copy the files that a model of `data` needs into RUN/prepared, in one step; an earlier copy is replaced."""
    kept = run / KEPT
    new, old = (run / f".{KEPT}.{os.getpid()}.{kind}" for kind in ("new", "old"))
    try:
        new.mkdir(parents=True)
        for path in (data / "PREP.json", *Preparation.at(data).files()):
            shutil.copyfile(path, new / path.name)
        (new / DIGEST).write_text(Preparation.at(new).digest() + "\n", encoding="utf-8")
        if kept.exists():
            kept.replace(old)
        new.replace(kept)
    finally:
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)


def require_same(kept: Preparation, data: Preparation, run: Path) -> None:
    """Refuse data that were prepared in another way than the run's training data, naming each difference."""
    ours, others = settings(kept), settings(data)
    differences = [
        f"{name}: the run's is {ours[name]}, that of {data.folder} is {others[name]}"
        for name in sorted(ours.keys() & others.keys())  # a later version may record more than an earlier one did
        if ours[name] != others[name]
    ]
    names = sorted({path.name for path in (*kept.files(), *data.files())})
    differences += [line for name in names if (line := file_difference(kept.folder / name, data.folder / name))]
    if differences:
        raise UserError(
            f"{data.folder} is not what {run} was trained on, or was prepared anew in another way:\n"
            + "\n".join(f"  {line}" for line in differences)
            + f"\nGive the data of its training, or prepare these with custom.sh --like {run}"
        )


def file_difference(ours: Path, other: Path) -> str | None:
    """The first difference of two files, in words; None where there is none."""
    for path, where in ((ours, other), (other, ours)):
        if not path.is_file():
            return f"{path.name}: is in {where.parent}, and not in {path.parent}"
    if ours.read_bytes() == other.read_bytes():
        return None
    if ours.suffix == ".model":
        return f"{ours.name}: other contents"
    pairs = itertools.zip_longest(read_lines(ours), read_lines(other))
    for number, (here, there) in enumerate(pairs, 1):
        if here != there:
            return f"{ours.name}, line {number}: {here!r} in the run's, {there!r} in {other}"
    return f"{ours.name}: the same lines with other ends, or a byte-order mark; prepare the data anew"


def of_model(checkpoint: Path, state: dict, run: Path | None = None, data: Preparation | None = None) -> Preparation:
    """The preparation of text for the model in a checkpoint, whose contents are `state`.

    Args:
        run: the run's folder (default: the checkpoint's).
        data: prepared data that the model is to be used with; refused unless they fit the model.
    """
    run = run or checkpoint.parent
    if kept := Preparation.kept_by(run):
        others = [data] if data else []
        own = checkpoint.parent  # another run's, where the checkpoint is one
        if own.resolve() != run.resolve() and (there := Preparation.kept_by(own)):
            others.append(there)
        for other in others:
            require_same(kept, other, run)
    preparation = kept or data or Preparation.at(trained_on(checkpoint, state))
    trained, given = ([names.get(side) for side in SIDES] for names in (task_of(state), preparation.prep))
    if all(trained) and trained != given:
        raise UserError(
            f"{checkpoint} translates {'-'.join(trained)}, and {preparation.folder} is {'-'.join(given)}; give "
            "the data of its training"
        )
    check_dictionaries(preparation.folder, preparation.prep, checkpoint, state)
    if not kept:
        _check_fingerprint(run, preparation.folder)
    return preparation


def of_one_language(checkpoint: Path, state: dict, data: Path | None = None) -> Preparation:
    """The preparation of text for a model of one language, of which runs keep no copy. Arguments as ``of_model``'s."""
    if data is None:
        return Preparation.at(trained_on(checkpoint, state))
    dictionary = Path(task_of(state).get("data") or "") / "dict.txt"
    if dictionary.is_file() and (difference := file_difference(dictionary, data / "dict.txt")):
        raise UserError(f"{data} is not what {checkpoint} was trained on: {difference}")
    return Preparation.at(data)


@contextlib.contextmanager
def fitting(checkpoint: Path, data: Path) -> Iterator[None]:
    """Inside, a checkpoint is read with the dictionaries of these data; where they do not fit, it is a UserError."""
    try:
        yield
    except RuntimeError as error:
        if wrong := re.search(r"size mismatch for .*", str(error)):
            raise UserError(f"{checkpoint} was not trained on {data}: {wrong[0]}") from None
        raise


def _check_fingerprint(run: Path, data: Path) -> None:
    """Compare data with the digest that run.json holds, as a run of an earlier version has it; then keep them."""
    record = run / "run.json"
    stated = read_json(record).get("identity", {}).get("data") if record.is_file() else None
    if stated and stated != (now := fingerprint(data)):
        raise UserError(
            f"{data} is not what {run} was trained on, or was prepared anew; give the data of its training. "
            f"The digest of its dictionaries and training text is {now}, and {record} says {stated}"
        )
    if stated:
        keep(run, data)
