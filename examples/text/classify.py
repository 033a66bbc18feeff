"""Classify sentences, or pairs of them, by the draft's models of text from nothing (its table 1), and by evolving ones.

    python -m examples.text.classify SST-2 --seeds 1 2 3
    python -m examples.text.classify DIR --glove glove.840B.300d.txt
    python -m examples.text.classify SNLI --glove glove.840B.300d.txt --epochs 30 --steps 10 --alpha 0.5

DIR has train.tsv and test.tsv without a header, in UTF-8: a class, a tab, a sentence, and for pairs a tab and another
sentence. SST-2 is GLUE's, with its development set as the test, from the hub where --data does not give it.
"""

import argparse
import itertools
import math
import re
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from ea_artifacts.command import Parser, UserError, positive, reporting, say
from ea_artifacts.files import read_lines
from evolving_attention.evolution import check
from examples.common import report
from examples.glue import tasks
from examples.text.model import BLOCKS, SYSTEMS, WIDTH, Classifier, systems

SIZE, BATCH, EPOCHS, RATE, LAST_RATE, DECAY = 300, 64, 10, 4e-4, 1e-6, 2e-6  # appendix B.2.1; SIZE is GloVe's
WIDTHS = (256, 384, 512, 768)  # appendix C.1
UNKNOWN = 1  # 0 is padding
SEPARATOR = "<sep>"  # which TOKEN never gives
TOKEN = re.compile(r"\w+|[^\w\s]")

Row = tuple[list[tuple[str, int]], str]  # words, each with its sentence's number, and the class


def make_row(sentences: list[str], label: str) -> Row:
    """A row in which a separator ends every sentence but the last, as in BERT."""
    split = ([*TOKEN.findall(sentence.lower()), SEPARATOR] for sentence in sentences)
    return [(word, number) for number, words in enumerate(split) for word in words][:-1], label


def sst2(data: Path | None) -> list[list[Row]]:
    """The rows of SST-2's training and development sets."""
    splits = tasks.load("SST-2", data).values()
    return [[make_row([row["sentence"]], str(row["label"])) for row in split] for split in splits]


def read(path: Path) -> list[Row]:
    """The rows of a file; an error names a faulty line."""
    rows = []
    for number, line in enumerate(read_lines(path), 1):
        label, *sentences = line.split("\t")
        if not any(map(str.strip, sentences)):
            raise UserError(f"{path}, line {number}: expected a class, a tab and a sentence, found {line!r}")
        rows.append(make_row(sentences, label))
    return rows


def glove(path: Path, words: list[str]) -> Tensor:
    """The words' vectors in a file of GloVe, V x SIZE; those that it lacks are random ones of such a size."""
    vectors, place = torch.randn(len(words), SIZE) * 0.4, {word: number for number, word in enumerate(words)}
    with path.open(encoding="utf-8") as file:
        for line in tqdm(file, "GloVe", disable=None):
            word, *numbers = line.rstrip().rsplit(" ", SIZE)
            if word in place:
                vectors[place[word]] = torch.tensor([float(number) for number in numbers])
    return vectors


class Batches:
    """Rows as tensors: words and their fields, B x T each, padded on the right, cut after ``longest``; classes, B."""

    def __init__(self, rows: list[Row], longest: int) -> None:
        known = dict.fromkeys(word for words, _ in rows for word, _ in words)
        self.words, self.classes = ["<pad>", "<unk>", *known], sorted({label for _, label in rows})
        self.place, self.longest = {word: number for number, word in enumerate(self.words)}, longest

    def __call__(self, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
        places = ([(self.place.get(w, UNKNOWN), field) for w, field in words[: self.longest]] for words, _ in rows)
        padded = nn.utils.rnn.pad_sequence(list(map(torch.tensor, places)), batch_first=True)  # B x T x 2
        return padded[..., 0], padded[..., 1], torch.tensor([self.classes.index(label) for _, label in rows])


def train(model: Classifier, rows: list[Row], batches: Batches, updates: int, step: int | None = None) -> None:
    """Train by Adam. The rate falls along a cosine, or to a tenth after every ``step`` updates."""
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), RATE, weight_decay=DECAY)
    schedule: torch.optim.lr_scheduler.LRScheduler
    if step:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step, 0.1)
    else:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates, LAST_RATE)
    loader = DataLoader(rows, BATCH, shuffle=True, collate_fn=batches)
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    for words, fields, classes in tqdm(itertools.islice(endless, updates), total=updates, disable=None):
        optimizer.zero_grad()
        F.cross_entropy(model(words, fields), classes).backward()
        optimizer.step()
        schedule.step()
    model.eval()


@torch.no_grad()
def accuracy(model: Classifier, rows: list[Row], batches: Batches) -> float:
    """Percent of the rows whose class has the highest score."""
    loader = DataLoader(rows, BATCH, collate_fn=batches)
    return 100 * sum(int((model(*words).argmax(1) == classes).sum()) for *words, classes in loader) / len(rows)


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("name", metavar="SST-2 | DIR", help="what to classify")
    add("--data", type=Path, metavar="DIR", help="SST-2's files (default: from the hub)")
    add("--systems", nargs="+", choices=SYSTEMS, default=list(SYSTEMS), metavar="NAME", help="(default: all)")
    add("--seeds", type=int, nargs="+", default=[1], metavar="N", help="(default: 1)")
    add("--glove", type=Path, metavar="FILE", help="fixed vectors of words (default: they are learnt)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=positive, default=EPOCHS, metavar="N", help=f"(default: {EPOCHS})")
    length.add_argument("--updates", type=positive, metavar="N", help="stop after so many")
    add("--steps", type=positive, metavar="N", help="rate / 10 every N epochs (default: a cosine)")
    add("--alpha", type=float, default=0.1, metavar="N", help="of Res, PA and EA (default: 0.1)")
    add("--conv-layers", type=positive, default=1, metavar="N", help="convolutions of PA (default: 1)")
    add("--blocks", type=positive, default=BLOCKS, metavar="N", help=f"(default: {BLOCKS})")
    add("--width", type=int, choices=WIDTHS, default=WIDTH, help=f"of a block (default: {WIDTH})")
    add("--max-length", type=positive, default=64, metavar="N", help="words of a row (default: 64)")
    add("--out", type=Path, metavar="FILE", help="keep the scores here, as JSON")
    args = parser.parse_args(words)
    try:
        check("predictive", 3, args.alpha, 0.0, args.conv_layers)
    except ValueError as error:
        parser.error(str(error))
    with reporting("classify"):
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Train and score each system with each seed."""
    if args.name == "SST-2":
        rows, test = sst2(args.data)
    elif not Path(args.name).is_dir():
        raise UserError(f"{args.name}: expected SST-2, or a folder with train.tsv and test.tsv")
    else:
        rows, test = (read(Path(args.name) / f"{split}.tsv") for split in ("train", "test"))
    batches = Batches(rows, args.max_length)
    if new := {label for _, label in test}.difference(batches.classes):
        raise UserError(f"test: has the classes {', '.join(sorted(new))}, which the training rows have not")
    vectors = glove(args.glove, batches.words) if args.glove else None
    epoch = math.ceil(len(rows) / BATCH)
    updates, step = args.updates or args.epochs * epoch, args.steps and args.steps * epoch
    fields = 1 + max(field for words, _ in rows for _, field in words)
    scores: dict[str, list[float]] = {name: [] for name in args.systems}
    sizes = {}
    for name, seed in itertools.product(args.systems, args.seeds):
        torch.manual_seed(seed)
        of_words = torch.randn(len(batches.words), SIZE) if vectors is None else vectors
        embedding = nn.Embedding.from_pretrained(of_words, freeze=vectors is not None, padding_idx=0)
        model = Classifier(
            systems(args.alpha, args.conv_layers)[name],
            embedding,
            classes=len(batches.classes),
            fields=fields,
            longest=args.max_length,
            blocks=args.blocks,
            width=args.width,
        )
        train(model, rows, batches, updates, step)
        scores[name].append(accuracy(model, test, batches))
        say(f"{name}, seed {seed}: {scores[name][-1]:.2f}")
        sizes[name] = sum(p.numel() for part, p in model.named_parameters() if not part.startswith("words."))
    report(scores, args.out, parameters=sizes, settings=vars(args))


if __name__ == "__main__":
    main()
