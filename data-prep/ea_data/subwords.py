"""Joint subwords: learnt on the words of both sides together, applied to each."""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr
from functools import partial
from itertools import islice
from pathlib import Path

import sentencepiece
from subword_nmt import learn_bpe
from tqdm import tqdm

from ea_artifacts.command import UserError, say
from ea_artifacts.preparation import CODES
from ea_runtime.text import VERSION, splitter

from .parallel import Chunk, read_rows, tqdm_options
from .text import checked_lines, count_lines, open_bytes, reading

MOST_SENTENCES = 5_000_000  # sentencepiece learns from no more, for its memory's sake


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


def count_merges(codes: bytes) -> int:
    """The number of merges in the contents of a file of codes."""
    return sum(not line.startswith(b"#version") for line in codes.splitlines())


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
    every = max(1, -(-sum(map(count_lines, texts)) // MOST_SENTENCES))
    lines = (
        line.decode().removesuffix("\n") for path in texts for (line,) in islice(read_rows([path]), 0, None, every)
    )
    try:
        # Names of files would become part of the model.
        with (folder / CODES["sentencepiece"]).open("wb") as model:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=lines, model_writer=model, model_type="bpe", vocab_size=size,
                character_coverage=1.0, normalization_rule_name="identity", minloglevel=1,
                hard_vocab_limit=False,  # a small text has fewer pieces than asked for, as it has fewer merges of BPE
            )  # fmt: skip
    except RuntimeError as error:
        raise UserError(f"sentencepiece could not learn {size:,} pieces (--merges): {error}") from error


def write_vocabularies(folder: Path, languages: Sequence[str], words: Sequence[Counter[bytes]], threshold: int) -> None:
    """Writes folder/vocabulary.XX: the subwords that occur at least `threshold` times in a side with these words."""
    split = splitter(folder, "subword_nmt", "")
    for language, side in zip(languages, words, strict=True):
        counts = Counter[str]()
        for word, count in side.items():
            for subword in split(word.decode()).split():
                counts[subword] += count
        allowed = sorted(subword for subword, count in counts.items() if count >= threshold)
        if not allowed:  # which subword-nmt takes for no list at all
            raise UserError(
                f"--vocabulary-threshold {threshold}: no {language} subword is that frequent; choose a smaller number"
            )
        (folder / f"vocabulary.{language}").write_text("".join(f"{word}\n" for word in allowed), encoding="utf-8")


class Apply:
    """Chunk -> the same lines in subwords, by the codes in `folder` and its lists of allowed subwords, if there are."""

    def __init__(self, folder: Path, kind: str, languages: Sequence[str]) -> None:
        self._sides = [splitter(folder, kind, language) for language in languages]

    def __call__(self, chunk: Chunk) -> Chunk:
        return tuple(
            [split(line[:-1].decode()).encode() + b"\n" for line in lines]
            for split, lines in zip(self._sides, chunk, strict=True)
        )


def split_otherwise(apply: Apply, chunk: Chunk) -> int:
    """How many lines of a chunk of subwords these codes would split otherwise."""
    sides = zip(chunk, apply(join(chunk)), strict=True)
    return sum(given.split() != made.split() for side in sides for given, made in zip(*side, strict=True))
