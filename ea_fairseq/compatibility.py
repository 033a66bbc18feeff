"""Mends small faults of fairseq 0.12.3.1 when ea_fairseq is imported; some are seen with newer packages only.

What worked before works as before, also for programs that use fairseq alone.

| mended | for | without it |
|---|---|---|
| ``np`` in two modules of ``fairseq.data`` | text cut into sentences | no ``compat`` in NumPy 2 |
| ``get_buckets`` | ``--num-batch-buckets`` | no ``interpolation`` in ``numpy.percentile`` |
| ``TranslationFromPretrainedBARTTask.args`` | the task of mBART | AttributeError: it reads options by an old name |
| ``DenoisingConfig.bpe`` | ``from_pretrained(bpe=...)`` of that task | a dictionary is refused |
| ``EncDecBaseConfig.layers_to_keep`` | ``--encoder-layers-to-keep 0,2`` | a list that readers want to split |
| ``prune_state_dict`` | ``--encoder-layers-to-keep 0,2`` alone | the decoder loses all its layers |
| ``NGramRepeatBlock._no_repeat_ngram`` | ``--no-repeat-ngram-size`` | it looks at the buffer's empty end |
| ``rdrop.duplicate_input`` | R-Drop with ``--eval-bleu`` | BLEU of a batch that is doubled |
| ``FairseqOptimizer.load_state_dict`` | older runs with ``--ea-learn-mix`` | moments without the shares' axis |

Other files add to fairseq and PyTorch. ``options`` shows our options in ``fairseq-train --help``. ``quantisation`` adds
our convolution to those that ``--quant-noise-scalar`` knows. ``__init__`` lets ``torch.load`` read fairseq's
configurations, and puts our trainer in the place of fairseq's in a command with ``flat_adam``.
"""

import contextlib
import functools
import itertools
import re
import types
from collections.abc import Sequence
from typing import Any, Optional

import numpy
import torch
from fairseq import checkpoint_utils
from fairseq.criterions import label_smoothed_cross_entropy_with_rdrop as rdrop
from fairseq.data import bucket_pad_length_dataset, language_pair_dataset, token_block_dataset
from fairseq.models.transformer.transformer_config import EncDecBaseConfig
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.optim import FairseqOptimizer
from fairseq.tasks.denoising import DenoisingConfig
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from omegaconf import OmegaConf, open_dict
from torch import Tensor


def mend_fairseq() -> None:
    """Put what works in the place of what does not."""
    for module in (token_block_dataset, language_pair_dataset):
        module.np = _NumPy("numpy")
    bucket_pad_length_dataset.get_buckets = _get_buckets

    if not hasattr(TranslationFromPretrainedBARTTask, "args"):
        options = functools.cached_property(lambda task: task.cfg)
        options.__set_name__(TranslationFromPretrainedBARTTask, "args")
        TranslationFromPretrainedBARTTask.args = options

    DenoisingConfig.__annotations__["bpe"] = Any

    EncDecBaseConfig.__dataclass_fields__["layers_to_keep"].type = Optional[str]  # noqa: UP045  (fairseq reads this form)
    EncDecBaseConfig.__annotations__["layers_to_keep"] = Optional[str]  # noqa: UP045

    checkpoint_utils.prune_state_dict = _prune_one_side
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram

    rdrop.duplicate_input = _duplicate_copy
    FairseqOptimizer.load_state_dict = _load_with_axes


_prune_both_sides = checkpoint_utils.prune_state_dict
_duplicate_in_place = rdrop.duplicate_input
_load_state_dict = FairseqOptimizer.load_state_dict


def layers_to_keep(state: dict[str, Tensor], model_cfg: Any, side: str) -> list[int]:
    """The layers of a side in a state dict that the options keep: all, where they name none or as many as there are.

    Checkpoints of a model that was pruned when it was loaded have as many, and the options still name them.
    """
    layers = {int(m[1]) for key in state if (m := re.match(rf"{side}\..*?layers\.(\d+)\.", key))}
    named = getattr(model_cfg, f"{side}_layers_to_keep", None)
    kept = {int(number) for number in named.split(",")} if named else layers
    return sorted(kept if len(kept) < len(layers) else layers)


def _prune_one_side(state_dict: dict[str, Tensor], model_cfg: Any) -> dict[str, Tensor]:
    """A state dict without the layers that the options of either side leave out.

    fairseq leaves out the whole other side, unless the options name its layers, too.
    """
    sides = ("encoder", "decoder")
    if any(getattr(model_cfg, f"{side}_layers_to_keep", None) for side in sides):
        for side in sides:
            if kept := layers_to_keep(state_dict, model_cfg, side):  # a language model has one side, and its options
                with open_dict(model_cfg) if OmegaConf.is_config(model_cfg) else contextlib.nullcontext():
                    setattr(model_cfg, f"{side}_layers_to_keep", ",".join(map(str, kept)))
    return _prune_both_sides(state_dict, model_cfg)


def _duplicate_copy(sample: dict[str, Any]) -> dict[str, Any]:
    """A batch, or its inputs alone, with every sentence twice, for R-Drop; what is given stays as it is."""
    inputs = {"net_input": {**sample["net_input"]}} if "net_input" in sample else {}
    return _duplicate_in_place({**sample, **inputs})


def _load_with_axes(
    self: FairseqOptimizer, state_dict: dict[str, Any], optimizer_overrides: dict[str, Any] | None = None
) -> None:
    """Load a state in which moments of parameters of shape (1,) may have shape ().

    They are changed in place, since fairseq's memory-efficient half precision reads the state once more.
    """
    saved, ours = (
        itertools.chain.from_iterable(group["params"] for group in groups)
        for groups in (state_dict["param_groups"], self.param_groups)
    )
    for number, parameter in zip(saved, ours, strict=False):  # loading itself compares their numbers
        moments = state_dict["state"].get(number, {})
        for name, value in moments.items():
            if name != "step" and isinstance(value, Tensor) and value.dim() == 0 and parameter.shape == (1,):
                moments[name] = value[None]
    _load_state_dict(self, state_dict, optimizer_overrides)


class _NumPy(types.ModuleType):
    """NumPy for a module that still asks for ``compat.long``."""

    compat = types.SimpleNamespace(long=int)

    def __getattr__(self, name: str) -> Any:
        return getattr(numpy, name)


def _no_repeat_ngram(
    self: NGramRepeatBlock, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Log-probabilities without the tokens that would complete an n-gram for the second time, changed in place.

    Generators may be scripted, so this is TorchScript.

    Args:
        tokens: B x longest, the hypotheses' tokens after the end-of-sentence symbol; those behind `step` do not count.
        lprobs: B x words, of the next token.
    """
    before = self.no_repeat_ngram_size - 1
    if step <= before:
        return lprobs
    words = tokens[:, 1 : step + 1]
    ngrams = words.unfold(1, before + 1, 1)  # B x (step - before) x n
    again = (ngrams[:, :, :before] == words[:, None, step - before :]).all(dim=2)
    banned = torch.zeros_like(lprobs).scatter_add(1, ngrams[:, :, before], again.to(lprobs.dtype))
    return lprobs.masked_fill_(banned > 0, -float("inf"))


def _get_buckets(sizes: Sequence[int], num_buckets: int) -> numpy.ndarray:
    """The lengths that --num-batch-buckets pads to: percentiles of the sentences' lengths, without repetition."""
    return numpy.unique(numpy.percentile(sizes, numpy.linspace(0, 100, num_buckets + 1), method="lower")[1:])
