"""Draw a model's attention maps for a sentence, beside the parts that they are mixed of; scripts/plot_attention.sh is
how it is called.

Each row of the picture is one place (kind, layer, head): the map in use, the map that the layer's own query-key logits
alone would give, the map that the convolution alone would give and, with --compare, another model's map in the same
place. One colour scale per row. The .html page, the .npz file and what --bertviz writes hold all layers and heads.

--words merges subwords: attention to a word is the sum over its subwords, attention from a word the mean over them.
--part rollout multiplies the maps through the layers (attention rollout), which says how much of each token is in each
place after a layer, by attention and residual connections alone.

The model may be one for translation, a BART, a RoBERTa (of which there are encoder maps) or a language model (decoder
maps), which reads one text: --source.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ea_data.command_line import Parser
from ea_tools.checkpoints import told_apart
from ea_tools.common import UserError, positive, replacing, reporting
from ea_tools.figures import style
from ea_tools.maps import KINDS
from ea_tools.maps.exports import bertviz, numbers, page
from ea_tools.maps.look import PARTS, Look, Maps, Row, columns_of
from ea_tools.maps.picture import picture
from ea_tools.maps.sides import NAMES
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
                print(f"drawing {path}", file=sys.stderr)
                temporary = stack.enter_context(replacing(path))
                temporary.write_bytes(render(look, rows, args.part, path.suffix.lower()))
            if args.bertviz:
                print(f"writing {args.bertviz}", file=sys.stderr)
                stack.enter_context(replacing(args.bertviz)).write_text(bertviz(look), encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = Parser(prog="plot_attention.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument(
        "--run", type=Path, metavar="DIR", help="the run's folder, whose model.json names the checkpoint"
    )
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint instead")
    parser.add_argument("--source", required=True, metavar="TEXT", help="a sentence, raw text; it may have a <mask>")
    parser.add_argument("--target", metavar="TEXT", help="its translation, raw text (default: the model's own)")
    parser.add_argument("--compare", type=Path, metavar="RUN", help="a baseline's folder or checkpoint, same data")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data (default: what the run was trained on)")
    parser.add_argument("--kind", nargs="+", choices=KINDS, help="of attention (default: all that the model has)")
    parser.add_argument(
        "--layer", nargs="+", type=_number_or("all"), metavar="N", help="from 1, or all (default: the middle one)"
    )
    parser.add_argument(
        "--head",
        nargs="+",
        type=_number_or("all", "mean"),
        default=[1],
        metavar="N",
        help="from 1, all, or mean (default: 1)",
    )
    parser.add_argument(
        "--part", nargs="+", choices=list(PARTS)[:4], help="columns of the picture (default: all but rollout)"
    )
    parser.add_argument("--words", action="store_true", help="maps of words instead of subwords")
    parser.add_argument("--beam", type=positive, default=5, help="where there is no --target (default: 5)")
    parser.add_argument(
        "--out",
        nargs="+",
        type=style.output(SUFFIXES),
        metavar="FILE",
        help=f"{', '.join(SUFFIXES)} (default: attention.png)",
    )
    parser.add_argument("--bertviz", type=Path, metavar="FILE", help="JSON for BertViz's head_view and model_view")
    args = parser.parse_args(arguments)
    args.out = args.out or ([] if args.bertviz else [Path("attention.png")])
    return args


def _number_or(*words: str) -> Callable[[str], int | str]:
    def parse(text: str) -> int | str:
        if text in words:
            return text
        number = int(text)
        if number < 1:
            raise ValueError
        return number

    parse.__name__ = " or ".join(["number", *words])  # for argparse's message: invalid ... value
    return parse


def examine(args: argparse.Namespace) -> Look:
    """Load the model (and the one to compare with), translate if need be, and collect the maps."""
    from ea_tools.maps.models import load_model

    print("loading", file=sys.stderr)
    loaded = load_model(args.run or args.checkpoint, args.data)
    other = load_model(args.compare, args.data or loaded.data) if args.compare else None
    if other and other.sides != loaded.sides:
        raise UserError(
            f"--compare {other.checkpoint}: has {NAMES[other.sides]}, and {loaded.checkpoint} {NAMES[loaded.sides]}"
        )
    if other and _words(loaded) != _words(other):
        raise UserError(f"--compare {other.checkpoint}: its dictionaries are others than those of {loaded.checkpoint}")
    source, target = loaded.sentences(args.source, args.target, args.beam)
    tokens, words = _tokens(loaded, source, target)
    for name, labels in tokens.items():
        if name != "read":
            print(f"{name}: {' '.join(labels)}", file=sys.stderr)
    if args.words:
        _say_where_words_are_not_known(loaded, tokens)
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


def _say_where_words_are_not_known(loaded: Loaded, tokens: Iterable[str]) -> None:
    for name, side in (("source", "source"), ("predicted", "target")):
        if name in tokens and not loaded.has_words(side):
            print(
                f"plot_attention: note: {loaded.prep[f'{side}_lang']} is written without spaces, so nothing says which "
                "subwords make a word: each stands for itself",
                file=sys.stderr,
            )


def _words(loaded: Loaded) -> tuple[list[str], list[str]]:
    return loaded.task.source_dictionary.symbols, loaded.task.target_dictionary.symbols


def _by_place(loaded: Loaded, source: Sentence | None, target: Sentence | None) -> Maps:
    return {(maps.kind, maps.layer): maps for maps in loaded.force(source, target)}


def chosen(look: Look, args: argparse.Namespace) -> list[Row]:
    """The rows of the picture.

    Raises:
        UserError: a layer, head or part that one of the models does not have.
    """
    rows = []
    for kind in dict.fromkeys(args.kind or look.kinds):
        layers = look.layers(kind)
        if not layers:
            raise UserError(
                f"--kind {kind}: {look.name} has no {KINDS[kind]}; it has {', '.join(KINDS[one] for one in look.kinds)}"
            )
        for layer in _spread(args.layer or [(len(layers) + 1) // 2], layers):
            _must_have(look.maps, look.name, kind, layer)
            heads = range(1, look.maps[kind, layer].weights.size(1) + 1)
            rows += [Row(kind, layer, head) for head in _spread(args.head, heads)]
    for row in rows:
        _must_have(look.maps, look.name, row.kind, row.layer, row.head)
        if look.baseline:
            _must_have(look.baseline, f"--compare {look.baseline_name}", row.kind, row.layer, row.head)
        if "convolution" in (args.part or []) and "convolution" not in look.maps[row.kind, row.layer].parts:
            raise UserError(
                f"--part convolution: {look.name} has no convolution in {KINDS[row.kind]}; choose --kind, or --part map"
            )
        if "rollout" in (args.part or []) and (row.kind, row.layer) not in look.rollouts["rollout"]:
            raise UserError(
                f"--part rollout: follows self-attention from layer to layer, and loses its way in {KINDS[row.kind]}, "
                "where a decoder takes in what an encoder has read: choose --kind encoder"
            )
    return rows


def _must_have(maps: Maps, name: str, kind: str, layer: int, head: int | str = "mean") -> None:
    layers = [number for of_kind, number in maps if of_kind == kind]
    if layer not in layers:
        raise UserError(f"--layer {layer}: {name} has {len(layers)} layers with {KINDS[kind]}")
    heads = maps[kind, layer].weights.size(1)
    if head != "mean" and head > heads:
        raise UserError(f"--head {head}: {name} has {heads} heads in {KINDS[kind]}")


def _spread(wanted: Sequence[int | str], there: Iterable[int]) -> list[int | str]:
    """The chosen values, once each; "all" stands for every one."""
    return list(dict.fromkeys(one for word in wanted for one in (there if word == "all" else [word])))


def render(look: Look, rows: list[Row], parts: list[str] | None, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".npz":
        return numbers(look)
    if suffix == ".html":
        return page(look, rows[0]).encode()
    return picture(look, rows, columns_of(look, parts or look.parts), suffix.removeprefix("."))


if __name__ == "__main__":
    main()
