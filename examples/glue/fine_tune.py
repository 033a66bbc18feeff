"""Fine-tune an encoder of Hugging Face on a task of GLUE, with and without evolving attention, by the papers' settings.

    python -m examples.glue.fine_tune CoLA --model bert-base-uncased --settings BERT-Base --seeds 1 2 3

Both models have the same seeds, batches and updates. The score is that of the development set after the last epoch.
--settings PA gives Predictive Attention, --rule realformer RealFormer. --alpha 0, --beta 0 and --kernel-size are the
papers' ablations.
With --from-scratch the model is a BERT of 3 layers, 256 wide, whose WordPieces come from the training sentences.
"""

import argparse
import contextlib
import json
import statistics
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
from datasets import Dataset
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertTokenizerFast,
    DataCollatorWithPadding,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
    set_seed,
)

from evolving_attention.evolution import RULES
from evolving_attention.huggingface import SETTINGS, evolve
from examples.glue.tasks import TASKS, DataError, load, score
from examples.report import positive, write

PAPERS = tomllib.loads((Path(__file__).parent / "papers.toml").read_text())


def main(words: list[str] | None = None) -> None:
    """The command."""
    args = _arguments(words)
    try:
        data = load(args.task, args.data)
        tokenizer = small_tokenizer(args.task, data) if args.from_scratch else AutoTokenizer.from_pretrained(args.model)
        tokenizer.model_max_length = args.max_length
        refuse(args, tokenizer)
        rows = {split: encode(part, args.task, tokenizer) for split, part in data.items()}
        print(f"| model | {'/'.join(TASKS[args.task].metrics)}, mean | standard deviation | each seed |")
        print("|---|---|---|---|")
        for evolving in (False, True):
            # One list for each seed: all metrics of all development sets.
            results = [run(args, evolving, seed, tokenizer, rows) for seed in args.seeds]
            print(_row(args, evolving, results), flush=True)
            if args.out:
                record = {"settings": vars(args), "evolving": evolving, "results": results}
                write(args.out / f"{args.task}-{_kind(evolving)}.json", record)
    except (DataError, OSError) as error:
        print(f"fine_tune: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(1)


def refuse(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    """Report mistakes before the first training.

    Raises:
        DataError: the model cannot evolve so, several GPUs are there, or ``--out`` has models of other settings, which
            a mean would mix up.
    """
    try:
        build(args, tokenizer, evolving=True)
    except ValueError as error:
        raise DataError(str(error)) from None
    if torch.cuda.device_count() > 1:  # Trainer would share each batch among them, and make it as many times larger
        raise DataError("one GPU is used, and this machine shows several; choose one: CUDA_VISIBLE_DEVICES=0")
    if not args.out:
        return
    settings = json.loads(json.dumps(vars(args), default=str))
    for path in sorted(args.out.glob(f"{args.task}-*.json")):
        before = json.loads(path.read_text())["settings"]
        if differ := [name for name in settings if name not in ("data", "out") and settings[name] != before.get(name)]:
            raise DataError(f"--out {args.out}: {path.name} has other {', '.join(differ)}; choose another folder")


def run(
    args: argparse.Namespace,
    evolving: bool,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    rows: dict[str, Dataset],
) -> list[float]:
    """Train one model and score it on the development sets. rows: those of ``encode``."""
    set_seed(seed)
    model = build(args, tokenizer, evolving)
    with contextlib.redirect_stdout(sys.stderr):  # the table alone goes to the standard output
        learner = trainer(args, model, rows["train"], tokenizer, seed)
        learner.train()
        results = []
        for split in TASKS[args.task].dev:
            # T5 gives these beside the scores.
            others = ["past_key_values", "encoder_last_hidden_state"]
            scores, expected, _ = learner.predict(rows[split], ignore_keys=others)
            predicted = scores[:, 0] if scores.shape[1] == 1 else scores.argmax(1)
            results += score(args.task, expected.tolist(), predicted.tolist())
    if args.out:
        folder = args.out / f"{args.task}-{_kind(evolving)}-{seed}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return results


def encode(rows: Dataset, task: str, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Rows of subwords, at most as many as the tokenizer's model_max_length."""
    columns = TASKS[task].sentences
    return rows.map(lambda batch: tokenizer(*(batch[name] for name in columns), truncation=True), batched=True)


def trainer(
    args: argparse.Namespace, model: PreTrainedModel, rows: Dataset, tokenizer: PreTrainedTokenizerBase, seed: int
) -> Trainer:
    """Hugging Face's, which seeds anew: both models see the same batches, and have the same dropout at first."""
    updates = args.epochs * -(-len(rows) // args.batch_size)
    settings = TrainingArguments(
        tempfile.gettempdir(),
        seed=seed,
        data_seed=seed,
        max_steps=min(updates, args.updates or updates),
        per_device_train_batch_size=args.batch_size,
        per_device_eval_batch_size=64,
        # Trainer's defaults are the rest: Adam with the papers' epsilon, a linear schedule, clipping at 1.0.
        optim="adamw_torch",
        learning_rate=args.lr,
        warmup_steps=0.1,
        dataloader_pin_memory=torch.cuda.is_available(),
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
    )
    collator = DataCollatorWithPadding(tokenizer)
    return Trainer(model, settings, train_dataset=rows, data_collator=collator, processing_class=tokenizer)


def build(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, evolving: bool) -> PreTrainedModel:
    """The model with a head for the task. New parameters of evolving attention are fresh."""
    labels = TASKS[args.task].labels
    options = {"num_labels": 1 if labels is None else len(labels)}
    if args.from_scratch:
        sizes = {"hidden_size": 256, "num_hidden_layers": 3, "num_attention_heads": 8, "intermediate_size": 1024}
        config = BertConfig(**sizes, vocab_size=len(tokenizer), max_position_embeddings=args.max_length, **options)
        model = AutoModelForSequenceClassification.from_config(config)
    else:
        # The papers' dropout, by the names of BERT, RoBERTa and T5.
        config = AutoConfig.from_pretrained(args.model, **options)
        if getattr(config, SETTINGS, None):
            raise DataError(f"--model {args.model}: evolves already; give the model that it was made from")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"):
            if hasattr(config, name):
                setattr(config, name, 0.1)
        model = AutoModelForSequenceClassification.from_pretrained(args.model, config=config)
    return evolve(model, args.alpha, args.beta, args.rule, args.kernel_size) if evolving else model


def small_tokenizer(task: str, data: dict[str, Dataset]) -> PreTrainedTokenizerBase:
    """8,000 WordPieces of the training sentences."""
    sentences = (sentence for name in TASKS[task].sentences for sentence in data["train"][name])
    return BertTokenizerFast().train_new_from_iterator(sentences, vocab_size=8000)


def _kind(evolving: bool) -> str:
    return "evolving" if evolving else "stock"


def _row(args: argparse.Namespace, evolving: bool, results: list[list[float]]) -> str:
    name = "BERT, 3 layers of 256, from scratch" if args.from_scratch else args.model
    if evolving:
        name += f", {args.rule}, alpha {args.alpha}, beta {args.beta}, kernel size {args.kernel_size}"
    columns = list(zip(*results, strict=True))
    mean = "/".join(f"{statistics.mean(column):.1f}" for column in columns)
    spread = "/".join(f"{statistics.stdev(column):.1f}" if len(column) > 1 else "-" for column in columns)
    return f"| {name} | {mean} | {spread} | {' '.join('/'.join(f'{x:.1f}' for x in seed) for seed in results)} |"


def _arguments(words: list[str] | None) -> argparse.Namespace:
    """The flags; the papers' table gives the others."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", metavar="NAME", help="a model's folder, or its name on the hub")
    start.add_argument("--from-scratch", action="store_true", help="a small BERT with random weights")
    parser.add_argument(
        "--settings",
        choices=PAPERS["settings"],
        default="BERT-Base",
        help="the papers' settings for this model (default: BERT-Base)",
    )
    parser.add_argument(
        "--rule", choices=RULES, help="how maps evolve (default: evolving; with --settings PA predictive)"
    )
    parser.add_argument("--kernel-size", type=positive, default=3, metavar="K", help="(default: 3)")
    parser.add_argument("--data", type=Path, metavar="DIR", help="files of the task (default: from the hub)")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the models and their scores there")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="(default: 1)")
    parser.add_argument("--updates", type=positive, metavar="N", help="stop after so many")
    parser.add_argument("--max-length", type=positive, default=128, metavar="N", help="tokens of a row (default: 128)")
    kinds = {"epochs": positive, "batch_size": positive, "lr": float, "alpha": float, "beta": float}
    for name, kind in kinds.items():
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=kind, metavar="N", help="(default: the papers' setting for the task)")
    args = parser.parse_args(words)
    args.rule = args.rule or PAPERS["rules"].get(args.settings, "evolving")
    chosen = PAPERS["settings"][args.settings][args.task]
    for name, value in zip(kinds, chosen, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
