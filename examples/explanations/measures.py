"""The measures of ERASER (DeYoung et al., 2020): is an explanation true to its model, and do people agree with it?

An explanation gives each word of a sentence a score. p is the model's probability of its class for the whole sentence.

- Comprehensiveness is p, less p without the best words. It is high where the model needs these words.
- Sufficiency is p, less p with the best words alone. It is low where the model needs no others.
- AUPRC is the area under the curve of precision and recall, against the words that people chose.

The first two are means over the best 1, 5, 10, 20 and 50% of the words, at least one word.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from sklearn.metrics import auc, precision_recall_curve

#: sentences -> probabilities, sentences x classes
Probabilities = Callable[[list[str]], np.ndarray]

SHARES = (0.01, 0.05, 0.1, 0.2, 0.5)


def faithfulness(probabilities: Probabilities, sentence: str, scores: Sequence[float]) -> tuple[float, float]:
    """Comprehensiveness and sufficiency of an explanation; ``scores`` has one number for each word."""
    words = sentence.split()
    with_best, without_best = [], []
    for share in SHARES:
        chosen = best(scores, share)
        with_best.append(" ".join(word for place, word in enumerate(words) if place in chosen))
        without_best.append(" ".join(word for place, word in enumerate(words) if place not in chosen))
    whole, *others = probabilities([sentence, *without_best, *with_best])
    changes = whole.max() - np.array(others)[:, whole.argmax()]
    without_change, with_change = changes.reshape(2, len(SHARES)).mean(1)
    return float(without_change), float(with_change)


def best(scores: Sequence[float], share: float) -> set[int]:
    """The places of the highest scores: this share of them, rounded up. The first of equal scores wins."""
    count = math.ceil(share * len(scores))
    return set(np.argsort(-np.asarray(scores), kind="stable")[:count].tolist())


def auprc(chosen: Sequence[bool], scores: Sequence[float]) -> float:
    """The area of one sentence; ``chosen`` says which words people chose, some but not all."""
    precision, recall, _ = precision_recall_curve(chosen, scores)
    return float(auc(recall, precision))
