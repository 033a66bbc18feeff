"""The convolution of maps under fairseq's ``--quant-noise-scalar``, which needs a class for each kind."""

from fairseq.modules.quantization.scalar.modules import IntConv2d
from fairseq.modules.quantization.scalar.utils import MAPPING
from torch import Tensor

from evolving_attention.evolution import MapConvolution, convolve


class QuantisedMapConvolution(IntConv2d):
    """A MapConvolution whose weights have quantisation noise in training, and are quantised in evaluation."""

    def forward(self, maps: Tensor, above: Tensor | None = None) -> Tensor:
        """As MapConvolution's."""
        return super().forward((maps, above))

    def _conv_forward(self, given: tuple[Tensor, Tensor | None], weight: Tensor) -> Tensor:
        maps, above = given
        return convolve(self.geometry, maps, above, weight, self.bias)


def quantise_map_convolutions() -> None:
    """Tell fairseq about the class, which it looks up by that of the convolution."""
    MAPPING[MapConvolution] = QuantisedMapConvolution
