"""Draw the attention maps of classifiers side by side, a mean over heads: ICML 2021, figure 11, on models of your own.

    python -m examples.explanations.draw models/sst2/SST-2-stock-1 models/sst2/SST-2-evolving-1 --out maps.png

All panels have one scale.
"""

import argparse
from pathlib import Path

import torch
from matplotlib.figure import Figure

from examples.explanations.explain import Classifier

SENTENCE = "Mary tried John to go abroad ."


@torch.no_grad()
def draw(folders: list[Path], sentence: str) -> Figure:
    """A row for each model, a column for each layer."""
    rows = []
    for folder in folders:
        classifier = Classifier(folder)
        inputs = classifier.tokenizer(sentence, return_tensors="pt")
        # For each layer T x T.
        maps = [layer[0].mean(0) for layer in classifier.model(**inputs, output_attentions=True).attentions]
        rows.append((folder.name, inputs.tokens(), maps))
    layers = len(rows[0][2])
    largest = max(weights.max().item() for _, _, maps in rows for weights in maps)
    figure = Figure(figsize=(3.2 * layers, 3.2 * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), layers, squeeze=False)
    for panels, (name, tokens, maps) in zip(grid, rows, strict=True):
        for number, (axes, weights) in enumerate(zip(panels, maps, strict=True), 1):
            axes.imshow(weights.numpy(), cmap="viridis", vmin=0, vmax=largest)
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
