"""Compare explanations of classifiers with and without evolving attention: by attention, and by LIME.

    python -m examples.glue.fine_tune SST-2 --from-scratch --epochs 2 --batch-size 32 --lr 4e-4 --updates 600 \
        --seeds 1 2 3 --out models/sst2
    python -m examples.explanations.explain --models models/sst2

Attention explains by the last layer's weights from [CLS] to the words, a mean over heads and a sum over a word's
subwords. LIME (Ribeiro et al., 2016) fits a linear model to the classifier's answers without some of the words.
"""

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from ea_artifacts.command import Parser, UserError, positive, reporting
from ea_artifacts.files import write_json
from evolving_attention import huggingface
from examples.common import deviation, origin
from examples.explanations.measures import Example, measure
from examples.glue.tasks import load

METHODS = ("attention", "LIME")
MEASURES = ("accuracy", "AUPRC", "comprehensiveness", "sufficiency")


class Classifier:
    """A model of ``examples.glue.fine_tune --out``, with or without evolving attention."""

    def __init__(self, folder: Path) -> None:
        config = AutoConfig.from_pretrained(folder)
        if config.is_encoder_decoder:
            raise UserError(f"{folder}: {config.model_type} has an encoder and a decoder; expected an encoder, as BERT")
        model_class = getattr(transformers, config.architectures[0])
        if hasattr(config, huggingface.SETTINGS):
            model = huggingface.from_pretrained(model_class, folder)
        else:  # other implementations do not return weights
            model = model_class.from_pretrained(folder, attn_implementation="eager")
        self.model, self.tokenizer = model.eval(), AutoTokenizer.from_pretrained(folder)

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
    def attention(self, example: Example) -> list[float]:
        """A score for each word."""
        inputs = self.tokenizer(example.words, is_split_into_words=True, truncation=True, return_tensors="pt")
        weights = self.model(**inputs, output_attentions=True).attentions[-1]  # 1 x K x T x T
        scores = [0.0] * len(example.words)
        for place, weight in zip(inputs.word_ids(), weights[0, :, 0].mean(0).tolist(), strict=True):
            if place is not None:
                scores[place] += weight
        return scores


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--models", type=Path, required=True, metavar="DIR", help="--out of examples.glue.fine_tune")
    parser.add_argument("--data", type=Path, metavar="DIR", help="SST-2's files (default: from the hub)")
    count = {"type": positive, "default": 100, "metavar": "N"}
    parser.add_argument("--sentences", **count, help="of the development set (default: 100)")
    parser.add_argument("--samples", **count, help="of LIME for a sentence (default: 100)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all numbers here, as JSON")
    args = parser.parse_args(words)
    with reporting("explain"):
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Print the table, and write the numbers."""
    folders = {kind: sorted(args.models.glob(f"SST-2-{kind}-*/")) for kind in ("stock", "evolving")}
    if not all(folders.values()):
        raise UserError(f"{args.models}: has no SST-2-stock-N and SST-2-evolving-N of examples.glue.fine_tune")
    data, results = load("SST-2", args.data), {}
    # SST-2 has no rationales. Its annotators did judge single words, which stand among the training rows.
    train = zip(data["train"]["sentence"], data["train"]["label"], strict=True)
    opinions = {sentence.strip(): label for sentence, label in train}
    examples = []
    for row in data["dev"].take(min(args.sentences, len(data["dev"]))):
        words = row["sentence"].split()
        chosen = [opinions.get(word) == row["label"] for word in words]
        examples.append(Example(words, label=row["label"], chosen=chosen))
    print(f"| model | method | {' | '.join(MEASURES)} |")
    print("|---" * (2 + len(MEASURES)) + "|")
    for kind in folders:
        results[kind] = [judge(Classifier(folder), examples, args.samples) for folder in folders[kind]]
        for method in METHODS:
            columns = [[result[method][name] for result in results[kind]] for name in MEASURES]
            cells = [f"{np.mean(values):.3f} ± {deviation(values):.3f}" for values in columns]
            print(f"| {kind} | {method} | {' | '.join(cells)} |", flush=True)
    if args.out:
        write_json(args.out, {**origin(), "settings": vars(args), "results": results})


def judge(model: Classifier, examples: list[Example], samples: int) -> dict[str, dict[str, float]]:
    """Method -> measure -> its mean over the examples."""
    counts = zip(METHODS, (None, samples), strict=True)
    return {
        method: measure(examples, lambda _: model.probabilities, model.attention, count) for method, count in counts
    }


if __name__ == "__main__":
    main()
