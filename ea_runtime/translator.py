"""Translates text with an exported model: a folder that scripts/export.sh wrote.

Axes: N sentences, S source length, R = N x beams hypotheses.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ea_runtime.kept import sha256
from ea_runtime.search import Hypothesis, Settings, check_n_best, check_whole, search

if TYPE_CHECKING:
    from ea_runtime.text import Text

logger = logging.getLogger(__name__)

#: The version of the folder's layout that this package reads.
FORMAT = 1
#: Entries that model.json must have, and their types.
FORM = {"format": int, "digests": dict, "dictionaries": dict, "search": dict, "max_positions": list}
#: fairseq's special symbols, which its dictionaries do not list; their places are their ids
SPECIAL = ("<s>", "<pad>", "</s>", "<unk>")
BOS, PAD, EOS, UNK = range(4)
#: The most entries of a batch's maps, N x S x S, in each head: 32 sentences of 181 tokens, one of 1,024.
ENTRIES = 2**20


class ExportError(Exception):
    """The folder holds no usable model; the message names the file and says what to do."""


class Model:
    """An exported decoder with its text rules. Several threads may share one.

    Args:
        folder: as scripts/export.sh wrote it.
        threads: of one call; default: one for each core.

    Raises:
        ExportError: the folder is no export of this kind, or files of it are damaged, or of another export, or too new.
        ValueError: threads is below 1.
    """

    TASK: str

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        if threads is not None:
            check_whole("threads", threads)
        self.folder = Path(folder)
        self.description = describe(self.folder)
        if (task := task_of(self.description)) != self.TASK:
            raise ExportError(f"{folder}: is a model for {task}; {type(self).__name__} takes one for {self.TASK} alone")
        from ea_runtime.text import Text  # here: --help needs none of the packages that split text

        self.text = Text(self.folder)
        names = self.description["dictionaries"]
        self._source, self._target = (_dictionary(self.folder / names[side]) for side in ("source", "target"))
        self._ids = {word: number for number, word in enumerate(self._source)}
        self._longest = self.description["max_positions"]  # source, target
        self._symbols = {"words": len(self._target), "eos": EOS, "pad": PAD, "unk": UNK}
        self._decoder = _session(self.folder / "decoder.onnx", threads)

    def settings(self, given: dict[str, Any]) -> Settings:
        """The export's settings with these in their place; None stands for the export's."""
        known = {field.name for field in fields(Settings)}
        if unknown := given.keys() - known:
            names, there = ", ".join(sorted(unknown)), ", ".join(sorted(known))
            raise ValueError(f"{names}: no setting of this search, which has {there}")
        return Settings(**{**self.description["search"], **{name: x for name, x in given.items() if x is not None}})

    def _tokens(self, line: str, number: int) -> list[int]:
        """Ids of a line's subwords, and the end of the sentence."""
        if not isinstance(line, str):
            raise ValueError(f"line {number}: expected text, not {type(line).__name__}")
        if "\n" in line.rstrip("\n"):
            raise ValueError(f"line {number}: it has a line break inside; give one sentence a line")
        ids = [self._ids.get(word, UNK) for word in self.text.subwords(line.rstrip("\n")).split()]
        room = self._longest[0] - 1
        if len(ids) > room:
            logger.warning("line %d: %d subwords, but the model reads %d; the rest is left out", number, len(ids), room)
        return [*ids[:room], EOS]

    def _sources(self, lines: Iterable[str], first: int) -> list[list[int]]:
        """Token ids of each line; messages number the lines from `first` on."""
        if isinstance(lines, str):
            raise ValueError("lines: expected several, such as [line], not one text")
        return [self._tokens(line, number) for number, line in enumerate(lines, first)]

    def words(self, tokens: Iterable[int]) -> str:
        """Target words, their subwords joined, of token ids."""
        return self.text.join(" ".join(self._target[token] for token in tokens if token != BOS))

    def _text(self, hypothesis: Hypothesis) -> str:
        return self.text.detokenize(self.words(hypothesis.tokens))


class Translator(Model):
    """An exported translation model with its text rules; see ``Model``."""

    TASK = "translation"

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        super().__init__(folder, threads)
        self._encoder = _session(self.folder / "encoder.onnx", threads)

    def translate(
        self,
        lines: str | Iterable[str],
        beam: int | None = None,
        lenpen: float | None = None,
        n_best: int = 1,
        batch: int = 32,
        prefixes: Sequence[str] | None = None,
        **settings: Any,
    ) -> str | list[str] | list[list[tuple[str, float]]]:
        """Translate raw text: a sentence, or several in order; empty ones stay empty.

        Args:
            lines: raw text, a sentence each.
            beam: width of the search; default: the export's, 5.
            lenpen: length penalty; above 1 favours longer translations.
            n_best: how many translations of each sentence; above 1, lists of (text, score) are returned. A score is
                the natural log-probability over length.
            batch: how many sentences the model reads together; fewer where they are long.
            prefixes: for each line, raw text that its translation begins with. As with fairseq, ``min_len`` does not
                hold while any line of a batch still has a prefix.
            settings: more of ``Settings``.

        Raises:
            ValueError: a setting that is unknown or out of range, or a line that is no line of text.
        """
        if isinstance(lines, str):
            return self.translate([lines], beam, lenpen, n_best, batch, prefixes, **settings)[0]
        translations = self.scored(lines, beam, lenpen, n_best, batch, prefixes, **settings)
        return translations if n_best > 1 else [best[0][0] if best else "" for best in translations]

    def scored(
        self,
        lines: Iterable[str],
        beam: int | None = None,
        lenpen: float | None = None,
        n_best: int = 1,
        batch: int = 32,
        prefixes: Sequence[str] | None = None,
        first: int = 1,
        **settings: Any,
    ) -> list[list[tuple[str, float]]]:
        """``translate`` with a list of (text, score) for each line, whatever n_best is; empty for an empty line.

        Messages number the lines from `first` on.
        """
        check_whole("batch", batch)
        sources = self._sources(lines, first)
        if prefixes is not None and (isinstance(prefixes, str) or [*map(type, prefixes)] != [str] * len(sources)):
            raise ValueError(f"prefixes: expected a list of one for each of {len(sources)} lines, not {prefixes!r}")
        search_settings = self.settings({"beam": beam, "lenpen": lenpen, **settings})
        check_n_best(n_best, search_settings.beam)
        forced = None if prefixes is None else self._forced(prefixes)
        numbers = [n for n, source in enumerate(sources) if len(source) > 1]
        prefixed = None if forced is None else [forced[n] for n in numbers]
        searched = self.search_all([sources[n] for n in numbers], search_settings, batch, prefixed)
        results = dict(zip(numbers, searched, strict=True))
        return [[(self._text(one), one.score) for one in results.get(n, [])[:n_best]] for n in range(len(sources))]

    def search_all(
        self, sources: Sequence[Sequence[int]], settings: Settings, batch: int, prefixes: list[list[int]] | None = None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sentences that are token ids, in batches by length."""
        results: list[list[Hypothesis]] = [[] for _ in sources]
        by_length = sorted(range(len(sources)), key=lambda n: -len(sources[n]))
        while by_length:
            size = min(batch, max(1, ENTRIES // len(sources[by_length[0]]) ** 2))
            numbers, by_length = by_length[:size], by_length[size:]
            of = None if prefixes is None else [prefixes[n] for n in numbers]
            searched = self.search_ids([sources[n] for n in numbers], settings, of)
            for n, hypotheses in zip(numbers, searched, strict=True):
                results[n] = hypotheses
        return results

    @cached_property
    def _target_text(self) -> tuple[Text, dict[str, int]]:
        """Rules for text in the target language, and ids of its subwords; few callers give prefixes."""
        from ea_runtime.text import Text

        ids = {word: number for number, word in enumerate(self._target)}
        return Text(self.folder, self.text.prep["target_lang"]), ids

    def _forced(self, prefixes: Sequence[str]) -> list[list[int]]:
        text, ids = self._target_text
        return [[ids.get(word, UNK) for word in text.subwords(prefix).split()] for prefix in prefixes]

    def search_ids(
        self, sources: list[list[int]], settings: Settings, prefixes: list[list[int]] | None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sentences that are token ids, the end included, best first."""
        length = max(map(len, sources))
        tokens = np.full((len(sources), length), PAD, np.int64)
        for row, source in zip(tokens, sources, strict=True):
            row[length - len(source) :] = source  # padded on the left, as fairseq does
        names = [value.name for value in self._encoder.get_outputs()]
        source = dict(zip(names, self._encoder.run(names, {"tokens": tokens}), strict=True))
        steps = Steps(self._decoder, {**source, "padding": tokens == PAD})
        max_len = settings.max_len(length, self._longest[1])
        return search(steps, len(sources), max_len, settings, **self._symbols, prefixes=prefixes)


class Steps:
    """The decoder's steps of one batch.

    Args:
        session: of decoder.onnx.
        source: by the names of the graph, the encoder's outputs, N x heads x S x head size each; and padding: N x S,
            True = masked.
    """

    def __init__(self, session: onnxruntime.InferenceSession, source: dict[str, NDArray]) -> None:
        self._session, self._outputs = session, [value.name for value in session.get_outputs()]
        self._source, self._values = source, {}

    def __call__(
        self,
        tokens: NDArray,
        position: int,
        order: NDArray,
        kept: NDArray | None,
        bias: NDArray,
        top: int,
        forced: NDArray,
    ) -> tuple[NDArray, NDArray]:
        """See ``search.Step``."""
        if position == 0:
            self._values = self._empty(tokens.size)
        if kept is not None:
            self._source = {name: x[kept] for name, x in self._source.items()}
        given = {"tokens": tokens, "step": np.array([position]), "order": order, "forced": forced, "bias": bias}
        given |= {"top": np.zeros(top, np.float32), **self._source, **self._values}
        best, words, *caches = self._session.run(self._outputs, given)
        self._values = {name.removeprefix("next_"): x for name, x in zip(self._outputs[2:], caches, strict=True)}
        return best, words

    def _empty(self, hypotheses: int) -> dict[str, NDArray]:
        """The caches before the first step: of no positions, and zeros above the source's map."""
        caches = {}
        for value in self._session.get_inputs():
            if f"next_{value.name}" in self._outputs:
                _, heads, *rest = value.shape
                known = [size if isinstance(size, int) else 0 for size in rest]
                if value.name.startswith("source_rows"):
                    known[-1] = self._source["padding"].shape[1]
                caches[value.name] = np.zeros((hypotheses, heads, *known), np.float32)
        return caches


def task_of(description: dict[str, Any]) -> str:
    """ "translation" or "language_modeling"."""
    return description.get("task", "translation")


def describe(folder: Path) -> dict[str, Any]:
    """model.json, after a look at all files that it names."""
    path = folder / "model.json"
    if not path.is_file():
        raise ExportError(f"{path}: no such file; {folder} is no exported model: make one with scripts/export.sh")
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ExportError(f"{path}: damaged ({error}); export the model again") from None
    version = description.get("format") if isinstance(description, dict) else None
    if isinstance(version, int) and version > FORMAT:
        raise ExportError(f"{path}: format {version}, but this version reads up to {FORMAT}; update ea_runtime")
    for name, kind in FORM.items():
        value = description.get(name) if isinstance(description, dict) else None
        if not isinstance(value, kind):
            raise ExportError(
                f"{path}: {name}: expected {kind.__name__}, found {type(value).__name__}; export the model again"
            )
    try:
        Settings(**description["search"])
    except (TypeError, ValueError) as error:
        raise ExportError(f"{path}: search: {error}; correct it, or export the model again") from None
    digests = description["digests"]
    needed = {"decoder.onnx", "PREP.json", *description["dictionaries"].values()}
    if missing := sorted(needed - digests.keys()):
        raise ExportError(f"{path}: digests: {missing[0]} is missing; export the model again")
    for name, expected in digests.items():
        if not (folder / name).is_file():
            raise ExportError(f"{folder / name}: no such file; export the model again")
        if sha256(folder / name) != expected:
            raise ExportError(f"{folder / name}: damaged, or of another export than model.json; export the model again")
    return description


def _dictionary(path: Path) -> list[str]:
    """A dictionary's words by their ids, fairseq's special symbols first."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [*SPECIAL, *(line.removesuffix(" #fairseq:overwrite").rsplit(" ", 1)[0] for line in lines)]


def _session(path: Path, threads: int | None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads or 0
    # One level more pads the few channels of maps to 16.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    # On the CPU, the two operations that this fusion joins are several times as fast apart.
    return onnxruntime.InferenceSession(
        path, options, providers=["CPUExecutionProvider"], disabled_optimizers=["SkipLayerNormFusion"]
    )
