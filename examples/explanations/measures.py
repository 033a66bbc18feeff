"""The measures of ERASER (DeYoung et al., 2020): is an explanation true to its model, and do people agree with it?

An explanation gives each word of a sentence a score. p is the model's probability of its class for the whole sentence.

- Comprehensiveness is p, less p without the best words. It is high where the model needs these words.
- Sufficiency is p, less p with the best words alone. It is low where the model needs no others.
- AUPRC is the area under the curve of precision and recall, against the words that people chose.

The first two are means over the best 1, 5, 10, 20 and 50% of the words, at least one word.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import pandas
from lime.lime_text import LimeTextExplainer
from sklearn.metrics import accuracy_score, auc, f1_score, precision_recall_curve
from tqdm import tqdm

#: sentences -> probabilities, sentences x classes
Probabilities = Callable[[list[str]], np.ndarray]

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)


class Example(NamedTuple):
    """A sentence or document that is explained."""

    words: list[str]
    query: str = ""
    label: int | str = 0  # a model's class, by its number or its name
    chosen: Sequence[bool] = ()  # the words that people chose


def lime(probabilities: Probabilities, words: Sequence[str], samples: int) -> list[float]:
    """A score for each word: its share in the probability of the class of the whole sentence."""
    explainer = LimeTextExplainer(split_expression=str.split, bow=False, mask_string="", random_state=1)
    options = {"top_labels": 1, "num_features": len(words), "num_samples": samples}
    (weights,) = explainer.explain_instance(" ".join(words), probabilities, **options).as_map().values()
    return [float(weight) for _, weight in sorted(weights)]


def faithfulness(
    probabilities: Probabilities, words: Sequence[str], scores: Sequence[float]
) -> tuple[int, float, float]:
    """The class, and the comprehensiveness and sufficiency of an explanation, which has a score for each word."""
    order = np.argsort(-np.asarray(scores), kind="stable").tolist()  # the first of equal scores wins
    with_best, without_best = [], []
    for share in SHARES:
        best = order[: math.ceil(share * len(words))]
        with_best.append(" ".join(word for place, word in enumerate(words) if place in best))
        without_best.append(" ".join(word for place, word in enumerate(words) if place not in best))
    whole, *others = probabilities([" ".join(words), *without_best, *with_best])
    changes = whole.max() - np.array(others)[:, whole.argmax()]
    without_change, with_change = changes.reshape(2, len(SHARES)).mean(1)
    return int(whole.argmax()), float(without_change), float(with_change)


def auprc(chosen: Sequence[bool], scores: Sequence[float]) -> float:
    """The area of one sentence; nan where people chose all of its words, or none."""
    if len(set(chosen)) == 1:
        return math.nan
    precision, recall, _ = precision_recall_curve(chosen, scores)
    return float(auc(recall, precision))


def measure(
    examples: Sequence[Example],
    probabilities: Callable[[Example], Probabilities],
    attention: Callable[[Example], Sequence[float]],
    samples: int | None = None,
) -> dict[str, float]:
    """Accuracy, macro F1, and the means of AUPRC, comprehensiveness and sufficiency over the examples that have them.

    Args:
        probabilities: an example -> the classifier of its parts.
        attention: an example -> attention's score for each word.
        samples: explain by LIME, with so many samples.
    """
    predicted, rows = [], []
    for example in tqdm(examples, disable=None):
        of_parts = probabilities(example)
        scores = lime(of_parts, example.words, samples) if samples else attention(example)
        label, *faithful = faithfulness(of_parts, example.words, scores)
        predicted.append(label)
        rows.append([auprc(example.chosen, scores), *faithful])
    labels = [example.label for example in examples]
    means = pandas.DataFrame(rows, columns=["AUPRC", "comprehensiveness", "sufficiency"]).mean()
    return {
        "accuracy": accuracy_score(labels, predicted),
        "F1": f1_score(labels, predicted, average="macro"),
        **means.to_dict(),
    }
