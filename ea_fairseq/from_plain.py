"""Starting from another model's checkpoint, fairseq's own or one that evolves: both must compute the same function.

New parameters, which evolving attention adds to fairseq's own model, get random values.

``fairseq-train --restore-file model.pt --reset-optimizer --reset-dataloader --reset-meters``, or
``--finetune-from-model model.pt``, which resumes when the same command is run again. The log names the new parameters.
Anything else that is missing or left over is refused, as fairseq does.
"""

import argparse
import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch
from fairseq.models import BaseFairseqModel
from torch import nn

from ea_artifacts.checkpoints import peek
from evolving_attention.attention import EvolvingHeads

from .options import Settings, functions

logger = logging.getLogger(__name__)

#: the parts of an attention that fairseq's has too
PLAIN_PARTS = ("q_proj", "k_proj", "v_proj", "out_proj")

#: Options that change a model's function and that no parameter need show: these, and those of both sides ...
OPTIONS = {
    *("activation_fn", "no_scale_embedding", "no_token_positional_embeddings", "no_cross_attention"),
    *("cross_self_attention", "layernorm_embedding"),
}
SIDES = ("encoder_", "decoder_")
#: ... but for these ends: of training, and of sizes, which parameters show
HARMLESS = ("layerdrop", "layers_to_keep", "embed_path", "layers", "dim")


def new_parameters(model: nn.Module) -> list[str]:
    """The state-dict keys that fairseq's own model does not have: convolutions, learnt shares, scores."""
    ours = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, EvolvingHeads))
    return [key for key in model.state_dict() if key.startswith(ours) and key.split(".")[-2] not in PLAIN_PARTS]


def origin(model_cfg: Any) -> str | None:
    """The checkpoint of another run from which a training run starts, or None.

    Args:
        model_cfg: the command line, as fairseq hands it to ``load_state_dict``.
    """
    restored = getattr(model_cfg, "restore_file", None)
    if restored not in (None, "checkpoint_last.pt"):
        return restored
    return getattr(model_cfg, "finetune_from_model", None)


def accept_first_model(model: BaseFairseqModel, given: dict[str, torch.Tensor], model_cfg: Any, keys: Any) -> None:
    """Check the model that a run starts from; new parameters start fresh where it has none of them.

    A run's own checkpoints name that model's checkpoint as well. So the loaded parameters must be those of the start:
    another checkpoint may lack the same ones.

    Args:
        model: the model that a state dict was loaded into; its SIDES are those that it has.
        given: that state dict.
        model_cfg: see ``origin``.
        keys: what PyTorch found missing and left over; what may be missing is taken out of its missing_keys.

    Raises:
        ValueError: the checkpoint's model computes something else than this one would with its parameters.
    """
    path = origin(model_cfg)
    if path is None or not Path(path).is_file():
        return
    try:
        state = peek(Path(path))
    except Exception:  # another file lies there now: these parameters were not read from it
        return
    if not _same(given, state.get("model", {})):
        return
    theirs = state.get("args") or state["cfg"]["model"]
    check_same_function(path, theirs if isinstance(theirs, dict) else vars(theirs), model_cfg, model.SIDES)
    _check_shared_parameters(path, state["model"], model)
    new = new_parameters(model)
    if new and set(new).issubset(keys.missing_keys):
        keys.missing_keys[:] = [key for key in keys.missing_keys if key not in set(new)]
        logger.info("%s is without evolving attention. These parameters start fresh: %s", path, ", ".join(new))


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value.cpu(), other[name]) for name, value in one.items())


def check_same_function(path: Path | str, theirs: dict[str, Any], ours: Any, sides: tuple[str, ...]) -> None:
    """Refuse options by which a checkpoint's parameters mean something else than where they were trained.

    Evolving attention may be new: a model of fairseq's own starts one that evolves.

    Args:
        path: the checkpoint.
        theirs: the options of its model.
        ours: those of the model that starts from it.
        sides: the sides that the model has.

    Raises:
        ValueError: the first option that differs.
    """
    for name, there in theirs.items():
        here = getattr(ours, name, None)
        counts = name in OPTIONS or (name.startswith(SIDES) and not name.endswith(HARMLESS))
        if counts and None not in (there, here) and there != here:
            raise ValueError(_means_another(name, here, there, path))
    if not _evolves(theirs):
        return
    before, now = (_settings(options) for options in (argparse.Namespace(**theirs), ours))
    if functions(before, ours, sides) == functions(now, ours, sides):
        return
    starts = before.learn_mix and now.learn_mix  # then alphas and betas come with the weights
    for field in dataclasses.fields(Settings):
        there, here = getattr(before, field.name), getattr(now, field.name)
        if there != here and field.name != "plain" and not (starts and field.name.endswith(("alpha", "beta"))):
            raise ValueError(_means_another(f"ea_{field.name}", here, there, path))


def _evolves(options: dict[str, Any]) -> bool:
    return any(name.startswith("ea_") for name in options)


def _settings(options: Any) -> Settings:
    return Settings.of(options) if _evolves(vars(options)) else Settings(alpha=0.0, beta=0.0)


def _means_another(name: str, here: Any, there: Any, path: Path | str) -> str:
    flag = "--" + name.replace("_", "-")
    return f"{flag} is {here} here, and {there} in {path}, where the same parameters mean something else"


def _check_shared_parameters(path: str, state: dict[str, torch.Tensor], model: nn.Module) -> None:
    """Parameters tied in the model must be tied in the checkpoint: else the last of several values would win."""
    first: dict[int, str] = {}  # address of a parameter -> the first of its names that the checkpoint has
    for name, value in model.state_dict(keep_vars=True).items():
        if name not in state or not isinstance(value, nn.Parameter):
            continue
        other = first.setdefault(value.data_ptr(), name)
        if other != name and not torch.equal(state[name], state[other]):
            raise ValueError(
                f"{other} and {name} are one parameter here, and two in {path}: leave out --share-all-embeddings and "
                "--share-decoder-input-output-embed, unless the model was trained with them"
            )
