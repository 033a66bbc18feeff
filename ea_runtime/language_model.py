"""Scores and completes text with an exported language model: a folder that scripts/export.sh wrote."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ea_runtime.folder import reading
from ea_runtime.onnx import Exported, Steps
from ea_runtime.search import Hypothesis, check_n_best, check_whole, max_len, search
from ea_runtime.translator import EOS


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
