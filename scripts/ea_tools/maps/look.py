"""A model's view of a pair of sentences: tokens, words, maps, and the parts of these.

Axes: K heads, T target (query) length, S source (key) length.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy

from ea_tools.maps import KINDS
from ea_tools.maps.words import Words, merged, rollout

if TYPE_CHECKING:  # imported where a model is loaded
    from ea_tools.maps.collect import LayerMaps

Maps = dict[tuple[str, int], "LayerMaps"]  # by kind of attention and layer, B = 1

PARTS = {
    "map": "map in use",
    "own": "own query-key logits",
    "convolution": "convolution",
    "rollout": "attention rollout",
    "baseline": "baseline",
    "baseline_rollout": "the baseline's rollout",
}
#: kind -> whose tokens the rows and columns are, and what these do
AXES = {
    "encoder": ("source", "source", "query: source token", "key: source token"),
    "decoder": ("predicted", "read", "query: token to predict", "key: token read so far"),
    "cross": ("predicted", "source", "query: token to predict", "key: source token"),
}


@dataclass(frozen=True)
class Look:
    """A model's input and output: a pair of sentences, or one."""

    tokens: dict[str, list[str]]  # "source", "predicted", "read", those that the model has: labels
    words: dict[str, Words]  # the words of these tokens
    maps: Maps
    baseline: Maps  # {} without one
    name: str  # of the model's checkpoint
    baseline_name: str | None
    in_words: bool = False  # whether words are shown and not tokens

    @property
    def title(self) -> str:
        """The title of the page."""
        return self.name + (f", compared with the baseline {self.baseline_name}" if self.baseline else "")

    @property
    def parts(self) -> list[str]:
        """The parts of this model's maps, without rollout; its own logits only beside another part."""
        parts = ["map"]
        if any(len(maps.parts) > 1 for maps in self.maps.values()):
            parts.append("own")
        if any("convolution" in maps.parts for maps in self.maps.values()):
            parts.append("convolution")
        return parts + ["baseline"] * bool(self.baseline)

    @property
    def kinds(self) -> list[str]:
        """The kinds of attention that the model has."""
        return [kind for kind in KINDS if self.layers(kind)]

    def layers(self, kind: str) -> list[int]:
        """The layers that have this kind of attention."""
        return [layer for of_kind, layer in self.maps if of_kind == kind]

    def labels(self, name: str) -> list[str]:
        """The labels of "source", "predicted" or "read", as they are shown."""
        return self.words[name].labels if self.in_words else self.tokens[name]

    @functools.cached_property
    def rollouts(self) -> dict[str, dict[tuple[str, int], numpy.ndarray]]:
        """part -> {(kind, layer): T x T} of the model and of the baseline, for self-attention that rollout follows."""
        return {"rollout": _rollouts(self.maps), "baseline_rollout": _rollouts(self.baseline)}


def _rollouts(maps: Maps) -> dict[tuple[str, int], numpy.ndarray]:
    """Attention rollout of an encoder, or of a language model: not of a decoder that reads an encoder as well."""
    kinds = {kind for kind, _ in maps}
    kind = "encoder" if "encoder" in kinds else "decoder"
    places = [place for place in maps if place[0] == kind]
    weights = [maps[place].weights.masked_fill(maps[place].masked, 0)[0].double().numpy() for place in places]
    return dict(zip(places, rollout(weights), strict=True))


@dataclass(frozen=True)
class Row:
    """One place in the model."""

    kind: str
    layer: int
    head: int | str  # from 1, or "mean"

    def __str__(self) -> str:
        head = "mean over heads" if self.head == "mean" else f"head {self.head}"
        return f"{KINDS[self.kind]}, layer {self.layer}, {head}"


def parts_of(look: Look, kind: str, layer: int) -> dict[str, numpy.ndarray]:
    """part -> map of all heads, NaN where a pixel is no part of it; without the parts that are not there.

    K x T x S, of tokens whether or not words are shown; of rollouts, 1 x T x T.
    """
    maps, baseline = look.maps[kind, layer], look.baseline.get((kind, layer))
    parts = {"map": maps.weights, "own": maps.alone("logits")}
    if "convolution" in maps.parts:
        parts["convolution"] = maps.alone("convolution")
    if baseline:
        parts["baseline"] = baseline.weights
    arrays = {part: values.masked_fill(maps.masked, numpy.nan)[0].numpy() for part, values in parts.items()}
    for part, rollouts in look.rollouts.items():
        if (kind, layer) in rollouts:
            arrays[part] = numpy.where(maps.masked[0].numpy(), numpy.nan, rollouts[kind, layer])
    return {part: arrays[part] for part in PARTS if part in arrays}


def of_words(look: Look, kind: str, values: numpy.ndarray) -> numpy.ndarray:
    """Maps of this kind, K x T x S, in words: K x words x words."""
    rows, columns = (look.words[side].numbers for side in AXES[kind][:2])
    return merged(values, rows, columns)


def one_head(values: numpy.ndarray, head: int | str) -> numpy.ndarray:
    """The map of one head, or the mean over heads: K x T x S -> T x S. Rollouts are of all heads together."""
    return values.mean(axis=0) if isinstance(head, str) or len(values) == 1 else values[head - 1]


def columns_of(look: Look, parts: Sequence[str]) -> list[str]:
    """These parts of the picture, and the same of the baseline where there is one."""
    shown = set(parts)
    if look.baseline and shown - {"rollout"}:
        shown.add("baseline")
    if look.baseline and "rollout" in shown:
        shown.add("baseline_rollout")
    return [part for part in PARTS if part in shown]
