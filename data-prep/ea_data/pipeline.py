"""The seven stages, from raw text to fairseq's binary data.

extract   raw/ and archives -> plain text, UTF-8 verified, both sides of a split with as many lines
clean     punctuation and non-printing characters, where the rules ask for it
tokenise  Moses tokens, case; length filter in words; the validation split
learn     joint subword codes
apply     text -> subwords
filter    length filter in subwords
binarise  fairseq's dictionaries and binary data; the finished data folder
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import IO, Any

from tqdm import tqdm

from ea_runtime.kept import CODES

from . import binary, download, overlap, report, round_trip, stages, subwords
from .command_line import UserError, say
from .corpus import Corpus
from .languages import base_language
from .parallel import Chunk, chunks, ordered_map, tqdm_options
from .preparation import Preparation, read_prep
from .rules import Normalise, Tokenise, TokeniseChecked, compose, faults, in_turn, plain_apostrophes
from .sources import Side
from .stages import NAMES, Stage
from .text import checked_lines, count_lines, lower_case_lines

RULES = 4  # raise this when the same options come to make other text
ROLES = ("src", "ref")  # what shared tasks call the two sides of a test
LIBRARIES = ("sacremoses", "subword-nmt", "sentencepiece", "regex", "numpy")


class Pipeline:
    """One preparation: `corpus` made of the text below `raw`, finished as the folder `out`.

    `command` is for the record. With `strict`, numbers of pairs other than those that the corpus expects are an error.
    """

    def __init__(
        self, corpus: Corpus, raw: Path, out: Path, workers: int = 1, command: Sequence[str] = (), strict: bool = False
    ) -> None:
        self.corpus, self.raw, self.out, self.workers, self.command = corpus, raw, out, workers, command
        self.strict = strict
        self.codes = subwords.given_codes(corpus.codes) if corpus.codes else None
        self.earlier = Preparation.like(corpus.like) if corpus.like else None
        self.languages = (corpus.source_lang, corpus.target_lang)  # as file names have them
        # For Moses.
        self.spoken = self.earlier.moses_languages if self.earlier else tuple(map(base_language, self.languages))
        self.sides = {
            split: [
                [Side(part, lang, role, raw) for lang, role in zip(self.languages, ROLES, strict=True)]
                for part in parts
            ]
            for split, parts in corpus.splits().items()
        }  # split -> part -> side
        self.work = stages.work_folder(out)
        folder = {name: self.work / f"{number}-{name}" for number, name in enumerate(NAMES, 1)}
        self.folder = folder | {"binarise": out}
        # Splits that the length filter applies to; splits that came as such stay whole, and aligned line by line.
        self.filtered = ["train", "valid"] if corpus.rules.valid_every else ["train"]
        self.chain = self._stages()

    def run(self, force: str | None = None) -> dict:
        """Makes the missing stages and returns the contents of PREP.json."""
        stages.refuse_others(self.out)
        with stages.alone(self.work):
            stages.run(self.chain, force, say)
        summary = read_prep(self.out)
        say(report.table(summary, colour=sys.stderr.isatty()))
        for warning in report.warnings(summary):
            say(warning)
        self._check_expected({split: facts["pairs"] for split, facts in summary["splits"].items()})
        return summary

    def _check_expected(self, pairs: dict[str, int]) -> None:
        wrong = {split: pairs[split] for split, number in self.corpus.expected.items() if pairs[split] != number}
        if wrong and self.strict:
            numbers = (f"{split} {n:,} pairs (not {self.corpus.expected[split]:,})" for split, n in wrong.items())
            raise UserError(f"--strict: {', '.join(numbers)}")

    def _stages(self) -> list[Stage]:
        rules = self.corpus.rules
        lengths = [rules.max_ratio, rules.max_length, rules.drop_test_overlap]
        lower_case_codes = bool(self.codes and rules.lowercase)  # such text must be lower-case already
        options = {
            "extract": [RULES, versions(), self.languages, self._fingerprint(), lower_case_codes, rules.normalise],
            "clean": [rules.normalise, "all but train" if rules.plain_apostrophes else False, rules.nfc, self.spoken],
            "tokenise": [rules.tokenizer, rules.lowercase, rules.split_dashes, rules.valid_every],
            "learn": self._what_is_learnt(),
            "apply": None,
            "filter": rules.filter_on,
            "binarise": [self.corpus.name, rules.separate_dictionaries],
        }
        at = "tokenise" if rules.filter_on == "words" else "filter"
        options[at] = [options[at], lengths]
        return [Stage(name, options[name], getattr(self, name), self.folder[name], self.work) for name in NAMES]

    def _what_is_learnt(self) -> str | list:
        """The settings that decide the subwords and the dictionary, beside the text."""
        if self.codes:
            return self.codes.hex()
        if self.earlier:
            return ["like", self.earlier.digest()]
        rules = self.corpus.rules
        return [rules.bpe, rules.merges, rules.vocabulary_threshold]

    def _fingerprint(self) -> list:
        return [
            [split, side.form, *side.fingerprint()]
            for split, parts in self.sides.items()
            for sides in parts
            for side in sides
        ]

    def text(self, stage: str, split: str, raw: bool = False) -> list[Path]:
        """Both files of a split as `stage` left them; `raw` for the text of the same lines before any rule."""
        folder = self.folder[stage] / "raw" if raw else self.folder[stage]
        return [folder / f"{split}.{lang}" for lang in self.languages]

    def splits(self) -> list[str]:
        """The splits of the finished data, training first."""
        return ["train", "valid", *self.corpus.test_names()]

    @property
    def merges(self) -> int:
        """The number of merges of the subwords, or of pieces of sentencepiece."""
        if self.codes:
            return sum(not line.startswith(b"#version") for line in self.codes.splitlines())
        return self.corpus.rules.merges

    def _read(self, function: Callable, paths: list[Path], what: str) -> Iterator[tuple[Chunk, Any]]:
        """See parallel.ordered_map; shows progress."""
        return ordered_map(function, chunks(paths, what, count_lines(paths[0])), self.workers)

    def _rewrite(self, function: Callable, stage: str, folder: Path, split: str) -> None:
        """Passes both sides of a split, as `stage` left them, through `function`, into `folder`."""
        inputs = self.text(stage, split)
        with ExitStack() as stack:
            files = _create(stack, [folder / path.name for path in inputs])
            for _, sides in self._read(function, inputs, f"{folder.stem} {split}"):
                for file, lines in zip(files, sides, strict=True):
                    file.writelines(lines)

    # --- extract ----------------------------------------------------------------------------------------------------

    def extract(self, folder: Path) -> dict:
        public = {
            side.path: side.part for parts in self.sides.values() for sides in parts for side in sides if side.public
        }
        known = {path.name: (part.size, part.sha256) for path, part in public.items()}
        download.verify(public, self.work / stages.SUMS, known)
        return {split: self._extract(folder, split) for split in self.sides}

    def _extract(self, folder: Path, split: str) -> int:
        total = 0
        for sides in self.sides[split]:
            counts = []
            for lang, side in zip(self.languages, sides, strict=True):
                keep_nul = split == "train" and self.corpus.rules.normalise  # which removes it
                with (folder / f"{split}.{lang}").open("ab", buffering=1 << 20) as file:
                    lines = tqdm(side.lines(), f"  {side.path.name}", unit=" lines", unit_scale=True, **tqdm_options())
                    checked = checked_lines(lines, str(side), keep_nul)
                    if self.codes and self.corpus.rules.lowercase:
                        checked = lower_case_lines(checked, str(side))
                    counts.append(_write(file, checked))
            if counts[0] != counts[1]:
                lengths = [f"  {count:>11,} lines in {side}" for count, side in zip(counts, sides, strict=True)]
                message = f"{split}: the two sides do not have the same number of lines:"
                raise UserError("\n".join([message, *lengths]))
            total += counts[0]
        if not total:
            raise UserError(f"{split}: no lines in {' and '.join(map(str, sides))}")
        return total

    # --- clean ------------------------------------------------------------------------------------------------------

    def clean(self, folder: Path) -> dict:
        rules = self.corpus.rules
        for split in self.corpus.splits():
            steps = [compose] * rules.nfc
            if split == "train" and rules.normalise:
                steps.append(Normalise(self.spoken))
            if split != "train" and rules.plain_apostrophes:
                steps.append(plain_apostrophes)
            if steps:
                self._rewrite(partial(in_turn, steps), "extract", folder, split)
            else:
                _link(self.text("extract", split), folder)
        return {}

    # --- tokenise ---------------------------------------------------------------------------------------------------

    def tokenise(self, folder: Path) -> dict:
        (folder / "raw").mkdir()
        for split in self.corpus.splits():
            if split != "train":
                self._rewrite(Tokenise(self.spoken, self.corpus.rules), "clean", folder, split)
                _link(self.text("extract", split), folder / "raw")
        return self._tokenise_train(folder)

    def _tokenise_train(self, folder: Path) -> dict:
        """Tokens of the training text, its length filter in words, and the validation split if it comes from there."""
        rules = self.corpus.rules
        every = rules.valid_every or sys.maxsize
        work = TokeniseChecked(self.spoken, rules)
        names = [f"train.{lang}" for lang in self.languages]
        if rules.valid_every:
            names += [f"{folder}valid.{lang}" for folder in ("", "raw/") for lang in self.languages]
        inputs = self.text("clean", "train") + (self.text("extract", "train") if rules.valid_every else [])
        read, dropped, kept = 0, Counter(), 0
        with ExitStack() as stack:
            files = _create(stack, [folder / name for name in names])
            train, valid = files[:2], files[2:]
            for chunk, (sides, wrong) in self._read(work, inputs, "tokenise train"):
                read += len(wrong)
                for fault, *row in zip(wrong, *sides, *chunk[2:], strict=True):
                    if fault:
                        dropped[fault] += 1
                        continue
                    kept += 1
                    for file, line in zip(valid if kept % every == 0 else train, row, strict=False):
                        file.write(line)
        if not kept:
            raise UserError(none_left("train", dropped))
        if rules.valid_every and kept < rules.valid_every:
            raise UserError(
                f"valid: no pair is left: --valid-every {rules.valid_every} of {kept:,} training pairs; "
                "choose a smaller number"
            )
        return {"train": {"in": read, "out": kept, "dropped": dict(dropped)}} if rules.filter_on == "words" else {}

    # --- learn ------------------------------------------------------------------------------------------------------

    def learn(self, folder: Path) -> dict:
        rules, train = self.corpus.rules, self.text("tokenise", "train")
        words = (Counter(), Counter())
        count_words = subwords.count_given_words if self.codes else subwords.count_words
        for _, counts in self._read(count_words, train, "count words"):
            for total, count in zip(words, counts, strict=True):
                total.update(count)
        if not (words[0] or words[1]):
            files = " and ".join(str(side) for sides in self.sides["train"] for side in sides)
            raise UserError(f"train: no words to learn subwords from, only empty lines, in {files}")
        if self.earlier:
            for path in self.earlier.files():
                shutil.copyfile(path, folder / path.name)
        elif self.codes:
            self._codes(folder).write_bytes(self.codes)
        elif rules.bpe == "sentencepiece":
            subwords.learn_sentencepiece(train, rules.merges, folder)
        else:
            subwords.learn(words[0] + words[1], rules.merges, folder)
        if rules.vocabulary_threshold and not self.earlier:
            for lang, side in zip(self.languages, words, strict=True):
                allowed = subwords.frequent(side, self._codes(folder), rules.vocabulary_threshold)
                if not allowed:  # which subword-nmt takes for no list at all
                    raise UserError(
                        f"--vocabulary-threshold {rules.vocabulary_threshold}: no {lang} subword is that frequent; "
                        "choose a smaller number"
                    )
                (folder / f"vocabulary.{lang}").write_text("".join(f"{word}\n" for word in allowed), encoding="utf-8")
        report = zip(self.languages, words, strict=True)
        return {lang: {"words": side.total(), "types": len(side)} for lang, side in report}

    def _codes(self, folder: Path) -> Path:
        return folder / CODES[self.corpus.rules.bpe]

    # --- apply ------------------------------------------------------------------------------------------------------

    def apply(self, folder: Path) -> dict:
        if self.codes:
            self._check_codes()
            for split in self.splits():
                _link(self.text("tokenise", split), folder)
            return {}
        learnt, vocabularies = self.folder["learn"], [None, None]
        if self.corpus.rules.vocabulary_threshold:
            files = [learnt / f"vocabulary.{lang}" for lang in self.languages]
            vocabularies = [file.read_text(encoding="utf-8").split("\n")[:-1] for file in files]
        work = subwords.Apply(self._codes(learnt), vocabularies)
        for split in self.splits():
            self._rewrite(work, "tokenise", folder, split)
        return {}

    def _check_codes(self) -> None:
        """Compare the validation text's subwords with those that the given codes make of its words.

        Text to translate is split by these codes: with the wrong ones the model would read subwords it never saw.
        """
        apply, paths = subwords.Apply(self._codes(self.folder["learn"])), self.text("tokenise", "valid")
        lines = sum(map(count_lines, paths))
        different = sum(n for _, n in self._read(partial(subwords.split_otherwise, apply), paths, "check valid"))
        if different:
            message = f"{different:,} of {lines:,} lines of the validation text are not in the subwords of these codes"
            if different > lines / 10:
                raise UserError(f"{self.corpus.codes}: {message}: are they of other text?")
            say(f"warning: {self.corpus.codes}: {message}")

    # --- filter -----------------------------------------------------------------------------------------------------

    def filter(self, folder: Path) -> dict:
        (folder / "raw").mkdir()
        result = {}
        for split in self.splits():
            raw = [] if split == "train" else self.text("tokenise", split, raw=True)
            if self.corpus.rules.filter_on == "subwords" and split in self.filtered:
                result[split] = self._filter(folder, split, raw)
            else:
                _link(self.text("apply", split), folder)
                _link(raw, folder / "raw")
        return result

    def _filter(self, folder: Path, split: str, raw: list[Path]) -> dict:
        inputs, read, dropped = self.text("apply", split), 0, Counter()
        outputs = [folder / path.name for path in inputs] + [folder / "raw" / path.name for path in raw]
        with ExitStack() as stack:
            files = _create(stack, outputs)
            for chunk, wrong in self._read(self._faults(split), inputs + raw, f"filter {split}"):
                read += len(wrong)
                for fault, *row in zip(wrong, *chunk, strict=True):
                    if fault:
                        dropped[fault] += 1
                    else:
                        for file, line in zip(files, row, strict=True):
                            file.write(line)
        if dropped.total() == read:
            raise UserError(none_left(split, dropped))
        return {"in": read, "out": read - dropped.total(), "dropped": dict(dropped)}

    def _faults(self, split: str) -> Callable:
        """The finder of pairs to drop from a split."""
        if split == "train" and self.corpus.rules.drop_test_overlap:
            held_out = (self._digests("apply", other) for other in self.splits()[1:])
            sentences = overlap.held_out(chain.from_iterable(held_out))
            return partial(overlap.faults_and_leaks, self.corpus.rules, sentences)
        return partial(faults, self.corpus.rules)

    def _digests(self, stage: str, split: str) -> list[tuple[bytes, bytes, bytes]]:
        """The digests of each pair of a split, as `stage` left it; see overlap.digests."""
        read = self._read(overlap.digests, self.text(stage, split), f"compare {split}")
        return [row for _, rows in read for row in rows]

    # --- binarise ---------------------------------------------------------------------------------------------------

    def binarise(self, folder: Path) -> dict:
        text = self.folder["filter"]
        self._check_expected({split: count_lines(text / f"{split}.{self.languages[0]}") for split in self.splits()})
        words = self.earlier.words() if self.earlier else self._dictionaries(folder)
        encode = binary.Encode(words)
        unknown = {split: self._binarise(folder, split, encode) for split in self.splits()}
        types = {lang: len(side) + len(binary.SPECIAL) for lang, side in zip(self.languages, words, strict=True)}
        for path in self.folder["learn"].iterdir():  # codes, vocabularies if there is a threshold, earlier dictionaries
            if path.name != stages.STAMP:
                shutil.copy(path, folder)
        if self.codes:
            (folder / "raw").mkdir()
            for split in self.splits()[1:]:
                self._rewrite(subwords.join, "filter", folder / "raw", split)
        else:
            shutil.copytree(text / "raw", folder / "raw")
        summary = report.summarise(
            self.corpus,
            folder,
            stages={stage.name: stage.report() for stage in self.chain[:-1]},
            merges=self.merges,
            unknown=unknown,
            types=types if self.corpus.rules.separate_dictionaries else types[self.languages[0]],
            command=self.command,
            versions=versions(),
        )
        summary |= self._checks()
        summary["languages"] = dict(zip(self.languages, self.spoken, strict=True))
        measured = report.unicode_form(summary, self.corpus.rules.nfc)
        summary["unicode"] = self.earlier.unicode if self.earlier else measured
        text = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        # Names of files need not be UTF-8.
        (folder / "PREP.json").write_text(text, encoding="utf-8", errors="backslashreplace")
        return {}

    def _dictionaries(self, folder: Path) -> list[list[str]]:
        """Writes each side's dictionary of the training text, one for both or its own; returns their subwords."""
        counts = [Counter(), Counter()] if self.corpus.rules.separate_dictionaries else [Counter()] * 2
        for _, of_chunk in self._read(binary.count_subwords, self.text("filter", "train"), "count subwords"):
            for total, of_side in zip(counts, of_chunk, strict=True):
                total.update(of_side)
        sides = list(map(binary.dictionary, counts))
        for lang, words in zip(self.languages, sides, strict=True):
            lines = "".join(f"{word} {count}\n" for word, count in words)
            (folder / f"dict.{lang}.txt").write_text(lines, encoding="utf-8")
        return [[word for word, _ in words] for words in sides]

    def _checks(self) -> dict:
        """The entries of PREP.json about the quality of the text; report.py has the limits for warnings."""
        paths, given = self.text("filter", "valid", raw=True), self.corpus.rules.tokenizer == "given"
        if self.earlier:
            escape = self.earlier.escape
        else:
            texts = (path.read_text(encoding="utf-8") for path in paths)
            escape = not given or round_trip.escaped(text.replace("@@ ", "") for text in texts)
        codes = self._codes(self.folder["learn"])
        work = round_trip.RoundTrip(self.spoken, self.corpus.rules, codes, escape, in_subwords=bool(self.codes))
        sides = reduce(round_trip.add, (counts for _, counts in self._read(work, paths, "check valid")))
        held_out = {split: self._digests("filter", split) for split in self.splits()[1:]}
        work = partial(overlap.seen, overlap.held_out(chain.from_iterable(held_out.values())))
        pairs, seen = [], (set(), set(), set())
        for _, (digests, known) in self._read(work, self.text("filter", "train"), "compare train"):
            pairs.append(digests)
            for total, more in zip(seen, known, strict=True):
                total |= more
        return {
            **({"escape": escape} if given else {}),
            "round_trip": dict(zip(self.languages, sides, strict=True)),
            "overlap_with_training": {split: overlap.count(rows, seen) for split, rows in held_out.items()},
            "duplicate_training_pairs": overlap.duplicates(pairs),
        }

    def _binarise(self, folder: Path, split: str, encode: binary.Encode) -> list[int]:
        """Writes .bin and .idx of both sides of a split; returns how many subwords of each are unknown."""
        names = [folder / f"{split}.{'-'.join(self.languages)}.{lang}" for lang in self.languages]
        data, sizes = ([Path(f"{name}.{kind}") for name in names] for kind in ("bin", "lengths"))
        unknown = [0, 0]
        with ExitStack() as stack:
            files = list(zip(_create(stack, data), _create(stack, sizes), strict=True))
            for _, sides in self._read(encode, self.text("filter", split), f"binarise {split}"):
                for side, (encoded, (numbers, lengths)) in enumerate(zip(sides, files, strict=True)):
                    numbers.write(encoded[0])
                    lengths.write(encoded[1])
                    unknown[side] += encoded[2]
        for name, lengths, number_type in zip(names, sizes, encode.types, strict=True):
            binary.write_index(Path(f"{name}.idx"), lengths, number_type)
            lengths.unlink()
        return unknown


def _create(stack: ExitStack, paths: list[Path]) -> list[IO[bytes]]:
    return [stack.enter_context(path.open("wb", buffering=1 << 20)) for path in paths]


def _write(file: IO[bytes], lines: Iterable[bytes]) -> int:
    """Writes the lines and says how many they were."""
    number = 0
    for number, line in enumerate(lines, 1):  # noqa: B007
        file.write(line)
    return number


def _link(paths: list[Path], folder: Path) -> None:
    """The same files in another folder, without a second copy on the disk where the file system can."""
    for path in paths:
        try:
            os.link(path, folder / path.name)
        except OSError:
            shutil.copyfile(path, folder / path.name)


def none_left(split: str, dropped: Counter[str]) -> str:
    """The message where every pair was dropped."""
    counts = ", ".join(f"{count:,} {fault}" for fault, count in dropped.items())
    limits = {"too long": "--max-length", "length ratio": "--max-ratio"}
    others = [f", or raise {option}" for fault, option in limits.items() if fault in dropped]
    return f"{split}: no pair is left: {counts}; give other text{''.join(others)}"


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that decide the data."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
