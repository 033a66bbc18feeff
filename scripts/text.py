"""Raw text to a prepared folder's tokens and back, as its PREP.json says."""

import json
from pathlib import Path

from sacremoses import MosesDetokenizer, MosesTokenizer


class PrepError(Exception):
    """A prepared data folder that cannot be used; the message names the file."""


def read_prep(data):
    """The contents of DATA/PREP.json, which data-prep/ writes last, when everything else is in place."""
    path = Path(data) / "PREP.json"
    try:
        prep = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PrepError(f"{path}: no such file; is {data} a folder made by data-prep/?") from None
    except ValueError as error:
        raise PrepError(f"{path}: not JSON: {error}") from None
    missing = [key for key in ("source_lang", "target_lang", "tokenizer", "lowercase", "bpe") if key not in prep]
    if missing:
        raise PrepError(f"{path}: has no {', '.join(missing)}")
    if prep["tokenizer"] != "moses":
        raise PrepError(f"{path}: tokenizer {prep['tokenizer']!r} is not known here (moses is)")
    return prep


def read_lines(path):
    """The lines of a UTF-8 file without their ends; only a line feed ends a line (never U+2028 and its like)."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PrepError(f"{path}: {error.strerror}") from None
    lines = content.removesuffix(b"\n").split(b"\n") if content else []
    decoded = []
    for number, line in enumerate(lines, 1):
        try:
            decoded.append(line.removesuffix(b"\r").decode("utf-8"))
        except UnicodeDecodeError as error:
            raise PrepError(f"{path}:{number}: not UTF-8: {error.reason} at byte {error.start}") from None
    return decoded


class Moses:
    """Moses tokens of one language, with the options that the data were prepared with."""

    def __init__(self, prep, language):
        self._tokenizer, self._detokenizer = MosesTokenizer(language), MosesDetokenizer(language)
        self._split_dashes = prep.get("rules", {}).get("split_dashes", False)

    def tokenize(self, line):
        """Raw text to tokens with spaces between."""
        return self._tokenizer.tokenize(line, aggressive_dash_splits=self._split_dashes, return_str=True)

    def detokenize(self, line):
        """Tokens with spaces between to raw text."""
        return self._detokenizer.detokenize(line.split())
