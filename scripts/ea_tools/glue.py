"""Fine-tune on a task of GLUE, pick on its development set, and report GLUE's metric over seeds.

Without options for them, epochs, batch size, learning rate, alpha and beta are what the papers chose for the task with
RoBERTa-Large; several values of one are a search, and --search is the papers' whole space. Each setting is trained with
each seed, keeping the epoch that is best on the development set; the setting with the best mean wins. Run the same
command again and it goes on. Any flag of fairseq-train may follow: --encoder-layers 3 --fp16

--table writes results/glue.md from what results/glue/ holds, the papers' numbers beside it, and trains nothing.
"""

import argparse
import itertools
import math
import shlex
import signal
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ea_data.command_line import Parser
from ea_data.digest import digest_of, sha256
from ea_tools import checkpoints
from ea_tools.common import REPO, UserError, positive, read_json, replacing, reporting, write_json
from ea_tools.glue_report import markdown, read_results
from ea_tools.glue_scores import METRICS, predict
from ea_tools.training import flag_faults, recipes, run_folder
from ea_tools.training.provenance import provenance

TABLE = recipes.FOLDER / "tables" / "glue.toml"

#: what fairseq's criterion must be told to compute during training, and what decides which epoch is best
BEST = {
    "matthews": {"report-mcc": True, "best-checkpoint-metric": "mcc"},
    "accuracy": {"best-checkpoint-metric": "accuracy"},
    "f1": {"report-acc-and-f1": True, "best-checkpoint-metric": "acc_and_f1"},
    "pearson": {"report-pearson-and-spearman": True, "best-checkpoint-metric": "pearson_and_spearman"},
}

#: of RoBERTa's own fine-tuning (Liu et al. 2019), where the papers say nothing; the last three are the papers'
FLAGS = {
    "adam-betas": "(0.9, 0.98)",
    "weight-decay": 0.1,
    "lr-scheduler": "polynomial_decay",
    "optimizer": "adam",
    "adam-eps": 1e-8,
    "dropout": 0.1,
}
WARMUP = 0.06  # of all updates; as RoBERTa's


@dataclass(frozen=True)
class Setting:
    """What the papers search on the development set. alpha and beta are None for a model that has none."""

    epochs: int
    batch_size: int
    lr: float
    alpha: float | None
    beta: float | None

    def __str__(self) -> str:
        """As the name of a folder."""
        shares = "" if self.alpha is None else f"-alpha{self.alpha:g}-beta{self.beta:g}"
        return f"epochs{self.epochs}-batch{self.batch_size}-lr{self.lr:g}{shares}"


def read_table() -> dict:
    """recipes/tables/glue.toml."""
    return recipes.read_toml(TABLE)


def main(arguments: list[str] | None = None) -> None:
    """Command line: train and score what is missing, pick, write the result and the table."""
    with reporting("glue"):
        args, flags = parse(sys.argv[1:] if arguments is None else arguments)
        if not args.table:
            run(args, flags)
        text = markdown(read_table(), read_results(args.results / "glue"))
        with replacing(args.results / "glue.md") as temporary:
            temporary.write_text(text, encoding="utf-8")
        print(text)


def parse(arguments: list[str]) -> tuple[argparse.Namespace, dict]:
    """Our own options, and flags for fairseq-train."""
    tasks = read_table()["tasks"]
    parser = Parser(
        prog="glue.sh",
        usage="glue.sh TASK ARCH [options] [fairseq-train flags]\n       glue.sh --table",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("task", nargs="?", choices=tasks, metavar="TASK", help=", ".join(tasks))
    parser.add_argument("arch", nargs="?", metavar="ARCH", help="ea_roberta_base, ea_roberta_large, roberta_base, ...")
    parser.add_argument("--checkpoint", type=Path, metavar="FILE", help="start from this model.pt (default: scratch)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data (default: data/glue/TASK)")
    parser.add_argument("--name", metavar="NAME", help="of the runs and of the result (default: ARCH)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="(default: 1)")
    parser.add_argument("--epochs", type=positive, nargs="+", metavar="N")
    parser.add_argument("--batch-size", type=positive, nargs="+", metavar="N")
    parser.add_argument("--lr", type=float, nargs="+", metavar="LR")
    parser.add_argument("--alpha", type=float, nargs="+", metavar="A", help="of architectures that begin with ea_")
    parser.add_argument("--beta", type=float, nargs="+", metavar="B", help="of architectures that begin with ea_")
    parser.add_argument("--search", action="store_true", help="the papers' whole space, where nothing is said")
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "glue", metavar="DIR", help="where runs go")
    parser.add_argument("--results", type=Path, default=REPO / "results", metavar="DIR", help="where results go")
    parser.add_argument("--table", action="store_true", help="only write the table from the results that there are")
    parser.add_argument("--dry-run", action="store_true", help="print the training commands and run nothing")
    args, rest = parser.parse_known_args(arguments)
    if not args.table and None in (args.task, args.arch):
        parser.error("TASK and ARCH are wanted")
    try:
        flags = recipes.parse_flags(rest)
    except UserError as error:
        parser.error(str(error))
    for name in ("save-dir", "restore-file", "finetune-from-model", "max-epoch", "seed", "ea-alpha", "ea-beta"):
        if name in flags:
            parser.error(f"--{name} is not to be given here, see --help")
    args.name = args.name or args.arch
    args.command = shlex.join(["scripts/glue.sh", *arguments])
    return args, flags


def settings(args: argparse.Namespace, table: dict) -> list[Setting]:
    """All that are to be trained: what the command line says, else the papers' choice or space."""
    chosen = table["tasks"][args.task]["settings"]

    def values(name: str) -> list:
        given = getattr(args, name.replace("-", "_"))
        return given or (table["search"][name] if args.search else [chosen[name]])

    shares = [values("alpha"), values("beta")] if args.arch.startswith("ea_") else [[None], [None]]
    if not args.arch.startswith("ea_") and (args.alpha or args.beta):
        raise UserError(f"--alpha and --beta are for architectures that begin with ea_, and not for {args.arch}")
    return [Setting(*each) for each in itertools.product(values("epochs"), values("batch-size"), values("lr"), *shares)]


# --- training ---------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, flags: dict) -> None:
    """Train and score every setting with every seed, and write results/glue/TASK-NAME.json."""
    table = read_table()
    wanted = settings(args, table)
    data = args.data or REPO / "data" / "glue" / args.task
    prep = read_prep(data, args.task)
    if args.checkpoint:
        check_checkpoint(args.checkpoint, data)
    began_with = sha256(args.checkpoint)[:16] if args.checkpoint else None
    metrics = table["tasks"][args.task]["metrics"]
    scores: dict[Setting, dict[int, dict]] = {}
    starts: list[dict] = []
    for setting, seed in itertools.product(wanted, args.seeds):
        folder = args.runs / args.task / args.name / f"{setting}-seed{seed}"
        command = training_command(args, flags, setting, seed, folder, data, prep, metrics)
        flag_faults.check(args.arch, command[4:], bool(flags))
        if args.dry_run:
            print(shlex.join(command))
            continue
        made = trained_and_scored(folder, command, data, prep, metrics, began_with)
        scores.setdefault(setting, {})[seed] = made["scores"]
        starts += made.get("starts", [{"commit": None}])  # a record of before this was written down
    if args.dry_run:
        raise SystemExit(0)
    result = {
        "task": args.task,
        "name": args.name,
        "arch": args.arch,
        "checkpoint": args.checkpoint.name if args.checkpoint else None,
        "flags": recipes.spell_flags(flags),
        **pick(scores, metrics),
        "command": args.command.replace(f"{REPO}/", ""),
        "data": fingerprint(data),
        "began_with": began_with,
        "trained_at": list(dict.fromkeys(start["commit"] for start in starts)),
        **provenance(on_cpu="cpu" in flags),
    }
    write_json(args.results / "glue" / f"{args.task}-{args.name}.json", result)


def read_prep(data: Path, task: str) -> dict:
    """DATA/PREP.json, which data-prep/glue.sh writes last."""
    path = data / "PREP.json"
    try:
        prep = read_json(path)
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; make {data} with data-prep/glue.sh {task}") from None
    if prep.get("task") != task:
        raise UserError(f"{data}: holds {prep.get('task', 'no task of GLUE')}, and not {task}")
    return prep


def fingerprint(data: Path) -> str:
    """A digest of what is trained and scored on: dictionaries, sentences and labels, as numbers."""
    return digest_of(data, sorted([*data.glob("input*/*"), *data.glob("label/*")]))[:16]


def check_checkpoint(path: Path, data: Path) -> None:
    """Refuse a checkpoint whose embeddings are not those of the data's dictionary.

    fairseq would find no file at --restore-file and train from nothing without a word.
    """
    weights = checkpoints.load(path)["model"]
    embeddings = [value for name, value in weights.items() if name.endswith("embed_tokens.weight")]
    words = data / "input0" / "dict.txt"
    here = len(words.read_text(encoding="utf-8").splitlines()) + 5  # <s>, <pad>, </s>, <unk> and <mask>
    if not embeddings:
        raise UserError(f"{path}: has no embeddings; is it a RoBERTa or a BART?")
    if len(embeddings[0]) != here:
        raise UserError(
            f"{path}: was trained with {len(embeddings[0]):,} subwords, and {words} makes {here:,} with fairseq's own "
            "five; prepare the data with the model's own: data-prep/glue.sh --gpt2 DIR"
        )
    beside = path.with_name("dict.txt")
    if beside.is_file() and beside.read_bytes() != words.read_bytes():
        raise UserError(f"{words}: is not the dictionary beside the checkpoint, {beside}; prepare the data with that")


def training_command(
    args: argparse.Namespace,
    flags: dict,
    setting: Setting,
    seed: int,
    folder: Path,
    data: Path,
    prep: dict,
    metrics: list[str],
) -> list[str]:
    """The words of one training run."""
    import torch

    batches = math.ceil(prep["splits"]["train"]["rows"] / setting.batch_size)
    updates = setting.epochs * math.ceil(batches / _whole(flags, "update-freq", 1))
    updates = min(updates, _whole(flags, "max-update", updates))
    numbers = prep["labels"] is None
    chosen: dict[str, Any] = {
        "task": "sentence_prediction",
        "criterion": "sentence_prediction",
        "arch": args.arch,
        "num-classes": 1 if numbers else len(prep["labels"]),
        "regression-target": numbers,
        "init-token": 0,
        "separator-token": 2,
        "add-prev-output-tokens": "bart" in args.arch,
        "shorten-method": "truncate",
        "batch-size": setting.batch_size,
        "required-batch-size-multiple": 1,
        "max-epoch": setting.epochs,
        "lr": setting.lr,
        "total-num-update": updates,
        "warmup-updates": max(1, round(WARMUP * updates)),
        **FLAGS,
        **BEST[metrics[0]],
        "maximize-best-checkpoint-metric": True,
        "no-epoch-checkpoints": True,
        "distributed-world-size": 1,
        "cpu": not torch.cuda.is_available(),
        "seed": seed,
        "log-format": "simple",
        "log-interval": 100,
        "save-dir": folder,
    }
    if setting.alpha is not None:
        chosen |= {"ea-alpha": setting.alpha, "ea-beta": setting.beta}
    if args.checkpoint:
        chosen["finetune-from-model"] = args.checkpoint
    train = REPO / "scripts" / "ea_tools" / "training" / "fairseq_train.py"
    words = recipes.spell_flags(chosen | flags)
    return [sys.executable, "-u", "-P", str(train), str(data), "--user-dir", str(REPO / "ea_fairseq"), *words]


def _whole(flags: dict, name: str, default: int) -> int:
    """What a flag says; 0 and less is the default."""
    value = " ".join(flags.get(name, [])) or "0"
    if not value.lstrip("-").isdecimal():
        raise UserError(f"--{name} {value}: a whole number is wanted")
    return int(value) if int(value) > 0 else default


def run_to_the_end(command: list[str]) -> int:
    """The status of a command, which ends where this process is told to: it would train on, and hold no lock."""

    def end(signum: int, _: FrameType | None) -> None:
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        with subprocess.Popen(command) as process:
            try:
                return process.wait()
            except BaseException:
                process.terminate()
                raise
    finally:
        signal.signal(signal.SIGTERM, before)


def trained_and_scored(
    folder: Path, command: list[str], data: Path, prep: dict, metrics: list[str], began_with: str | None = None
) -> dict:
    """One run's record, from folder/glue.json or made now: its command and data, every start, its scores.

    It is written before the training too, so that one that goes on does so on the same data. `began_with` is the digest
    of the checkpoint that training begins with.
    """
    path, found = folder / "glue.json", fingerprint(data)
    new = {"command": command, "data": found, "began_with": began_with, "starts": []}
    record = read_json(path) if path.exists() else new
    if record["command"] != command:
        raise UserError(f"{folder}: was made by another command; delete it, or choose another --name")
    if record.get("data", found) != found:  # older records have none
        raise UserError(
            f"{folder}: was trained on other data (digest {record['data']}) than {data} holds now ({found}), and their "
            "scores must not be mixed; move it away to train it again, or choose another --name"
        )
    if record.get("began_with", began_with) != began_with:
        raise UserError(
            f"{folder}: began with another model than the checkpoint holds now (digest {record['began_with']}, now "
            f"{began_with}), and their scores must not be mixed; move it away, or choose another --name"
        )
    if "scores" in record:
        return record
    run_folder.take(folder, path.name)  # the same command may be at work on it
    record["starts"].append(provenance(on_cpu="--cpu" in command))
    write_json(path, record)
    print("+ " + shlex.join(command), file=sys.stderr, flush=True)
    if run_to_the_end(command):
        raise UserError(f"{folder}: training failed, see above; the same command goes on")
    best = folder / "checkpoint_best.pt"
    record["scores"] = {}
    for split in prep["splits"]:
        if split != "train":
            predicted, expected = predict(best, data, split)
            record["scores"][split] = {name: 100 * METRICS[name](expected, predicted) for name in metrics}
    write_json(path, record)
    return record


def pick(scores: dict[Setting, dict[int, dict]], metrics: list[str]) -> dict:
    """The setting with the best mean over seeds, metrics and splits, and what it and all others reached."""

    def mean(setting: Setting) -> float:
        return statistics.mean(
            value for splits in scores[setting].values() for named in splits.values() for value in named.values()
        )

    best = max(scores, key=mean)
    summary = {}
    for split, name in itertools.product(next(iter(scores[best].values())), metrics):
        values = [splits[split][name] for splits in scores[best].values()]
        deviation = statistics.stdev(values) if len(values) > 1 else None
        summary[f"{split}/{name}"] = {"mean": statistics.mean(values), "deviation": deviation, "seeds": len(values)}
    return {
        "setting": asdict(best),
        "scores": summary,
        "all": [{"setting": asdict(setting), "scores": seeds} for setting, seeds in scores.items()],
    }


if __name__ == "__main__":
    main()
