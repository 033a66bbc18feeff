"""Lines of text files, and the raw text of prepared data in words."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ea_data.command_line import UserError, explained
from ea_data.preparation import read_prep  # noqa: F401  (commands take it from here)
from ea_data.text import wide_encoding
from ea_runtime.kept import language_in


def read_lines(path: Path | str) -> list[str]:
    """The lines of a UTF-8 file without their ends; only a line feed ends a line (never U+2028 or its relatives)."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise UserError(explained(error)) from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    return [decode(line, path, number) for number, line in enumerate(lines, 1)]


def decode(line: bytes, path: Path | str, number: int) -> str:
    """One line of bytes as text without its end, or an error that names the file and the line's number.

    A carriage return inside the line becomes a space, as in prepared data.
    """
    if number == 1 and (encoding := wide_encoding(line)):
        raise UserError(f"{path}:{number}: not UTF-8 but {encoding}; convert it first: iconv -f {encoding} -t UTF-8")
    if b"\0" in line:
        raise UserError(
            f"{path}:{number}: a NUL byte; is the file damaged? If it is UTF-16: iconv -f UTF-16LE -t UTF-8"
        )
    try:
        text = line.removesuffix(b"\n").removesuffix(b"\r").replace(b"\r", b" ").decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start + 1}") from None
    return text.removeprefix("\ufeff") if number == 1 else text  # a byte-order mark is no part of the text


def digest(lines: Sequence[str]) -> str:
    """A digest that tells two texts apart, such as the references of two scores."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def as_written(path: Path, prep: dict[str, Any], language: str) -> list[str]:
    """The lines of a file in DATA/raw as people write them.

    Text that came in tokens is in tokens there, too, and is detokenised. Text of a corpus in Unicode's form NFC is
    brought to NFC, since a model cannot write any other.
    """
    from ea_runtime.text import composed, words_of

    lines = read_lines(path)
    if prep["tokenizer"] == "given":
        return list(map(words_of(prep, language).detokenize, lines))
    return [composed(line) for line in lines] if prep.get("rules", {}).get("nfc") else lines


def references(path: Path, prep: dict[str, Any]) -> tuple[list[str], list[str]]:
    """The lines of a file in DATA/raw on the target side, twice: as people write them, and in tokens."""
    from ea_runtime.text import Normalizer, words_of

    language, rules = prep["target_lang"], prep.get("rules", {})
    written = as_written(path, prep, language)
    if prep["tokenizer"] == "given":
        return written, read_lines(path)
    lines = written
    was_training_text = rules.get("valid_every") and path.name.startswith("valid.")
    if was_training_text and rules.get("normalise"):
        lines = list(map(Normalizer(language_in(prep, language)).clean, lines))
    if rules.get("plain_apostrophes") and not was_training_text:
        lines = [line.replace("’", "'") for line in lines]
    return written, list(map(words_of(prep, language).tokenize, lines))
