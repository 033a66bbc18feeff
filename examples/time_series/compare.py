"""Compare EA-DC-Transformer and its baselines on data sets of aeon; print a table, keep all scores.

    python -m examples.time_series.compare JapaneseVowels BasicMotions --out scores.json

A system's settings are those with the best score on 30% of the training series, never on the test series. With them
it is trained on all training series, once for each seed. Scores that are in the file already are not made again.
"""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
from aeon.datasets import load_classification, load_regression
from aeon.datasets.tser_datasets import tser_soton as REGRESSION
from scipy.stats import rankdata
from sklearn.metrics import root_mean_squared_error
from sklearn.model_selection import GridSearchCV, ParameterGrid, ShuffleSplit, StratifiedShuffleSplit

from ea_artifacts.command import Parser, positive
from ea_artifacts.files import read_json, write_json
from examples.common import deviation, draw_classes, origin
from examples.time_series.estimators import EvolvingDCTransformerClassifier, EvolvingDCTransformerRegressor

PLAIN = {"alpha": [0.0], "beta": [0.0]}
SHARES = [0.1, 0.3, 0.5, 0.7, 0.9]
#: system -> values of its settings to choose from
SYSTEMS = {
    "LSTM": {"kind": ["LSTM"]},
    "GRU": {"kind": ["GRU"]},
    "ResNet": {"kind": ["ResNet"]},
    "Dilated convolution": {"p": [0.0], **PLAIN},
    "Transformer": {"p": [1.0], **PLAIN},
    "DC-Transformer": PLAIN,
    "EA-DC-Transformer": {"alpha": SHARES, "beta": SHARES},
}
#: what --search chooses first, one after the other: the paper's two to five blocks of two layers, d and p
SIZES = [{"layers": [4, 6, 8, 10]}, {"d": [64, 128]}, {"p": [number / 8 for number in range(1, 8)]}]
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


def search(name: str, options: dict[str, list], common: dict[str, Any]) -> dict[str, Any]:
    """A system's settings: its sizes, those first that all have, and then its own."""
    sizes = [size for size in SIZES if not options.keys() & size.keys()]
    if "kind" in options:  # no attention, whose share p is
        sizes = [size for size in sizes if "p" not in size]
    chosen = {option: values[0] for option, values in options.items()}
    for size in sizes:
        chosen |= choose(name, size, {**common, **chosen})
    return {**chosen, **choose(name, options, {**common, **chosen})}


def choose(name: str, options: dict[str, list], common: dict[str, Any]) -> dict[str, Any]:
    """The settings with the best score on 30% of the training series; log loss decides between equal accuracies."""
    grid, regression = ParameterGrid(options), name in REGRESSION
    if len(grid) == 1:
        return grid[0]
    split = (ShuffleSplit if regression else StratifiedShuffleSplit)(1, test_size=0.3, random_state=0)
    measures = ["neg_root_mean_squared_error"] if regression else ["accuracy", "neg_log_loss"]
    grid = GridSearchCV(build(name, common, seed=0), options, scoring=measures, cv=split, refit=False)
    results = grid.fit(*load(name, "train")).cv_results_
    scores = [results[f"mean_test_{measure}"] for measure in reversed(measures)]
    order = np.lexsort(np.nan_to_num(scores, nan=-np.inf))  # a training that diverged
    return results["params"][order[-1]]


def measure(name: str, settings: dict[str, Any], common: dict[str, Any], seeds: list[int]) -> dict[str, Any]:
    """Each seed's score on the test series, with the settings and the commit."""
    (x, y), test = load(name, "train"), load(name, "test")
    metric = root_mean_squared_error if name in REGRESSION else "accuracy"
    models = ((str(seed), build(name, {**common, **settings}, seed)) for seed in seeds)
    scores = {seed: model.fit(x, y).score(*test, metric=metric) for seed, model in models}
    return {**origin(), **common, "settings": settings, "scores": scores}


def table(results: dict[str, dict], names: list[str], systems: list[str]) -> str:
    """Mean and deviation of each system on each data set; its average rank and relative difference (equation 12)."""
    scores = [[list(results[name][system]["scores"].values()) for name in names] for system in systems]
    means = np.array([[np.mean(values) for values in row] for row in scores])
    ranks = rankdata(means if names[0] in REGRESSION else -means, axis=0).mean(axis=1)
    differences = (means / means.mean(axis=0) - 1).mean(axis=1)
    lines = [f"| system | {' | '.join(names)} | average rank | average relative difference |"]
    lines.append("|---" * (len(names) + 3) + "|")
    for system, row, rank, difference in zip(systems, scores, ranks, differences, strict=True):
        cells = [f"{np.mean(values):.3f} ± {deviation(values):.3f}" for values in row]
        lines.append(f"| {system} | {' | '.join(cells)} | {rank:.1f} | {difference:+.1%} |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("data", nargs="+", help="names in aeon of data sets of one kind")
    add("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5], metavar="N")
    add("--epochs", type=positive, default=50, metavar="N", help="(default: 50)")
    add("--pretrain-epochs", type=int, default=0, metavar="N", help="of masked values (default: 0)")
    add("--search", action="store_true", help="also choose layers, d and p: three to eight times as long")
    add("--ablations", action="store_true", help="also the paper's ablation")
    add("--tsne", type=Path, metavar="FILE", help="draw the representations of the first test set")
    add("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    if len({name in REGRESSION for name in args.data}) > 1:
        parser.error("data: expected classification only, or regression only")
    if args.tsne and args.data[0] in REGRESSION:
        parser.error("--tsne: draws classes, and these data sets have none")
    results = read_json(args.out) if args.out and args.out.exists() else {}
    common = {"epochs": args.epochs, "pretrain_epochs": args.pretrain_epochs}
    find = search if args.search else choose
    systems = {**SYSTEMS, **(ABLATIONS if args.ablations else {})}
    for name, system in itertools.product(args.data, systems):
        known = results.setdefault(name, {})
        if system in known:
            made = {option: known[system].get(option, False) for option in (*common, "search")}
            made["seeds"] = [*map(int, known[system]["scores"])]
            if made != {**common, "search": args.search, "seeds": args.seeds}:
                parser.error(f"--out {args.out}: its scores of {name}, {system}, are of {made}; give another file")
            continue
        if system in SYSTEMS:
            settings = find(name, SYSTEMS[system], common)
        else:
            settings = {**known["EA-DC-Transformer"]["settings"], **ABLATIONS[system]}
        known[system] = {"search": args.search, **measure(name, settings, common, args.seeds)}
        print(name, system, settings, *known[system]["scores"].values(), flush=True)
        if args.out:
            write_json(args.out, results)
    print(table(results, args.data, list(systems)))
    if args.tsne:
        name, (x, y) = args.data[0], load(args.data[0], "test")
        drawn = {}
        for system in list(SYSTEMS)[-3:]:
            model = build(name, {**common, **results[name][system]["settings"]}, seed=1)
            drawn[system] = model.fit(*load(name, "train")).represent(x)
        draw_classes(drawn, y, args.tsne)


if __name__ == "__main__":
    main()
