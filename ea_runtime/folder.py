"""Reads an exported model's folder: the one place that does, with one error for whatever cannot be used."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_artifacts.command import UserError
from ea_artifacts.files import sha256
from ea_artifacts.preparation import FILE
from ea_runtime.search import Settings, check_whole

if TYPE_CHECKING:
    from ea_runtime.text import Text

#: The version of the folder's layout that this package reads.
FORMAT = 1
#: Task -> its graphs.
GRAPHS = {"translation": ("encoder.onnx", "decoder.onnx"), "language_modeling": ("decoder.onnx",)}
#: fairseq's special symbols, which its dictionaries do not list; their places are their ids
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")


class ExportError(UserError):
    """The folder holds no usable model; the message names the file and says what to do."""


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Whatever fails in this context is an ExportError that names the file."""
    try:
        yield
    except ExportError:
        raise
    except FileNotFoundError:
        raise ExportError(f"{path}: no such file; export the model again") from None
    except Exception as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise ExportError(f"{path}: damaged ({reason}); export the model again") from None


@dataclass(frozen=True)
class Export:
    """An exported model's folder. Its methods raise ExportError for a file that cannot be used."""

    folder: Path

    def verify(self) -> None:
        """Raise ExportError unless all files that are read are listed, and all that are listed are whole."""
        for name, digest in self.digests.items():
            path = self.folder / name
            with reading(path):
                if sha256(path) != digest:
                    raise ExportError(f"{path}: damaged, or of another export than model.json; export the model again")
        # A file that lies there and is not listed comes from another export, and would be read all the same.
        used = {path.name for path in self.text.files} | set(self.description["dictionaries"].values())
        if unlisted := sorted((used | set(GRAPHS[self.task])) - self.digests.keys()):
            raise ExportError(
                f"{self.folder / unlisted[0]}: model.json does not list it, so it is of another export; export the "
                "model again, to a new folder"
            )

    @cached_property
    def description(self) -> dict[str, Any]:
        """model.json."""
        path = self.folder / "model.json"
        if not path.is_file():
            raise ExportError(
                f"{path}: no such file; {self.folder} is no exported model: make one by scripts/export.sh"
            )
        with reading(path):
            description = json.loads(path.read_text(encoding="utf-8"))
            version = description["format"]
            check_whole("format", version)
            if version > FORMAT:
                raise ExportError(f"{path}: format {version}, but this version reads up to {FORMAT}; update ea_runtime")
            _check(description)
            return description

    @property
    def task(self) -> str:
        """One of ``GRAPHS``."""
        return self.description.get("task", "translation")

    @property
    def digests(self) -> dict[str, str]:
        """File -> its digest."""
        return self.description["digests"]

    @cached_property
    def text(self) -> Text:
        """Rules for text in the source language, and for making text of the model's words."""
        from ea_runtime.text import Text  # here: --help needs none of the packages that split text

        with reading(self.folder / FILE):
            text = Text(self.folder)
            text.detokenize(text.join(text.subwords("a")))  # else some faults would show at the first sentence
            return text

    def dictionary(self, side: str) -> list[str]:
        """The words of a side, "source" or "target", by their ids; fairseq's special symbols first."""
        path = self.folder / self.description["dictionaries"][side]
        with reading(path):
            words = list(SPECIAL)
            for line in path.read_text(encoding="utf-8").removesuffix("\n").split("\n"):
                word, count = line.removesuffix(" #fairseq:overwrite").rsplit(" ", 1)
                check_whole(f"{word}: count", int(count), 0)
                words.append(word)
            return words


def _check(description: dict[str, Any]) -> None:
    """Raise an exception for an entry of model.json that no model can have."""
    if description.get("task", "translation") not in GRAPHS:
        raise ValueError(f"task {description['task']!r}: expected one of {', '.join(GRAPHS)}")
    for name, keys in (("dictionaries", ["source", "target"]), ("digests", None)):
        entries = description[name]
        if not isinstance(entries, dict) or keys not in (None, sorted(entries)):
            raise ValueError(f"{name}: expected entries {' and '.join(keys or ['of files'])}, not {entries!r}")
        for file in entries.values() if keys else entries:
            if not isinstance(file, str) or Path(file).name != file:
                raise ValueError(f"{name}: expected a file of the folder, not {file!r}")
    positions = description["max_positions"]
    if not isinstance(positions, list) or len(positions) != 2:
        raise ValueError(f"max_positions: expected two numbers, not {positions!r}")
    for most in positions:
        check_whole("max_positions", most, 2)  # a word, and the end of the sentence
    Settings(**description["search"])
