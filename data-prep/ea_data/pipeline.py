"""Raw text becomes fairseq's binary data in three stages; each streams the text through in chunks.

tokens    pass 1: raw/ and archives -> verified UTF-8, punctuation, Moses tokens, case; length filter in words; the
          validation split, if it comes from the training text
subwords  joint codes, learnt on the training tokens; pass 2: tokens -> subwords; length filter in subwords
binary    fairseq's dictionaries and binary data, and the report; the finished data folder
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial, reduce
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from ea_artifacts.command import UserError, say
from ea_artifacts.files import read_json
from ea_artifacts.preparation import CODES, FILE, Preparation

from . import binary, download, overlap, report, round_trip, stages, subwords
from .corpus import Corpus
from .languages import base_language
from .parallel import Chunk, chunks, ordered_map, read_rows
from .rules import Normalise, Tokenise, compose, faults, in_turn, no_faults, plain_apostrophes
from .sources import Side
from .stages import NAMES, Stage
from .text import checked_lines, count_lines, lower_case_lines

RULES = 4  # raise this when the same options come to make other text
ROLES = ("src", "ref")  # what shared tasks call the two sides of a test
LIBRARIES = ("sacremoses", "subword-nmt", "sentencepiece", "regex", "numpy")
LEARNT = "learnt"  # in the folder of the subwords: codes, lists of allowed subwords, dictionaries of earlier data


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
        self.folder = folder | {"binary": out}
        self.chain = self._stages()

    def run(self, force: str | None = None) -> dict:
        """Makes the missing stages and returns the contents of PREP.json."""
        stages.refuse_others(self.out)
        with stages.alone(self.work):
            stages.run(self.chain, force, say)
        summary = read_json(Preparation.at(self.out).folder / FILE)
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
        """The stages, each with the options that it depends on beside those of the stage before it."""
        tokens = dataclasses.asdict(self.corpus.rules)
        learnt = {name: tokens.pop(name) for name in ("bpe", "merges", "vocabulary_threshold")}
        lengths = {name: tokens.pop(name) for name in ("max_ratio", "max_length", "drop_test_overlap")}
        binary = [self.corpus.name, tokens.pop("separate_dictionaries")]
        in_words = self.corpus.rules.filter_on == "words"
        options: dict[str, list] = {
            "tokens": [RULES, versions(), self.languages, self.spoken, self._fingerprint(), bool(self.codes), tokens],
            "subwords": [self._what_is_learnt(learnt)],
            "binary": binary,
        }
        options["tokens" if in_words else "subwords"].append(lengths)
        return [
            Stage(name, options[name], getattr(self, f"make_{name}"), self.folder[name], self.work) for name in NAMES
        ]

    def _what_is_learnt(self, settings: dict[str, Any]) -> str | list | dict:
        """The source of the subwords and the dictionary, beside the text: these settings, codes, or earlier data."""
        if self.codes:
            return self.codes.hex()
        return ["like", self.earlier.digest()] if self.earlier else settings

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
        return ordered_map(function, chunks(read_rows(paths), what, count_lines(paths[0])), self.workers)

    def _write(
        self,
        outputs: Sequence[list[Path]],
        rows: Iterator[tuple[bytes, ...]],
        what: str,
        steps: Sequence[Callable[[Chunk], Chunk]],
        find: Callable[[Chunk], Sequence[str | None]],
        total: int | None = None,
    ) -> dict[str, Any]:
        """Writes rows as `steps` change their first two lines, but for those that `find` finds at fault.

        Args:
            outputs: the files to write, one for each line of a row; a second list gets every n-th row, as
                rules.valid_every states, and the first list the others.
            find: the fault of each pair of a changed chunk, or None.
            total: the number of rows, if it is known, for the progress bar.

        Returns:
            The number of rows read and written, and how many were dropped for which fault.
        """
        every = (len(outputs) > 1 and self.corpus.rules.valid_every) or sys.maxsize
        kept, dropped = 0, Counter[str]()

        def work(chunk: Chunk) -> tuple[Chunk, Sequence[str | None]]:
            changed = in_turn(steps, chunk)
            return changed, find(changed)

        with ExitStack() as stack:
            files = [[stack.enter_context(path.open("wb", buffering=1 << 20)) for path in some] for some in outputs]
            for chunk, (changed, wrong) in ordered_map(work, chunks(rows, what, total), self.workers):
                for fault, *row in zip(wrong, *changed, *chunk[2:], strict=True):
                    if fault:
                        dropped[fault] += 1
                        continue
                    kept += 1
                    for file, line in zip(files[kept % every == 0], row, strict=False):
                        file.write(line)
        if not kept:
            raise UserError(none_left(outputs[0][0].stem, dropped))
        return {"in": kept + dropped.total(), "out": kept, "dropped": dict(dropped)}

    def _outputs(self, folder: Path, split: str) -> list[Path]:
        """The files of a split in a stage's folder: both sides, and of validation and tests also the raw text."""
        folders = [folder] if split == "train" else [folder, folder / "raw"]
        return [place / f"{split}.{lang}" for place in folders for lang in self.languages]

    # --- tokens -----------------------------------------------------------------------------------------------------

    def make_tokens(self, folder: Path) -> dict:
        public = {
            side.path: side.part for parts in self.sides.values() for sides in parts for side in sides if side.public
        }
        known = {path.name: (part.size, part.sha256) for path, part in public.items()}
        download.verify(public, self.work / stages.SUMS, known)
        (folder / "raw").mkdir()
        # The training text comes last: a fault in a test is reported in seconds.
        return {split: counts for split in [*self.sides][::-1] if (counts := self._tokens(folder, split))}

    def _tokens(self, folder: Path, split: str) -> dict | None:
        """Makes a split, and the validation split with the training text it comes from; the length filter's numbers."""
        rules = self.corpus.rules
        steps: list[Callable[[Chunk], Chunk]] = [compose] * rules.nfc
        if split == "train" and rules.normalise:
            steps.append(Normalise(self.spoken))
        if split != "train" and rules.plain_apostrophes:
            steps.append(plain_apostrophes)
        steps.append(Tokenise(self.spoken, rules))
        filtered = split == "train" and rules.filter_on == "words"
        outputs = [self._outputs(folder, split)]
        if split == "train" and rules.valid_every:
            outputs.append(self._outputs(folder, "valid"))
        rows = (pair * 2 for pair in self._pairs(split))  # what becomes tokens, and the raw text
        counts = self._write(outputs, rows, f"tokens {split}", steps, partial(faults, rules) if filtered else no_faults)
        if len(outputs) > 1 and counts["out"] < rules.valid_every:
            raise UserError(
                f"valid: no pair is left: --valid-every {rules.valid_every} of {counts['out']:,} training pairs; "
                "choose a smaller number"
            )
        return counts if filtered else None

    def _pairs(self, split: str) -> Iterator[tuple[bytes, ...]]:
        """The raw text of a split, checked, one part after the other."""
        found = False
        for sides in self.sides[split]:
            both = [self._checked(side, split) for side in sides]
            for number, pair in enumerate(zip_longest(*both)):
                if None in pair:
                    counts = [
                        number + (line is not None) + sum(1 for _ in rest)
                        for line, rest in zip(pair, both, strict=True)
                    ]
                    lengths = [f"  {count:>11,} lines in {side}" for count, side in zip(counts, sides, strict=True)]
                    message = f"{split}: the two sides do not have the same number of lines:"
                    raise UserError("\n".join([message, *lengths]))
                found = True
                yield pair
        if not found:
            raise UserError(f"{split}: no lines in {' and '.join(map(str, sides))}")

    def _checked(self, side: Side, split: str) -> Iterator[bytes]:
        keep_nul = split == "train" and self.corpus.rules.normalise  # which removes it
        lines = checked_lines(side.lines(), str(side), keep_nul)
        # With codes the text is in subwords, and must be lower-case already.
        return lower_case_lines(lines, str(side)) if self.codes and self.corpus.rules.lowercase else lines

    # --- subwords ---------------------------------------------------------------------------------------------------

    def make_subwords(self, folder: Path) -> dict:
        (folder / "raw").mkdir()
        words = self._learn(folder / LEARNT)
        steps: list[Callable] = [] if self.codes else [self._apply(folder / LEARNT)]
        counts = {split: self._subwords(folder, split, steps) for split in self.splits()}
        return {"words": words, "filters": {split: some for split, some in counts.items() if some}}

    def _learn(self, folder: Path) -> dict[str, dict[str, int]]:
        """Learns subwords and writes them to a new folder; the numbers of words they were learnt from."""
        folder.mkdir()
        rules, train = self.corpus.rules, self.text("tokens", "train")
        words = (Counter[bytes](), Counter[bytes]())
        count = partial(in_turn, [*[subwords.join] * bool(self.codes), subwords.count_words])
        for _, counts in self._read(count, train, "count words"):
            for total, of_chunk in zip(words, counts, strict=True):
                total.update(of_chunk)
        if not (words[0] or words[1]):
            files = " and ".join(str(side) for sides in self.sides["train"] for side in sides)
            raise UserError(f"train: no words to learn subwords from, only empty lines, in {files}")
        if self.earlier:
            _copy(self.earlier.files(), folder)
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
        if self.codes:
            self._check_codes(folder)
        report = zip(self.languages, words, strict=True)
        return {lang: {"words": side.total(), "types": len(side)} for lang, side in report}

    def _codes(self, folder: Path) -> Path:
        return folder / CODES[self.corpus.rules.bpe]

    def _apply(self, learnt: Path) -> subwords.Apply:
        vocabularies: list[list[str] | None] = [None, None]
        if self.corpus.rules.vocabulary_threshold:
            files = [learnt / f"vocabulary.{lang}" for lang in self.languages]
            vocabularies = [file.read_text(encoding="utf-8").split("\n")[:-1] for file in files]
        return subwords.Apply(self._codes(learnt), vocabularies)

    def _check_codes(self, folder: Path) -> None:
        """Compare the validation text's subwords with those that the given codes make of its words.

        Text to translate is split by these codes: with the wrong ones the model would read subwords it never saw.
        """
        apply, paths = subwords.Apply(self._codes(folder)), self.text("tokens", "valid")
        lines = sum(map(count_lines, paths))
        different = sum(n for _, n in self._read(partial(subwords.split_otherwise, apply), paths, "check valid"))
        if different:
            message = f"{different:,} of {lines:,} lines of the validation text are not in the subwords of these codes"
            if different > lines / 10:
                raise UserError(f"{self.corpus.codes}: {message}: are they of other text?")
            say(f"warning: {self.corpus.codes}: {message}")

    def _subwords(self, folder: Path, split: str, steps: list[Callable[[Chunk], Chunk]]) -> dict | None:
        """Makes a split, which `steps` bring into subwords; the length filter's numbers."""
        rules = self.corpus.rules
        # Splits that came as such stay whole, and aligned line by line.
        filtered = rules.filter_on == "subwords" and (split == "train" or (split == "valid" and rules.valid_every))
        find: Callable = partial(faults, rules) if filtered else no_faults
        if filtered and split == "train" and rules.drop_test_overlap:
            held_out = (self._digests("tokens", other, *steps) for other in self.splits()[1:])
            find = partial(overlap.faults_and_leaks, rules, overlap.held_out(chain.from_iterable(held_out)))
        paths = self._outputs(self.folder["tokens"], split)
        rows = read_rows(paths)
        if self.codes and split != "train":  # text that came in subwords is scored in words
            rows = ((*pair, *map(subwords.joined, pair)) for pair in read_rows(paths[:2]))
        outputs = [self._outputs(folder, split)]
        counts = self._write(outputs, rows, f"subwords {split}", steps, find, count_lines(paths[0]))
        return counts if filtered else None

    def _digests(self, stage: str, split: str, *steps: Callable[[Chunk], Chunk]) -> list[tuple[bytes, bytes, bytes]]:
        """The digests of each pair of a split, as `stage` left it and `steps` change it; see overlap.digests."""
        read = self._read(partial(in_turn, [*steps, overlap.digests]), self.text(stage, split), f"compare {split}")
        return [row for _, rows in read for row in rows]

    # --- binary -----------------------------------------------------------------------------------------------------

    def make_binary(self, folder: Path) -> dict:
        text = self.folder["subwords"]
        self._check_expected({split: count_lines(text / f"{split}.{self.languages[0]}") for split in self.splits()})
        _copy((text / LEARNT).iterdir(), folder)
        _copy((text / "raw").iterdir(), folder / "raw")
        dictionaries = self._dictionaries(folder)
        unknown = {split: self._binary(folder, split, dictionaries) for split in self.splits()}
        sizes = dict(zip(self.languages, map(len, dictionaries), strict=True))
        tokens, in_subwords = (stage.report() or {} for stage in self.chain[:2])
        summary = report.summarise(
            self.corpus,
            folder,
            filters=tokens | in_subwords["filters"],
            words=in_subwords["words"],
            merges=self.merges,
            unknown=unknown,
            types=sizes if self.corpus.rules.separate_dictionaries else sizes[self.languages[0]],
            command=self.command,
            versions=versions(),
        )
        summary |= self._checks()
        summary["languages"] = dict(zip(self.languages, self.spoken, strict=True))
        measured = report.unicode_form(summary, self.corpus.rules.nfc)
        summary["unicode"] = self.earlier.unicode if self.earlier else measured
        content = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        # Names of files need not be UTF-8.
        (folder / FILE).write_text(content, encoding="utf-8", errors="backslashreplace")
        return {}

    def _dictionaries(self, folder: Path) -> list[binary.Dictionary]:
        """Each side's dictionary: that of earlier data, or one of the training text, which is written."""
        paths = [folder / f"dict.{lang}.txt" for lang in self.languages]
        if self.earlier:
            return [binary.load_dictionary(path) for path in paths]
        counts: list[Counter[str]] = (
            [Counter(), Counter()] if self.corpus.rules.separate_dictionaries else [Counter()] * 2
        )
        for _, of_chunk in self._read(binary.count_subwords, self.text("subwords", "train"), "count subwords"):
            for total, of_side in zip(counts, of_chunk, strict=True):
                total.update(of_side)
        dictionaries = list(map(binary.dictionary, counts))
        for path, numbers in zip(paths, dictionaries, strict=True):
            numbers.save(str(path))
        return dictionaries

    def _binary(self, folder: Path, split: str, dictionaries: list[binary.Dictionary]) -> list[int]:
        """Writes .bin and .idx of both sides of a split; returns how many subwords of each are unknown."""
        names = [folder / f"{split}.{'-'.join(self.languages)}.{lang}" for lang in self.languages]
        encoded = self._read(binary.Encode(dictionaries), self.text("subwords", split), f"binary {split}")
        return binary.write(names, dictionaries, (sides for _, sides in encoded))

    def _checks(self) -> dict:
        """The entries of PREP.json about the quality of the text; report.py has the limits for warnings."""
        paths, given = self.text("subwords", "valid", raw=True), self.corpus.rules.tokenizer == "given"
        if self.earlier:
            escape = self.earlier.escape
        else:
            texts = (path.read_text(encoding="utf-8") for path in paths)
            escape = not given or round_trip.escaped(texts)
        codes = self._codes(self.folder["subwords"] / LEARNT)
        trip = round_trip.RoundTrip(self.spoken, self.corpus.rules, codes, escape)
        sides = reduce(round_trip.add, (counts for _, counts in self._read(trip, paths, "check valid")))
        held_out = {split: self._digests("subwords", split) for split in self.splits()[1:]}
        work = partial(overlap.seen, overlap.held_out(chain.from_iterable(held_out.values())))
        pairs: list = []
        seen: tuple[set[bytes], ...] = (set(), set(), set())
        for _, (digests, known) in self._read(work, self.text("subwords", "train"), "compare train"):
            pairs.append(digests)
            for total, more in zip(seen, known, strict=True):
                total |= more
        return {
            **({"escape": escape} if given else {}),
            "round_trip": dict(zip(self.languages, sides, strict=True)),
            "overlap_with_training": {split: overlap.count(rows, seen) for split, rows in held_out.items()},
            "duplicate_training_pairs": overlap.duplicates(pairs),
        }


def _copy(files: Iterable[Path], folder: Path) -> None:
    """Copies files into a folder; shutil.copytree hides the system's error, which says what to do."""
    folder.mkdir(exist_ok=True)
    for path in files:
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
