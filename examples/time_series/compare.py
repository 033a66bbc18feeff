"""Compare EA-DC-Transformer and its baselines on data sets of aeon; print a table, keep all scores.

    python -m examples.time_series.compare JapaneseVowels BasicMotions --out scores.json

A system's settings are those with the best score on 30% of the training series, never on the test series. With them
it is trained on all training series, once for each seed. Scores that are in the file already are not made again.

aeon ships some sets, and for regression Covid3Month and CardanoSentiment. It downloads the others.
"""

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import numpy as np
from aeon.datasets import load_classification, load_regression
from scipy.stats import rankdata
from sklearn.metrics import log_loss, root_mean_squared_error
from sklearn.model_selection import train_test_split
from tqdm import tqdm

from examples.report import draw_classes, origin
from examples.time_series.estimators import EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor

REGRESSION = {"Covid3Month", "CardanoSentiment"}
PLAIN = {"alpha": [0.0], "beta": [0.0]}
#: system -> values of its settings to choose from
SYSTEMS = {
    "Dilated convolution": {"p": [0.0], **PLAIN},
    "GRU": {"layers": [0]},
    "Transformer": {"p": [1.0], **PLAIN},
    "DC-Transformer": PLAIN,
    "EA-DC-Transformer": {"alpha": [0.1, 0.5, 0.9], "beta": [0.1, 0.5, 0.9]},
}
#: row of the paper's ablation -> its changes to the settings of EA-DC-Transformer
ABLATIONS = {
    "EA-DC without convolution": {"beta": 0.0},
    "EA-DC without skip connection": {"alpha": 0.0},
    "EA-DC with 1 x 1 convolution": {"kernel_size": 1},
    "EA-DC with 5 x 5 convolution": {"kernel_size": 5},
}


def load(name: str, split: str) -> tuple[Any, np.ndarray]:
    """Series, n x C x T or a list of C x T, and their targets."""
    return (load_regression if name in REGRESSION else load_classification)(name, split=split)


def build(name: str, settings: dict[str, Any], seed: int) -> Any:
    """The estimator for a data set."""
    kind = EvolvingDCTransformerRegressor if name in REGRESSION else EvolvingDCTransformerClassifier
    return kind(random_state=seed, **settings)


def score(estimator: Any, x: Any, y: np.ndarray) -> float:
    """Accuracy, or the root of the mean squared error."""
    if isinstance(estimator, EvolvingDCTransformerRegressor):
        return root_mean_squared_error(y, estimator.predict(x))
    return estimator.score(x, y)


def choose(name: str, options: dict[str, list], common: dict[str, Any]) -> dict[str, Any]:
    """The settings with the best score on 30% of the training series; log loss decides between equal accuracies."""
    grid = [dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())]
    if len(grid) == 1:
        return grid[0]
    x, y = load(name, "train")
    classes = None if name in REGRESSION else y
    some, others = train_test_split(np.arange(len(y)), test_size=0.3, random_state=0, stratify=classes)
    held_out, wanted = [x[i] for i in others], y[others]

    def quality(settings: dict[str, Any]) -> tuple[float, ...]:
        model = build(name, {**common, **settings}, seed=0).fit([x[i] for i in some], y[some])
        if classes is None:
            return (-score(model, held_out, wanted),)
        return score(model, held_out, wanted), -log_loss(wanted, model.predict_proba(held_out), labels=model.classes_)

    return max(tqdm(grid, "choosing", disable=None), key=quality)


def measure(name: str, settings: dict[str, Any], common: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Each seed's score on the test series, with the settings and the commit."""
    (x, y), test = load(name, "train"), load(name, "test")
    models = (build(name, {**common, **settings}, seed).fit(x, y) for seed in seeds)
    scores = {str(seed): score(model, *test) for seed, model in zip(seeds, models, strict=True)}
    return {**origin(), **common, "settings": settings, "scores": scores}


def table(results: dict[str, dict], names: list[str], systems: list[str]) -> str:
    """Mean and deviation of each system on each data set; its average rank and relative difference (equation 12)."""
    means = np.array([[statistics.mean(results[n][s]["scores"].values()) for n in names] for s in systems])
    better_first = means if names[0] in REGRESSION else -means
    ranks = rankdata(better_first, axis=0).mean(axis=1)
    differences = (means / means.mean(axis=0) - 1).mean(axis=1)
    lines = [f"| system | {' | '.join(names)} | average rank | average relative difference |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for system, row, rank, difference in zip(systems, means, ranks, differences, strict=True):
        deviations = [np.std(list(results[name][system]["scores"].values()), ddof=1) for name in names]
        cells = [f"{mean:.3f} ± {deviation:.3f}" for mean, deviation in zip(row, deviations, strict=True)]
        lines.append(f"| {system} | {' | '.join(cells)} | {rank:.1f} | {difference:+.1%} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", help="data sets' names in aeon, of one kind")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    parser.add_argument("--epochs", type=int, default=50, metavar="N", help="(default: 50)")
    parser.add_argument("--pretrain-epochs", type=int, default=0, metavar="N", help="of masked values (default: 0)")
    parser.add_argument("--ablations", action="store_true", help="also the paper's ablation")
    parser.add_argument("--tsne", type=Path, metavar="FILE", help="draw the representations of the first test set")
    parser.add_argument("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    if len({name in REGRESSION for name in args.data}) > 1:
        parser.error("data: expected classification only, or regression only")
    results = json.loads(args.out.read_text()) if args.out and args.out.exists() else {}
    common = {"epochs": args.epochs, "pretrain_epochs": args.pretrain_epochs}
    systems = {**SYSTEMS, **(ABLATIONS if args.ablations else {})}
    for name, system in itertools.product(args.data, systems):
        known = results.setdefault(name, {})
        if system in known:
            continue
        if system in SYSTEMS:
            settings = choose(name, SYSTEMS[system], common)
        else:
            settings = {**known["EA-DC-Transformer"]["settings"], **ABLATIONS[system]}
        known[system] = measure(name, settings, common, args.seeds)
        print(name, system, settings, *known[system]["scores"].values(), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results, args.data, list(systems)))
    if args.tsne:
        name, (x, y) = args.data[0], load(args.data[0], "test")
        drawn = {system: results[name][system]["settings"] for system in list(SYSTEMS)[2:]}
        models = {system: build(name, {**common, **settings}, seed=1) for system, settings in drawn.items()}
        fitted = {system: model.fit(*load(name, "train")) for system, model in models.items()}
        draw_classes({system: model.represent(x) for system, model in fitted.items()}, y, args.tsne)


if __name__ == "__main__":
    main()
