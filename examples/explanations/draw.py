"""Draw the attention maps of classifiers side by side, a mean over heads: ICML 2021, figure 11, on models of your own.

python -m examples.explanations.draw models/cola/CoLA-stock-1 models/cola/CoLA-evolving-1 --out maps.png
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from examples.explanations.explain import Classifier

SENTENCE = "Mary tried John to go abroad ."


@torch.no_grad()
def draw(folders: list[Path], sentence: str) -> Figure:
    """A row for each model, a column for each layer; the panels have one scale."""
    columns = []
    for folder in folders:
        classifier = Classifier(folder)
        inputs = classifier.tokenizer(sentence, return_tensors="pt")
        # For each layer T x T.
        maps = [layer[0].mean(0) for layer in classifier.model(**inputs, output_attentions=True).attentions]
        columns.append((folder.name, inputs.tokens(), maps))
    layers = len(columns[0][2])
    figure = Figure(figsize=(3.2 * layers, 3.2 * len(columns)), layout="constrained")
    grid = figure.subplots(len(columns), layers, squeeze=False)
    for row, (name, tokens, maps) in zip(grid, columns, strict=True):
        for number, (axes, weights) in enumerate(zip(row, maps, strict=True), 1):
            axes.imshow(weights.numpy(), cmap="viridis", vmin=0, vmax=1)
            axes.set_title(f"{name}, layer {number}", fontsize=9)
            axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=8)
            axes.set_yticks(range(len(tokens)), tokens, fontsize=8)
    return figure


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", metavar="DIR", help="models of examples.glue.fine_tune --out")
    parser.add_argument("--sentence", default=SENTENCE, metavar="TEXT", help=f"(default: {SENTENCE})")
    parser.add_argument("--out", type=Path, default=Path("maps.png"), metavar="FILE", help="(default: maps.png)")
    args = parser.parse_args(words)
    draw(args.models, args.sentence).savefig(args.out, dpi=100)


if __name__ == "__main__":
    main()
