"""Rationales from attention, and by LIME, on a corpus of ERASER: ICML 2021, table 11.

    python -m examples.explanations.eraser movies --model bert-base-uncased --lime 1000

The corpus is a folder as ERASER publishes it (DeYoung et al., 2020): docs/ with a file for each document, or
docs.jsonl, and train.jsonl and test.jsonl with annotations. BERT, a BiLSTM and two layers of attention read a document.
The second layer's weights, a mean over heads and queries, are the words' scores. The papers name no number of layers.
LIME explains the model with plain attention, and one whose BERT evolves.

Axes: B batch, T subwords. Masks: True = padded.
"""

import argparse
import json
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from ea_artifacts.command import Parser, positive, reporting
from ea_artifacts.files import read_lines, write_json
from evolving_attention import EvolvingAttention, Geometry
from evolving_attention.huggingface import evolve
from examples.common import fit, origin
from examples.explanations.measures import Example, measure

HEADS, SHARE = 4, 0.1  # SHARE: alpha and beta
SEPARATOR = "[SEP]"
#: a model of table 11 -> alpha and beta in BERT, the same in the layers behind it, and what explains it; 0: plain
SYSTEMS = {
    "BERT+LSTM": (0.0, 0.0, ["attention", "LIME"]),
    "BERT+LSTM, evolving": (0.0, SHARE, ["attention"]),
    "EA-BERT+LSTM": (SHARE, 0.0, ["LIME"]),
}


def read(folder: Path, split: str) -> list[Example]:
    """The examples of a split: their documents with evidence, joined by SEPARATOR.

    Both sentences of e-SNLI are always read: leaving out the one without evidence would give the label away.
    """
    path = folder / "docs.jsonl"
    if path.exists():
        texts = {row["docid"]: row["document"] for row in map(json.loads, read_lines(path))}
    else:
        texts = {file.name: file.read_text() for file in (folder / "docs").iterdir()}
    examples = []
    for row in map(json.loads, read_lines(folder / f"{split}.jsonl")):
        name, evidence = row["annotation_id"], [one for group in row["evidences"] for one in group]
        pair = [document for document in (f"{name}_premise", f"{name}_hypothesis") if document in texts]
        documents = pair or sorted({one["docid"] for one in evidence}) or row.get("docids") or [name]
        marked = {(one["docid"], place) for one in evidence for place in range(one["start_token"], one["end_token"])}
        words: list[str] = []
        chosen: list[bool] = []
        for document in documents:
            part = texts[document].split()
            words += [*part, SEPARATOR]
            chosen += [(document, place) in marked for place in range(len(part) + 1)]
        examples.append(Example(words[:-1], row.get("query") or "", row["classification"], chosen[:-1]))
    return examples


class Reader(nn.Module):
    """BERT, a BiLSTM and two layers of attention, whose alpha and beta are ``share``; 0: plain attention."""

    def __init__(self, bert: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, labels: int, share: float) -> None:
        super().__init__()
        self.bert, self.tokenizer, width = bert, tokenizer, bert.config.hidden_size
        self.lstm = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.layers = nn.ModuleList(
            EvolvingAttention(Geometry.ENCODER_SELF, width, HEADS, alpha=share, beta=share, first=first)
            for first in (True, False)
        )
        self.head = nn.Linear(width, labels)

    def encoded(self, *examples: Example) -> BatchEncoding:
        """Queries and words as subwords; the end of a document that is too long is cut."""
        queries, documents = zip(*((one.query.split() or ["."], one.words or ["."]) for one in examples), strict=True)
        longest = self.bert.config.max_position_embeddings - 2  # RoBERTa's first two stand for no place
        options = {"is_split_into_words": True, "truncation": "only_second", "padding": True, "max_length": longest}
        return self.tokenizer(queries, documents, return_tensors="pt", **options)

    def forward(self, inputs: BatchEncoding) -> tuple[Tensor, Tensor]:
        """The labels' scores, B x labels, and the subwords', B x T."""
        padded = inputs["attention_mask"] == 0
        x, a_logit = self.lstm(self.bert(**inputs).last_hidden_state)[0], None
        for layer in self.layers:
            output, a_logit, weights, _ = layer(x, padding=padded, previous=a_logit, need_weights=True)
            x = x + output
        shares = (~padded / (~padded).sum(1, keepdim=True)).type_as(x)  # B x T
        return self.head(torch.einsum("bt,btc->bc", shares, x)), torch.einsum("bt,bkts->bs", shares / HEADS, weights)

    @torch.no_grad()
    def probabilities(self, sentences: list[str], query: str) -> np.ndarray:
        """N sentences, which are documents or parts of one -> N x labels."""
        rows = [self(self.encoded(Example(sentence.split(), query)))[0].softmax(1) for sentence in sentences]
        return torch.cat(rows).numpy()

    @torch.no_grad()
    def attention(self, example: Example) -> list[float]:
        """A score for each word; 0 for those that are cut off."""
        inputs = self.encoded(example)
        scores = [0.0] * len(example.words)
        for place, side, score in zip(inputs.word_ids(), inputs.sequence_ids(), self(inputs)[1][0], strict=True):
            if side == 1:
                scores[place] += float(score)
        return scores


def train(model: Reader, examples: list[Example], epochs: int, batch: int, rate: float) -> None:
    """Train all parameters."""

    def loss(rows: Tensor) -> Tensor:
        part = [examples[row] for row in rows]
        return F.cross_entropy(model(model.encoded(*part))[0], torch.tensor([one.label for one in part]))

    fit(model, loss, len(examples), batch, epochs, torch.optim.AdamW(model.parameters(), lr=rate))


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("folder", type=Path, metavar="DIR", help="a corpus of ERASER")
    add("--model", required=True, metavar="NAME", help="a BERT: its folder, or its name on the hub")
    add("--lime", type=positive, metavar="N", help="LIME too, by N samples a document (ERASER: 1000)")
    add("--epochs", type=positive, default=5, metavar="N", help="(default: 5)")
    add("--batch-size", type=positive, default=8, metavar="N", help="(default: 8)")
    add("--lr", type=float, default=2e-5, metavar="N", help="(default: 2e-5)")
    add("--seed", type=int, default=1, metavar="N", help="(default: 1)")
    add("--out", type=Path, metavar="FILE", help="also write the numbers here, as JSON")
    args = parser.parse_args(words)
    with reporting("eraser"):
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Train each system, explain it, print the measures, and write them."""
    splits = [read(args.folder, split) for split in ("train", "test")]
    labels, results = sorted({one.label for one in splits[0]}), {}
    examples, tests = ([one._replace(label=labels.index(one.label)) for one in split] for split in splits)
    for name, (in_bert, behind, methods) in SYSTEMS.items():
        methods = [method for method in methods if method == "attention" or args.lime]
        if not methods:
            continue
        torch.manual_seed(args.seed)
        bert, tokenizer = AutoModel.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
        if in_bert:
            evolve(bert, in_bert, in_bert)
        model = Reader(bert, tokenizer, len(labels), behind)
        train(model, examples, args.epochs, args.batch_size, args.lr)
        for method in methods:
            results[f"{name}, {method}"] = row = judge(model, tests, args.lime if method == "LIME" else None)
            print(f"{name}, {method}", *(f"{measured} {value:.3f}" for measured, value in row.items()), flush=True)
    if args.out:
        write_json(args.out, {**origin(), "settings": vars(args), "results": results})


def judge(model: Reader, examples: list[Example], samples: int | None) -> dict[str, float]:
    """The measures of attention, or with samples of LIME."""
    return measure(examples, lambda one: partial(model.probabilities, query=one.query), model.attention, samples)


if __name__ == "__main__":
    main()
