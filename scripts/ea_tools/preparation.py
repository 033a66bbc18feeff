"""The part of its data's preparation that a run keeps, so that its model works when the data have moved or changed.

RUN/prepared holds the dictionaries, the codes that split words into subwords, PREP.json and a digest of all these.
The tools read them there, and refuse data that were prepared in another way.
"""

import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from ea_data.corpus import CODES
from ea_data.digest import digest_of
from ea_data.languages import language_in
from ea_tools.checkpoints import check_dictionaries, section
from ea_tools.common import UserError, read_json
from ea_tools.text import read_lines, read_prep

FOLDER = "prepared"  # in a run's folder
DIGEST = "DIGEST"  # the last file to be written there: a folder without it is not complete

_SIDES = ("source_lang", "target_lang")
# Settings in PREP.json for the way from text to subwords.
_SETTINGS = (*_SIDES, "tokenizer", "escape", "unicode", "lowercase", "bpe")
# Rules of data preparation that choose sentences, or whose effect is in the codes or in a setting: two corpora may
# differ in them.
_NOT_COMPARED = {"filter_on", "max_ratio", "max_length", "valid_every", "drop_test_overlap"}
_NOT_COMPARED |= {"merges", "vocabulary_threshold", "nfc"}


@dataclass(frozen=True)
class Preparation:
    """The preparation of one model's text: `folder` holds dictionaries, codes and PREP.json, `prep` is the latter."""

    folder: Path
    prep: dict


def files(folder: Path, prep: dict) -> list[Path]:
    """The files that a model needs: dictionaries, codes, and the list of allowed subwords where there is one."""
    names = [f"{kind}.{prep[side]}{end}" for kind, end in (("dict", ".txt"), ("vocabulary", "")) for side in _SIDES]
    return [folder / name for name in (*names, *CODES.values()) if (folder / name).is_file()]


def settings(prep: dict) -> dict:
    """The settings and rules that must agree, by name."""
    rules = {name: value for name, value in prep.get("rules", {}).items() if name not in _NOT_COMPARED}
    moses = {} if prep["tokenizer"] == "none" else {"languages": [language_in(prep, prep[side]) for side in _SIDES]}
    return {**rules, **moses, **{name: prep[name] for name in _SETTINGS if name in prep}}


def digest(folder: Path) -> str:
    """A digest of PREP.json and of the files beside it that a model needs."""
    return digest_of(folder, [folder / "PREP.json", *sorted(files(folder, read_prep(folder)))])[:16]


def fingerprint(data: Path) -> str:
    """A digest of the training data: the dictionaries, and the index of the binary text."""
    found = hashlib.sha256()
    for path in sorted([*data.glob("dict.*.txt"), *data.glob("train.*.idx")]):
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()[:16]


def keep(run: Path, data: Path) -> None:
    """Copy what a model of `data` needs into RUN/prepared, in one step; an earlier copy is replaced."""
    prep, kept = read_prep(data), run / FOLDER
    new, old = (run / f".{FOLDER}.{os.getpid()}.{kind}" for kind in ("new", "old"))
    try:
        new.mkdir(parents=True)
        for path in (data / "PREP.json", *files(data, prep)):
            shutil.copyfile(path, new / path.name)
        (new / DIGEST).write_text(digest(new) + "\n", encoding="utf-8")
        if kept.exists():
            kept.replace(old)
        new.replace(kept)
    finally:
        for folder in (new, old):
            shutil.rmtree(folder, ignore_errors=True)


def kept_by(run: Path) -> Preparation | None:
    """A run's kept preparation, or None where plain fairseq-train made the run."""
    folder = run / FOLDER
    if not (folder / DIGEST).is_file():
        return None
    stated, found = (folder / DIGEST).read_text(encoding="utf-8").strip(), digest(folder)
    if stated != found:
        raise UserError(
            f"{folder}: has been changed since the run began (digest {found}, at first {stated}); the model cannot be "
            "used with it. Remove the folder to use --data, or the data named in the checkpoint, at your own risk"
        )
    return Preparation(folder, read_prep(folder))


def require_same(kept: Preparation, data: Path, run: Path) -> None:
    """Refuse data that were prepared in another way than the run's training data, naming each difference."""
    prep = read_prep(data)
    ours, others = settings(kept.prep), settings(prep)
    differences = [
        f"{name}: the run's is {ours[name]}, that of {data} is {others[name]}"
        for name in sorted(ours.keys() & others.keys())  # a later version may record more than an earlier one did
        if ours[name] != others[name]
    ]
    names = sorted({path.name for path in (*files(kept.folder, kept.prep), *files(data, prep))})
    differences += [line for name in names if (line := file_difference(kept.folder / name, data / name))]
    if differences:
        raise UserError(
            f"{data} is not what {run} was trained on, or was prepared anew in another way:\n"
            + "\n".join(f"  {line}" for line in differences)
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
    lines, other_lines = read_lines(ours), read_lines(other)
    if len(lines) != len(other_lines):
        return f"{ours.name}: {len(lines):,} lines in the run's, {len(other_lines):,} in {other}"
    number = next(i for i, pair in enumerate(zip(lines, other_lines, strict=True), 1) if pair[0] != pair[1])
    return f"{ours.name}, line {number}: {lines[number - 1]!r} in the run's, {other_lines[number - 1]!r} in {other}"


def of_model(checkpoint: Path, state: dict, run: Path | None = None, data: Path | None = None) -> Preparation:
    """The preparation of text for the model in a checkpoint, whose contents are `state`.

    Args:
        run: the run's folder (default: the checkpoint's).
        data: prepared data that the model is to be used with; refused unless they fit the model.
    """
    run = run or checkpoint.parent
    if kept := kept_by(run):
        if data is not None:
            require_same(kept, data, run)
        own = checkpoint.parent  # another run's, where the checkpoint is one
        if own.resolve() != run.resolve() and (own / FOLDER / DIGEST).is_file():
            require_same(kept, own / FOLDER, run)
        _check_direction(checkpoint, state, kept)
        check_dictionaries(kept.folder, kept.prep, checkpoint, state, compare_words=False)
        return kept
    data = data or Path(section(state, "task").get("data") or "")
    prep = read_prep(data)
    _check_direction(checkpoint, state, Preparation(data, prep))
    check_dictionaries(data, prep, checkpoint, state)
    _check_fingerprint(run, data)
    return Preparation(data, prep)


def _check_direction(checkpoint: Path, state: dict, preparation: Preparation) -> None:
    trained, given = ([names.get(side) for side in _SIDES] for names in (section(state, "task"), preparation.prep))
    if all(trained) and trained != given:
        raise UserError(f"{checkpoint} translates {'-'.join(trained)}, and {preparation.folder} is {'-'.join(given)}")


def _check_fingerprint(run: Path, data: Path) -> None:
    """Compare data with the digest that run.json holds, if there is one; a run that was made before it kept more."""
    record = run / "run.json"
    if not record.is_file():
        return
    stated = read_json(record).get("identity", {}).get("data")
    if stated and stated != (found := fingerprint(data)):
        raise UserError(
            f"{data} is not what {run} was trained on, or was prepared anew: the digest of its dictionaries and "
            f"training text is {found}, and {record} says {stated}"
        )
    if stated:
        keep(run, data)
