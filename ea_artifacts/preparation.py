"""Prepared text: PREP.json, the files beside it that a model needs, and the copy of all these that a run keeps.

RUN/prepared holds the dictionaries, the codes that split words into subwords, PREP.json and a digest of all these. So a
model works when its data have moved or changed. Data preparation writes PREP.json; all others read it here.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .command import MissingError, UserError
from .files import read_lines, sha256

FILE = "PREP.json"
#: In a run's folder, the part of its data's preparation that the run keeps.
KEPT = "prepared"
#: The last file to be written there: a folder without it is not complete.
DIGEST = "DIGEST"
#: Kind of subwords -> the file of codes that makes them.
CODES = {"subword_nmt": "code", "sentencepiece": "sentencepiece.bpe.model"}
#: Entries that PREP.json must have -> their values; () for any word.
FORM: dict[str, tuple] = {
    **dict.fromkeys(("source_lang", "target_lang"), ()),
    "tokenizer": ("moses", "none", "given"),
    "lowercase": (True, False),
    "bpe": tuple(CODES),
}
#: Entries that earlier versions did not write -> their types.
LATER: dict[str, type] = {"name": str, "escape": bool, "unicode": str, "languages": dict, "rules": dict, "splits": dict}
# Rules that choose sentences, or whose effect is in the codes or in a setting: two corpora may differ in them.
_NOT_COMPARED = {"filter_on", "max_ratio", "max_length", "valid_every", "drop_test_overlap"}
_NOT_COMPARED |= {"merges", "vocabulary_threshold", "nfc"}
#: Corpora that a command of data-prep/ makes -> its words.
_COMMANDS = {
    **{name: f"{name}.sh" for name in ("sample", "multi30k", "iwslt14-de-en", "wmt14-en-de", "wmt14-en-fr")},
    **{f"multi30k-{pair}": f"multi30k.sh {pair}" for pair in ("de-en", "en-de", "en-fr")},
    "iwslt14-de-en-joint": "iwslt14-de-en.sh --joint-dictionary --out data/iwslt14-de-en-joint",
}


@dataclass(frozen=True)
class Preparation:
    """The preparation of the text in `folder`. A missing entry has the value that earlier versions had."""

    folder: Path
    source_lang: str  # as file names have it
    target_lang: str
    tokenizer: str  # moses, none, or given: the text came in tokens
    lowercase: bool
    bpe: str  # a key of CODES
    name: str  # of the corpus
    escape: bool  # tokens have Moses' escapes, such as "&apos;"
    unicode: str  # the form that text is brought to: "NFC" or "as given"
    merges: int | None
    moses: dict[str, str]  # language -> the one by whose rules Moses splits and joins its text
    rules: dict[str, Any]  # of ea_data.corpora.Rules, as far as they were recorded
    pairs: int | None  # of the training text

    @classmethod
    def at(cls, folder: Path | str) -> Preparation:
        """The preparation in a folder.

        Raises:
            UserError: PREP.json is missing or not of the form that data-prep/ writes.
        """
        folder = Path(folder)
        path = folder / FILE
        if not path.is_file():
            made_by = f" bash data-prep/{_COMMANDS[folder.name]} makes it" if folder.name in _COMMANDS else ""
            raise MissingError(f"{path}: no such file; is {folder} a folder made by data-prep/?{made_by}")
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{path}: not JSON: {error}; prepare the text again") from None
        for name, values in FORM.items():
            value = content.get(name) if isinstance(content, dict) else None
            if value not in values if values else not isinstance(value, str):
                expected = f"one of {', '.join(map(str, values))}" if values else "a language"
                raise UserError(f"{path}: {name}: expected {expected}, found {value!r}; prepare the text again")
        for name, kind in LATER.items():
            if name in content and not isinstance(content[name], kind):
                fault = f"expected a {kind.__name__}, found {content[name]!r}"
                raise UserError(f"{path}: {name}: {fault}; prepare the text again")
        train = content.get("splits", {}).get("train")
        return cls(
            folder,
            **{name: content[name] for name in FORM},
            name=content.get("name", folder.name),
            escape=content.get("escape", True),
            unicode=content.get("unicode", "NFC"),
            merges=content.get("bpe_merges"),
            moses=content.get("languages", {}),
            rules=content.get("rules", {}),
            pairs=train.get("pairs") if isinstance(train, dict) else None,
        )

    @classmethod
    def kept_by(cls, run: Path) -> Preparation | None:
        """The preparation that a run keeps, or None where plain fairseq-train made the run.

        Raises:
            UserError: its files are missing, damaged, or not those of the run's beginning.
        """
        folder = run / KEPT
        if not (folder / DIGEST).is_file():
            return None
        expected = (folder / DIGEST).read_text(encoding="utf-8").strip()
        try:
            kept = cls.at(folder)
            present = kept.digest()
        except (UserError, OSError, ValueError):
            present = "files that are missing or damaged"
        if present != expected:
            raise UserError(
                f"{folder}: has been changed since the run began (expected digest {expected}, found {present}); the "
                "model cannot be used with it. Remove the folder to use the data given, or named in the checkpoint, at "
                "your own risk"
            )
        return kept

    @classmethod
    def like(cls, place: Path) -> Preparation:
        """The complete preparation that a run of scripts/train.sh keeps, or that of a folder of prepared data."""
        preparation = cls.kept_by(place) or cls.at(place)
        preparation.check_dictionaries()  # now and not after hours
        return preparation

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language, as file names have them."""
        return self.source_lang, self.target_lang

    def moses_language(self, code: str) -> str:
        """The language by whose rules Moses splits and joins text of this code."""
        # before PREP.json named languages, it was the code without region and script
        return self.moses.get(code, first_part(code))

    @property
    def moses_languages(self) -> tuple[str, str]:
        """The languages by whose rules Moses splits and joins the text, source first."""
        return self.moses_language(self.source_lang), self.moses_language(self.target_lang)

    @property
    def separate_dictionaries(self) -> bool:
        """Whether each side has its own dictionary; in earlier versions the dictionary was always joint."""
        return self.rules.get("separate_dictionaries", False)

    def binary(self, split: str, language: str) -> Path:
        """The binary text of a split, without the ends .bin and .idx."""
        return self.folder / f"{split}.{self.source_lang}-{self.target_lang}.{language}"

    def files(self) -> list[Path]:
        """The files that a model needs: dictionaries, source first; lists of allowed subwords; codes."""
        names = [
            f"{kind}.{code}{end}" for kind, end in (("dict", ".txt"), ("vocabulary", "")) for code in self.languages
        ]
        # a language model's has two equal languages
        return [path for name in dict.fromkeys((*names, *CODES.values())) if (path := self.folder / name).is_file()]

    def digest(self) -> str:
        """A digest of PREP.json and `files`: 16 hexadecimal digits."""
        whole = hashlib.sha256()
        for path in (self.folder / FILE, *sorted(self.files())):
            whole.update(path.name.encode() + b"\0" + bytes.fromhex(sha256(path)))
        return whole.hexdigest()[:16]

    def check_dictionaries(self) -> None:
        """Raise UserError where codes or dictionaries are missing, fairseq would refuse them, or joint ones differ."""
        needed = [*(f"dict.{code}.txt" for code in self.languages), CODES[self.bpe]]
        for name in needed:
            if not (self.folder / name).is_file():
                raise UserError(f"{self.folder / name}: no such file; prepare that text again")
        sides = [_entries(self.folder / name) for name in needed[:2]]
        if sides[0] != sides[1] and not self.separate_dictionaries:
            raise UserError(f"{self.folder}: the dictionaries of its two languages differ; prepare that text again")

    def settings(self) -> dict[str, Any]:
        """The way from text to subwords, by name; two preparations must agree in it."""
        rules = {name: value for name, value in self.rules.items() if name not in _NOT_COMPARED}
        moses = {} if self.tokenizer == "none" else {"languages": self.moses_languages}
        return {**rules, **moses, **{name: getattr(self, name) for name in (*FORM, "escape", "unicode")}}

    def keep(self, run: Path) -> None:
        """Copy the files that a model needs into RUN/prepared, in one step; an earlier copy is replaced."""
        kept = run / KEPT
        new, old = (run / f".{KEPT}.{os.getpid()}.{kind}" for kind in ("new", "old"))
        try:
            new.mkdir(parents=True)
            for path in (self.folder / FILE, *self.files()):
                shutil.copyfile(path, new / path.name)
            (new / DIGEST).write_text(Preparation.at(new).digest() + "\n", encoding="utf-8")
            if kept.exists():
                kept.replace(old)
            new.replace(kept)
        finally:
            for folder in (new, old):
                shutil.rmtree(folder, ignore_errors=True)

    def require_same(self, data: Preparation, run: Path) -> None:
        """Refuse data that were prepared in another way than this, `run`'s own, naming each difference."""
        ours, others = self.settings(), data.settings()
        differences = [
            f"{name}: the run's is {ours[name]}, that of {data.folder} is {others[name]}"
            for name in sorted(ours.keys() & others.keys())  # a later version may record more than an earlier one did
            if ours[name] != others[name]
        ]
        names = sorted({path.name for path in (*self.files(), *data.files())})
        differences += [line for name in names if (line := file_difference(self.folder / name, data.folder / name))]
        if differences:
            raise UserError(
                f"{data.folder} is not what {run} was trained on, or was prepared anew in another way:\n"
                + "\n".join(f"  {line}" for line in differences)
                + f"\nGive the data of its training, or prepare these with custom.sh --like {run}"
            )


def _entries(dictionary: Path) -> list[str]:
    """The lines of a dictionary; a UserError names the first that fairseq would not take."""
    entries, words = [], {"<s>", "<pad>", "</s>", "<unk>"}  # which fairseq adds itself
    for number, line in enumerate(dictionary.read_bytes().split(b"\n")[:-1], 1):
        expected = "expected a subword and its count"
        try:
            entries.append(line.decode())
            word, count = entries[-1].removesuffix(" #fairseq:overwrite").rsplit(" ", 1)
            int(count)
            if word in words and not entries[-1].endswith(" #fairseq:overwrite"):
                expected = "expected each subword once"
                raise ValueError
        except ValueError:
            raise UserError(f"{dictionary}:{number}: {expected}, found {line!r}; prepare that text again") from None
        words.add(word)
    return entries


def one_side(folder: Path, language: str) -> dict[str, Any]:
    """The content of PREP.json for one language of prepared text, as language models have it."""
    content = json.loads((folder / FILE).read_text(encoding="utf-8"))
    names = ("name", "tokenizer", "escape", "unicode", "lowercase", "bpe", "rules", "languages")
    kept = {name: content[name] for name in names if name in content}
    return {**kept, "source_lang": language, "target_lang": language}


def first_part(code: str) -> str:
    """A code of a language without region and script."""
    return code.split("_")[0].lower()


def fingerprint(data: Path) -> str:
    """A digest of the training data: the dictionaries, and the index of the binary text."""
    digest = hashlib.sha256()
    for path in sorted([*data.glob("dict.*.txt"), *data.glob("train.*.idx")]):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


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
