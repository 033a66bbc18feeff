"""Draw a model's attention maps for a sentence, and their parts.

Each row of the picture is one place: a kind of attention, a layer and a head. It shows the map in use, the map of the
layer's own query-key logits alone and the map of the convolution alone. With --compare it shows another model's map in
the same place, too. A row has one colour scale. The .html page and the .npz file hold all layers and heads.

--words merges subwords: attention to a word is the sum over its subwords, attention from a word the mean over them.
--part rollout multiplies the maps through the layers (attention rollout). It shows how much of each token is in each
place after a layer, by attention and residual connections alone.

The model may be one for translation, a BART, a RoBERTa (encoder maps) or a language model (decoder maps, --source).
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_artifacts.checkpoints import told_apart
from ea_artifacts.command import Parser, UserError, positive, reporting, say
from ea_artifacts.files import replacing
from ea_tools.figures import style
from ea_tools.maps import KINDS
from ea_tools.maps.exports import numbers, page
from ea_tools.maps.look import PARTS, Look, Maps, Row, columns_of
from ea_tools.maps.picture import picture
from ea_tools.maps.words import Words

if TYPE_CHECKING:  # imported where a model is loaded
    from ea_tools.maps.models import Loaded, Sentence

SUFFIXES = (".png", ".svg", ".html", ".npz")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load, collect, draw; a file appears under its name only when all of them are complete."""
    args = parse(arguments)
    with reporting("plot_attention"):
        look = examine(args)
        rows = chosen(look, args)
        with contextlib.ExitStack() as stack:
            for path in dict.fromkeys(args.out):
                say(f"drawing {path}")
                temporary = stack.enter_context(replacing(path))
                temporary.write_bytes(render(look, rows, args.part, path.suffix.lower()))


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="plot_attention.sh", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, metavar="DIR", help="a run, whose model.json names the checkpoint")
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint instead")
    add = parser.add_argument
    add("--source", required=True, metavar="TEXT", help="a sentence, raw text; it may have a <mask>")
    add("--target", metavar="TEXT", help="its translation, raw text (default: the model's own)")
    add("--compare", type=Path, metavar="RUN", help="a baseline's folder or checkpoint, same data")
    add("--data", type=Path, metavar="DIR", help="prepared data (default: the run's own)")
    add("--kind", nargs="+", choices=KINDS, help="of attention (default: all that the model has)")
    number, mean = _number_or("all"), _number_or("all", "mean")
    add("--layer", nargs="+", type=number, metavar="N", help="from 1, or all (default: the middle one)")
    add("--head", nargs="+", type=mean, default=[1], metavar="N", help="from 1, all, or mean (default: 1)")
    add("--part", nargs="+", choices=list(PARTS)[:4], help="columns of the picture (default: all but rollout)")
    add("--words", action="store_true", help="maps of words instead of subwords")
    add("--beam", type=positive, default=5, help="where there is no --target (default: 5)")
    files = ", ".join(SUFFIXES)
    out, default = style.output(SUFFIXES), [Path("attention.png")]
    add("--out", nargs="+", type=out, default=default, metavar="FILE", help=f"{files} (default: attention.png)")
    return parser.parse_args(arguments)


def _number_or(*words: str) -> Callable[[str], int | str]:
    """An argparse type: a number of at least 1, or one of these words."""

    def number(text: str) -> int | str:
        return text if text in words else positive(text)

    return number


def examine(args: argparse.Namespace) -> Look:
    """Load the model (and the one to compare with), translate if need be, and collect the maps."""
    from ea_tools.maps.models import load_models

    say("loading")
    loaded, other = load_models(args.run or args.checkpoint, args.compare, args.data)
    source, target = loaded.sentences(args.source, args.target, args.beam)
    tokens, words = _tokens(loaded, source, target)
    for name, side in (("source", "source"), ("predicted", "target")):
        if name in tokens:
            say(f"{name}: {' '.join(tokens[name])}")
            if args.words and not loaded.has_words(side):
                say(
                    f"plot_attention: note: {loaded.language(side)} is written without spaces: where its words "
                    "begin cannot be told, and each subword stands for itself"
                )
    names = told_apart([one.checkpoint for one in (loaded, other) if one])
    return Look(
        tokens=tokens,
        words=words,
        maps=_by_place(loaded, source, target),
        baseline=_by_place(other, source, target) if other else {},
        name=names[0],
        baseline_name=names[1] if other else None,
        in_words=args.words,
    )


def _tokens(
    loaded: Loaded, source: Sentence | None, target: Sentence | None
) -> tuple[dict[str, list[str]], dict[str, Words]]:
    """Labels and words of the encoder's input, the decoder's output and the decoder's input."""
    tokens, words = {}, {}
    if source:
        tokens["source"], words["source"] = source.labels, source.words
    if target:
        first, _ = loaded.reads(target)
        tokens |= {"predicted": target.labels, "read": [first, *target.labels[:-1]]}
        words |= {"predicted": target.words, "read": target.words.read(first)}
    return tokens, words


def _by_place(loaded: Loaded, source: Sentence | None, target: Sentence | None) -> Maps:
    return {(maps.kind, maps.layer): maps for maps in loaded.force(source, target)}


def chosen(look: Look, args: argparse.Namespace) -> list[Row]:
    """The rows of the picture.

    Raises:
        UserError: a layer, head or part that one of the models does not have.
    """
    rows, parts = [], args.part or []
    for kind in dict.fromkeys(args.kind or look.kinds):
        layers = look.layers(kind)
        if not layers:
            kinds = ", ".join(KINDS[one] for one in look.kinds)
            raise UserError(f"--kind {kind}: {look.name} has no {KINDS[kind]}; it has {kinds}")
        for layer in _spread(args.layer or [(len(layers) + 1) // 2], layers):
            heads = range(1, look.maps[kind, layers[0]].weights.size(1) + 1)
            rows += [Row(kind, layer, head) for head in _spread(args.head, heads)]
    for row in rows:
        place, kind = (row.kind, row.layer), KINDS[row.kind]
        _must_have(look.maps, look.name, row)
        if look.baseline:
            _must_have(look.baseline, f"--compare {look.baseline_name}", row)
        if "convolution" in parts and "convolution" not in look.maps[place].parts:
            raise UserError(
                f"--part convolution: {look.name} has none in layer {row.layer} of {kind}; choose another --layer "
                "or --kind, or --part map"
            )
        if "rollout" in parts and place not in look.rollouts["rollout"]:
            raise UserError(
                f"--part rollout: follows self-attention from layer to layer, and a decoder that reads an encoder has "
                f"none in its {kind}; choose --kind encoder"
            )
    return rows


def _must_have(maps: Maps, name: str, row: Row) -> None:
    layers = [layer for kind, layer in maps if kind == row.kind]
    if row.layer not in layers:
        raise UserError(f"--layer {row.layer}: {name} has {len(layers)} layers with {KINDS[row.kind]}")
    heads = maps[row.kind, row.layer].weights.size(1)
    if not isinstance(row.head, str) and row.head > heads:
        raise UserError(f"--head {row.head}: {name} has {heads} heads in {KINDS[row.kind]}")


def _spread(given: Sequence[Any], there: Iterable[int]) -> list[Any]:
    """The chosen values, once each; "all" stands for every one."""
    return list(dict.fromkeys(one for word in given for one in (there if word == "all" else [word])))


def render(look: Look, rows: list[Row], parts: list[str] | None, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".npz":
        return numbers(look)
    if suffix == ".html":
        return page(look, rows[0]).encode()
    return picture(look, rows, columns_of(look, parts or look.parts), suffix.removeprefix("."))
