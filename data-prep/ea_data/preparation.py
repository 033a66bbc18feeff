"""A finished preparation of text: PREP.json, and the files beside it that a model needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ea_runtime import kept

from .command_line import UserError
from .corpora import PUBLIC
from .corpus import Rules

SIDES = ("source_lang", "target_lang")
#: Entries that PREP.json must have -> their values; () for any word.
FORM: dict[str, tuple] = {
    **dict.fromkeys(SIDES, ()),
    "tokenizer": ("moses", "none", "given"),
    "lowercase": (True, False),
    "bpe": tuple(kept.CODES),
}
#: Rules for a line of text that PREP.json states under "rules" alone; the other rules there choose lines.
ABOUT_TEXT = ("split_dashes", "normalise", "plain_apostrophes", "vocabulary_threshold", "separate_dictionaries")


@dataclass(frozen=True)
class Preparation:
    """`folder` holds dictionaries, codes and PREP.json; `prep` is the content of PREP.json."""

    folder: Path
    prep: dict[str, Any]

    @classmethod
    def at(cls, folder: Path) -> Preparation:
        """The preparation in a folder.

        Raises:
            UserError: PREP.json is missing or not of the form that data-prep/ writes.
        """
        return cls(folder, read_prep(folder))

    @classmethod
    def kept_by(cls, run: Path) -> Preparation | None:
        """The preparation that a run keeps, or None where plain fairseq-train made the run.

        Raises:
            UserError: it has been changed since.
        """
        try:
            folder = kept.kept_by(run)
        except ValueError as error:
            raise UserError(str(error)) from None
        return None if folder is None else cls.at(folder)

    @classmethod
    def like(cls, place: Path) -> Preparation:
        """The complete preparation that a run of scripts/train.sh keeps, or that of a folder of prepared data."""
        preparation = cls.kept_by(place) or cls.at(place)
        preparation.words()  # a missing file is reported now and not after hours
        return preparation

    @property
    def languages(self) -> tuple[str, str]:
        """Source and target language, as file names have them."""
        return self.prep["source_lang"], self.prep["target_lang"]

    @property
    def moses_languages(self) -> tuple[str, str]:
        """The languages by whose rules Moses splits and joins the text, source first."""
        source, target = (kept.language_in(self.prep, code) for code in self.languages)
        return source, target

    @property
    def unicode(self) -> str:
        """The form of Unicode that text is brought to: "NFC" or "as given"."""
        return self.prep.get("unicode", "NFC")

    @property
    def escape(self) -> bool:
        """Whether tokens have Moses' escapes, such as "&apos;"."""
        return self.prep.get("escape", True)

    def files(self) -> list[Path]:
        """The files that a model needs; see ``ea_runtime.kept.model_files``."""
        return kept.model_files(self.folder, self.prep)

    def digest(self) -> str:
        """A digest of PREP.json and `files`."""
        return kept.digest(self.folder)

    @property
    def separate_dictionaries(self) -> bool:
        """Whether each side has a dictionary of its own; earlier versions knew a joint one alone."""
        return self.prep.get("rules", {}).get("separate_dictionaries", False)

    def words(self) -> list[list[str]]:
        """The subwords of each side's dictionary, source first, in the order of their numbers.

        Raises:
            UserError: a dictionary or the codes are missing, or the dictionaries differ where they should not.
        """
        needed = [*(f"dict.{code}.txt" for code in self.languages), kept.CODES[self.prep["bpe"]]]
        for name in needed:
            if not (self.folder / name).is_file():
                raise UserError(f"{self.folder / name}: no such file; prepare that text again")
        sides = [(self.folder / name).read_text(encoding="utf-8").split("\n")[:-1] for name in needed[:2]]
        if sides[0] != sides[1] and not self.separate_dictionaries:
            raise UserError(f"{self.folder}: the dictionaries of its two languages differ; prepare that text again")
        return [[line.rsplit(" ", 1)[0] for line in lines] for lines in sides]

    def rules(self, **about_lines: object) -> Rules:
        """Its rules for a line of text, with other rules that choose lines."""
        stated = self.prep.get("rules", {})
        rules = {name: stated[name] for name in ABOUT_TEXT if name in stated}
        rules |= {name: self.prep[name] for name in ("tokenizer", "lowercase", "bpe")}
        return Rules(**rules, nfc=self.unicode == "NFC", merges=self.prep["bpe_merges"], **about_lines)


def read_prep(folder: Path | str) -> dict[str, Any]:
    """The content of FOLDER/PREP.json, which data-prep/ writes last; see `Preparation.at`."""
    path = Path(folder) / "PREP.json"
    if not path.is_file():
        raise UserError(f"{path}: no such file; is {folder} a folder made by data-prep/?{_made_by(Path(folder).name)}")
    try:
        prep = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}; prepare the text again") from None
    for name, values in FORM.items():
        value = prep.get(name) if isinstance(prep, dict) else None
        if value not in values if values else not isinstance(value, str):
            expected = f"one of {', '.join(map(str, values))}" if values else "a language"
            raise UserError(f"{path}: {name}: expected {expected}, found {value!r}; prepare the text again")
    return prep


def _made_by(name: str) -> str:
    """The command that makes a corpus of this name, where it is a public one."""
    commands = {f"{corpus}-{pair}": f"{corpus}.sh {pair}" for corpus, (_, pairs) in PUBLIC.items() for pair in pairs}
    commands |= {corpus: f"{corpus}.sh" for corpus in ("sample", *PUBLIC)}
    joint = "iwslt14-de-en-joint"  # the recipe iwslt14-de-en-rdrop's
    commands[joint] = f"iwslt14-de-en.sh --joint-dictionary --out data/{joint}"
    return f" bash data-prep/{commands[name]} makes it" if name in commands else ""
