"""Classify sentences, or pairs of them, by the draft's models of text from nothing (its table 1), and by evolving ones.

    python -m examples.text.classify SST-2 --seeds 1 2 3
    python -m examples.text.classify DIR --glove glove.840B.300d.txt
    python -m examples.text.classify SNLI --glove glove.840B.300d.txt --epochs 30 --steps 10 --alpha 0.5

DIR has train.tsv and test.tsv without a header, in UTF-8: a class, a tab, a sentence, and for pairs a tab and another
sentence. SST-2 is GLUE's, with its development set as the test, from the hub where --data does not give it.
"""

import argparse
import math
import re
import sys
from collections import Counter
from itertools import chain, islice, repeat
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from evolving_attention.evolution import check
from examples.glue import tasks
from examples.report import positive, report
from examples.text.model import BLOCKS, SYSTEMS, WIDTH, Classifier, systems

SIZE, BATCH, EPOCHS, RATE, LAST_RATE, DECAY = 300, 64, 10, 4e-4, 1e-6, 2e-6  # appendix B.2.1; SIZE is GloVe's
WIDTHS = (256, 384, 512, 768)  # appendix C.1
UNKNOWN = 1  # 0 is padding
SEPARATOR = "<sep>"  # which TOKEN never gives
TOKEN = re.compile(r"\w+|[^\w\s]")

Row = tuple[list[list[str]], str]  # words of each sentence, class


def sst2(data: Path | None) -> list[list[Row]]:
    """The rows of SST-2's training and development sets."""
    return [
        [([TOKEN.findall(row["sentence"].lower())], str(row["label"])) for row in split]
        for split in tasks.load("SST-2", data).values()
    ]


def read(name: str, split: str) -> list[Row]:
    """The rows of a folder's file.

    Raises:
        tasks.DataError: a file or a line that is none.
    """
    path, rows = Path(name) / f"{split}.tsv", []
    if not path.is_file():
        raise tasks.DataError(f"{path}: no such file; expected SST-2, or a folder with train.tsv and test.tsv")
    with path.open(encoding="utf-8") as file:  # str.splitlines would also split at a review's U+0085 and U+2028
        for number, line in enumerate(file, 1):
            label, *sentences = line.rstrip("\n").split("\t")
            if not any(map(str.strip, sentences)):
                raise tasks.DataError(f"{path}, line {number}: expected a class, a tab and a sentence, found {line!r}")
            rows.append(([TOKEN.findall(sentence.lower()) for sentence in sentences], label))
    return rows


def join(sentences: list[list[str]]) -> list[tuple[str, int]]:
    """Words, each with its sentence's number; a separator ends every sentence but the last, as in BERT."""
    last = len(sentences) - 1
    ended = (words if number == last else [*words, SEPARATOR] for number, words in enumerate(sentences))
    return [(word, number) for number, words in enumerate(ended) for word in words]


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
        known = Counter(word for row, _ in rows for word, _ in join(row))
        self.words, self.classes = ["<pad>", "<unk>", *known], sorted({label for _, label in rows})
        self.place, self.longest = {word: number for number, word in enumerate(self.words)}, longest

    def __call__(self, rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
        places = ([(self.place.get(w, UNKNOWN), field) for w, field in join(row)[: self.longest]] for row, _ in rows)
        padded = nn.utils.rnn.pad_sequence(list(map(torch.tensor, places)), batch_first=True)  # B x T x 2
        return padded[..., 0], padded[..., 1], torch.tensor([self.classes.index(label) for _, label in rows])


def train(model: Classifier, rows: list[Row], batches: Batches, updates: int, step: int | None = None) -> Classifier:
    """The model after Adam. The rate falls along a cosine, or to a tenth after every ``step`` updates."""
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), RATE, weight_decay=DECAY)
    schedule: torch.optim.lr_scheduler.LRScheduler
    if step:
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step, 0.1)
    else:
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, updates, LAST_RATE)
    loader = DataLoader(rows, BATCH, shuffle=True, collate_fn=batches)
    for words, fields, classes in tqdm(
        islice(chain.from_iterable(repeat(loader)), updates), total=updates, disable=None
    ):
        optimizer.zero_grad()
        F.cross_entropy(model(words, fields), classes).backward()
        optimizer.step()
        schedule.step()
    return model.eval()


@torch.no_grad()
def accuracy(model: Classifier, rows: list[Row], batches: Batches) -> float:
    """Percent of the rows whose class has the highest score."""
    loader = DataLoader(rows, BATCH, collate_fn=batches)
    return 100 * sum(int((model(*words).argmax(1) == classes).sum()) for *words, classes in loader) / len(rows)


def main(words: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
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
        if args.name == "SST-2":
            rows, test = sst2(args.data)
        else:
            rows, test = read(args.name, "train"), read(args.name, "test")
        batches = Batches(rows, args.max_length)
        if new := {label for _, label in test}.difference(batches.classes):
            raise tasks.DataError(f"test: has the classes {', '.join(sorted(new))}, which the training rows have not")
        vectors = glove(args.glove, batches.words) if args.glove else None
    except (tasks.DataError, OSError, ValueError) as error:
        sys.exit(f"classify: {error}")
    epoch = math.ceil(len(rows) / BATCH)
    updates, step = args.updates or args.epochs * epoch, args.steps and args.steps * epoch
    scores, sizes, chosen = {}, {}, systems(args.alpha, args.conv_layers)
    for name in args.systems:
        scores[name] = []
        for seed in args.seeds:
            torch.manual_seed(seed)
            of_words = torch.randn(len(batches.words), SIZE) if vectors is None else vectors.clone()
            shape = (len(batches.classes), len(rows[0][0]), args.max_length)
            size = {"blocks": args.blocks, "width": args.width}
            model = Classifier(chosen[name], of_words, vectors is not None, *shape, **size)
            scores[name].append(accuracy(train(model, rows, batches, updates, step), test, batches))
            print(f"{name}, seed {seed}: {scores[name][-1]:.2f}", file=sys.stderr, flush=True)
        sizes[name] = sum(p.numel() for part, p in model.named_parameters() if not part.startswith("words."))
    report(scores, args.out, parameters=sizes, settings=vars(args))


if __name__ == "__main__":
    main()
