"""Learnt alpha and beta, by name, and in the log of every validation."""

from collections import Counter

from fairseq.logging import metrics
from torch import nn

from evolving_attention.evolution import Evolution


def learnt_mixes(model: nn.Module) -> dict[str, float]:
    """{"alpha_encoder_2": 0.1, ...}: alpha and beta where they are parameters, by kind of attention and layer."""
    layers: Counter[str] = Counter()
    mixes: dict[str, float] = {}
    for place, module in model.named_modules():
        if isinstance(module, Evolution):
            # by its place: a bidirectional decoder's geometry is the encoder's
            kind = "cross" if "encoder_attn" in place else "decoder" if "decoder." in place else "encoder"
            layers[kind] += 1
            for name, share in module.named_parameters(recurse=False):
                mixes[f"{name}_{kind}_{layers[kind]}"] = share.item()
    return mixes


def log_mixes(model: nn.Module) -> None:
    """Give fairseq a model's learnt mixes for its log and TensorBoard, where it collects such values.

    It collects in validation and in training. A model that is evaluated outside of that gives nothing to anybody.
    """
    always_there = metrics.get_meters("default")
    collecting = any(meters is not always_there for meters in metrics.get_active_aggregators())
    if not collecting:
        return
    for name, value in learnt_mixes(model).items():
        metrics.log_scalar(name, value, weight=0, priority=300, round=4)
