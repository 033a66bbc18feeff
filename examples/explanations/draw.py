"""Draw what classifiers of your own look at: ICML 2021, figure 11; the journal, figure 6.

    python -m examples.explanations.draw models/sst2/SST-2-stock-1 models/sst2/SST-2-evolving-1 --out maps.png
    python -m examples.explanations.draw models/sst2/SST-2-*-1 --lime 1 2 3 --out rationales.png

A row of maps, means over heads, is the attention of a model. Two rows below it, in a model that evolves, are its parts,
each after a softmax: the convolution, and the layer's own logits (self-attention). All panels have one scale.
"""

from functools import partial
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from ea_artifacts.command import Parser, UserError, positive, reporting
from evolving_attention.evolution import Evolution, mix
from examples.explanations.explain import Classifier
from examples.explanations.measures import lime

SENTENCE = "Mary tried John to go abroad ."


@torch.no_grad()
def draw(folders: list[Path], sentence: str) -> Figure:
    """A row for each model and part, a column for each layer."""
    rows = []
    for folder in folders:
        classifier = Classifier(folder)
        inputs = classifier.tokenizer(sentence, return_tensors="pt")
        parts: dict[str, list[Tensor]] = {"": [], ", convolution": [], ", self-attention": []}
        for module in classifier.model.modules():
            if isinstance(module, Evolution):
                module.register_forward_hook(partial(_keep, parts))
        parts[""] = [layer[0].mean(0) for layer in classifier.model(**inputs, output_attentions=True).attentions]
        rows += [(f"{folder.name}{part}", inputs.tokens(), layers) for part, layers in parts.items() if layers]
    layers = len(rows[0][2])
    largest = max(weights.max().item() for _, _, maps in rows for weights in maps)
    figure = Figure(figsize=(3.2 * layers, 3.2 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), layers, squeeze=False)
    for panels, (name, tokens, maps) in zip(grid, rows, strict=True):
        for number, (axes, weights) in enumerate(zip(panels, maps, strict=False), 1):
            axes.imshow(weights.numpy(), cmap="viridis", vmin=0, vmax=largest)
            axes.set_title(f"{name}, layer {number}", fontsize=9)
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
            axes.set_yticks(range(len(tokens)), tokens, fontsize=8)
    return figure


def _keep(parts: dict[str, list[Tensor]], evolution: Evolution, maps: tuple[Tensor | None, ...], _: Tensor) -> None:
    """A hook that keeps the parts of one sentence's map, T x T each, a mean over heads."""
    logits, hidden, previous, above = maps
    mixed = mix(evolution.coefficients(previous is not None), logits, hidden, previous)
    convolved = logits * 0 if evolution.conv is None else evolution.convolve(mixed, above, hidden).relu()
    parts[", convolution"].append(convolved.softmax(-1)[0].mean(0))
    parts[", self-attention"].append(logits.softmax(-1)[0].mean(0))


def rationales(folders: list[Path], sentence: str, layers: list[int], samples: int) -> Figure:
    """LIME's weights of the words for class 1, a row for each model and layer whose output the classifier reads."""
    rows, words = {}, sentence.split()
    for folder in folders:
        classifier = Classifier(folder)
        if max(layers) > (depth := classifier.model.config.num_hidden_layers):
            raise UserError(f"--lime {max(layers)}: {folder} has {depth} layers")
        for layer in layers:
            probabilities = partial(classifier.probabilities, layer=layer)
            sign = 1 if probabilities([sentence])[0].argmax() == 1 else -1  # LIME explains the likelier class
            rows[f"{folder.name}, layer {layer}"] = sign * np.array(lime(probabilities, words, samples))
    figure = Figure(figsize=(3 + 0.7 * len(words), 1.5 + 0.4 * len(rows)), layout="constrained")
    axes, largest = figure.subplots(), np.abs(list(rows.values())).max()
    picture = axes.imshow(list(rows.values()), cmap="PuOr", vmin=-largest, vmax=largest, aspect="auto")
    axes.set_xticks(range(len(words)), words, rotation=45)
    axes.set_yticks(range(len(rows)), list(rows))
    figure.colorbar(picture, label="for class 1")
    return figure


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("models", type=Path, nargs="+", metavar="DIR", help="models of examples.glue.fine_tune --out")
    add("--sentence", default=SENTENCE, metavar="TEXT", help=f"(default: {SENTENCE})")
    add("--lime", type=positive, nargs="+", metavar="LAYER", help="draw LIME's rationales by these layers")
    add("--samples", type=positive, default=1000, metavar="N", help="of LIME (default: 1000)")
    add("--out", type=Path, default=Path("maps.png"), metavar="FILE", help="(default: maps.png)")
    args = parser.parse_args(words)
    with reporting("draw"):
        if args.lime:
            figure = rationales(args.models, args.sentence, args.lime, args.samples)
        else:
            figure = draw(args.models, args.sentence)
        figure.savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
