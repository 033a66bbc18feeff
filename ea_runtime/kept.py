"""The part of its data's preparation that a run keeps: what its model needs to read and write text."""

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

#: In a run's folder, the part of its data's preparation that the run keeps.
KEPT = "prepared"
#: The last file to be written there: a folder without it is not complete.
DIGEST = "DIGEST"
#: Kind of subwords -> the file of codes that makes them.
CODES = {"subword_nmt": "code", "sentencepiece": "sentencepiece.bpe.model"}


def kept_by(run: Path) -> Path | None:
    """RUN/prepared, or None where plain fairseq-train made the run.

    Raises:
        ValueError: its files are missing, damaged, or not those of the run's beginning.
    """
    folder = run / KEPT
    if not (folder / DIGEST).is_file():
        return None
    expected, present = (folder / DIGEST).read_text(encoding="utf-8").strip(), "files that are missing or damaged"
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        present = digest(folder)
    if present != expected:
        raise ValueError(
            f"{folder}: has been changed since the run began (expected digest {expected}, found {present}); the model "
            "cannot be used with it. Remove the folder to use the data given, or named in the checkpoint, at your own "
            "risk"
        )
    return folder


def digest(folder: Path) -> str:
    """A digest of PREP.json and ``model_files``: 16 hexadecimal digits."""
    prep = json.loads((folder / "PREP.json").read_text(encoding="utf-8"))
    whole = hashlib.sha256()
    for path in (folder / "PREP.json", *sorted(model_files(folder, prep))):
        whole.update(path.name.encode() + b"\0" + bytes.fromhex(sha256(path)))
    return whole.hexdigest()[:16]


def sha256(path: Path) -> str:
    """The digest of a file, which may be large: 64 hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def model_files(folder: Path, prep: dict[str, Any]) -> list[Path]:
    """The files that a model needs: dictionaries, source first; lists of allowed subwords; codes."""
    languages = (prep["source_lang"], prep["target_lang"])
    names = [f"dict.{language}.txt" for language in languages] + [f"vocabulary.{language}" for language in languages]
    return [path for name in (*names, *CODES.values()) if (path := folder / name).is_file()]


def language_in(prep: dict[str, Any], code: str) -> str:
    """The language by whose rules Moses splits and joins text of this code, in data with this PREP.json."""
    # before PREP.json named languages, it was the code without region and script
    return prep.get("languages", {}).get(code, first_part(code))


def first_part(code: str) -> str:
    """A code of a language without region and script."""
    return code.split("_")[0].lower()
