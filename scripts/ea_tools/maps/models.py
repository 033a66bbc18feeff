"""A trained model, with the preparation of the text that it reads, ready to be looked at.

    loaded = load_model("runs/mine")
    source = loaded.source("Guten Morgen!")
    maps = loaded.force(source, loaded.translate(source))

A language model has no source, and a RoBERTa no target: `loaded.sides`.
"""

from __future__ import annotations

import logging
import re
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ea_fairseq  # noqa: F401  (registers the architectures; first, for fairseq is less talkative then)
from ea_artifacts.checkpoints import ONE_LANGUAGE, peek
from ea_artifacts.command import say
from ea_artifacts.run import Run

# isort: split
import torch
from fairseq.data import Dictionary
from fairseq.tasks import FairseqTask
from torch import Tensor

from ea_artifacts.checkpoints import of_model, task_of, trained_on
from ea_artifacts.command import UserError
from ea_artifacts.preparation import Preparation
from ea_fairseq.translator import read_models
from ea_runtime.text import Text
from ea_tools.maps.collect import LayerMaps, collect
from ea_tools.maps.words import Words, starts, words_of
from ea_tools.metrics import written_with_spaces
from ea_tools.sides import BOTH, ENCODER, NAMES, Sides, arguments, sides_of

TASKS = ("translation", *ONE_LANGUAGE)
MASK = "<mask>"


@dataclass(frozen=True)
class Sentence:
    """A sentence as the model reads it."""

    ids: Tensor  # its length; the last one is the end of the sentence
    labels: list[str]  # the subwords; one that the dictionary does not know stands in ⟨⟩
    words: Words  # of which these are the subwords


@dataclass
class Loaded:
    """A trained model on the CPU."""

    checkpoint: Path
    data: Path
    preparation: Preparation
    model: Any  # of fairseq
    task: FairseqTask
    trained_for: dict[str, Any]  # the task's options

    @property
    def sides(self) -> Sides:
        """Encoder, decoder or both."""
        return sides_of(type(self.model))

    @property
    def task_name(self) -> str:
        """The task of the training."""
        return self.trained_for["_name"]

    def source(self, text: str) -> Sentence:
        """Raw text in the source language, or for an encoder alone."""
        return self._read(text, "source")

    def target(self, text: str) -> Sentence:
        """Raw text in the target language, or of a language model."""
        return self._read(text, "target")

    def _read(self, text: str, side: str) -> Sentence:
        """Raw text in subwords, between the symbols that the task puts around each sentence.

        <mask> stays as it is where the model knows it.
        """
        if (readable := text.encode(errors="replace").decode()) != text:
            raise UserError(f"the {self.called(side)}sentence is not UTF-8: {readable}")
        split, dictionary = Text(self.data, self.language(side)).subwords, self.dictionary(side)
        known = dictionary.index(MASK) != dictionary.unk()
        parts = re.split(f"({MASK})", text) if known else [text]
        symbols = [symbol for part in parts for symbol in ([MASK] if part == MASK else split(part.rstrip()).split())]
        if not symbols:
            raise UserError(f"the {self.called(side)}sentence is empty")
        begin = [dictionary.bos_word] if self.task_name in ("masked_lm", "denoising") else []
        return self._sentence([*begin, *symbols, dictionary.eos_word], side)

    def dictionary(self, side: str) -> Dictionary:
        """The words of this side, "source" or "target"."""
        return getattr(self.task, f"{side}_dictionary")

    def _sentence(self, symbols: list[str], side: str) -> Sentence:
        dictionary = self.dictionary(side)
        ids = torch.tensor([dictionary.index(symbol) for symbol in symbols])
        self._must_fit(ids, side)
        known = (ids != dictionary.unk()).tolist()
        labels = [symbol if word else f"⟨{symbol}⟩" for symbol, word in zip(symbols, known, strict=True)]
        return Sentence(ids, labels, self.words(symbols, side, known))

    def words(self, symbols: Sequence[str], side: str, known: Sequence[bool] | None = None) -> Words:
        """The words that subwords belong to; a token of the task or of fairseq, such as </s>, is a word.

        In a language that is written without spaces each subword counts as a word.
        """
        bpe = self.preparation.bpe
        begins = [True] * len(symbols)
        if self.has_words(side):
            special = [re.fullmatch(r"</?\w+>", symbol) is not None for symbol in symbols]
            after = [False, *special[:-1]]
            begins = [any(each) for each in zip(starts(symbols, bpe), special, after, strict=True)]
        return words_of(symbols, known or [True] * len(symbols), begins, bpe)

    @property
    def stem(self) -> str:
        """The name of the model's input in the data's folder, with {} for the split."""
        if self.task_name == "translation":
            source, target = self.preparation.languages
            return f"{{}}.{source}-{target}.{source}.bin"
        return "{}.bin"

    def language(self, side: str) -> str:
        """The language of this side, "source" or "target", as file names have it."""
        return self.preparation.languages[("source", "target").index(side)]

    def has_words(self, side: str) -> bool:
        """Whether the subwords of this side show where a word begins."""
        return self.preparation.tokenizer == "given" or written_with_spaces(self.language(side))

    def _must_fit(self, ids: Tensor, side: str) -> None:
        positions = self.model.max_positions()
        most = positions[("source", "target").index(side)] if isinstance(positions, tuple) else positions
        if len(ids) > most:
            counts = f"has {len(ids) - 1:,} subwords; {self.checkpoint} takes {most - 1:,}"
            raise UserError(f"the {self.called(side)}sentence {counts}")

    def called(self, side: str) -> str:
        """The word before "sentence" in messages: none where there is one side only."""
        return f"{side} " if self.sides == BOTH else ""

    @torch.no_grad()
    def translate(self, source: Sentence, beam: int = 5) -> Sentence:
        """The model's own translation, by fairseq's beam search."""
        generator = self.task.build_generator([self.model], Namespace(beam=beam))
        net_input = {"src_tokens": source.ids[None], "src_lengths": torch.tensor([len(source.ids)])}
        ids = generator.generate([self.model], {"net_input": net_input})[0][0]["tokens"]
        # The generator leaves fairseq's own attention expecting that many copies of each sentence.
        self.model.decoder.set_beam_size(1)
        return self._sentence([self.task.target_dictionary[word] for word in ids], "target")

    def sentences(
        self, source: str, target: str | None = None, beam: int = 5
    ) -> tuple[Sentence | None, Sentence | None]:
        """The inputs of encoder and decoder for these texts; None for a side that the model does not have.

        A model that was trained to restore its text is made to give that text, where there is no target.
        """
        if self.sides == BOTH:
            given = self.source(source)
            if target is None and self.task_name != "denoising":
                return given, self.translate(given, beam)
            return given, self.target(source if target is None else target)
        if target is not None:
            raise UserError(f"--target: {self.checkpoint} has {NAMES[self.sides]}, and reads one text: give --source")
        if self.sides == ENCODER:
            return self.source(source), None
        return None, self.target(source)

    def reads(self, target: Sentence) -> tuple[str, Tensor]:
        """The decoder's input: the label of its first token, and all of them, the target's one place later."""
        first = target.ids[-1:]  # fairseq's decoder begins with the end of sentence
        if self.trained_for.get("add_bos_token"):
            first = torch.tensor([self.task.source_dictionary.bos()])
        return self.task.target_dictionary[int(first)], torch.cat([first, target.ids[:-1]])

    @torch.no_grad()
    def force(self, source: Sentence | None, target: Sentence | None) -> list[LayerMaps]:
        """The maps, B = 1, of the model while it reads `source` and is made to write `target`."""
        for sentence, side in ((source, "source"), (target, "target")):
            if sentence is not None:
                self._must_fit(sentence.ids, side)
        tokens = source.ids[None] if source else None
        with collect(self.model) as collected:
            self.model(**arguments(self.sides, tokens, self.reads(target)[1][None] if target else None))
        return collected.layers


def load_model(run_or_checkpoint: Path | str, data: Path | str | None = None, with_text: bool = False) -> Loaded:
    """The model of a run (see ``Run.model``) or of a checkpoint file, in evaluation mode on the CPU.

    Args:
        data: prepared data to use the model with; by default the run's own copy, or the data of its training.
        with_text: whether the prepared text is needed, too, of which a run keeps no copy.

    Raises:
        UserError: the folder, checkpoint or data cannot be used.
    """
    path = Path(run_or_checkpoint)
    checkpoint = Run(path).choose(say) if path.is_dir() else path
    state = peek(checkpoint)
    trained_for = task_of(state)
    if (name := trained_for["_name"]) not in TASKS:
        raise UserError(f"{checkpoint} was trained for the task {name}; known here are {', '.join(TASKS)}")
    if with_text and data is None:
        data = trained_on(checkpoint, state)
    given = Path(data) if data else None
    run = path if path.is_dir() else None
    preparation = of_model(checkpoint, state, run, Preparation.at(given) if given else None)
    folder = given or preparation.folder
    logging.getLogger("fairseq").setLevel(logging.WARNING)
    # Read a second time, and as safely: fairseq brings older checkpoints up to date while it reads.
    (model,), _, task = read_models([checkpoint], folder, preparation.languages)
    return Loaded(checkpoint, folder, preparation, model.eval(), task, trained_for)


def load_models(
    run: Path, compare: Path | None, data: Path | None = None, with_text: bool = False
) -> tuple[Loaded, Loaded | None]:
    """The model of a run or a checkpoint, and the baseline to compare it with, if there is one: of the same sides."""
    loaded = load_model(run, data, with_text)
    other = load_model(compare, data or loaded.data) if compare else None
    if other and other.sides != loaded.sides:
        raise UserError(
            f"--compare {other.checkpoint}: has {NAMES[other.sides]}, and {loaded.checkpoint} {NAMES[loaded.sides]}"
        )
    return loaded, other
