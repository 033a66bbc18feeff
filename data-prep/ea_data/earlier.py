"""Earlier dictionaries and codes, for text that is prepared like theirs: custom.sh --like."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from .corpus import CODES, Rules
from .digest import digest_of
from .languages import language_in
from .text import PrepError

#: Rules that say how a line becomes what a model reads, beside those that PREP.json states by themselves; the others
#: choose lines.
ABOUT_TEXT = ("split_dashes", "normalise", "plain_apostrophes", "vocabulary_threshold")

#: The entries that PREP.json must have.
NEEDED = {"source_lang", "target_lang", "tokenizer", "lowercase", "bpe", "bpe_merges"}


@dataclass(frozen=True)
class Earlier:
    """A finished preparation: ``folder`` holds dictionaries, codes and PREP.json, ``prep`` is the latter's content."""

    folder: Path
    prep: dict

    @classmethod
    def at(cls, place: Path) -> Earlier:
        """The one that a run of scripts/train.sh keeps, or that of a folder of prepared data.

        Raises:
            PrepError: there is none, it is damaged, or it is not of two languages; the message names the folder.
        """
        folder = place / "prepared" if (place / "prepared" / "PREP.json").is_file() else place
        record = folder / "PREP.json"
        if not record.is_file():
            raise PrepError(
                f"--like {place}: has no PREP.json; name a run of scripts/train.sh, or data that data-prep/ prepared"
            )
        try:
            prep = json.loads(record.read_text(encoding="utf-8"))
        except ValueError as error:
            raise PrepError(f"--like {place}: {record} is damaged ({error})") from error
        if not (isinstance(prep, dict) and prep.keys() >= NEEDED and prep["bpe"] in CODES):
            raise PrepError(f"--like {place}: {record} is not of data for translation")
        earlier = cls(folder, prep)
        earlier.words()  # refused now, rather than after hours
        return earlier

    def require_languages(self, source: str, target: str) -> None:
        """Refuse languages other than its own.

        Raises:
            PrepError: names both pairs.
        """
        own = f"{self.prep['source_lang']}-{self.prep['target_lang']}"
        if own != f"{source}-{target}":
            raise PrepError(f"--like {self.folder}: is {own}, and the text is to be {source}-{target}")

    def rules(self, **others: object) -> Rules:
        """Its rules about text, and others about lines."""
        stated = self.prep.get("rules", {})
        rules = {name: stated[name] for name in ABOUT_TEXT if name in stated}
        rules |= {name: self.prep[name] for name in ("tokenizer", "lowercase", "bpe")}
        return Rules(**rules, nfc=self.unicode == "NFC", merges=self.prep["bpe_merges"], **others)

    @property
    def languages(self) -> tuple[str, str]:
        """The languages by whose rules Moses splits and joins its text, source first."""
        source, target = (language_in(self.prep, self.prep[side]) for side in ("source_lang", "target_lang"))
        return source, target

    @property
    def unicode(self) -> str:
        """The form that text is brought to, as PREP.json calls it."""
        return self.prep.get("unicode", "NFC")

    @property
    def escape(self) -> bool:
        """Whether its tokens have Moses' escapes, such as "&apos;"."""
        return self.prep.get("escape", True)

    def files(self) -> list[Path]:
        """The files that a model of these subwords needs: dictionaries, codes, lists of allowed subwords.

        Raises:
            PrepError: one of them is not there.
        """
        languages = (self.prep["source_lang"], self.prep["target_lang"])
        needed = [self.folder / name for name in (*(f"dict.{lang}.txt" for lang in languages), CODES[self.prep["bpe"]])]
        for path in needed:
            if not path.is_file():
                raise PrepError(f"--like: {path} is not there")
        allowed = (self.folder / f"vocabulary.{lang}" for lang in languages)
        return [*needed, *(path for path in allowed if path.is_file())]

    def words(self) -> list[str]:
        """The subwords of the dictionary that both languages share, in the order of their numbers.

        Raises:
            PrepError: the languages' dictionaries differ.
        """
        one, other = (path.read_bytes() for path in self.files()[:2])
        if one != other:
            raise PrepError(f"--like: the dictionaries of the two languages in {self.folder} differ, and must not")
        return [line.rsplit(" ", 1)[0] for line in one.decode().split("\n")[:-1]]

    def digest(self) -> str:
        """The digest of everything that decides the prepared text."""
        return digest_of(self.folder, self.files())
