"""An exported model in place of a run: the same translations, scores and lines of output as by fairseq."""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ea_data.binary import read_sentences
from ea_runtime import ExportError, Translator
from ea_runtime.search import Settings
from ea_runtime.translator import EOS, UNK
from ea_tools.common import UserError, listed, say
from ea_tools.training.recipes import parse_flags

#: flags of fairseq-generate that change its speed and its device, and not the translations
OF_THE_WORK = {"cpu", "batch-size", "max-tokens", "num-workers", "log-format"}
#: the value of a flag, by the type of its setting
EXPECTED = {bool: "no value", int: "a whole number", float: "a number"}
#: how many sentences the model reads together by default
BATCH = 32


def refuse(args: argparse.Namespace, *names: str) -> None:
    """Refuse options that choose a checkpoint or how it computes: an export holds one model, whose numbers are fixed.

    Raises:
        UserError: one of these options, or a --precision, was given; the message names it.
    """
    given = [name for name in names if getattr(args, name)] + ["precision"] * (args.precision != "fp32")
    if given:
        raise UserError(f"--{given[0]}: has no effect on {args.run}, an exported model; leave it out, or export anew")


def load(folder: Path) -> Translator:
    """The exported model. One that is damaged is a UserError."""
    try:
        return Translator(folder)
    except ExportError as error:
        raise UserError(f"--run {error}") from None


def search_settings(beam: int, lenpen: float, flags: Sequence[str]) -> dict[str, Any]:
    """The search's settings from the command line, and from those of fairseq's flags that the search here has."""
    kinds = {field.name: type(field.default) for field in dataclasses.fields(Settings)}
    settings: dict[str, Any] = {"beam": beam, "lenpen": lenpen}
    for flag, values in parse_flags(flags).items():
        name = flag.replace("-", "_")
        if flag in OF_THE_WORK:
            continue
        if name not in kinds:
            known = ", ".join(f"--{name.replace('_', '-')}" for name in kinds if name not in ("beam", "lenpen"))
            raise UserError(f"-- --{flag}: an exported model has beam search alone, with {known}")
        try:
            if len(values) != (kinds[name] is not bool):
                raise ValueError
            settings[name] = kinds[name](*values) if values else True
        except ValueError:
            raise UserError(f"-- --{flag} {listed(values, ' ')}: expected {EXPECTED[kinds[name]]}") from None
    return settings


def batch_size(flags: Sequence[str]) -> int:
    """How many sentences the model reads together, by fairseq's flag."""
    value = " ".join(parse_flags(flags).get("batch-size", [str(BATCH)])[-1:])
    if not value.isdecimal() or int(value) < 1:
        raise UserError(f"-- --batch-size {value}: expected a whole number from 1 on")
    return int(value)


class Exported:
    """An exported model with the methods of ``ea_fairseq.Translator`` that translate.sh uses."""

    def __init__(self, translator: Translator, batch: int) -> None:
        self._translator, self._batch = translator, batch

    def hypotheses(self, lines: Sequence[str], beam: int, first: int, **settings: Any) -> list[list[tuple[str, float]]]:
        """The translations of each line, best first, and their scores to base 2."""
        translations = self._translator.scored(lines, beam, n_best=beam, batch=self._batch, first=first, **settings)
        return [[(text, score / math.log(2)) for text, score in best] or [("", 0.0)] * beam for best in translations]


def generate(translator: Translator, data: Path, subset: str, settings: dict[str, Any], batch: int) -> list[str]:
    """fairseq-generate's lines T and H of a split of binary data, and its line on speed.

    Sentences whose reference is longer than the model writes have no line, as fairseq leaves them out.
    """
    prep = translator.text.prep
    source, target = prep["source_lang"], prep["target_lang"]
    sources, references = (
        read_sentences(data / f"{subset}.{source}-{target}.{language}") for language in (source, target)
    )
    longest_source, longest_target = translator.description["max_positions"]
    numbers = [n for n, reference in enumerate(references) if len(reference) <= longest_target]
    tokens = [[*sources[n][:-1][: longest_source - 1], EOS] for n in numbers]
    if cut := sum(len(sources[n]) > longest_source for n in numbers):
        say(f"warning: {cut} source sentences are cut to the {longest_source - 1} subwords that the model reads")
    begin = time.perf_counter()
    try:
        best = [hypotheses[0] for hypotheses in translator.search_all(tokens, translator.settings(settings), batch)]
    except ValueError as error:
        raise UserError(str(error)) from None
    seconds, count = time.perf_counter() - begin, sum(len(one.tokens) + 1 for one in best)
    speed = f"in {seconds:.1f}s ({len(best) / seconds:.2f} sentences/s, {count / seconds:.2f} tokens/s)"
    output = []
    for n, one in zip(numbers, best, strict=True):
        output.append(f"H-{n}\t{one.score / math.log(2)}\t{translator.words(one.tokens)}")
        if UNK not in references[n]:  # such a line could not be compared with the raw reference
            output.append(f"T-{n}\t{translator.words(references[n][:-1])}")
    return [*output, f"Translated {len(best):,} sentences ({count:,} tokens) {speed}"]
