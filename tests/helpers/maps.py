"""Attention maps of a model, for tests of what collects and draws them."""

import torch

from ea_tools.maps.collect import collect
from helpers.models import batch


def inputs(source, target, **sides):
    """Source tokens, their lengths, and the decoder's tokens, for sentences of these lengths."""
    return batch(source, **sides), torch.tensor(source), batch(target, eos_first=True, **sides)


def maps_of(model, *arguments, **options):
    """The maps of one call, layer by layer."""
    with collect(model) as collected, torch.no_grad():
        model(*arguments, **options)
    return collected.layers
