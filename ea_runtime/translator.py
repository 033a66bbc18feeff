"""Translates text with an exported model: a folder that scripts/export.sh wrote.

Axes: N sentences, S source length, R = N x beams hypotheses.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ea_runtime.folder import Export, ExportError, reading
from ea_runtime.search import Hypothesis, Settings, check_n_best, check_whole, search

if TYPE_CHECKING:
    from ea_runtime.text import Text

logger = logging.getLogger(__name__)

#: The ids of fairseq's special symbols.
BOS, PAD, EOS, UNK = range(4)
#: The most entries of a batch's maps, N x S x S, in each head: 32 sentences of 181 tokens, one of 1,024.
ENTRIES = 2**20
#: The most hypotheses of a batch, whose caches may need megabytes each: 32 sentences with a beam of 62.
HYPOTHESES = 2000
#: The most threads: more block the machine.
MOST_THREADS = 256


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
            check_whole("threads", threads, most=MOST_THREADS)
        self.folder, self._threads = Path(folder), threads
        self._export = export = Export(self.folder)
        if export.task != self.TASK:
            name = type(self).__name__
            raise ExportError(f"{folder}: is a model for {export.task}; {name} takes one for {self.TASK} alone")
        export.verify()
        self.description, self.text = export.description, export.text
        self._source, self._target = export.dictionary("source"), export.dictionary("target")
        self._ids = {word: number for number, word in enumerate(self._source)}
        self._longest = self.description["max_positions"]  # source, target
        self._symbols = {"words": len(self._target), "eos": EOS, "pad": PAD, "unk": UNK}
        self._decoder = self._session("decoder.onnx")

    def _session(self, name: str) -> onnxruntime.InferenceSession:
        """A graph of the folder."""
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # errors are exceptions, and need no second message
        options.intra_op_num_threads = self._threads or 0
        # Threads that wait by spinning take the processor from other processes, and from their own sleeping ones.
        spins = os.environ.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE"
        options.add_session_config_entry("session.intra_op.allow_spinning", str(int(spins)))
        # One level more pads the few channels of maps to 16.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        # On the CPU, the two operations that this fusion joins are several times as fast apart.
        others = {"providers": ["CPUExecutionProvider"], "disabled_optimizers": ["SkipLayerNormFusion"]}
        with reading(self.folder / name):
            return onnxruntime.InferenceSession(self.folder / name, options, **others)

    def settings(self, given: dict[str, Any]) -> Settings:
        """The export's settings with these in their place; None stands for the export's."""
        known = {field.name for field in fields(Settings)}
        if unknown := given.keys() - known:
            names, there = ", ".join(sorted(unknown)), ", ".join(sorted(known))
            raise ValueError(f"{names}: no setting of this search, which has {there}")
        return Settings(**{**self.description["search"], **{name: x for name, x in given.items() if x is not None}})

    @property
    def room(self) -> int:
        """The most subwords of a source sentence."""
        return self._longest[0] - 1

    def encode(self, line: str, where: str) -> list[int]:
        """Ids of all subwords of a line; a message names it by `where`.

        Raises:
            ValueError: it is no line of text.
        """
        return [self._ids.get(word, UNK) for word in _subwords(line, where, self.text)]

    def _tokens(self, line: str, number: int) -> list[int]:
        """Ids of a line's subwords, as many as the model reads, and the end of the sentence."""
        ids, room = self.encode(line, f"line {number}"), self.room
        if len(ids) > room:
            logger.warning("line %d: %d subwords, but the model reads %d; the rest is left out", number, len(ids), room)
        return [*ids[:room], EOS]

    def _sources(self, lines: Iterable[str], first: int) -> list[list[int]]:
        """Token ids of each line; messages number the lines from `first` on."""
        if isinstance(lines, str):
            raise ValueError("lines: expected several, such as [line], not one text")
        return [self._tokens(line, number) for number, line in enumerate(lines, first)]

    def _begin(
        self, line: str, where: str, text: Text, ids: dict[str, int], settings: Settings, source: int | None = None
    ) -> list[int]:
        """Ids of the words that a sentence has to begin with; source: its source's length, by default their own.

        Raises:
            ValueError: it is no line of text, has words that the model does not know, or leaves no room for more.
        """
        words = _subwords(line, where, text)
        if unknown := [word for word in words if word not in ids]:
            raise ValueError(f"{where}: the model does not know {unknown[0]!r}; leave it out")
        most = settings.max_len(len(words) + 1 if source is None else source, self._longest[1])
        if len(words) >= most:
            hint = " or raise max_len_b" if most < self._longest[1] - 1 else ""
            raise ValueError(f"{where}: fills the {most} subwords that a sentence may have; shorten it{hint}")
        return [ids[word] for word in words]

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
        self._encoder = self._session("encoder.onnx")
        with reading(self.folder):  # files that do not fit each other
            self.search_ids([[len(self._source) - 1, EOS]], Settings(beam=1, max_len_b=1), None)

    def translate(
        self,
        lines: str | Iterable[str],
        beam: int | None = None,
        lenpen: float | None = None,
        n_best: int = 1,
        batch: int = 32,
        prefixes: Iterable[str] | None = None,
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
            prefixes: for each line, raw text that its translation begins with, of words that the model knows. As with
                fairseq, ``min_len`` does not hold while any line of a batch still has a prefix.
            settings: more of ``Settings``.

        Raises:
            ValueError: a setting that is unknown or out of range, a line that is no line of text, or a prefix that
                cannot be the beginning.
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
        prefixes: Iterable[str] | None = None,
        first: int = 1,
        **settings: Any,
    ) -> list[list[tuple[str, float]]]:
        """``translate`` with a list of (text, score) for each line, whatever n_best is; empty for an empty line.

        Messages number the lines from `first` on.
        """
        sources = self._sources(lines, first)
        search_settings = self.settings({"beam": beam, "lenpen": lenpen, **settings})
        forced = None if prefixes is None else self._forced(prefixes, sources, search_settings, first)
        return self.scored_ids(sources, search_settings, n_best, batch, forced)

    def scored_ids(
        self,
        sources: Sequence[list[int]],
        settings: Settings,
        n_best: int = 1,
        batch: int = 32,
        prefixes: Sequence[list[int]] | None = None,
    ) -> list[list[tuple[str, float]]]:
        """``scored`` for sentences that are token ids, the end included; empty for the end alone."""
        check_whole("batch", batch)
        check_n_best(n_best, settings.beam)
        numbers = [n for n, source in enumerate(sources) if len(source) > 1]
        prefixed = None if prefixes is None else [prefixes[n] for n in numbers]
        searched = self.search_all([sources[n] for n in numbers], settings, batch, prefixed)
        results = dict(zip(numbers, searched, strict=True))
        return [[(self._text(one), one.score) for one in results.get(n, [])[:n_best]] for n in range(len(sources))]

    def search_all(
        self, sources: Sequence[Sequence[int]], settings: Settings, batch: int, prefixes: list[list[int]] | None = None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sentences that are token ids, in batches by length."""
        results: list[list[Hypothesis]] = [[] for _ in sources]
        by_length = sorted(range(len(sources)), key=lambda n: -len(sources[n]))
        while by_length:
            size = min(ENTRIES // len(sources[by_length[0]]) ** 2, HYPOTHESES // settings.beam, batch)
            size = max(1, size)
            numbers, by_length = by_length[:size], by_length[size:]
            of = None if prefixes is None else [prefixes[n] for n in numbers]
            searched = self.search_ids([sources[n] for n in numbers], settings, of)
            for n, hypotheses in zip(numbers, searched, strict=True):
                results[n] = hypotheses
        return results

    @cached_property
    def _target_text(self) -> tuple[Text, dict[str, int]]:
        """Rules for text in the target language, and ids of its subwords; few callers give prefixes."""
        ids = {word: number for number, word in enumerate(self._target)}
        return self._export.text_in(self.text.prep["target_lang"]), ids

    def _forced(
        self, prefixes: Iterable[str], sources: list[list[int]], settings: Settings, first: int
    ) -> list[list[int]]:
        if isinstance(prefixes, str):
            raise ValueError("prefixes: expected several, such as [prefix], not one text")
        prefixes = list(prefixes)
        if len(prefixes) != len(sources):
            raise ValueError(f"prefixes: expected one for each of {len(sources)} lines, not {len(prefixes)}")
        return [
            self._begin(prefix, f"prefix of line {number}", *self._target_text, settings, len(source))
            for number, (prefix, source) in enumerate(zip(prefixes, sources, strict=True), first)
        ]

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


def _subwords(line: str, where: str, text: Text) -> list[str]:
    """The subwords of a line; see ``Model.encode``."""
    if not isinstance(line, str):
        raise ValueError(f"{where}: expected text, not {type(line).__name__}")
    if "\n" in line.rstrip("\n"):
        raise ValueError(f"{where}: it has a line break inside; give one sentence a line")
    return text.subwords(line.rstrip("\n")).split()


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
