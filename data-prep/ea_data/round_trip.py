"""Whether text survives being split into words and subwords and joined again, as every translation is joined."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ea_runtime.text import composed, join_pieces, splitter, words

from .corpora import Rules
from .parallel import Chunk

EXAMPLES = 3  # kept of each side
ENTITY = re.compile(r"&(amp|apos|quot|lt|gt|#124|#91|#93);")  # what Moses writes for a character that means something
BARE = re.compile(r"""['"<>|\[\]]|&(?!\w+;|#\d+;)""")  # such a character


def escaped(texts: Iterable[str]) -> bool:
    """Whether texts in tokens have Moses' "&apos;" for an apostrophe; also where they have neither."""
    counts = [(len(ENTITY.findall(text)), len(BARE.findall(text))) for text in texts]
    return sum(entities for entities, _ in counts) >= sum(bare for _, bare in counts)


class RoundTrip:
    """Chunk of raw text -> for each side {"lines", "same", "decomposed", "examples": pairs of a line and its return}.

    `same` counts the lines that come back as they were, but for white space at the ends and doubled spaces;
    `decomposed` counts those that are not in Unicode's form NFC. Text that was given in tokens goes the other way: to
    what people would have written, and back to tokens, as text to translate is made into tokens.

    Args:
        spoken: the languages by whose rules Moses splits and joins their text.
        folder: what holds the codes of the subwords.
        escape: see ``ea_runtime.text.Moses``.
    """

    def __init__(self, spoken: Sequence[str], rules: Rules, folder: Path, escape: bool = True) -> None:
        self._words = [words(rules.tokenizer, language, rules.split_dashes, escape) for language in spoken]
        self._rules = rules
        # subword-nmt only marks where it cut a word; sentencepiece also changes spaces and rare characters.
        self._pieces = splitter(folder, rules.bpe, "") if rules.bpe == "sentencepiece" else None

    def __call__(self, chunk: Chunk) -> list[dict[str, Any]]:
        return [self._side(at, [line.decode() for line in lines]) for at, lines in enumerate(chunk)]

    def _side(self, at: int, lines: list[str]) -> dict[str, Any]:
        decomposed = sum(not unicodedata.is_normalized("NFC", line) for line in lines)
        there_and_back = self._back_and_there if self._rules.tokenizer == "given" else self._there_and_back
        texts = [" ".join((composed(line) if self._rules.nfc else line).split()) for line in lines]
        pairs = [(text, back) for text in texts if (back := there_and_back(at, text)) != text]
        return {
            "lines": len(lines),
            "same": len(lines) - len(pairs),
            "decomposed": decomposed,
            "examples": pairs[:EXAMPLES],
        }

    def _there_and_back(self, at: int, text: str) -> str:
        tokens = self._words[at].tokenize(text)
        if self._pieces:
            tokens = join_pieces(self._pieces(tokens))
        return " ".join(self._words[at].detokenize(tokens).split())

    def _back_and_there(self, at: int, tokens: str) -> str:
        return " ".join(self._words[at].tokenize(self._words[at].detokenize(tokens)).split())


def add(total: list[dict[str, Any]], more: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The results of two chunks as one."""
    for side, other in zip(total, more, strict=True):
        side["examples"] = (side["examples"] + other["examples"])[:EXAMPLES]
        for name in ("lines", "same", "decomposed"):
            side[name] += other[name]
    return total
