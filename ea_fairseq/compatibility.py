"""Small faults of fairseq 0.12.2 that stand in the way of language models and BART, with today's packages or at all."""

import functools
import types
from typing import Any

import numpy
from fairseq.tasks.denoising import DenoisingConfig
from fairseq.tasks.translation_from_pretrained_bart import TranslationFromPretrainedBARTTask


def mend_fairseq() -> None:
    """Mend what language models and BART need."""
    # Text is cut into sentences with a name that NumPy 2 has no more.
    if not hasattr(numpy, "compat"):
        numpy.compat = types.SimpleNamespace(long=int)

    # The task of mBART asks for its options under the name that they had before.
    if not hasattr(TranslationFromPretrainedBARTTask, "args"):
        options = functools.cached_property(lambda task: task.cfg)
        options.__set_name__(TranslationFromPretrainedBARTTask, "args")
        TranslationFromPretrainedBARTTask.args = options

    # from_pretrained(bpe=...) puts the options of the encoding where this task has room for a name only.
    DenoisingConfig.__annotations__["bpe"] = Any
