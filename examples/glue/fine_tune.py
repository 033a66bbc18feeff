"""Fine-tune an encoder of Hugging Face on a task of GLUE, with and without evolving attention, by the papers' settings.

    python -m examples.glue.fine_tune CoLA --model bert-base-uncased --settings BERT-Base --seeds 1 2 3

Both models have the same seeds, batches and updates. The score is that of the development set after the last epoch.
--settings PA gives Predictive Attention, --rule realformer RealFormer. --alpha 0, --beta 0 and --kernel-size are the
papers' ablations.
With --from-scratch the model is a BERT of 3 layers, 256 wide, whose WordPieces come from the training sentences.
"""

import argparse
import contextlib
import sys
import tempfile
import tomllib
from pathlib import Path

import torch
from datasets import Dataset, DatasetDict
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

from ea_artifacts.command import Parser, UserError, positive, reporting, say
from ea_artifacts.files import write_json
from evolving_attention.evolution import RULES
from evolving_attention.huggingface import SETTINGS, evolve
from examples.common import check_settings, report
from examples.glue.tasks import TASKS, load, score

PAPERS = tomllib.loads((Path(__file__).parent / "papers.toml").read_text())


def main(words: list[str] | None = None) -> None:
    args = _arguments(words)
    with reporting("fine_tune"):
        compare(args)


def compare(args: argparse.Namespace) -> None:
    """Train both models with each seed; report each score of each development set."""
    data = load(args.task, args.data)
    tokenizer = small_tokenizer(args.task, data) if args.from_scratch else AutoTokenizer.from_pretrained(args.model)
    tokenizer.model_max_length = args.max_length
    # Mistakes are named before the first training.
    try:
        build(args, tokenizer, evolving=True)
    except ValueError as error:
        raise UserError(str(error)) from None
    if torch.cuda.device_count() > 1:  # Trainer would share each batch among them, and make it as many times larger
        raise UserError("one GPU is used, and this machine shows several; choose one: CUDA_VISIBLE_DEVICES=0")
    settings = {name: value for name, value in vars(args).items() if name not in ("data", "out")}
    record = args.out and args.out / f"{args.task}.json"
    if record:  # explanations' means would mix up models of other settings
        check_settings(record, settings)
        write_json(record, {"settings": settings})
    columns = TASKS[args.task].sentences
    rows = data.map(lambda batch: tokenizer(*map(batch.get, columns), truncation=True), batched=True)
    scores: dict[str, list[float]] = {}
    for evolving in (False, True):
        for seed in args.seeds:
            found = run(args, evolving, seed, tokenizer, rows)
            say(f"seed {seed}: {found}")
            for name, value in found.items():
                scores.setdefault(name, []).append(value)
    print(
        f"{args.model or 'BERT, 3 layers of 256, from scratch'}; evolving: {args.rule}, alpha {args.alpha}, "
        f"beta {args.beta}, kernel size {args.kernel_size}"
    )
    report(scores, record, settings=settings)


def run(
    args: argparse.Namespace, evolving: bool, seed: int, tokenizer: PreTrainedTokenizerBase, rows: DatasetDict
) -> dict[str, float]:
    """Train one model; its scores on the development sets."""
    kind, task, found = "evolving" if evolving else "stock", TASKS[args.task], {}
    set_seed(seed)
    model = build(args, tokenizer, evolving)
    with contextlib.redirect_stdout(sys.stderr):  # the table alone goes to the standard output
        learner = trainer(args, model, rows["train"], tokenizer, seed)
        learner.train()
        for split in task.dev:
            # T5 gives these beside the scores.
            others = ["cache", "encoder_last_hidden_state"]
            scores, expected, _ = learner.predict(rows[split], ignore_keys=others)
            predicted = scores[:, 0] if scores.shape[1] == 1 else scores.argmax(1)
            measured = score(args.task, expected.tolist(), predicted.tolist())
            found |= {f"{kind}, {metric} of {split}": value for metric, value in measured.items()}
    if args.out:
        folder = args.out / f"{args.task}-{kind}-{seed}"
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return found


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
            raise UserError(f"--model {args.model}: evolves already; give the model that it was made from")
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout_rate"):
            if hasattr(config, name):
                setattr(config, name, 0.1)
        model = AutoModelForSequenceClassification.from_pretrained(args.model, config=config)
    return evolve(model, args.alpha, args.beta, args.rule, args.kernel_size) if evolving else model


def small_tokenizer(task: str, data: DatasetDict) -> PreTrainedTokenizerBase:
    """8,000 WordPieces of the training sentences."""
    sentences = (sentence for name in TASKS[task].sentences for sentence in data["train"][name])
    return BertTokenizerFast().train_new_from_iterator(sentences, vocab_size=8000)


def _arguments(words: list[str] | None) -> argparse.Namespace:
    """The flags; the papers' table gives the others."""
    parser = Parser(description=__doc__)
    add = parser.add_argument
    add("task", choices=TASKS, metavar="TASK", help=", ".join(TASKS))
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--model", metavar="NAME", help="a model's folder, or its name on the hub")
    start.add_argument("--from-scratch", action="store_true", help="a small BERT with random weights")
    add("--settings", choices=PAPERS["settings"], default="BERT-Base", help="the papers' (default: BERT-Base)")
    add("--rule", choices=RULES, help="how maps evolve (default: evolving; with --settings PA predictive)")
    add("--kernel-size", type=positive, default=3, metavar="K", help="(default: 3)")
    add("--data", type=Path, metavar="DIR", help="files of the task (default: from the hub)")
    add("--out", type=Path, metavar="DIR", help="keep the models and their scores there")
    add("--seeds", type=int, nargs="+", default=[1], metavar="N", help="(default: 1)")
    add("--updates", type=positive, metavar="N", help="stop after so many")
    add("--max-length", type=positive, default=128, metavar="N", help="tokens of a row (default: 128)")
    kinds = {"epochs": positive, "batch_size": positive, "lr": float, "alpha": float, "beta": float}
    for name, kind in kinds.items():
        add(f"--{name.replace('_', '-')}", type=kind, metavar="N", help="(default: the papers' for the task)")
    args = parser.parse_args(words)
    args.rule = args.rule or PAPERS["rules"].get(args.settings, "evolving")
    chosen = PAPERS["settings"][args.settings][args.task]
    for name, value in zip(kinds, chosen, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    return args


if __name__ == "__main__":
    main()
