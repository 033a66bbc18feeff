"""A trained run from Python: ``ea_fairseq.load("runs/mine").translate(["Guten Morgen!"])``."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from fairseq import checkpoint_utils
from fairseq.data.data_utils import post_process
from fairseq.hub_utils import GeneratorHubInterface

if TYPE_CHECKING:
    from .text import Text

logger = logging.getLogger(__name__)


class Translator:
    """A model and the text processing that it was trained with. ``hub`` is fairseq's own interface to the model."""

    def __init__(self, hub: GeneratorHubInterface, text: Text) -> None:
        self.hub, self.text = hub.eval(), text

    def to(self, device: torch.device | str) -> Translator:
        """Move the model, for example ``to("cuda")``."""
        self.hub.to(device)
        return self

    def translate(
        self, sentences: str | Sequence[str], beam: int = 5, lenpen: float = 1.0, **generation: object
    ) -> str | list[str]:
        """Translate raw text: a sentence, or a list of them, of which order and empty ones are kept.

        What is longer than the model reads is cut, with a warning that names the sentence.

        Args:
            sentences: raw text, as a person writes it: the model's own rules make tokens and subwords of it.
            beam: width of the beam search.
            lenpen: length penalty; above 1 favours longer translations.
            generation: more of fairseq-generate's settings, for example ``max_len_b=50``.
        """
        if isinstance(sentences, str):
            return self.translate([sentences], beam, lenpen, **generation)[0]
        tokens = {}  # place in `sentences` -> token ids, those of empty sentences left out
        for place, sentence in enumerate(sentences):
            if subwords := self._that_fit(self.text.subwords(sentence).split(), place):
                tokens[place] = self.hub.binarize(" ".join(subwords))
        translations = [""] * len(sentences)
        if tokens:
            batched = self.hub.generate(list(tokens.values()), beam, lenpen=lenpen, **generation)
            for place, hypotheses in zip(tokens, batched, strict=True):
                translations[place] = self._text_of(hypotheses[0]["tokens"])
        return translations

    def _that_fit(self, subwords: list[str], place: int) -> list[str]:
        """As many subwords as the model reads; one position is for the end of the sentence."""
        longest = self.hub.max_positions[0] - 1
        if len(subwords) > longest:
            logger.warning(
                "Sentence %d has %d subwords, and the model takes %d: the rest of it is left out.",
                *(place + 1, len(subwords), longest),
            )
        return subwords[:longest]

    def _text_of(self, tokens: torch.Tensor) -> str:
        return self.text.detokenize(post_process(self.hub.string(tokens), self.text.prep["bpe"]))


def load(run: str | Path, checkpoint: str | None = None, data: str | Path | None = None) -> Translator:
    """A trained run, ready to translate raw text as scripts/translate.sh does: lower-cased, tokenised and split alike.

    Args:
        run: its folder.
        checkpoint: the name of a checkpoint in it, or several with colons between them for an ensemble; by default the
            newest average, else the best, else the last.
        data: prepared data, for a run that keeps no preparation of its own in RUN/prepared; by default what its
            checkpoint says that it was trained on.

    Raises:
        FileNotFoundError: the checkpoint, or the preparation, is not there; the message names the file.
    """
    from .text import Text  # here, for training needs none of the packages that split text

    run = Path(run)
    paths = [run / name for name in (checkpoint or _newest(run)).split(":")]
    for path in paths:
        _require(path)
    folder = run / "prepared"
    if not (folder / "DIGEST").is_file():
        folder = Path(data or _trained_on(paths[0]))
    _require(folder / "PREP.json")
    text = Text(folder)
    overrides = {"data": str(folder), "source_lang": text.prep["source_lang"], "target_lang": text.prep["target_lang"]}
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(path) for path in paths], overrides)
    # Sentences are batched by their tokens, as in scripts/translate.sh, however the model was trained.
    hub = GeneratorHubInterface(cfg, task, models)
    cfg.dataset.max_tokens, cfg.dataset.batch_size = max(4096, hub.max_positions[0]), None
    return Translator(hub, text)


def _newest(run: Path) -> str:
    averages = sorted(run.glob("average*.pt"), key=lambda path: path.stat().st_mtime, reverse=True)
    names = [path.name for path in averages] + ["checkpoint_best.pt", "checkpoint_last.pt"]
    for name in names:
        if (run / name).exists():
            _note_if_old(run / name, run / "checkpoint_last.pt")
            return name
    raise FileNotFoundError(f"{run}: {'has no checkpoint' if run.is_dir() else 'no such folder'}")


def _note_if_old(average: Path, last: Path) -> None:
    # A minute, for a folder that was copied has times in any order.
    if average.name.startswith("average") and last.exists() and last.stat().st_mtime > average.stat().st_mtime + 60:
        logger.warning("%s was made before the training went on", average)


def _trained_on(checkpoint: Path) -> str:
    """The folder of prepared data that a checkpoint names."""
    return checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))["cfg"]["task"].data


def _require(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
