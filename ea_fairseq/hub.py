"""A trained run from Python: ``ea_fairseq.load("runs/mine").translate(["Guten Morgen!"])``."""

from __future__ import annotations

import dataclasses
import difflib
import logging
import math
import numbers
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.configs import GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask

from ea_runtime.kept import kept_by

from .loading import model_of, peek, trained_further

if TYPE_CHECKING:
    from fairseq.models import FairseqModel
    from fairseq.tasks import FairseqTask
    from omegaconf import DictConfig

    from ea_runtime.text import Text

logger = logging.getLogger(__name__)

#: Settings of fairseq-generate that beam search reads. The others would not change what ``translate`` returns.
SEARCH_SETTINGS = (
    *("beam", "lenpen", "max_len_a", "max_len_b", "min_len", "match_source_len", "unnormalized", "unkpen"),
    *("temperature", "no_repeat_ngram_size", "sampling", "sampling_topk", "sampling_topp"),
    *("diverse_beam_groups", "diverse_beam_strength", "diversity_rate"),
)


class Hub(GeneratorHubInterface):
    """fairseq's interface to a model, without a DataLoader, whose pinned memory gives a warning without a GPU."""

    def _build_batches(self, tokens: list[torch.Tensor], skip_invalid_size_inputs: bool) -> Iterator[dict[str, Any]]:
        sentences = self.task.build_dataset_for_inference(tokens, [len(sentence) for sentence in tokens])
        batches = self.task.get_batch_iterator(
            sentences,
            max_tokens=self.cfg.dataset.max_tokens,
            max_sentences=self.cfg.dataset.batch_size,
            max_positions=self.max_positions,
            ignore_invalid_inputs=skip_invalid_size_inputs,
            disable_iterator_cache=True,
        )
        for batch in batches.frozen_batches:
            yield batches.collate_fn([sentences[number] for number in batch])


class Translator:
    """A model and the text processing that it was trained with.

    ``hub`` is fairseq's own interface to the model, ``checkpoints`` are the files that it was read from.
    """

    def __init__(self, hub: GeneratorHubInterface, text: Text, checkpoints: Iterable[Path] = ()) -> None:
        self.hub, self.text, self.checkpoints = hub.eval(), text, tuple(checkpoints)

    def __repr__(self) -> str:
        return f"Translator({':'.join(map(str, self.checkpoints))})"

    def to(self, device: torch.device | str) -> Translator:
        """Move the model, for example ``to("cuda")``."""
        self.hub.to(device)
        return self

    def translate(
        self, sentences: str | Iterable[str], beam: int = 5, lenpen: float = 1.0, **generation: object
    ) -> str | list[str]:
        """Translate raw text: a sentence, or several, of which order and empty ones are kept.

        A sentence longer than the model reads is cut, with a warning that names it.

        Args:
            sentences: raw text, as a person writes it: the model's own rules make tokens and subwords of it. A
                sentence is one line.
            beam: width of the beam search.
            lenpen: length penalty; above 1 favours longer translations.
            generation: more of fairseq-generate's settings, for example ``max_len_b=50``: see ``SEARCH_SETTINGS``.

        Raises:
            TypeError, ValueError: something else than text, a line break in a sentence, or a setting that is unknown,
                without effect, or of another kind.
        """
        settings = {"beam": beam, "lenpen": lenpen, **generation}
        if isinstance(sentences, str):
            return self.translate([sentences], **settings)[0]
        return [hypotheses[0][0] for hypotheses in self.hypotheses(sentences, **settings)]

    def hypotheses(
        self, sentences: Iterable[str], beam: int = 5, lenpen: float = 1.0, first: int = 1, **generation: object
    ) -> list[list[tuple[str, float]]]:
        """The ``beam`` best translations of each sentence, best first, each with its score; see ``translate``.

        A score is the model's log-probability (base 2) over length. An empty sentence has empty ones with score 0.

        Args:
            first: the number of the first sentence in warnings.
        """
        settings = {"beam": beam, "lenpen": lenpen, **generation}
        for name, value in settings.items():
            _check_setting(name, value)
        sentences = _lines(sentences)
        tokens = {}  # place in `sentences` -> token ids, those of empty sentences left out
        for place, sentence in enumerate(sentences):
            if subwords := self._that_fit(self.text.subwords(sentence).split(), first + place):
                tokens[place] = self.hub.binarize(" ".join(subwords))
        hypotheses = [[("", 0.0)] * beam for _ in sentences]
        if tokens:
            try:
                generated = self.hub.generate(list(tokens.values()), **settings)
            except AssertionError as error:  # how fairseq refuses settings that do not go together
                raise ValueError(str(error)) from None
            for place, beams in zip(tokens, generated, strict=True):
                hypotheses[place] = [(self._text_of(one["tokens"]), float(one["score"]) / math.log(2)) for one in beams]
        return hypotheses

    def _that_fit(self, subwords: list[str], number: int) -> list[str]:
        """As many subwords as the model reads; one position is for the end of the sentence."""
        longest = self.hub.max_positions[0] - 1
        if len(subwords) > longest:
            logger.warning(
                "Sentence %d has %d subwords, and the model takes %d: the rest of it is left out.",
                *(number, len(subwords), longest),
            )
        return subwords[:longest]

    def _text_of(self, tokens: torch.Tensor) -> str:
        return self.text.detokenize(self.text.join(self.hub.string(tokens)))


def load(run: str | Path, checkpoint: str | Path | None = None, data: str | Path | None = None) -> Translator:
    """A trained run, ready to translate raw text as scripts/translate.sh does: lower-cased, tokenised and split alike.

    Args:
        run: its folder.
        checkpoint: the name of a checkpoint in it, or several with colons between them for an ensemble; by default the
            run's model, see ``loading.model_of``. The log names it.
        data: prepared data, for a run that keeps no preparation of its own in RUN/prepared; by default what its
            checkpoint says that it was trained on.

    Raises:
        FileNotFoundError: the checkpoint, or the preparation, is not there; the message names the file.
        TypeError, ValueError: `checkpoint` is no name, the model does not translate, or RUN/prepared was changed.
    """
    run = Path(run)
    paths = [_model_of(run)] if checkpoint is None else _named(run, checkpoint)
    trained_on = [_data_of_translation(path) for path in paths]
    folder = kept_by(run) or Path(data or trained_on[0])
    _require(folder / "PREP.json")
    return translator(paths, folder)


def translator(checkpoints: Sequence[Path], folder: Path) -> Translator:
    """Models, an ensemble where there are several, with the preparation in `folder`."""
    try:
        from ea_runtime.text import Text  # here: training needs none of the packages that split text
    except ModuleNotFoundError as error:
        needed = "pip install regex sacremoses subword-nmt sentencepiece"
        raise ModuleNotFoundError(f"{error.name}: is needed to split text; {needed}", name=error.name) from None

    text = Text(folder)
    models, cfg, task = read_models(checkpoints, folder, text.prep)
    hub = Hub(cfg, task, models)
    # Sentences are batched by their tokens, as fairseq-interactive does, however the model was trained.
    longest = hub.max_positions if isinstance(hub.max_positions, int) else hub.max_positions[0]
    cfg.dataset.max_tokens, cfg.dataset.batch_size = max(4096, longest), None
    return Translator(hub, text, checkpoints)


def read_models(
    checkpoints: Sequence[Path], folder: Path, prep: dict[str, Any]
) -> tuple[list[FairseqModel], DictConfig, FairseqTask]:
    """The checkpoints' models, the last one's configuration and its task, with the dictionaries in `folder`."""
    overrides = {"data": str(folder), "source_lang": prep["source_lang"], "target_lang": prep["target_lang"]}
    return checkpoint_utils.load_model_ensemble_and_task([str(path) for path in checkpoints], overrides)


def _lines(sentences: Iterable[str]) -> list[str]:
    """The sentences as a list. Anything but lines of text is refused."""
    if isinstance(sentences, (str, bytes, bytearray)) or not isinstance(sentences, Iterable):
        raise TypeError(f"sentences: expected several, such as [sentence], each a str, not {_kind(sentences)}")
    lines = list(sentences)
    for number, line in enumerate(lines, 1):
        if not isinstance(line, str):
            raise TypeError(f"sentence {number}: must be a str, not {_kind(line)}")
        if {"\n", "\r"} & set(line.rstrip("\r\n")):
            raise ValueError(f"sentence {number}: has a line break; give each line as a separate sentence")
    return lines


def _check_setting(name: str, value: object) -> None:
    """Refuse a setting of the search that fairseq would ignore, or that is of another kind than fairseq's."""
    kinds = {field.name: field.type for field in dataclasses.fields(GenerationConfig)}
    if name not in kinds:
        near = difflib.get_close_matches(name, SEARCH_SETTINGS, n=1)
        hint = f"is {near[0]} meant?" if near else f"there are: {', '.join(SEARCH_SETTINGS)}"
        raise TypeError(f"{name}: fairseq-generate has no such setting; {hint}")
    if name not in SEARCH_SETTINGS:
        raise TypeError(f"{name}: has no effect on what translate returns; leave it out")
    accepted, expected = {
        bool: (bool, "True or False"),
        int: (numbers.Integral, "a whole number"),
        float: (numbers.Real, "a number"),
    }[kinds[name]]
    if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
        raise TypeError(f"{name}={value!r}: must be {expected}, not {_kind(value)}")
    if not math.isfinite(value) or (name == "beam" and value < 1):
        raise ValueError(f"{name}={value!r}: must be {'at least 1' if name == 'beam' else 'a finite number'}")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


def _named(run: Path, checkpoint: object) -> list[Path]:
    if not isinstance(checkpoint, (str, Path)):
        raise TypeError(
            f"checkpoint: must be a name, or several with colons between them, not {_kind(checkpoint)}: {checkpoint!r}"
        )
    return [run / name for name in str(checkpoint).split(":")]


def _model_of(run: Path) -> Path:
    path = model_of(run)
    logger.info("the model of %s is %s", run, path.name)
    if note := trained_further(path):
        logger.warning(note)
    return path


def _data_of_translation(checkpoint: Path) -> str:
    """The folder of prepared data that a checkpoint names; one that was not trained to translate is refused."""
    _require(checkpoint)
    state = peek(checkpoint)
    stored = (state.get("cfg") or {}).get("task") or state.get("args")
    options = stored if isinstance(stored, dict) else vars(stored)
    name = options.get("_name") or options.get("task") or "translation"
    if not issubclass(TASK_REGISTRY.get(name, TranslationTask), TranslationTask):
        raise ValueError(f"{checkpoint}: was trained for the task {name}; load takes a model that translates")
    return options["data"]


def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
