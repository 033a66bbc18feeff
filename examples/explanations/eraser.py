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
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.metrics import f1_score
from torch import Tensor, nn
from tqdm import tqdm
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase

from evolving_attention import EvolvingAttention, Geometry
from evolving_attention.huggingface import evolve
from examples.explanations.explain import lime
from examples.explanations.measures import auprc, faithfulness
from examples.report import positive, write

HEADS, SHARE = 4, 0.1  # SHARE: alpha and beta
SEPARATOR = "[SEP]"


class System(NamedTuple):
    """A model of table 11, and whether attention and LIME explain it."""

    bert: float  # alpha and beta in BERT; 0: plain
    attention: float  # the same in the layers behind it
    by_attention: bool
    by_lime: bool


SYSTEMS = {
    "BERT+LSTM": System(0.0, 0.0, True, True),
    "BERT+LSTM, evolving": System(0.0, SHARE, True, False),
    "EA-BERT+LSTM": System(SHARE, 0.0, False, True),
}


class Document(NamedTuple):
    """One annotated example."""

    words: list[str]
    query: str  # "" where there is none
    label: str
    chosen: list[bool]  # the words that people chose


def read(folder: Path, split: str) -> list[Document]:
    """The examples of a split: their documents with evidence, joined by SEPARATOR.

    Both sentences of e-SNLI are always read: leaving out the one without evidence would give the label away.
    """
    path = folder / "docs.jsonl"
    if path.exists():
        texts = {row["docid"]: row["document"] for row in map(json.loads, path.read_text().splitlines())}
    else:
        texts = {file.name: file.read_text() for file in (folder / "docs").iterdir()}
    examples = []
    for row in map(json.loads, (folder / f"{split}.jsonl").read_text().splitlines()):
        name, evidence = row["annotation_id"], [one for group in row["evidences"] for one in group]
        pair = [document for document in (f"{name}_premise", f"{name}_hypothesis") if document in texts]
        words: list[str] = []
        chosen: list[bool] = []
        for document in pair or sorted({one["docid"] for one in evidence}) or row.get("docids") or [name]:
            if words:
                words.append(SEPARATOR)
                chosen.append(False)
            part = texts[document].split()
            marks = [False] * len(part)
            for one in evidence:
                if one["docid"] == document:
                    marks[one["start_token"] : one["end_token"]] = [True] * (one["end_token"] - one["start_token"])
            words += part
            chosen += marks
        examples.append(Document(words, row.get("query") or "", row["classification"], chosen))
    return examples


class Reader(nn.Module):
    """BERT, a BiLSTM and two layers of attention; alpha = beta = 0: plain attention."""

    def __init__(
        self, bert: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, labels: list[str], alpha: float, beta: float
    ) -> None:
        super().__init__()
        self.bert, self.tokenizer, self.labels = bert, tokenizer, labels
        width = bert.config.hidden_size
        self.lstm = nn.LSTM(width, width // 2, bidirectional=True, batch_first=True)
        self.layers = nn.ModuleList(
            EvolvingAttention(Geometry.ENCODER_SELF, width, HEADS, alpha=alpha, beta=beta, first=first)
            for first in (True, False)
        )
        self.head = nn.Linear(width, len(labels))

    def encoded(self, documents: list[list[str]], queries: list[str]) -> BatchEncoding:
        """Queries and words as subwords; the end of a document that is too long is cut."""
        pairs = [query.split() or ["."] for query in queries], [words or ["."] for words in documents]
        longest = self.bert.config.max_position_embeddings - 2  # RoBERTa's first two stand for no place
        options = {"is_split_into_words": True, "truncation": "only_second", "padding": True, "max_length": longest}
        return self.tokenizer(*pairs, return_tensors="pt", **options)

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
        rows = [self(self.encoded([sentence.split()], [query]))[0].softmax(1) for sentence in sentences]
        return torch.cat(rows).numpy()

    @torch.no_grad()
    def attention(self, document: Document) -> list[float]:
        """A score for each word; 0 for those that are cut off."""
        inputs = self.encoded([document.words], [document.query])
        scores = [0.0] * len(document.words)
        for place, side, score in zip(inputs.word_ids(), inputs.sequence_ids(), self(inputs)[1][0], strict=True):
            if side == 1:
                scores[place] += float(score)
        return scores

    def lime(self, document: Document, samples: int) -> list[float]:
        """LIME's score for each word."""
        return lime(partial(self.probabilities, query=document.query), " ".join(document.words), samples)


def train(model: Reader, documents: list[Document], epochs: int, batch: int, rate: float) -> None:
    """Train all parameters."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    model.train()
    for _ in range(epochs):
        for rows in tqdm(torch.randperm(len(documents)).split(batch), disable=None):
            part = [documents[row] for row in rows]
            scores, _ = model(model.encoded([one.words for one in part], [one.query for one in part]))
            optimizer.zero_grad()
            F.cross_entropy(scores, torch.tensor([model.labels.index(one.label) for one in part])).backward()
            optimizer.step()
    model.eval()


def measure(
    model: Reader, documents: list[Document], explain: Callable[[Document], Sequence[float]]
) -> dict[str, float]:
    """Accuracy, macro F1, and the means over documents of AUPRC, comprehensiveness and sufficiency.

    Args:
        explain: a document -> a score for each word.
    """
    rows, predicted, expected = [], [], [document.label for document in documents]
    for document in tqdm(documents, disable=None):
        probabilities, sentence = partial(model.probabilities, query=document.query), " ".join(document.words)
        scores = explain(document)
        predicted.append(model.labels[probabilities([sentence])[0].argmax()])
        agreement = auprc(document.chosen, scores) if len(set(document.chosen)) == 2 else np.nan
        rows.append([agreement, *faithfulness(probabilities, sentence, scores)])
    names = ("AUPRC", "comprehensiveness", "sufficiency")
    return {
        "accuracy": float(np.mean(np.array(predicted) == np.array(expected))),
        "F1": float(f1_score(expected, predicted, average="macro")),
        **dict(zip(names, np.nanmean(np.array(rows), axis=0).tolist(), strict=True)),
    }


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="a corpus of ERASER")
    parser.add_argument("--model", required=True, metavar="NAME", help="a BERT: its folder, or its name on the hub")
    parser.add_argument("--lime", type=positive, metavar="N", help="LIME too, by N samples a document (ERASER: 1000)")
    parser.add_argument("--epochs", type=positive, default=5, metavar="N", help="(default: 5)")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="(default: 8)")
    parser.add_argument("--lr", type=float, default=2e-5, metavar="N", help="(default: 2e-5)")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="(default: 1)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write the numbers here, as JSON")
    args = parser.parse_args(words)
    documents, tests = read(args.folder, "train"), read(args.folder, "test")
    labels, results = sorted({one.label for one in documents}), {}
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    for name, system in SYSTEMS.items():
        if not (system.by_attention or args.lime):
            continue
        torch.manual_seed(args.seed)
        bert = AutoModel.from_pretrained(args.model)
        if system.bert:
            evolve(bert, system.bert, system.bert)
        model = Reader(bert, tokenizer, labels, system.attention, system.attention)
        train(model, documents, args.epochs, args.batch_size, args.lr)
        methods: dict[str, Callable[[Document], Sequence[float]]] = {}
        if system.by_attention:
            methods["attention"] = model.attention
        if system.by_lime and args.lime:
            methods["LIME"] = partial(model.lime, samples=args.lime)
        for method, explain in methods.items():
            row = f"{name}, {method}"
            results[row] = measure(model, tests, explain)
            print(row, *(f"{measured} {value:.3f}" for measured, value in results[row].items()), flush=True)
    if args.out:
        write(args.out, {"settings": vars(args), "results": results})


if __name__ == "__main__":
    main()
