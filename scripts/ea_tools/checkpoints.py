"""Read, find and describe fairseq checkpoints, safely: a checkpoint is weights and settings, never code."""

import argparse
import pickle
import re
from pathlib import Path

import numpy
import torch

from ea_tools.common import UserError

# What fairseq's checkpoints hold beside tensors and plain values: settings, and --eval-bleu's counts.
_PLAIN = [
    argparse.Namespace,
    numpy.ndarray,
    numpy.dtype,
    numpy.dtypes.Int64DType,
    numpy.dtypes.Float64DType,
    numpy._core.multiarray._reconstruct,
    numpy._core.multiarray.scalar,
]

# fairseq's own file names: --keep-last-epochs and --keep-interval-updates write these.
EPOCH = re.compile(r"checkpoint(\d+)\.pt")
UPDATE = re.compile(r"checkpoint_\d+_(\d+)\.pt")

# Settings that decide what the weights mean although keys and shapes may agree: heads, alpha, pre-norm and so on.
_STRUCTURE_PREFIXES = ("ea_", "encoder_", "decoder_", "share_", "adaptive_softmax_")
_STRUCTURE = {
    "_name",
    "arch",
    "activation_fn",
    "cross_self_attention",
    "layernorm_embedding",
    "no_cross_attention",
    "no_scale_embedding",
    "no_token_positional_embeddings",
    "source_lang",
    "target_lang",
}


def load(path):
    """Read a checkpoint onto the CPU with weights_only: whatever is not plain data is refused and never executed."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path}: no such checkpoint file")
    if path.stat().st_size == 0:
        raise UserError(f"{path}: the file is empty")
    try:
        # Only what is missing: on its way out the context forbids all that it was given, allowed before or not.
        with torch.serialization.safe_globals(list(set(_PLAIN) - set(torch.serialization.get_safe_globals()))):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        if not found:
            raise UserError(f"{path}: torn or damaged, or not a checkpoint") from None
        reason = f"it asks for {found[1]}, which is neither weights nor settings"
        raise UserError(f"{path}: refused, and nothing of it was run: {reason}") from None
    except (RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UserError(f"{path}: torn or damaged, or not a checkpoint ({reason})") from None
    weights = state.get("model") if isinstance(state, dict) else None
    if not isinstance(weights, dict) or not all(isinstance(value, torch.Tensor) for value in weights.values()):
        raise UserError(f"{path}: not a fairseq checkpoint: it has no model weights")
    return state


def numbered(paths, pattern):
    """The (number, path) pairs among `paths` whose names match EPOCH or UPDATE, lowest number first."""
    matches = ((pattern.fullmatch(Path(path).name), Path(path)) for path in paths)
    return sorted((int(match[1]), path) for match, path in matches if match)


def settings(state):
    """Every model setting of a checkpoint as one flat dict, whichever way fairseq stored it."""
    stored = state.get("args") or (state.get("cfg") or {}).get("model") or {}
    return dict(vars(stored)) if isinstance(stored, argparse.Namespace) else dict(stored)


def section(state, name):
    """One section of a checkpoint's configuration ("common", "task", ...); {} where there is none."""
    stored = (state.get("cfg") or {}).get(name) or {}
    return dict(vars(stored)) if isinstance(stored, argparse.Namespace) else dict(stored)


def structure(state):
    """The settings in which two checkpoints must agree for their weights to mean the same thing."""
    return {
        name: value
        for name, value in settings(state).items()
        if name in _STRUCTURE or (name.startswith(_STRUCTURE_PREFIXES) and not name.endswith("layerdrop"))
    }
