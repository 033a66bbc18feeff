"""fairseq's dropout, by a faster way on CPUs. A GPU's is PyTorch's."""

from typing import Any

from fairseq.models.transformer import transformer_decoder, transformer_encoder
from fairseq.modules.fairseq_dropout import FairseqDropout
from torch import Tensor, nn

from evolving_attention.kernels import sees
from evolving_attention.kernels.cpu import dropout

from .options import Settings


class Dropout(FairseqDropout):
    """The same probability, and other random bits than PyTorch's with the same seed."""

    def forward(self, x: Tensor, inplace: bool = False) -> Tensor:
        """As fairseq's. x: any shape."""
        drops = (self.training or self.apply_during_inference) and 0 < self.p <= 1
        if inplace or not drops or not dropout.knows(x) or not sees(x):
            return super().forward(x, inplace)
        return dropout.drop(x, self.p)


def adopt_dropout(module: nn.Module, settings: Settings) -> None:
    """Put ours in the place of fairseq's in an encoder, a decoder or a layer, unless the plain way was asked for.

    Either is called by the name that fairseq gives it, which --retain-dropout-modules asks for: that of the class that
    the module's own extends. The attentions in it keep theirs, whose probability alone the kernels read.
    """
    extended = next(base.__name__ for base in type(module).__mro__ if base.__module__.startswith("fairseq."))
    for short in (transformer_encoder.module_name_fordropout, transformer_decoder.module_name_fordropout):
        extended = short(extended)
    child: Any
    for name, child in module.named_children():
        if type(child) is FairseqDropout:
            child.module_name = extended
            if not settings.plain:
                setattr(module, name, Dropout(child.p, extended))
