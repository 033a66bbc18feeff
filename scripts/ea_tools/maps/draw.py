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
import base64
import contextlib
import functools
import io
import json
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy

from ea_tools.common import UserError, positive, replacing, reporting
from ea_tools.figures import style
from ea_tools.figures.labels import families, visual, width
from ea_tools.maps import KINDS
from ea_tools.maps.words import Words, merged, rollout
from ea_tools.sides import NAMES

if TYPE_CHECKING:  # imported where a model is loaded or a figure is made
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from ea_tools.maps.collect import LayerMaps
    from ea_tools.maps.models import Loaded, Sentence

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
DOTS, MOST_DOTS = 200, 30_000  # per inch; from top to bottom
SUFFIXES = (".png", ".svg", ".html", ".npz")


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: load, collect, draw; a file appears under its name only when all of them are complete."""
    args = parse(arguments)
    with reporting("plot_attention"):
        look = examine(args)
        rows = chosen(look, args)
        with contextlib.ExitStack() as stack:
            for path in args.out:
                print(f"drawing {path}", file=sys.stderr)
                temporary = stack.enter_context(replacing(path))
                temporary.write_bytes(render(look, rows, args.part, path.suffix.lower()))
            if args.bertviz:
                print(f"writing {args.bertviz}", file=sys.stderr)
                stack.enter_context(replacing(args.bertviz)).write_text(bertviz(look), encoding="utf-8")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="plot_attention.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", type=Path, metavar="DIR", help="the run's folder: its averaged checkpoint, or its best")
    which.add_argument("--checkpoint", type=Path, metavar="FILE", help="this checkpoint instead")
    parser.add_argument("--source", required=True, metavar="TEXT", help="a sentence, raw text; it may have a <mask>")
    parser.add_argument("--target", metavar="TEXT", help="its translation, raw text (default: the model's own)")
    parser.add_argument(
        "--second", metavar="TEXT", help="the second sentence, for a model of pairs of sentences (GLUE)"
    )
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


# ---- what there is to show


@dataclass(frozen=True)
class Look:
    """Everything that is known about what a model reads and writes: a pair of sentences, or one."""

    tokens: dict[str, list[str]]  # "source", "predicted", "read", those that the model has: labels
    words: dict[str, Words]  # the words of these tokens
    maps: Maps
    baseline: Maps  # {} without one
    name: str  # of the model's checkpoint
    baseline_name: str | None
    in_words: bool = False  # what is shown: words instead of tokens

    @property
    def title(self) -> str:
        """What the page is called."""
        return self.name + (f", compared with the baseline {self.baseline_name}" if self.baseline else "")

    @property
    def parts(self) -> list[str]:
        """What there is to see of this model but for rollout: its own logits only where they are not all."""
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
    source, target = loaded.sentences(args.source, args.target, args.second, args.beam)
    tokens, words = _tokens(loaded, source, target)
    for name, labels in tokens.items():
        if name != "read":
            print(f"{name}: {' '.join(labels)}", file=sys.stderr)
    if args.words:
        _say_where_words_are_not_known(loaded, tokens)
    return Look(
        tokens=tokens,
        words=words,
        maps=_by_place(loaded, source, target),
        baseline=_by_place(other, source, target) if other else {},
        name=_name(loaded.checkpoint),
        baseline_name=_name(other.checkpoint) if other else None,
        in_words=args.words,
    )


def _tokens(
    loaded: Loaded, source: Sentence | None, target: Sentence | None
) -> tuple[dict[str, list[str]], dict[str, Words]]:
    """Labels and words of what the encoder reads, of what the decoder predicts and of what it reads."""
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


def _name(checkpoint: Path) -> str:
    """RUN/checkpoint.pt, without the folders above."""
    return "/".join(checkpoint.parts[-2:])


def _by_place(loaded: Loaded, source: Sentence | None, target: Sentence | None) -> Maps:
    return {(maps.kind, maps.layer): maps for maps in loaded.force(source, target)}


@dataclass(frozen=True)
class Row:
    """One place in the model."""

    kind: str
    layer: int
    head: int | str  # from 1, or "mean"

    def __str__(self) -> str:
        head = "mean over heads" if self.head == "mean" else f"head {self.head}"
        return f"{KINDS[self.kind]}, layer {self.layer}, {head}"


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
    """What was asked for, once each, with all that is there in the place of "all"."""
    return list(dict.fromkeys(one for word in wanted for one in (there if word == "all" else [word])))


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
    return values.mean(axis=0) if head == "mean" or len(values) == 1 else values[head - 1]


def render(look: Look, rows: list[Row], parts: list[str] | None, suffix: str) -> bytes:
    """The contents of a file of this kind."""
    if suffix == ".npz":
        return numbers(look)
    if suffix == ".html":
        return page(look, rows[0]).encode()
    return picture(look, rows, columns_of(look, parts or look.parts), suffix.removeprefix("."))


def columns_of(look: Look, parts: Sequence[str]) -> list[str]:
    """These parts of the picture, and the same of the baseline where there is one."""
    shown = set(parts)
    if look.baseline and shown - {"rollout"}:
        shown.add("baseline")
    if look.baseline and "rollout" in shown:
        shown.add("baseline_rollout")
    return [part for part in PARTS if part in shown]


# ---- the numbers


def numbers(look: Look) -> bytes:
    """Every layer's maps and parts as a .npz file: encoder.1.weights, K x T x S, and so on; tokens.source, ..."""
    arrays = {f"tokens.{name}": numpy.array(labels) for name, labels in look.tokens.items()}
    for name, words in look.words.items():
        arrays |= {f"words.{name}": numpy.array(words.labels), f"words.{name}.of_token": words.numbers}
    for prefix, places, through in (("", look.maps, "rollout"), ("baseline.", look.baseline, "baseline_rollout")):
        for (kind, layer), maps in places.items():
            place = f"{prefix}{kind}.{layer}"
            if (kind, layer) in look.rollouts[through]:
                arrays[f"{place}.rollout"] = look.rollouts[through][kind, layer]
            if look.in_words:
                seen = maps.weights.masked_fill(maps.masked, numpy.nan)[0].double().numpy()
                arrays[f"{place}.word_weights"] = of_words(look, kind, seen)
            for name in ("weights", "a_logit", "masked"):
                arrays[f"{place}.{name}"] = getattr(maps, name)[0].numpy()
            for name, part in maps.parts.items():
                arrays[f"{place}.{name}"] = part.map[0].numpy()
                arrays[f"{place}.{name}.share"] = numpy.float64(part.share)
    file = io.BytesIO()
    numpy.savez_compressed(file, **arrays)
    return file.getvalue()


# ---- BertViz


def bertviz(look: Look) -> str:
    """JSON of what BertViz's head_view and model_view take, by the names of their arguments.

    Attention is layers x 1 x K x T x S, 0 where it is hidden. A decoder's tokens are those that it reads.
    """
    views: dict[str, Any] = {}
    alone = len(look.kinds) == 1
    for kind in look.kinds:
        layers = []
        for layer in look.layers(kind):
            values = parts_of(look, kind, layer)["map"].astype(float)
            layers.append(
                [numpy.nan_to_num(of_words(look, kind, values) if look.in_words else values).round(6).tolist()]
            )
        views["attention" if alone else f"{kind}_attention"] = layers
    for name, of_side in (("source", "encoder_tokens"), ("read", "decoder_tokens")):
        if name in look.tokens:
            views["tokens" if alone else of_side] = look.labels(name)
    return json.dumps(views, ensure_ascii=False) + "\n"


# ---- the page


def page(look: Look, start: Row) -> str:
    """One self-contained HTML page with the maps of all layers and heads."""
    import matplotlib

    colours = matplotlib.colormaps[style.MAP_COLOURS](range(256), bytes=True)[:, :3]
    data = {
        "title": look.title,
        "parts": {part: PARTS[part] for part in columns_of(look, [*look.parts, "rollout"])},
        "tokens": look.tokens,
        "words": {
            name: {"labels": words.labels, "of_token": words.numbers.tolist()} for name, words in look.words.items()
        },
        "heads": max(maps.weights.size(1) for maps in look.maps.values()),
        "start": {
            **{"kind": start.kind, "layer": start.layer, "head": 0 if start.head == "mean" else start.head},
            "words": look.in_words,
        },
        "colours": colours.tobytes().hex(),
        "kinds": {kind: _kind_for_page(look, kind) for kind in look.kinds},
    }
    text = json.dumps(data, ensure_ascii=False).replace("<", "\\u003c")  # no token may end the script element
    return Path(__file__).with_name("explorer.html").read_text(encoding="utf-8").replace("@DATA@", text)


def _kind_for_page(look: Look, kind: str) -> dict[str, Any]:
    rows, columns, row_title, column_title = AXES[kind]
    layers = [
        {part: _packed(values) for part, values in parts_of(look, kind, layer).items()} for layer in look.layers(kind)
    ]
    return {
        "name": KINDS[kind],
        "rows": rows,
        "columns": columns,
        "row_title": row_title,
        "column_title": column_title,
        "layers": layers,
    }


def _packed(values: numpy.ndarray) -> str:
    """Numbers from 0 to 1 as base64 of little-endian 16-bit integers: 65534 is 1, 65535 is NaN."""
    stored = numpy.where(numpy.isnan(values), 65535, numpy.rint(numpy.nan_to_num(values) * 65534))
    return base64.b64encode(stored.astype("<u2").tobytes()).decode()


# ---- the picture


NARROWEST = 0.135  # inches of a cell beside which a label can be read
LABELLED = 90  # so many tokens have a label each; with more of them a picture would be wider than can be drawn


@dataclass(frozen=True)
class Sizes:
    """Sizes in inches, but for the fonts' points, which follow from the number of tokens."""

    cell: float
    font: float
    families: tuple[str, ...]
    heading: float
    gap: float = 0.22
    every: int = 1  # of the tokens, counted from the first, has its label

    @property
    def small(self) -> float:
        """The font size of what is beside the maps."""
        return self.heading * 0.83

    @property
    def line(self) -> float:
        """The height of a line of text."""
        return self.heading * 1.5 / 72


def picture(look: Look, rows: list[Row], parts: list[str], form: str) -> bytes:
    """PNG or SVG: a line of panels for each row.

    Raises:
        UserError: a PNG of more pixels than can be drawn.
    """
    import matplotlib

    sizes = _sizes(look)
    settings = {"font.family": sizes.families, "axes.linewidth": 0.6}
    file = io.BytesIO()
    with matplotlib.rc_context(settings), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lines = [_Line(look, row, parts, sizes) for row in rows]
        dots = round(sum(line.height for line in lines) * DOTS)
        if form == "png" and dots > MOST_DOTS:
            raise UserError(
                f"the picture would be {dots:,} pixels high: choose fewer layers and heads, or .svg or .html"
            )
        style.save(_figure(lines, len(parts), sizes), file, form, dots=DOTS)
    for message in sorted({str(warning.message) for warning in said}):
        if not message.startswith("Glyph"):  # _sizes has said so
            print(f"plot_attention: warning: {message} The .html page does.", file=sys.stderr)
    return file.getvalue()


def _figure(lines: list[_Line], parts: int, sizes: Sizes) -> Figure:
    """The lines of panels, one below the other; sizes in inches."""
    from matplotlib.figure import Figure

    left, right = max(line.left for line in lines), 0.1 + 4.5 * sizes.small / 72
    panel = max(line.panel for line in lines)
    height = sum(line.height for line in lines) + 0.1
    figure = Figure(figsize=(left + parts * (panel + sizes.gap) + right, height))
    top = height - 0.05
    for line in lines:
        line.draw(figure, left, top, panel)
        top -= line.height
    return figure


def _sizes(look: Look) -> Sizes:
    """Cells wide enough for a readable label each, and fonts to go with them.

    A map of more tokens than have room for that is as large as one of LABELLED, and only every so manyth has a label.
    """
    shown = [look.labels(name) for name in look.tokens]
    longest = max(map(len, shown))
    every = -(-longest // LABELLED)
    cell = min(0.32, max(NARROWEST, 2.4 / longest)) if every == 1 else NARROWEST * LABELLED / longest
    if every > 1:
        unit = "words" if look.in_words else "tokens"
        print(
            f"plot_attention: note: of {longest} {unit} every {every}. has its label in the picture; an .html page has "
            "all of them",
            file=sys.stderr,
        )
    names, missing = families("".join(label for labels in shown for label in labels))
    if missing:
        print(
            f"plot_attention: warning: no installed font has {' '.join(sorted(missing))}; install one that does, for "
            "example Noto Sans of that script, or use an .html page, for which browsers find fonts",
            file=sys.stderr,
        )
    font = min(8.5, max(cell, NARROWEST) * 72 * 0.68)
    return Sizes(cell, font, names, heading=max(9.0, 1.6 * cell * longest), every=every)


class _Line:
    """One row of panels, and the room that it needs."""

    def __init__(self, look: Look, row: Row, parts: list[str], sizes: Sizes) -> None:
        self._row, self._sizes = row, sizes
        there = parts_of(look, row.kind, row.layer)
        if look.in_words:
            there = {part: of_words(look, row.kind, values) for part, values in there.items()}
        self._maps = {part: one_head(there[part], row.head) if part in there else None for part in parts}
        rows, columns, self._row_title, self._column_title = AXES[row.kind]
        if look.in_words:
            self._row_title, self._column_title = (
                title.replace("token", "word") for title in (self._row_title, self._column_title)
            )
        self._down, self._across = ([visual(label) for label in look.labels(side)] for side in (rows, columns))
        self._below = max(width(label, sizes.families, sizes.font) for label in self._across) + 0.15
        self.left = max(width(label, sizes.families, sizes.font) for label in self._down) + 0.15 + sizes.line
        self.panel = max(len(self._across) * sizes.cell, 1.45)
        self._map_height = len(self._down) * sizes.cell
        self.height = 2 * sizes.line + 0.05 + self._map_height + self._below + sizes.line + 0.15

    def draw(self, figure: Figure, left: float, top: float, panel: float) -> None:
        """Draw this row with its upper edge at `top`, its first panel at `left`, panels `panel` apart; in inches."""
        wide, high = figure.get_size_inches()
        heading = {"fontsize": self._sizes.heading, "va": "top"}
        figure.text(left / wide, top / high, str(self._row), fontweight="bold", **heading)
        top -= 2 * self._sizes.line + 0.05
        most = max(numpy.nanmax(values) for values in self._maps.values() if values is not None)
        for number, (part, values) in enumerate(self._maps.items()):
            x = left + number * (panel + self._sizes.gap)
            figure.text(x / wide, (top + self._sizes.line) / high, PARTS[part], **heading)
            if values is None:
                figure.text(x / wide, top / high, "none in this attention", color="0.4", **heading)
                continue
            size = (len(self._across) * self._sizes.cell, self._map_height)
            axes = figure.add_axes((x / wide, (top - size[1]) / high, size[0] / wide, size[1] / high))
            image = self._map(axes, values, most, labelled=number == 0)
        x = left + len(self._maps) * (panel + self._sizes.gap)
        bar = figure.add_axes((x / wide, (top - self._map_height) / high, 0.1 / wide, self._map_height / high))
        figure.colorbar(image, cax=bar)
        bar.tick_params(labelsize=self._sizes.small, length=2)

    def _map(self, axes: Axes, values: numpy.ndarray, most: float, labelled: bool) -> AxesImage:
        """One panel; the tokens of the rows stand beside the first one only."""
        axes.set_facecolor("0.93")  # what is no part of the map
        image = axes.imshow(values, cmap=style.MAP_COLOURS, vmin=0, vmax=most, aspect="auto", interpolation="nearest")
        font = {"fontsize": self._sizes.font}
        across, down = (range(0, len(side), self._sizes.every) for side in (self._across, self._down))
        axes.set_xticks(across, [self._across[place] for place in across], rotation=90, **font)
        axes.set_yticks(down, [self._down[place] for place in down] if labelled else [], **font)
        axes.tick_params(length=0, pad=2)
        axes.set_xlabel(self._column_title, fontsize=self._sizes.small, color="0.3", labelpad=4)
        if labelled:
            axes.set_ylabel(self._row_title, fontsize=self._sizes.small, color="0.3", labelpad=4)
        return image


if __name__ == "__main__":
    main()
