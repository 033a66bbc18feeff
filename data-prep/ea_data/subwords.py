"""Joint subwords: learnt on the words of both sides together, applied to each."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import sentencepiece
from subword_nmt import learn_bpe
from subword_nmt.apply_bpe import BPE
from tqdm import tqdm

from ea_artifacts.command import UserError, say
from ea_artifacts.preparation import CODES
from ea_runtime.text import VERSION, segmenter

from .parallel import Chunk, tqdm_options
from .text import checked_lines, count_lines, open_bytes, reading

MOST_SENTENCES = 5_000_000  # sentencepiece learns from no more, for its memory's sake
CACHE_WORDS = 200_000  # per worker; rare words come and go, the frequent ones are soon back


def given_codes(path: Path) -> bytes:
    """The contents of a file of subword-nmt's codes, plain or .gz, which is refused where it is none."""
    with reading(path), open_bytes(path) as file:
        content = b"".join(checked_lines(file, str(path)))
    for number, line in enumerate(content.decode().split("\n")[:-1], 1):
        if len(line.split(" ")) != 2:
            raise UserError(f"{path}, line {number}: a merge of BPE is two subwords with a space between, not {line!r}")
    if not content:
        raise UserError(f"{path}: is empty, and no codes of subword-nmt")
    return content


def joined(line: bytes) -> bytes:
    """A line of subwords in words."""
    return (line[:-1] + b" ").replace(b"@@ ", b"").rstrip(b" ") + b"\n"


def join(chunk: Chunk) -> Chunk:
    """Chunk of subwords -> the same lines in words."""
    return tuple(list(map(joined, lines)) for lines in chunk)


def count_words(chunk: Chunk) -> tuple[Counter[bytes], ...]:
    """The words of each side of a chunk, as bytes."""
    return tuple(Counter(b"".join(lines).split()) for lines in chunk)


def learn(words: Counter, merges: int, folder: Path) -> None:
    """Writes folder/code: what `subword-nmt learn-bpe -s merges` learns from text with these words.

    subword-nmt fails on text without a word of two characters: the file then is its first line alone.
    """
    learn_bpe.tqdm = partial(tqdm, desc="  learn", unit=" merges", file=sys.stderr, **tqdm_options())  # with a name
    entries = [f"{word.decode()} {count}" for word, count in words.items()]
    with (folder / CODES["subword_nmt"]).open("w", encoding="utf-8", newline="\n") as file:
        if any(len(word.decode()) > 1 for word in words):
            with redirect_stderr(io.StringIO()) as remark:
                learn_bpe.learn_bpe(entries, file, merges, is_dict=True)
            if remark.getvalue():
                say(f"fewer than {merges:,} merges (--merges): no other pair of subwords occurs twice")
        else:
            file.write(f"{VERSION} 0.2\n")


def learn_sentencepiece(texts: list[Path], size: int, folder: Path) -> None:
    """Writes folder/sentencepiece.bpe.model, of `size` pieces.

    From more than MOST_SENTENCES every second line is taken, or every third and so on: sentencepiece's own choice is
    another one every time.
    """
    prefix = folder / CODES["sentencepiece"].removesuffix(".model")
    every = -(-sum(map(count_lines, texts)) // MOST_SENTENCES)
    source: dict[str, Any] = {"input": [str(path) for path in texts]}
    if every > 1:
        source = {"sentence_iterator": (line for path in texts for line in _some_lines(path, every))}
    try:
        sentencepiece.SentencePieceTrainer.train(
            **source, model_prefix=str(prefix), model_type="bpe", vocab_size=size,
            character_coverage=1.0, normalization_rule_name="identity", minloglevel=1,
            hard_vocab_limit=False,  # a small text has fewer pieces than asked for, as it has fewer merges of BPE
        )  # fmt: skip
    except RuntimeError as error:
        raise UserError(f"sentencepiece could not learn {size:,} pieces (--merges): {error}") from error
    prefix.with_suffix(".bpe.vocab").unlink(missing_ok=True)


def _some_lines(path: Path, every: int) -> Iterator[str]:
    with path.open("rb") as file:
        for line in islice(file, 0, None, every):
            yield line.decode().removesuffix("\n")


def frequent(words: Counter, codes: Path, threshold: int) -> list[str]:
    """The subwords that occur at least `threshold` times in text with these words."""
    side, counts = Apply(codes).sides[0], Counter[bytes]()
    for word, count in words.items():
        for subword in side.line(word).split():
            counts[subword] += count
    return sorted(subword.decode() for subword, count in counts.items() if count >= threshold)


class Apply:
    """Chunk -> the same lines in subwords.

    `vocabularies` gives each side's allowed subwords, or None for all; for subword-nmt only.
    """

    def __init__(self, codes: Path, vocabularies: Sequence[list[str] | None] = (None, None)) -> None:
        self.sides: Sequence[_Pieces | _Words]
        if codes.name == CODES["sentencepiece"]:
            self.sides = [_Pieces(codes)] * len(vocabularies)
        else:
            self.sides = [_Words(segmenter(codes, vocabulary)) for vocabulary in vocabularies]

    def __call__(self, chunk: Chunk) -> Chunk:
        return tuple([side.line(line) for line in lines] for side, lines in zip(self.sides, chunk, strict=True))


def split_otherwise(apply: Apply, chunk: Chunk) -> int:
    """How many lines of a chunk of subwords these codes would split otherwise."""
    sides = zip(chunk, apply(join(chunk)), strict=True)
    return sum(given.split() != made.split() for side in sides for given, made in zip(*side, strict=True))


class _Words(dict):
    """Word -> its subwords, both as bytes; a missing word is looked up in subword-nmt."""

    def __init__(self, bpe: BPE) -> None:
        super().__init__()
        self._bpe = bpe

    def __missing__(self, word: bytes) -> bytes:
        if len(self) >= CACHE_WORDS:
            self.clear()
            self._bpe.cache.clear()
        self[word] = subwords = " ".join(self._bpe.segment_tokens([word.decode()])).encode()
        return subwords

    def line(self, line: bytes) -> bytes:
        """Spaces at either end stay, as in subword-nmt; Moses' tokenizer leaves one after a final .' for example."""
        text = line.rstrip(b"\n")
        start = len(text) - len(text.lstrip(b" "))
        end = max(start, len(text.rstrip(b" ")))
        words = filter(None, text[start:end].split(b" "))
        return text[:start] + b" ".join(map(self.__getitem__, words)) + text[end:] + b"\n"


class _Pieces:
    def __init__(self, model: Path) -> None:
        self._model = sentencepiece.SentencePieceProcessor(model_file=str(model))

    def line(self, line: bytes) -> bytes:
        return " ".join(self._model.encode(line.decode().rstrip("\n"), out_type=str)).encode() + b"\n"
