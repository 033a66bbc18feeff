"""The raw text of prepared data, as people write it and in words."""

from __future__ import annotations

from pathlib import Path

from ea_artifacts.files import read_lines
from ea_artifacts.preparation import Preparation


def as_written(path: Path, data: Preparation, language: str) -> list[str]:
    """The lines of a file in DATA/raw as people write them.

    Text that came in tokens is in tokens there, too, and is detokenised. Text of a corpus in Unicode's form NFC is
    brought to NFC, since a model cannot write any other.
    """
    from ea_runtime.text import composed, words_of

    lines = read_lines(path)
    if data.tokenizer == "given":
        return list(map(words_of(data, language).detokenize, lines))
    return [composed(line) for line in lines] if data.rules.get("nfc") else lines


def references(path: Path, data: Preparation) -> tuple[list[str], list[str]]:
    """The lines of a file in DATA/raw on the target side, twice: as people write them, and in tokens."""
    from ea_runtime.text import Normalizer, words_of

    language, rules = data.target_lang, data.rules
    written = as_written(path, data, language)
    if data.tokenizer == "given":
        return written, read_lines(path)
    lines = written
    was_training_text = rules.get("valid_every") and path.name.startswith("valid.")
    if was_training_text and rules.get("normalise"):
        lines = list(map(Normalizer(data.moses_language(language)).clean, lines))
    if rules.get("plain_apostrophes") and not was_training_text:
        lines = [line.replace("’", "'") for line in lines]
    return written, list(map(words_of(data, language).tokenize, lines))
