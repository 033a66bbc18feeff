"""A trained run from Python: ``ea_fairseq.load("runs/mine").translate(["Guten Morgen!"])``."""

from __future__ import annotations

import dataclasses
import logging
import math
import numbers
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from fairseq import checkpoint_utils, utils
from fairseq.data.data_utils import collate_tokens
from fairseq.dataclass.configs import GenerationConfig
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.tasks import TASK_REGISTRY
from fairseq.tasks.translation import TranslationTask
from fairseq.tasks.translation_lev import TranslationLevenshteinTask

from ea_artifacts.checkpoints import fitting, of_model, peek, task_of
from ea_artifacts.command import MissingError, UserError, hint
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import Run
from ea_runtime.search import Hypothesis, Settings
from ea_runtime.text import Text
from ea_runtime.translator import PAD, Translator

if TYPE_CHECKING:
    from fairseq.models import FairseqModel
    from fairseq.tasks import FairseqTask
    from omegaconf import DictConfig

logger = logging.getLogger(__name__)

#: Settings of fairseq-generate that beam search reads. The others would not change a translation.
SEARCH_SETTINGS = (
    *("beam", "lenpen", "max_len_a", "max_len_b", "min_len", "match_source_len", "unnormalized", "unkpen"),
    *("temperature", "no_repeat_ngram_size", "sampling", "sampling_topk", "sampling_topp"),
    *("diverse_beam_groups", "diverse_beam_strength", "diversity_rate"),
)
#: Those that fairseq's refinement reads, of models that write all words at once; its beam is of lengths.
REFINEMENT_SETTINGS = ("beam", "iter_decode_max_iter", "iter_decode_eos_penalty", "iter_decode_force_max_iter")
#: The most tokens of a batch, padding included: on a CPU as fairseq-interactive has it, on a GPU as fairseq-generate.
TOKENS = {"cpu": 4096, "cuda": 12_000}


class FairseqTranslator(Translator):
    """A model, or an ensemble, that fairseq's own generator searches with.

    ``hub`` is fairseq's interface to the model, ``checkpoints`` are the files that it was read from.
    """

    def __init__(self, hub: GeneratorHubInterface, text: Text, checkpoints: Iterable[Path] = ()) -> None:
        longest = hub.max_positions
        words = hub.task.source_dictionary.symbols, hub.task.target_dictionary.symbols
        super().__init__(text, *words, (longest, longest) if isinstance(longest, int) else longest)
        self.hub, self.checkpoints = hub.eval(), tuple(checkpoints)
        self._refines = isinstance(hub.task, TranslationLevenshteinTask)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({':'.join(map(str, self.checkpoints))})"

    def to(self, device: torch.device | str) -> FairseqTranslator:
        """Move the model, for example ``to("cuda")``."""
        self.hub.to(device)
        return self

    @property
    def kinds(self) -> dict[str, type]:
        """The settings of fairseq-generate that the search reads, and their types."""
        types: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(GenerationConfig)}
        return {name: types[name] for name in (REFINEMENT_SETTINGS if self._refines else SEARCH_SETTINGS)}

    def settings(self, given: dict[str, Any]) -> GenerationConfig:
        """See ``Translator``."""
        chosen = {name: value for name, value in given.items() if value is not None}
        if self._refines and chosen.get("lenpen") == 1:
            del chosen["lenpen"]  # as the commands' default
        for name, value in chosen.items():
            _check_setting(name, value, self.kinds)
        limited = ("beam", "lenpen", "max_len_a", "max_len_b")
        Settings(**{name: chosen[name] for name in limited if name in chosen})  # which knows their limits
        if self._refines:  # it gives one translation, of the best of these lengths
            chosen |= {"beam": 1, "iter_decode_with_beam": chosen.get("beam", GenerationConfig.beam)}
        return GenerationConfig(**chosen)

    def search_ids(
        self, sources: Sequence[Sequence[int]], settings: GenerationConfig, prefixes: Sequence[Sequence[int]] | None
    ) -> list[list[Hypothesis]]:
        """See ``Translator``."""
        if prefixes and self._refines:
            raise ValueError("prefixes: a model that writes all words at once takes none; leave them out")
        tokens = [torch.tensor(source) for source in sources]
        data = self.hub.task.build_dataset_for_inference(tokens, list(map(len, tokens)))
        batch = utils.apply_to_sample(
            lambda x: x.to(self.hub.device), data.collater([data[n] for n in range(len(data))])
        )
        order = batch["id"].tolist()
        forced = prefixes and collate_tokens([torch.tensor(prefixes[n]).long() for n in order], PAD).to(self.hub.device)
        try:
            # One for each call, since threads may share a model; it takes less than a millisecond.
            generator = self.hub.task.build_generator(self.hub.models, settings)
            found = self.hub.task.inference_step(generator, self.hub.models, batch, prefix_tokens=forced)
        except AssertionError as error:  # how fairseq refuses settings that do not go together
            raise ValueError(str(error)) from None
        hypotheses = dict(zip(order, found, strict=True))
        return [
            [Hypothesis(tuple(one["tokens"][:-1].tolist()), float(one["score"])) for one in hypotheses[n]]
            for n in range(len(sources))
        ]

    def _most(self, longest: int, settings: GenerationConfig, batch: int | None) -> int:
        """See ``Translator``. A CPU is as fast with few sentences, and progress is shown batch by batch."""
        kind = self.hub.device.type
        return min(TOKENS.get(kind, TOKENS["cuda"]) // longest, batch or (self.BATCH if kind == "cpu" else 12_000))


def load(run: str | Path, checkpoint: str | Path | None = None, data: str | Path | None = None) -> FairseqTranslator:
    """A trained run, ready to translate raw text as scripts/translate.sh does: lower-cased, tokenised and split alike.

    Args:
        run: its folder.
        checkpoint: the name of a checkpoint in it, or several with colons between them for an ensemble; by default the
            run's model, see ``ea_artifacts.run.Run.model``. The log names it.
        data: prepared data, for a run that keeps no preparation of its own in RUN/prepared; by default what its
            checkpoint says that it was trained on.

    Raises:
        FileNotFoundError: the checkpoint, or the preparation, is not there; the message names the file.
        TypeError, ValueError: `checkpoint` is no name, the model does not translate, or does not fit the data.
    """
    run = Path(run)
    if not isinstance(checkpoint, str | Path | None):
        raise TypeError(f"checkpoint: must be a name, or several with colons between them, not {checkpoint!r}")
    try:
        names = [] if checkpoint is None else str(checkpoint).split(":")
        paths = [run / name for name in names] or [Run(run).choose(logger.info)]
        return of_run(paths, run, Preparation.at(data) if data else None)
    except MissingError as error:
        raise FileNotFoundError(str(error)) from None
    except UserError as error:
        raise ValueError(str(error)) from None


def of_run(paths: Sequence[Path], run: Path | None, data: Preparation | None = None) -> FairseqTranslator:
    """The model of a checkpoint, or an ensemble of several, with the preparation that `run` keeps.

    Args:
        run: by default the folder of each checkpoint.
        data: prepared data to use the model with.

    Raises:
        UserError: a checkpoint cannot be read, does not translate, or does not fit the data.
    """
    for path in paths:
        state = peek(path)
        name = task_of(state)["_name"] or "translation"
        if not issubclass(TASK_REGISTRY.get(name, TranslationTask), TranslationTask):
            raise UserError(f"{path}: was trained for the task {name}; give a model that translates")
        preparation = of_model(path, state, run, data)
    return of_checkpoints(paths, preparation.folder)


def of_checkpoints(paths: Sequence[Path], folder: Path) -> FairseqTranslator:
    """Models, an ensemble where there are several, with the preparation in `folder`."""
    text = Text(folder)
    models, cfg, task = read_models(paths, folder, text.preparation.languages)
    return FairseqTranslator(GeneratorHubInterface(cfg, task, models), text, paths)


def read_models(
    paths: Sequence[Path], folder: Path, languages: tuple[str, str]
) -> tuple[list[FairseqModel], DictConfig, FairseqTask]:
    """The checkpoints' models, the last one's configuration and its task, with the dictionaries in `folder`."""
    overrides = {"data": str(folder), "source_lang": languages[0], "target_lang": languages[1]}
    with fitting(paths[-1], folder):
        return checkpoint_utils.load_model_ensemble_and_task([str(path) for path in paths], overrides)


def _check_setting(name: str, value: Any, kinds: dict[str, type]) -> None:
    """Refuse a setting of the search that fairseq would ignore, or that is of another kind than fairseq's."""
    if name in GenerationConfig.__dataclass_fields__ and name not in kinds:
        raise ValueError(f"{name}: has no effect on what translate returns; leave it out")
    if name not in kinds:
        raise ValueError(f"{name}: fairseq-generate has no such setting; {hint(name, kinds)}")
    described: dict[type, tuple[Any, str]] = {
        bool: (bool, "True or False"),
        int: (numbers.Integral, "a whole number"),
        float: (numbers.Real, "a number"),
    }
    accepted, expected = described[kinds[name]]
    if not isinstance(value, accepted) or (isinstance(value, bool) and accepted is not bool):
        raise ValueError(f"{name}={value!r}: must be {expected}, not {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"{name}={value!r}: must be a finite number")
