"""Starting from a checkpoint of fairseq's own model: what evolving attention adds to it gets random values.

``fairseq-train --restore-file model.pt --reset-optimizer --reset-dataloader --reset-meters``, or
``--finetune-from-model model.pt``, which resumes when the same command is run again. The log names the new parameters.
Anything else that is missing or left over is refused, as fairseq does.
"""

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from evolving_attention.attention import EvolvingHeads

from .loading import peek

logger = logging.getLogger(__name__)

#: the parts of an attention that fairseq's has too
PLAIN_PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")

#: options that change a model's function, and neither names nor shapes of its parameters
INVISIBLE_OPTIONS = (
    *("encoder_attention_heads", "decoder_attention_heads", "activation_fn", "no_scale_embedding"),
    *("no_token_positional_embeddings", "decoder_normalize_before", "cross_self_attention"),
)


def new_parameters(model: nn.Module) -> list[str]:
    """The state-dict keys that fairseq's own model does not have: convolutions, learnt shares, scores."""
    return [
        f"{module_name}.{key}"
        for module_name, module in model.named_modules()
        if isinstance(module, EvolvingHeads)
        for key in module.state_dict()
        if key.split(".")[0] not in PLAIN_PARTS
    ]


def origin(model_cfg: Any) -> str | None:
    """The checkpoint of another run from which a training run starts, or None.

    Args:
        model_cfg: the command line, as fairseq hands it to ``load_state_dict``.
    """
    restored = getattr(model_cfg, "restore_file", None)
    if restored not in (None, "checkpoint_last.pt"):
        return restored
    return getattr(model_cfg, "finetune_from_model", None)


def accept_plain(model: nn.Module, given: dict[str, torch.Tensor], model_cfg: Any, keys: Any) -> None:
    """Let all that is new start fresh, if none of it is in the checkpoint from which a run starts.

    A run's own checkpoints name that checkpoint as well. So the loaded parameters must be those of the start: another
    checkpoint may lack the same ones.

    Args:
        model: the model that a state dict was loaded into.
        given: that state dict.
        model_cfg: see ``origin``.
        keys: what PyTorch found missing and left over; what may be missing is taken out of its missing_keys.

    Raises:
        ValueError: the checkpoint's model computes something else than this one would with its parameters.
    """
    path, new = origin(model_cfg), new_parameters(model)
    if path is None or not set(new).issubset(keys.missing_keys) or not Path(path).is_file():
        return
    state = peek(Path(path))
    if not _same(given, state["model"]):
        return
    _check_invisible_options(path, state, model_cfg)
    _check_shared_parameters(path, state["model"], model)
    if new:
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in set(new)]
        logger.info("%s is without evolving attention. These parameters start fresh: %s", path, ", ".join(new))


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value.cpu(), other[name]) for name, value in one.items())


def _check_invisible_options(path: str, state: dict[str, Any], model_cfg: Any) -> None:
    theirs = state.get("args") or state["cfg"]["model"]
    theirs = theirs if isinstance(theirs, dict) else vars(theirs)
    for name in INVISIBLE_OPTIONS:
        expected, given = theirs.get(name), getattr(model_cfg, name, None)
        if None not in (expected, given) and expected != given:
            flag = "--" + name.replace("_", "-")
            raise ValueError(
                f"{flag} is {given} here, and {expected} in {path}, where the same parameters mean something else"
            )


def _check_shared_parameters(path: str, state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Parameters tied in the model must be tied in the checkpoint: else the last of several values would win."""
    first = {}  # address of a parameter -> the first of its names that the checkpoint has
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in state or not isinstance(value, nn.Parameter):
            continue
        other = first.setdefault(value.data_ptr(), name)
        if other != name and not torch.equal(state[name], state[other]):
            raise ValueError(
                f"{other} and {name} are one parameter here, and two in {path}: leave out --share-all-embeddings and "
                "--share-decoder-input-output-embed, unless the model was trained with them"
            )
