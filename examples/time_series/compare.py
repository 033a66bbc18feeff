"""Compare EA-DC-Transformer and its baselines on a data set of aeon; print and write a table.

    python -m examples.time_series.compare JapaneseVowels --seeds 1 2 3 4 5

Each system's settings are chosen on 30% of the training series, never on the test series. It is then trained on all
training series. aeon ships a few data sets, among them JapaneseVowels, BasicMotions, GunPoint and ItalyPowerDemand,
and for regression Covid3Month and CardanoSentiment; it downloads the others.
"""

import argparse
import itertools
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from aeon.datasets import load_classification, load_regression
from sklearn.manifold import TSNE
from sklearn.metrics import mean_squared_error
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from examples.time_series.estimators import EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor

REGRESSION = {"Covid3Month", "CardanoSentiment"}
PLAIN = {"alpha": [0.0], "beta": [0.0]}
#: system -> values of its settings to choose from
SYSTEMS = {
    "Transformer": {"p": [1.0], **PLAIN},
    "Dilated convolution": {"p": [0.0], **PLAIN},
    "GRU": {"layers": [0]},
    "DC-Transformer": PLAIN,
    "EA-DC-Transformer": {"alpha": [0.1, 0.5], "beta": [0.1, 0.5]},
}
#: rows of the papers' ablation, with alpha = beta = 0.5
ABLATIONS = {
    "EA-DC, alpha 0.5, beta 0.5": {"alpha": [0.5], "beta": [0.5]},
    "without convolution of maps": {"alpha": [0.5], "beta": [0.0]},
    "without skip connection": {"alpha": [0.0], "beta": [0.5]},
}


def score(estimator: Any, x: list, y: np.ndarray) -> float:
    """Accuracy, or the root of the mean squared error."""
    if isinstance(estimator, EvolvingDCTransformerRegressor):
        return mean_squared_error(y, estimator.predict(x)) ** 0.5
    return float(np.mean(estimator.predict(x) == y))


def choose(kind: type, options: dict[str, list], x: list, y: np.ndarray, epochs: int) -> dict[str, Any]:
    """The settings with the best score on 30% of the training series; no search where there is one candidate."""
    grid = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    if len(grid) == 1:
        return grid[0]
    classes = None if kind is EvolvingDCTransformerRegressor else y
    some, others = train_test_split(np.arange(len(y)), test_size=0.3, random_state=0, stratify=classes)
    sign = -1 if classes is None else 1

    def held_out(settings: dict[str, Any]) -> float:
        model = kind(epochs=epochs, random_state=0, **settings).fit([x[i] for i in some], y[some])
        return sign * score(model, [x[i] for i in others], y[others])

    return max(grid, key=held_out)


def relative_differences(scores: dict[str, float]) -> dict[str, float]:
    """The difference of each system's score from the mean of all systems, relative to it (equation 12)."""
    mean = statistics.mean(scores.values())
    return {system: (value - mean) / mean for system, value in scores.items()}


def draw(models: dict[str, Any], x: list, y: np.ndarray, path: Path) -> None:
    """t-SNE of each model's representations, with the mean distance of a series to the centre of its class."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(models), 4), layout="constrained")
    for axes, (system, model) in zip(figure.subplots(1, len(models), squeeze=False)[0], models.items(), strict=True):
        points = TSNE(random_state=0).fit_transform(model.represent(x))
        points = (points - points.mean(0)) / points.std(0)
        centres = {label: points[y == label].mean(0) for label in np.unique(y)}
        distance = np.mean([np.linalg.norm(point - centres[label]) for point, label in zip(points, y, strict=True)])
        axes.scatter(*points.T, c=np.unique(y, return_inverse=True)[1], cmap="tab10", s=8)
        axes.set_title(f"{system}: mean distance {distance:.2f}")
    figure.savefig(path)


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", help="a data set's name in aeon")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    parser.add_argument("--epochs", type=int, default=100, metavar="N", help="(default: 100)")
    parser.add_argument("--pretrain-epochs", type=int, default=0, metavar="N", help="of masked values (default: 0)")
    parser.add_argument("--ablations", action="store_true", help="the papers' ablation in place of the systems")
    parser.add_argument("--tsne", type=Path, metavar="FILE", help="draw the representations of the test series")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the table here")
    args = parser.parse_args(words)
    regression = args.data in REGRESSION
    kind = EvolvingDCTransformerRegressor if regression else EvolvingDCTransformerClassifier
    load = load_regression if regression else load_classification
    (x, y), (test_x, test_y) = (load(args.data, split=split) for split in ("train", "test"))
    rows, models = {}, {}
    for system, options in (ABLATIONS if args.ablations else SYSTEMS).items():
        settings = choose(kind, options, x, y, args.epochs)
        given = {"epochs": args.epochs, "pretrain_epochs": args.pretrain_epochs, **settings}
        scores = []
        for seed in tqdm(args.seeds, system, disable=None):
            models[system] = kind(random_state=seed, **given).fit(x, y)
            scores.append(score(models[system], test_x, test_y))
        rows[system] = settings, scores
    means = {system: statistics.mean(scores) for system, (_, scores) in rows.items()}
    order = sorted(means, key=means.get, reverse=not regression)
    differences = relative_differences(means)
    name = "root mean squared error" if regression else "accuracy"
    lines = [
        f"| system | {name} | standard deviation | rank | relative difference | settings |",
        "|---|---|---|---|---|---|",
    ]
    for system, (settings, scores) in rows.items():
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        chosen = ", ".join(f"{key} {value}" for key, value in settings.items())
        numbers = f"{means[system]:.3f} | {spread:.3f} | {order.index(system) + 1} | {differences[system]:+.1%}"
        lines.append(f"| {system} | {numbers} | {chosen} |")
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines) + "\n")
    if args.tsne:
        draw(models, test_x, test_y, args.tsne)


if __name__ == "__main__":
    main()
