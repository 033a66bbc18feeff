"""Prepare one task of GLUE for fairseq's sentence_prediction.

Raw files are those of gluebenchmark.com: train.tsv and dev.tsv (MNLI: dev_matched.tsv and dev_mismatched.tsv), plain
or .gz, in DIR or in DIR/TASK. The finished folder holds

    input0/, input1/   the sentences: dict.txt, train and valid (MNLI: and valid1) as binary data
    label/             the labels in the same way, or as text where they are numbers (STS-B, divided by 5)
    raw/               the sentences of valid, as they were
    PREP.json          what was done; written last

A folder that was made from the same files with the same options is not made again; one made from others is replaced.

Subwords: with --gpt2 DIR those of GPT-2, which public RoBERTa models know (DIR holds encoder.json, vocab.bpe and the
model's dict.txt), else pieces of SentencePiece, learnt on the task's own training sentences.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from . import binary, download
from .command_line import Parser
from .corpus import CODES
from .digest import sha256
from .subwords import Apply, learn_sentencepiece
from .system import explained
from .text import PrepError, checked_lines, open_bytes, reading, refuse_undecodable_names

DATA = Path(__file__).resolve().parents[2] / "data"
URL = "https://dl.fbaipublicfiles.com/glue/data/"
GPT2_FILES = ("encoder.json", "vocab.bpe", "dict.txt")


@dataclass(frozen=True)
class Task:
    """Where a task's files have what. Columns are names in the header, or numbers where a file has none."""

    sentences: tuple[str | int, ...]
    label: str | int
    labels: tuple[str, ...] | None  # in the order of their classes; None: numbers, from 0 to 5
    dev: tuple[str, ...] = ("dev",)
    archive: str | None = None  # below URL
    drops_short_rows: bool = False  # some rows of the published file lack columns


ENTAILS = ("entailment", "not_entailment")
TASKS = {
    "CoLA": Task((3,), 1, ("0", "1"), archive="CoLA.zip"),
    "SST-2": Task(("sentence",), "label", ("0", "1"), archive="SST-2.zip"),
    "MRPC": Task(("#1 String", "#2 String"), "Quality", ("0", "1")),
    "STS-B": Task(("sentence1", "sentence2"), "score", None, archive="STS-B.zip"),
    "QQP": Task(
        ("question1", "question2"), "is_duplicate", ("0", "1"), archive="QQP-clean.zip", drops_short_rows=True
    ),
    "MNLI": Task(
        ("sentence1", "sentence2"), "gold_label", ("contradiction", "neutral", "entailment"),
        dev=("dev_matched", "dev_mismatched"), archive="MNLI.zip",
    ),
    "QNLI": Task(("question", "sentence"), "label", ENTAILS, archive="QNLIv2.zip"),
    "RTE": Task(("sentence1", "sentence2"), "label", ENTAILS, archive="RTE.zip"),
}  # fmt: skip


@dataclass
class Split:
    """The rows of one file: a list of sentences for each column, and the labels as text."""

    sentences: list[list[str]]
    labels: list[str]
    dropped: int = 0


def read_split(path: Path, task: Task) -> Split:
    """The rows of a .tsv file. Quotation marks mean nothing in it.

    Raises:
        PrepError: a row without its columns, an empty sentence, or a label that the task does not have.
    """
    with reading(path), open_bytes(path) as file:
        lines = [line.decode()[:-1] for line in checked_lines(file, str(path))]
    start, places = _columns(path, lines, task)
    split = Split([[] for _ in task.sentences], [])
    for number, line in enumerate(lines[start:], start + 1):
        fields = line.split("\t")
        if len(fields) <= max(places):
            if task.drops_short_rows:
                split.dropped += 1
                continue
            raise PrepError(f"{path}, line {number}: has {len(fields)} columns, and {max(places) + 1} are needed")
        *sentences, label = (fields[place].strip() for place in places)
        if not all(sentences):
            raise PrepError(f"{path}, line {number}: has an empty sentence")
        split.labels.append(_label(label, task, f"{path}, line {number}"))
        for column, sentence in zip(split.sentences, sentences, strict=True):
            column.append(sentence)
    if not split.labels:
        raise PrepError(f"{path}: has no rows")
    return split


def _columns(path: Path, lines: list[str], task: Task) -> tuple[int, list[int]]:
    """How many lines the header takes, and where the sentences and the label stand."""
    names = [*task.sentences, task.label]
    if all(isinstance(name, int) for name in names):
        return 0, names
    header = lines[0].split("\t") if lines else []
    missing = [name for name in names if name not in header]
    if missing:
        raise PrepError(f"{path}, line 1: the header has no column {', '.join(missing)}; is it a file of this task?")
    return 1, [header.index(name) for name in names]


def _label(text: str, task: Task, where: str) -> str:
    if task.labels is not None:
        if text not in task.labels:
            raise PrepError(f"{where}: the label is {text!r}, and must be one of {', '.join(task.labels)}")
        return text
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 5:
        raise PrepError(f"{where}: the label is {text!r}, and must be a number from 0 to 5")
    return repr(value / 5)


def find(raw: Path, name: str, split: str) -> Path:
    """The file of a split below the raw folder."""
    there = [raw / folder / f"{split}.tsv{end}" for folder in (name, ".") for end in ("", ".gz")]
    for path in there:
        if path.is_file():
            return path
    raise PrepError(f"{raw}: has no {split}.tsv and no {split}.tsv.gz, there or in {name}/")


def downloaded(name: str) -> Path:
    """The folder with a task's files, downloaded and unpacked before where that was done."""
    archive = TASKS[name].archive
    if archive is None:
        raise PrepError(f"{name}: its files are not in one place; make train.tsv and dev.tsv, and say --raw DIR")
    folder = DATA / "downloads" / "glue"
    path = folder / archive
    if not path.exists():
        download.fetch(URL + archive, path)
    try:
        with zipfile.ZipFile(path) as contents:
            for member in contents.namelist():
                if member.endswith(".tsv") and not (folder / name / Path(member).name).exists():
                    target = folder / name / Path(member).name
                    target.parent.mkdir(exist_ok=True)
                    part = target.with_name(target.name + ".part")
                    part.write_bytes(contents.read(member))
                    part.rename(target)
    except zipfile.BadZipFile as error:
        raise PrepError(f"{path}: truncated or damaged ({error}); delete it, and it is fetched again") from error
    return folder / name


Encode = Callable[[str], str]


def own_pieces(texts: Iterable[str], pieces: int, folder: Path) -> Encode:
    """Learn SentencePiece on these sentences and keep its model in the folder."""
    text = folder / "train.txt"
    text.write_text("".join(f"{line}\n" for line in texts), encoding="utf-8")
    learn_sentencepiece([text], pieces, folder, "--pieces")
    text.unlink()
    apply = Apply(folder / CODES["sentencepiece"], (None,))
    return lambda sentence: apply(([f"{sentence}\n".encode()],))[0][0].decode().strip()


def gpt2_files(given: Path) -> dict[str, Path]:
    """The files of GPT-2's subwords by name.

    Raises:
        PrepError: one of them is not there.
    """
    missing = [name for name in GPT2_FILES if not (given / name).is_file()]
    if missing:
        raise PrepError(f"--gpt2 {given}: has no {', '.join(missing)}; wanted are {', '.join(GPT2_FILES)}")
    return {name: given / name for name in GPT2_FILES}


def gpt2(given: Path, folder: Path) -> Encode:
    """GPT-2's subwords as fairseq's encoder makes them; its files go into the folder too."""
    for name in GPT2_FILES[:2]:
        shutil.copyfile(given / name, folder / name)
    from fairseq.data.encoders.gpt2_bpe_utils import get_encoder

    try:
        encoder = get_encoder(folder / "encoder.json", folder / "vocab.bpe")
    except (ValueError, IndexError, AttributeError) as error:
        raise PrepError(f"--gpt2 {given}: encoder.json or vocab.bpe is not GPT-2's ({error})") from error
    return lambda sentence: " ".join(map(str, encoder.encode(sentence)))


def given_words(path: Path) -> list[tuple[str, int]]:
    """A dictionary as fairseq writes it."""
    words = []
    with open_bytes(path) as file:
        for number, line in enumerate(checked_lines(file, str(path)), 1):
            word, _, count = line.decode().rstrip("\n").rpartition(" ")
            if not word or not count.isdecimal():
                raise PrepError(f'{path}, line {number}: not "subword count", as a line of a dictionary is')
            words.append((word, int(count)))
    return words


def write_column(folder: Path, lines: dict[str, list[str]], words: list[tuple[str, int]]) -> int:
    """Write one column of all splits as fairseq's binary data; how many subwords the dictionary does not know."""
    folder.mkdir()
    dictionary = "".join(f"{word} {count}\n" for word, count in words)
    (folder / "dict.txt").write_text(dictionary, encoding="utf-8")
    encode, unknown = binary.Encode(word for word, _ in words), 0
    for split, texts in lines.items():
        ((numbers, lengths, missing),) = encode(([text.encode() for text in texts],))
        unknown += missing
        (folder / f"{split}.bin").write_bytes(numbers)
        (folder / "lengths").write_bytes(lengths)
        binary.write_index(folder / f"{split}.idx", folder / "lengths", encode.type)
    (folder / "lengths").unlink()
    return unknown


def made_before(out: Path) -> dict:
    """PREP.json of a folder that this command made; empty where there is nothing yet.

    Raises:
        PrepError: there is something else.
    """
    try:
        prep = json.loads((out / "PREP.json").read_text(encoding="utf-8"))
        if prep["task"] in TASKS:
            return prep
    except (FileNotFoundError, NotADirectoryError, ValueError, TypeError, KeyError):
        pass
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise PrepError(f"{out}: exists and was not made here; move it away or choose another --out")
    return {}


def _digests(paths: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    return {name: {"file": path.name, "sha256": sha256(path)} for name, path in paths.items()}


def prepare(name: str, raw: Path, out: Path, pieces: int, gpt2_folder: Path | None) -> bool:
    """Fill the folder `out`, which gets its name only when it is complete; False where it was made before."""
    task, before = TASKS[name], made_before(out)
    if raw.is_relative_to(out):
        raise PrepError(f"--out {out}: holds the files of --raw {raw}; choose another")
    files = {"train": "train", **{"valid" + (str(i) if i else ""): dev for i, dev in enumerate(task.dev)}}
    paths = {split: find(raw, name, file) for split, file in files.items()}
    options = {
        "task": name,
        "bpe": "gpt2" if gpt2_folder else "sentencepiece",
        "subwords": _digests(gpt2_files(gpt2_folder)) if gpt2_folder else {"pieces": pieces},
        "files": _digests(paths),
    }
    if options.items() <= before.items():
        return False
    splits = {split: read_split(path, task) for split, path in paths.items()}
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as temporary:
        folder = Path(temporary) / "data"
        folder.mkdir()
        sentences = (text for column in splits["train"].sentences for text in column)
        encode = gpt2(gpt2_folder, folder) if gpt2_folder else own_pieces(sentences, pieces, folder)
        unknown = _write(folder, task, splits, encode, gpt2_folder)
        record = options | {
            "labels": task.labels,
            "sentences": len(task.sentences),
            "splits": {split: {"rows": len(part.labels), "dropped": part.dropped} for split, part in splits.items()},
            "unknown_subwords": unknown,
        }
        (folder / "PREP.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(folder.with_name("replaced"))
        folder.rename(out)
    return True


def _write(folder: Path, task: Task, splits: dict[str, Split], encode: Encode, gpt2_folder: Path | None) -> int:
    """Write sentences and labels of all splits; how many subwords are unknown."""
    columns = [
        {split: [encode(text) for text in part.sentences[i]] for split, part in splits.items()}
        for i in range(len(task.sentences))
    ]
    if gpt2_folder:
        words = given_words(gpt2_folder / "dict.txt")
    else:
        words = binary.dictionary(
            Counter(word for column in columns for line in column["train"] for word in line.split())
        )
    unknown = sum(write_column(folder / f"input{i}", lines, words) for i, lines in enumerate(columns))
    for split, part in splits.items():
        if split != "train":
            for i, texts in enumerate(part.sentences):
                _lines(folder / "raw" / f"{split}.input{i}", texts)
    if task.labels is None:
        for split, part in splits.items():
            _lines(folder / "label" / f"{split}.label", part.labels)
    else:
        counts = Counter(splits["train"].labels)
        labels = {split: part.labels for split, part in splits.items()}
        write_column(folder / "label", labels, [(label, counts[label]) for label in task.labels])
    return unknown


def _lines(path: Path, lines: list[str]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def number_of_pieces(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


def main() -> None:
    parser = Parser(prog="glue.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    parser.add_argument("--raw", type=Path, metavar="DIR", help="folder with the files (default: they are downloaded)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="the finished folder (default: data/glue/TASK)")
    parser.add_argument("--gpt2", type=Path, metavar="DIR", help="encoder.json, vocab.bpe and dict.txt of a model")
    parser.add_argument("--pieces", type=number_of_pieces, default=4000, metavar="N",
                        help="of SentencePiece, without --gpt2 (default: 4000)")  # fmt: skip
    args = parser.parse_args()
    out = (args.out or DATA / "glue" / args.task).resolve()
    try:
        refuse_undecodable_names([*sys.argv[1:], str(out)])
        made_before(out)  # refuses somebody else's folder before anything is downloaded
        raw = args.raw.resolve() if args.raw else downloaded(args.task)
        if not prepare(args.task, raw, out, args.pieces, args.gpt2):
            print("nothing to do: made before, with the same options from the same files", file=sys.stderr)
    except PrepError as error:
        sys.exit(f"glue.sh: {error}")
    except OSError as error:
        sys.exit(f"glue.sh: {explained(error)}")
    except KeyboardInterrupt:
        print("\nglue.sh: interrupted; run it again", file=sys.stderr)
        sys.exit(130)
    print(f"{out}: ready")


if __name__ == "__main__":
    main()
