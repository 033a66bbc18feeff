"""Mends small faults of fairseq 0.12.3.1 when ea_fairseq is imported; some are seen with newer packages only."""

import functools
import math
import types
from collections.abc import Sequence
from typing import Any, Optional

import numpy
from fairseq.criterions import label_smoothed_cross_entropy_with_rdrop as rdrop
from fairseq.data import bucket_pad_length_dataset
from fairseq.models.transformer.transformer_config import EncDecBaseConfig
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.tasks.denoising import DenoisingConfig
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask
from torch import Tensor


def mend_fairseq() -> None:
    """Put what works in the place of what does not."""
    # Text is cut into sentences with a name that NumPy 2 has no more.
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)

    # --num-batch-buckets asks NumPy for percentiles with a keyword that it has no more.
    bucket_pad_length_dataset.get_buckets = _get_buckets

    # The task of mBART asks for its options under the name that they had before.
    if not hasattr(TranslationFromPretrainedBARTTask, "args"):
        options = functools.cached_property(lambda task: task.cfg)
        options.__set_name__(TranslationFromPretrainedBARTTask, "args")
        TranslationFromPretrainedBARTTask.args = options

    # from_pretrained(bpe=...) puts the options of the encoding where this task has room for a name only.
    DenoisingConfig.__annotations__["bpe"] = Any

    # The parser makes a list of --encoder-layers-to-keep 0,2, and everything that reads it expects the text.
    EncDecBaseConfig.__dataclass_fields__["layers_to_keep"].type = Optional[str]  # noqa: UP045  (fairseq reads this form)
    EncDecBaseConfig.__annotations__["layers_to_keep"] = Optional[str]  # noqa: UP045

    # --no-repeat-ngram-size looks for the last words at the end of the buffer, where there are none yet.
    NGramRepeatBlock._no_repeat_ngram = _no_repeat_ngram

    # R-Drop doubles the batch in place, and --eval-bleu translates the same batch afterwards.
    rdrop.duplicate_input = _duplicate_copy


_duplicate_in_place = rdrop.duplicate_input


def _duplicate_copy(sample: dict[str, Any]) -> dict[str, Any]:
    """A batch with every sentence twice, for R-Drop; the given batch stays as it is."""
    return _duplicate_in_place({**sample, "net_input": {**sample["net_input"]}})


def _no_repeat_ngram(
    self: NGramRepeatBlock, tokens: Tensor, lprobs: Tensor, bsz: int, beam_size: int, step: int
) -> Tensor:
    """Log-probabilities without the tokens that would complete an n-gram for the second time, changed in place.

    Args:
        tokens: B x longest, the hypotheses' tokens after the end-of-sentence symbol; those behind `step` do not count.
        lprobs: B x words, of the next token.
    """
    before = self.no_repeat_ngram_size - 1
    for row, words in zip(lprobs, tokens[:, 1 : step + 1].tolist(), strict=True):
        last = words[len(words) - before :]
        row[[words[i + before] for i in range(len(words) - before) if words[i : i + before] == last]] = -math.inf
    return lprobs


def _get_buckets(sizes: Sequence[int], num_buckets: int) -> numpy.ndarray:
    """The lengths that --num-batch-buckets pads to: percentiles of the sentences' lengths, without repetition."""
    return numpy.unique(numpy.percentile(sizes, numpy.linspace(0, 100, num_buckets + 1), method="lower")[1:])
