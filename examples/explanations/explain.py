"""Compare explanations of classifiers with and without evolving attention: by attention, and by LIME.

    python -m examples.glue.fine_tune SST-2 --from-scratch --epochs 2 --batch-size 32 --lr 4e-4 --updates 600 \
        --seeds 1 2 3 --out models/sst2
    python -m examples.explanations.explain --models models/sst2

Attention explains by the last layer's weights from [CLS] to the words, a mean over heads and a sum over a word's
subwords. LIME (Ribeiro et al., 2016) fits a linear model to the classifier's answers without some of the words.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import transformers
from lime.lime_text import LimeTextExplainer
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer

from evolving_attention import huggingface
from examples.explanations.measures import Probabilities, auprc, faithfulness
from examples.glue.tasks import DataError, load
from examples.report import positive, write

METHODS = ("attention", "LIME")
MEASURES = ("accuracy", "AUPRC", "comprehensiveness", "sufficiency")


class Classifier:
    """A model of ``examples.glue.fine_tune --out``, with or without evolving attention."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        if config.is_encoder_decoder:
            raise DataError(f"{folder}: {config.model_type} has an encoder and a decoder; expected an encoder, as BERT")
        model_class = getattr(transformers, config.architectures[0])
        if hasattr(config, huggingface.SETTINGS):
            model = huggingface.from_pretrained(model_class, folder)
        else:
            # Other implementations do not return weights.
            model = model_class.from_pretrained(folder, attn_implementation="eager")
        self.model = model.eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)

    @torch.no_grad()
    def probabilities(self, sentences: list[str], layer: int = -1) -> np.ndarray:
        """N sentences -> N x classes; layer: whose output the classifier reads, the last by default."""
        parts, pooler = [], getattr(self.model.base_model, "pooler", None)
        for start in range(0, len(sentences), 64):
            part = self.tokenizer(sentences[start : start + 64], padding=True, truncation=True, return_tensors="pt")
            hidden = self.model.base_model(**part, output_hidden_states=True).hidden_states[layer]
            scores = self.model.classifier(hidden if pooler is None else pooler(hidden))
            parts.append(scores.softmax(1))
        return torch.cat(parts).numpy()

    @torch.no_grad()
    def attention(self, sentence: str) -> list[float]:
        """A score for each word."""
        words = sentence.split()
        inputs = self.tokenizer(words, is_split_into_words=True, truncation=True, return_tensors="pt")
        weights = self.model(**inputs, output_attentions=True).attentions[-1]  # 1 x K x T x T
        scores = [0.0] * len(words)
        for place, weight in zip(inputs.word_ids(), weights[0, :, 0].mean(0).tolist(), strict=True):
            if place is not None:
                scores[place] += weight
        return scores


def lime(probabilities: Probabilities, sentence: str, samples: int) -> list[float]:
    """A score for each word: its share in the probability of the class of the whole sentence."""
    explainer = LimeTextExplainer(split_expression=str.split, bow=False, mask_string="", random_state=1)
    options = {"top_labels": 1, "num_features": len(sentence.split()), "num_samples": samples}
    (weights,) = explainer.explain_instance(sentence, probabilities, **options).as_map().values()
    return [float(weight) for _, weight in sorted(weights)]


def measure(
    classifier: Classifier, rows: Iterable[dict], opinions: dict[str, int], samples: int
) -> dict[str, dict[str, float]]:
    """Method -> measure -> the mean over the rows."""
    results: dict[str, dict[str, list[float]]] = {method: defaultdict(list) for method in METHODS}
    for row in tqdm(rows, disable=None):
        sentence, label = row["sentence"], row["label"]
        correct = classifier.probabilities([sentence])[0].argmax() == label
        chosen = [opinions.get(word) == label for word in sentence.split()]
        explanations = (classifier.attention(sentence), lime(classifier.probabilities, sentence, samples))
        for result, scores in zip(results.values(), explanations, strict=True):
            comprehensiveness, sufficiency = faithfulness(classifier.probabilities, sentence, scores)
            result["accuracy"].append(correct)
            result["comprehensiveness"].append(comprehensiveness)
            result["sufficiency"].append(sufficiency)
            if len(set(chosen)) == 2:
                result["AUPRC"].append(auprc(chosen, scores))
    return {
        method: {name: float(np.mean(result[name])) if result[name] else math.nan for name in MEASURES}
        for method, result in results.items()
    }


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="--out of examples.glue.fine_tune")
    parser.add_argument("--data", type=Path, metavar="DIR", help="SST-2's files (default: from the hub)")
    count = {"type": positive, "default": 100, "metavar": "N"}
    parser.add_argument("--sentences", **count, help="of the development set (default: 100)")
    parser.add_argument("--samples", **count, help="of LIME for a sentence (default: 100)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers here, as JSON")
    args = parser.parse_args(words)
    try:
        compare(args)
    except DataError as error:
        print(f"explain: {error}", file=sys.stderr)
        sys.exit(1)


def compare(args: argparse.Namespace) -> None:
    """Print the table, and write the numbers."""
    data = load("SST-2", args.data)
    rows = data["dev"].take(min(args.sentences, len(data["dev"])))
    folders = {kind: sorted(args.models.glob(f"SST-2-{kind}-*/")) for kind in ("stock", "evolving")}
    if not all(folders.values()):
        raise DataError(f"{args.models}: has no SST-2-stock-N and SST-2-evolving-N of examples.glue.fine_tune")
    # SST-2 has no rationales. Its annotators did judge single words, which stand among the training rows.
    train = zip(data["train"]["sentence"], data["train"]["label"], strict=True)
    opinions = {sentence: label for sentence, label in train if len(sentence.split()) == 1}
    print(f"| model | method | {' | '.join(MEASURES)} |")
    print("|---" * (2 + len(MEASURES)) + "|")
    record = {}
    for kind, some in folders.items():
        results = [measure(Classifier(folder), rows, opinions, args.samples) for folder in some]
        record[kind] = results
        for method in METHODS:
            cells = [_mean([result[method][name] for result in results]) for name in MEASURES]
            print(f"| {kind} | {method} | {' | '.join(cells)} |", flush=True)
    if args.out:
        write(args.out, {"settings": vars(args), "results": record})


def _mean(values: list[float]) -> str:
    """Mean and standard deviation over seeds."""
    spread = f" ± {np.std(values, ddof=1):.3f}" if len(values) > 1 else ""
    return f"{np.mean(values):.3f}{spread}"


if __name__ == "__main__":
    main()
