"""Exported models: folders that scripts/export.sh wrote, read by ONNX Runtime.

Axes: N sentences, S source length, R = N x beams hypotheses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from ea_runtime.folder import Export, ExportError, reading
from ea_runtime.search import Hypothesis, Settings, check_n_best, check_whole, max_len, search
from ea_runtime.translator import EOS, PAD, UNK, TextModel, Translator

#: The most threads: more block the machine.
MOST_THREADS = 256


class Exported(TextModel):
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
        export = Export(self.folder)
        if export.task != self.TASK:
            name = type(self).__name__
            raise ExportError(f"{folder}: is a model for {export.task}; {name} takes one for {self.TASK} alone")
        export.verify()
        self.description = export.description
        words = export.dictionary("source"), export.dictionary("target")
        super().__init__(export.text, *words, self.description["max_positions"])
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
            available = ", ".join(sorted(known))
            raise ValueError(f"{', '.join(sorted(unknown))}: no such setting of the search; available: {available}")
        return Settings(**{**self.description["search"], **{name: x for name, x in given.items() if x is not None}})


class OnnxTranslator(Exported, Translator):
    """An exported translation model; see ``Exported``."""

    TASK = "translation"

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        super().__init__(folder, threads)
        self._encoder = self._session("encoder.onnx")
        with reading(self.folder):  # files that do not fit each other
            self.search_ids([[len(self._source) - 1, EOS]], Settings(beam=1, max_len_b=1), None)

    @property
    def kinds(self) -> dict[str, type]:
        """See ``Translator``."""
        return {field.name: type(field.default) for field in fields(Settings)}

    def search_ids(
        self, sources: list[list[int]], settings: Settings, prefixes: list[list[int]] | None
    ) -> list[list[Hypothesis]]:
        """See ``Translator``."""
        length = max(map(len, sources))
        tokens = np.full((len(sources), length), PAD, np.int64)
        for row, source in zip(tokens, sources, strict=True):
            row[length - len(source) :] = source  # padded on the left, as fairseq does
        names = [value.name for value in self._encoder.get_outputs()]
        encoded = dict(zip(names, self._encoder.run(names, {"tokens": tokens}), strict=True))
        steps = Steps(self._decoder, {**encoded, "padding": tokens == PAD})
        most = max_len(settings, length, self._longest[1])
        return search(steps, len(sources), most, settings, **self._symbols, prefixes=prefixes)


class LanguageModel(Exported):
    """An exported language model with its text rules; see ``Exported``."""

    TASK = "language_modeling"

    def __init__(self, folder: str | Path, threads: int | None = None) -> None:
        super().__init__(folder, threads)
        with reading(self.folder):  # files that do not fit each other
            self.score_ids([[len(self._source) - 1, EOS]], batch=1)

    def score(self, lines: Iterable[str], batch: int = 32, first: int = 1) -> list[tuple[float, int]]:
        """The natural log-probability of each line, its end included, and how many tokens that is.

        Perplexity is exp(- sum of log-probabilities / sum of tokens).

        Args:
            lines: raw text, a sentence each.
            batch: how many sentences the model reads together.
            first: messages number the lines from here on.
        """
        check_whole("batch", batch)
        scored = self.score_ids(self.sources(lines, first), batch)
        return [(best.score, len(best.tokens) + 1) for best in scored]

    def score_ids(self, sources: list[list[int]], batch: int) -> list[Hypothesis]:
        """The scores of sentences that are token ids, the end included."""
        hypotheses: dict[int, Hypothesis] = {}
        by_length = sorted(range(len(sources)), key=lambda n: len(sources[n]))
        for begin in range(0, len(sources), batch):
            numbers = by_length[begin : begin + batch]
            longest = len(sources[numbers[-1]])
            settings = self.settings({"beam": 1, "max_len_b": longest, "unnormalized": True})
            steps = Steps(self._decoder, {})
            prefixes = [sources[n] for n in numbers]
            results = search(steps, len(numbers), longest, settings, **self._symbols, prefixes=prefixes)
            hypotheses |= {n: best for n, (best,) in zip(numbers, results, strict=True)}
        return [hypotheses[n] for n in range(len(sources))]

    def complete(self, start: str, n_best: int = 1, **settings: Any) -> list[tuple[str, float]]:
        """The best sentences that begin with these words, and their scores, best first.

        Args:
            start: raw text.
            n_best: how many.
            settings: of the search; see ``Settings``.
        """
        chosen = self.settings(settings)
        check_n_best(n_best, chosen.beam)
        tokens = self._begin(start, "start", self.text, self._ids, chosen)
        most = max_len(chosen, len(tokens) + 1, self._longest[1])
        (completions,) = search(Steps(self._decoder, {}), 1, most, chosen, **self._symbols, prefixes=[tokens])
        return [(self.text.detokenize(self.words(one.tokens)), one.score) for one in completions[:n_best]]


class Steps:
    """The decoder's steps of one batch.

    Args:
        session: of decoder.onnx.
        source: by the names of the graph, the encoder's outputs, N x heads x S x head size each; and padding: N x S,
            True = masked.
    """

    def __init__(self, session: onnxruntime.InferenceSession, source: dict[str, NDArray]) -> None:
        self._session, self._outputs = session, [value.name for value in session.get_outputs()]
        self._source = source
        self._values: dict[str, NDArray] = {}

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
        inputs = {"tokens": tokens, "step": np.array([position]), "order": order, "forced": forced, "bias": bias}
        inputs |= {"top": np.zeros(top, np.float32), **self._source, **self._values}
        best, words, *caches = self._session.run(self._outputs, inputs)
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
