"""Raw text becomes fairseq's binary data in three stages; each streams the text through in chunks.

tokens    pass 1: raw/ and archives -> verified UTF-8, punctuation, Moses tokens, case; length filter in words; the
          validation split, if it comes from the training text
subwords  joint codes, learnt on the training tokens; pass 2: tokens -> subwords; length filter in subwords;
          dictionaries; sentences that training shares with validation and tests
binary    fairseq's binary data, and the report; the finished data folder
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
import shlex
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
from ea_artifacts.preparation import CODES, FILE

from . import binary, download, overlap, report, round_trip, stages, subwords
from .corpora import Corpus
from .languages import base_language
from .parallel import Chunk, chunks, ordered_map, read_rows
from .rules import Tokenise, faults, in_turn, no_faults
from .text import Side, checked_lines, count_lines

RULES = 4  # raise this when the same options come to make other text
ROLES = ("src", "ref")  # what shared tasks call the two sides of a test
LIBRARIES = ("sacremoses", "subword-nmt", "sentencepiece", "regex", "numpy")
LEARNT = "learnt"  # in the folder of the subwords: codes, lists of allowed subwords, dictionaries
Step = Callable[[Chunk], Chunk]


class Pipeline:
    """One preparation: `corpus` made of the text below `raw`, finished as the folder `out`.

    `command` is for the record.
    """

    def __init__(self, corpus: Corpus, raw: Path, out: Path, workers: int = 1, command: Sequence[str] = ()) -> None:
        self.corpus, self.rules, self.out, self.workers, self.command = corpus, corpus.rules, out, workers, command
        self.codes = subwords.given_codes(corpus.codes) if corpus.codes else None
        self.earlier = corpus.like
        if self.earlier:  # codes are read now, and not after hours
            subwords.Apply(self.earlier.folder, self.earlier.bpe, self.earlier.languages)
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
        makers = {"tokens": self.make_tokens, "subwords": self.make_subwords, "binary": self.make_binary}
        self.chain = stages.chain(out, makers, self._options())

    def _options(self) -> dict[str, list]:
        """The options, text and versions that decide each stage's result, beside the stages before it."""
        rules = dataclasses.asdict(self.rules)
        later = {"bpe", "merges", "vocabulary_threshold", "separate_dictionaries"}
        if self.rules.filter_on == "subwords":
            later |= {"max_ratio", "max_length", "drop_test_overlap"}
        tokens = {name: value for name, value in rules.items() if name not in later}
        text = [[split, *side.fingerprint()] for split, parts in self.sides.items() for side in chain(*parts)]
        return {
            "tokens": [RULES, versions(), self.languages, self.spoken, text, bool(self.codes), tokens],
            "subwords": [rules, self.codes and self.codes.hex(), self.earlier and self.earlier.digest()],
            "binary": [self.corpus.name],
        }

    def run(self) -> dict:
        """Makes the missing stages and returns the contents of PREP.json."""
        stages.run(self.chain)
        summary = read_json(self.out / FILE)
        say(report.table(summary))
        for warning in report.warnings(summary):
            say(warning)
        return summary

    def text(self, stage: str, split: str, raw: bool = False) -> list[Path]:
        """Both files of a split as `stage` left them; `raw` for the text of the same lines before any rule."""
        folder = self.chain[stages.NAMES.index(stage)].folder
        return self._files(folder / "raw" if raw else folder, split)

    def _files(self, folder: Path, stem: str, end: str = "") -> list[Path]:
        return [folder / f"{stem}.{lang}{end}" for lang in self.languages]

    def _with_raw(self, folder: Path, split: str) -> list[Path]:
        """The files of a split in a stage's folder: both sides, and of validation and tests also the raw text."""
        raw = [] if split == "train" else self._files(folder / "raw", split)
        return [*self._files(folder, split), *raw]

    def splits(self) -> list[str]:
        """The splits of the finished data, training first."""
        return ["train", "valid", *self.corpus.test_names()]

    def _read(self, function: Callable, paths: list[Path], what: str) -> Iterator[Any]:
        """The function's results for each chunk of the files, in order; shows progress."""
        rows = chunks(read_rows(paths), what, count_lines(paths[0]))
        return (result for _, result in ordered_map(function, rows, self.workers))

    def _write(
        self,
        outputs: Sequence[list[Path]],
        rows: Iterator[tuple[bytes, ...]],
        what: str,
        steps: Sequence[Step],
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
        every = (len(outputs) > 1 and self.rules.valid_every) or sys.maxsize
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
            counts = ", ".join(f"{count:,} {fault}" for fault, count in dropped.items()) or "there was none"
            options = "--max-length, --max-ratio or --valid-every"
            raise UserError(f"{outputs[0][0].stem}: no pair is left: {counts}; give other text, or change {options}")
        return {"in": kept + dropped.total(), "out": kept, "dropped": dict(dropped)}

    # --- tokens -----------------------------------------------------------------------------------------------------

    def make_tokens(self, folder: Path) -> dict:
        every = chain(*chain(*self.sides.values()))
        for path, part in {side.path: side.part for side in every if side.public}.items():
            download.verify(path, part)
        (folder / "raw").mkdir()
        # The training text comes last: a fault in a test is reported in seconds.
        return {split: counts for split in [*self.sides][::-1] if (counts := self._tokens(folder, split))}

    def _tokens(self, folder: Path, split: str) -> dict | None:
        """Makes a split, and the validation split with the training text it comes from; the length filter's numbers."""
        rules, training = self.rules, split == "train"
        steps = [Tokenise(self.spoken, rules, training)]
        filtered = training and rules.filter_on == "words"
        outputs = [self._with_raw(folder, split)]
        if training and rules.valid_every:
            outputs.append(self._with_raw(folder, "valid"))
        rows = (pair * 2 for pair in self._pairs(split))  # what becomes tokens, and the raw text
        counts = self._write(outputs, rows, f"tokens {split}", steps, partial(faults, rules) if filtered else no_faults)
        return counts if filtered else None

    def _pairs(self, split: str) -> Iterator[tuple[bytes, ...]]:
        """The raw text of a split, checked, one part after the other."""
        empty = True
        for sides in self.sides[split]:
            lines = [self._checked(side, split) for side in sides]
            for number, pair in enumerate(zip_longest(*lines)):
                if None in pair:
                    ends = zip(pair, lines, sides, strict=True)
                    counts = ((number + (line is not None) + sum(1 for _ in rest), side) for line, rest, side in ends)
                    lengths = "\n".join(f"  {count:>11,} lines in {side}" for count, side in counts)
                    raise UserError(f"{split}: the two sides do not have the same number of lines:\n{lengths}")
                empty = False
                yield pair
        if empty:
            raise UserError(f"{split}: no lines in {self._files_of(split)}")

    def _files_of(self, split: str) -> str:
        return " and ".join(map(str, chain(*self.sides[split])))

    def _checked(self, side: Side, split: str) -> Iterator[bytes]:
        keep_nul = split == "train" and self.rules.normalise  # which removes it
        return checked_lines(side.lines(), str(side), keep_nul)

    # --- subwords ---------------------------------------------------------------------------------------------------

    def make_subwords(self, folder: Path) -> dict:
        (folder / "raw").mkdir()
        words = self._learn(folder / LEARNT)
        steps: list[Step] = []
        if not self.codes:
            steps = [subwords.Apply(folder / LEARNT, self.rules.bpe, self.languages)]
        # The training text comes last: sentences of the other splits are dropped from it, or counted.
        filters, digests = {}, {}
        for split in self.splits()[:0:-1]:
            filters[split] = self._subwords(folder, split, steps)
            rows = self._read(overlap.digests, self._files(folder, split), f"compare {split}")
            digests[split] = [*chain.from_iterable(rows)]
        held_out = overlap.held_out(chain.from_iterable(digests.values()))
        filters["train"] = self._subwords(folder, "train", steps, held_out)

        counts, seen, pairs = (Counter[str](), Counter[str]()), (set[bytes](), set[bytes](), set[bytes]()), []
        measure = partial(overlap.measure, held_out)
        for of_chunk, known, numbers in self._read(measure, self._files(folder, "train"), "count subwords"):
            pairs.append(numbers)
            for total, more in zip(counts, of_chunk, strict=True):
                total.update(more)
            for shared, more in zip(seen, known, strict=True):
                shared |= more
        if not self.earlier:
            binary.save_dictionaries(
                counts, self._files(folder / LEARNT, "dict", ".txt"), self.rules.separate_dictionaries
            )
        return {
            "words": words,
            "filters": {split: filters[split] for split in self.splits() if filters[split]},
            "shared": {
                "overlap_with_training": {split: overlap.count(digests[split], seen) for split in self.splits()[1:]},
                "duplicate_training_pairs": overlap.duplicates(pairs),
            },
        }

    def _learn(self, folder: Path) -> dict[str, dict[str, int]]:
        """Learns subwords and writes them to a new folder; the numbers of words they were learnt from."""
        folder.mkdir()
        rules, train = self.rules, self.text("tokens", "train")
        words = (Counter[bytes](), Counter[bytes]())
        count = partial(in_turn, [*[subwords.join] * bool(self.codes), subwords.count_words])
        for counts in self._read(count, train, "count words"):
            for total, of_chunk in zip(words, counts, strict=True):
                total.update(of_chunk)
        if not any(words):
            raise UserError(f"train: no words to learn subwords from, only empty lines, in {self._files_of('train')}")
        if self.earlier:
            _copy(self.earlier.files(), folder)
        elif self.codes:
            (folder / CODES["subword_nmt"]).write_bytes(self.codes)
            self._check_codes(folder)
        elif rules.bpe == "sentencepiece":
            subwords.learn_sentencepiece(train, rules.merges, folder)
        else:
            subwords.learn(words[0] + words[1], rules.merges, folder)
            if rules.vocabulary_threshold:
                subwords.write_vocabularies(folder, self.languages, words, rules.vocabulary_threshold)
        sides = zip(self.languages, words, strict=True)
        return {lang: {"words": side.total(), "types": len(side)} for lang, side in sides}

    def _check_codes(self, folder: Path) -> None:
        """Compare the validation text's subwords with those that the given codes make of its words.

        Text to translate is split by these codes: with the wrong ones the model would read subwords it never saw.
        """
        apply, paths = subwords.Apply(folder, "subword_nmt", self.languages), self.text("tokens", "valid")
        lines = sum(map(count_lines, paths))
        different = sum(self._read(partial(subwords.split_otherwise, apply), paths, "check valid"))
        if different:
            message = f"{different:,} of {lines:,} lines of the validation text are not in the subwords of these codes"
            if different > lines / 10:
                raise UserError(f"{self.corpus.codes}: {message}: are they of other text?")
            say(f"warning: {self.corpus.codes}: {message}")

    def _subwords(
        self, folder: Path, split: str, steps: list[Step], held_out: overlap.Digests | None = None
    ) -> dict | None:
        """Makes a split, which `steps` bring into subwords; the length filter's numbers."""
        rules = self.rules
        # Splits that came as such stay whole, and aligned line by line.
        filtered = rules.filter_on == "subwords" and (split == "train" or (split == "valid" and rules.valid_every))
        find: Callable = partial(faults, rules) if filtered else no_faults
        if filtered and held_out and rules.drop_test_overlap:
            find = partial(overlap.faults_and_leaks, rules, held_out)
        paths = self._with_raw(self.chain[0].folder, split)
        rows = read_rows(paths)
        if self.codes and split != "train":  # text that came in subwords is scored in words
            rows = ((*pair, *map(subwords.joined, pair)) for pair in read_rows(paths[:2]))
        outputs = [self._with_raw(folder, split)]
        counts = self._write(outputs, rows, f"subwords {split}", steps, find, count_lines(paths[0]))
        return counts if filtered else None

    # --- binary -----------------------------------------------------------------------------------------------------

    def make_binary(self, folder: Path) -> dict:
        text, rules = self.chain[1].folder, self.rules
        _copy((text / LEARNT).iterdir(), folder)
        _copy((text / "raw").iterdir(), folder / "raw")
        dictionaries = list(map(binary.load_dictionary, self._files(folder, "dict", ".txt")))
        sizes = dict(zip(self.languages, map(len, dictionaries), strict=True))
        tokens, in_subwords = (stage.report() or {} for stage in self.chain[:2])
        filters = tokens | in_subwords["filters"]
        dropped = sum((Counter(counts["dropped"]) for counts in filters.values()), Counter[str]())
        escape, sides = self._round_trip(folder)
        summary = {
            "name": self.corpus.name,
            "source_lang": self.corpus.source_lang,
            "target_lang": self.corpus.target_lang,
            "tokenizer": rules.tokenizer,
            "lowercase": rules.lowercase,
            "bpe": rules.bpe,
            "bpe_merges": subwords.count_merges(self.codes) if self.codes else rules.merges,
            "rules": dataclasses.asdict(rules),
            "splits": {split: self._binary(folder, split, dictionaries) for split in self.splits()},
            "dictionary": sizes if rules.separate_dictionaries else sizes[self.languages[0]],
            "train_words": in_subwords["words"],
            "filters": [{"on": rules.filter_on, "split": split} | counts for split, counts in filters.items()],
            "dropped": dict(dropped),
            "command": shlex.join(self.command),
            "versions": versions(),
            **({"escape": escape} if rules.tokenizer == "given" else {}),
            "round_trip": sides,
            **in_subwords["shared"],
            "languages": dict(zip(self.languages, self.spoken, strict=True)),
            "unicode": self.earlier.unicode if self.earlier else report.unicode_form(sides, rules.nfc),
        }
        content = json.dumps(summary, indent=1, ensure_ascii=False) + "\n"
        # Names of files need not be UTF-8.
        (folder / FILE).write_text(content, encoding="utf-8", errors="backslashreplace")
        return {}

    def _binary(self, folder: Path, split: str, dictionaries: Sequence[binary.Dictionary]) -> dict[str, Any]:
        """Writes .bin and .idx of both sides of a split; its entry in PREP.json."""
        names = self._files(folder, f"{split}.{'-'.join(self.languages)}")
        encoded = self._read(binary.Encode(dictionaries), self.text("subwords", split), f"binary {split}")
        sides = binary.write(names, dictionaries, encoded)
        parts = self.corpus.splits().get(split, self.corpus.train)
        return {
            "pairs": sides[0].pop("pairs"),
            "expected": self.corpus.expected.get(split),
            "name": self.corpus.test_names().get(split, split),
            "source": [part.url or part.member for part in parts],
        } | {name: dict(zip(self.languages, (side[name] for side in sides), strict=True)) for name in sides[0]}

    def _round_trip(self, folder: Path) -> tuple[bool, dict[str, dict]]:
        """Whether the text has Moses' escapes, and how much of each side of the validation text survives."""
        paths = self.text("subwords", "valid", raw=True)
        if self.earlier:
            escape = self.earlier.escape
        else:
            texts = (path.read_text(encoding="utf-8") for path in paths)
            escape = self.rules.tokenizer != "given" or round_trip.escaped(texts)
        trip = round_trip.RoundTrip(self.spoken, self.rules, folder, escape)
        sides = reduce(round_trip.add, self._read(trip, paths, "check valid"))
        return escape, dict(zip(self.languages, sides, strict=True))


def _copy(files: Iterable[Path], folder: Path) -> None:
    """Copies files into a folder; shutil.copytree hides the system's error, which says what to do."""
    folder.mkdir(exist_ok=True)
    for path in files:
        shutil.copyfile(path, folder / path.name)


def versions() -> dict[str, str]:
    """The versions of Python and of the libraries that decide the data."""
    return {"python": platform.python_version()} | {name: importlib.metadata.version(name) for name in LIBRARIES}
