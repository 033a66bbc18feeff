"""What was learnt on other text before, for text that is prepared like it: custom.sh --like."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from .corpus import Rules
from .text import PrepError

#: Rules that say how a line becomes what a model reads; the others choose lines.
ABOUT_TEXT = ("tokenizer", "lowercase", "split_dashes", "normalise", "plain_apostrophes", "bpe", "vocabulary_threshold")

#: What PREP.json must say for that.
NEEDED = {"source_lang", "target_lang", "tokenizer", "lowercase", "bpe", "bpe_merges"}


@dataclass(frozen=True)
class Earlier:
    """A finished preparation: ``folder`` holds dictionaries, codes and PREP.json, ``prep`` is what the latter says."""

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
        if not (isinstance(prep, dict) and prep.keys() >= NEEDED):
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
    def unicode(self) -> str:
        """The form that text is brought to, as PREP.json calls it."""
        return self.prep.get("unicode", "NFC")

    def files(self) -> dict[str, bytes]:
        """What a model of these subwords cannot do without, by name: dictionaries, codes, lists of allowed subwords.

        Raises:
            PrepError: one of them is not there.
        """
        languages = (self.prep["source_lang"], self.prep["target_lang"])
        dictionaries = [f"dict.{lang}.txt" for lang in languages]
        codes = "sentencepiece.bpe.model" if self.prep["bpe"] == "sentencepiece" else "code"
        allowed = [f"vocabulary.{lang}" for lang in languages if (self.folder / f"vocabulary.{lang}").is_file()]
        for name in (*dictionaries, codes):
            if not (self.folder / name).is_file():
                raise PrepError(f"--like: {self.folder / name} is not there")
        return {name: (self.folder / name).read_bytes() for name in (*dictionaries, codes, *allowed)}

    def words(self) -> list[str]:
        """The subwords of the dictionary that both languages share, in the order of their numbers.

        Raises:
            PrepError: the languages' dictionaries differ.
        """
        one, other = (content for name, content in self.files().items() if name.startswith("dict."))
        if one != other:
            raise PrepError(f"--like: the dictionaries of the two languages in {self.folder} differ, and must not")
        return [line.rsplit(" ", 1)[0] for line in one.decode().split("\n")[:-1]]

    def digest(self) -> str:
        """Of everything that decides what text becomes."""
        found = hashlib.sha256()
        for name, content in sorted(self.files().items()):
            found.update(name.encode() + b"\0" + hashlib.sha256(content).digest())
        return found.hexdigest()
