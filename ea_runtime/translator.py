"""Raw text in, raw text out, whatever model translates: one of fairseq (ea_fairseq) or an exported one (``onnx``).

Axes: N sentences, S source length.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

from ea_runtime.search import Hypothesis, Limits, check_n_best, check_whole, max_len
from ea_runtime.text import Text

logger = logging.getLogger(__name__)

#: The ids of fairseq's special symbols, which its dictionaries do not list.
BOS, PAD, EOS, UNK = range(4)
#: The most entries of a batch's maps, N x S x S, in each head: 32 sentences of 181 tokens, one of 1,024.
ENTRIES = 2**20
#: The most hypotheses of a batch, whose caches may need megabytes each: 32 sentences with a beam of 62.
HYPOTHESES = 2000


class TextModel:
    """A model's text: lines to token ids, and back.

    Args:
        text: the rules of the text.
        source, target: the words of each side by their ids, fairseq's special symbols first.
        positions: the most tokens of a source sentence and of a target sentence, the end included.
    """

    def __init__(self, text: Text, source: Sequence[str], target: Sequence[str], positions: Sequence[int]) -> None:
        self.text, self._source, self._target, self._longest = text, source, target, positions
        self._ids = {word: number for number, word in enumerate(source)}

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

    def sources(self, lines: Iterable[str], first: int) -> list[list[int]]:
        """Token ids of each line, as many as the model reads, and the end; messages count lines from `first` on."""
        _refuse_one("lines", lines)
        sources, room = [], self.room
        for number, line in enumerate(lines, first):
            ids = self.encode(line, f"line {number}")
            if len(ids) > room:
                message = "line %d: %d subwords, but the model reads %d; the rest is left out"
                logger.warning(message, number, len(ids), room)
            sources.append(self.cut(ids))
        return sources

    def cut(self, ids: Sequence[int]) -> list[int]:
        """As many of a source's subwords as the model reads, and the end of the sentence."""
        return [*ids[: self.room], EOS]

    def _begin(
        self, line: str, where: str, text: Text, ids: dict[str, int], settings: Limits, source: int | None = None
    ) -> list[int]:
        """Ids of the words that a sentence has to begin with; source: its source's length, by default their own.

        Raises:
            ValueError: it is no line of text, has words that the model does not know, or leaves no room for more.
        """
        words = _subwords(line, where, text)
        if unknown := [word for word in words if word not in ids]:
            raise ValueError(f"{where}: the model does not know {unknown[0]!r}; leave it out")
        most = max_len(settings, len(words) + 1 if source is None else source, self._longest[1])
        if len(words) >= most:
            hint = " or raise max_len_b" if most < self._longest[1] - 1 else ""
            raise ValueError(f"{where}: fills the {most} subwords that a sentence may have; shorten it{hint}")
        return [ids[word] for word in words]

    def words(self, tokens: Iterable[int]) -> str:
        """Target words, their subwords joined, of token ids; fairseq's diverse search may go on after an end."""
        return self.text.join(" ".join(self._target[token] for token in tokens if token not in (BOS, EOS)))

    def _text(self, hypothesis: Hypothesis) -> str:
        return self.text.detokenize(self.words(hypothesis.tokens))


class Translator(TextModel, ABC):
    """A translation model with its text; a model has to give the abstract methods."""

    #: sentences that the model reads together, where a call says nothing
    BATCH = 32

    @abstractmethod
    def settings(self, given: dict[str, Any]) -> Any:
        """The settings of a search, ``Limits`` among them; None stands for a default.

        Raises:
            ValueError: one that is unknown, without effect or out of range.
        """

    @property
    @abstractmethod
    def kinds(self) -> dict[str, type]:
        """The settings of the search and their types, bool, int or float."""

    @abstractmethod
    def search_ids(
        self, sources: list[list[int]], settings: Any, prefixes: list[list[int]] | None
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sentences that are token ids, the end included, best first.

        Args:
            prefixes: token ids that each translation begins with.

        Raises:
            ValueError: settings that do not go together.
        """

    def translate(
        self,
        lines: str | Iterable[str],
        beam: int | None = None,
        lenpen: float | None = None,
        n_best: int = 1,
        batch: int | None = None,
        prefixes: Iterable[str] | None = None,
        **settings: Any,
    ) -> str | list[str] | list[tuple[str, float]] | list[list[tuple[str, float]]]:
        """Translate raw text: a sentence, or several in order; empty ones stay empty.

        A sentence longer than the model reads is cut, with a warning that names it.

        Args:
            lines: raw text as a person writes it, a sentence each.
            beam: width of the search; default: the model's, 5.
            lenpen: length penalty; above 1 favours longer translations.
            n_best: how many translations of each sentence; above 1, lists of (text, score) are returned. A score is
                the natural log-probability over length.
            batch: how many sentences the model reads together, 32 by default; fewer where they are long.
            prefixes: for each line, raw text that its translation begins with, of words that the model knows. As with
                fairseq, ``min_len`` does not hold while any line of a batch still has a prefix.
            settings: more of the search's, for example ``max_len_b=50``: see ``kinds``.

        Raises:
            ValueError: a setting that is unknown or out of range, a line that is no line of text, or a prefix that
                cannot be the beginning.
        """
        several = [lines] if isinstance(lines, str) else lines
        translations = self.scored(several, beam, lenpen, n_best, batch, prefixes, **settings)
        if n_best > 1:
            return translations[0] if isinstance(lines, str) else translations
        texts = [best[0][0] for best in translations]
        return texts[0] if isinstance(lines, str) else texts

    def scored(
        self,
        lines: Iterable[str],
        beam: int | None = None,
        lenpen: float | None = None,
        n_best: int = 1,
        batch: int | None = None,
        prefixes: Iterable[str] | None = None,
        first: int = 1,
        **settings: Any,
    ) -> list[list[tuple[str, float]]]:
        """``translate`` with a list of (text, score) for each line, whatever n_best is; of an empty one, ("", 0.0).

        Messages number the lines from `first` on.
        """
        chosen = self.settings({"beam": beam, "lenpen": lenpen, **settings})
        sources = self.sources(lines, first)
        forced = None if prefixes is None else self._forced(prefixes, sources, chosen, first)
        return self.scored_ids(sources, chosen, n_best, batch, forced)

    def scored_ids(
        self,
        sources: Sequence[list[int]],
        settings: Any,
        n_best: int = 1,
        batch: int | None = None,
        prefixes: Sequence[list[int]] | None = None,
    ) -> list[list[tuple[str, float]]]:
        """``scored`` for sentences that are token ids, the end included; an empty one is the end alone."""
        check_n_best(n_best, settings.beam)
        searched = self.search_all(sources, settings, batch, prefixes)
        nothing = [("", 0.0)] * n_best
        return [[(self._text(one), one.score) for one in best[:n_best]] or nothing for best in searched]

    def search_all(
        self,
        sources: Sequence[list[int]],
        settings: Any,
        batch: int | None = None,
        prefixes: Sequence[list[int]] | None = None,
        done: Callable[[int], object] = lambda sentences: None,
    ) -> list[list[Hypothesis]]:
        """The hypotheses of sentences that are token ids, in batches by length; none of the end of a sentence alone.

        `done` is given the number of sentences of each batch that has ended.
        """
        check_whole("batch", self.BATCH if batch is None else batch)
        results: list[list[Hypothesis]] = [[] for _ in sources]
        by_length = sorted((n for n in range(len(sources)) if len(sources[n]) > 1), key=lambda n: -len(sources[n]))
        while by_length:
            size = max(1, self._most(len(sources[by_length[0]]), settings, batch))
            numbers, by_length = by_length[:size], by_length[size:]
            of = None if prefixes is None else [prefixes[n] for n in numbers]
            searched = self.search_ids([sources[n] for n in numbers], settings, of)
            for n, hypotheses in zip(numbers, searched, strict=True):
                results[n] = hypotheses
            done(len(numbers))
        return results

    def _most(self, longest: int, settings: Any, batch: int | None) -> int:
        """The most sentences of a batch whose longest has so many tokens."""
        return min(ENTRIES // longest**2, HYPOTHESES // settings.beam, batch or self.BATCH)

    @cached_property
    def _target_text(self) -> tuple[Text, dict[str, int]]:
        """Rules for text in the target language, and ids of its subwords; few callers give prefixes."""
        prepared = self.text.preparation
        return Text(prepared.folder, prepared.target_lang), {word: number for number, word in enumerate(self._target)}

    def _forced(self, prefixes: Iterable[str], sources: list[list[int]], settings: Any, first: int) -> list[list[int]]:
        _refuse_one("prefixes", prefixes)
        prefixes = list(prefixes)
        if len(prefixes) != len(sources):
            raise ValueError(f"prefixes: expected one for each of {len(sources)} lines, not {len(prefixes)}")
        return [
            self._begin(prefix, f"prefix of line {number}", *self._target_text, settings, len(source))
            for number, (prefix, source) in enumerate(zip(prefixes, sources, strict=True), first)
        ]


def _refuse_one(name: str, lines: object) -> None:
    """Refuse one text where several are expected: each of its letters would be a sentence."""
    if isinstance(lines, str | bytes) or not isinstance(lines, Iterable):
        given = "one text" if isinstance(lines, str | bytes) else type(lines).__name__
        raise ValueError(f"{name}: expected several texts, each a str, not {given}")


def _subwords(line: str, where: str, text: Text) -> list[str]:
    """The subwords of a line; see ``TextModel.encode``."""
    if not isinstance(line, str):
        raise ValueError(f"{where}: expected text, not {type(line).__name__}")
    if "\n" in line.rstrip("\r\n"):
        raise ValueError(f"{where}: it has a line break inside; give one sentence a line")
    if "\0" in line:  # it would be translated as other words
        raise ValueError(f"{where}: it has a NUL character; if the text is UTF-16: iconv -f UTF-16LE -t UTF-8")
    return text.subwords(line.rstrip("\r\n")).split()
