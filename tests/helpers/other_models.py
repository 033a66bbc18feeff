"""Language models, RoBERTa and BART in tests: tiny ones, tiny data, and fairseq's commands without a new process."""

import contextlib
import io
import logging
import random
import sys
from types import SimpleNamespace
from unittest import mock

import torch
from fairseq import options
from fairseq.models import ARCH_MODEL_REGISTRY

from helpers import REPO, warm
from helpers.models import dictionary

ENCODER = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 4 --encoder-layers 3 --dropout 0"
).split()
DECODER = (
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 24 --decoder-attention-heads 4 --decoder-layers 2 --dropout 0"
).split()
LM = [*DECODER, "--decoder-input-dim", "16", "--decoder-output-dim", "16"]
ROBERTA = [*ENCODER, "--attention-dropout", "0", "--max-positions", "20"]
BART = [*ENCODER, "--decoder-attention-heads", "4", "--decoder-layers", "2"]
#: what a tiny model of each kind is built with: its task and its size
KINDS = {
    "transformer_lm": ("language_modeling", LM),
    "roberta": ("masked_lm", ROBERTA),
    "bart": ("denoising", [*BART, "--max-source-positions", "20", "--max-target-positions", "20"]),
}


def kind_of(arch):
    """The key of ``KINDS`` that an architecture belongs to, ours or fairseq's."""
    return next(kind for kind in KINDS if kind in arch)


def build(arch, *flags, size=None, train=False):
    """A model with random weights, on a task that is only a dictionary, which has a symbol <mask> as its last."""
    task_name, tiny = KINDS[kind_of(arch)]
    words = dictionary()
    words.add_symbol("<mask>")
    parser = options.get_training_parser()
    command = ["data", "--arch", arch, "--task", task_name, *(tiny if size is None else size), *map(str, flags)]
    args = options.parse_args_and_arch(parser, command)
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, max_positions=lambda: 20)
    model_class = ARCH_MODEL_REGISTRY[arch]
    if "__dataclass" in vars(model_class) and model_class.__module__.startswith("fairseq."):
        from fairseq.models import build_model

        model = build_model(options_of(args), task)
    else:
        model = model_class.build_model(args, task)
    model.train(train)
    return model


def options_of(args):
    """The model's part of fairseq's configuration, from a command line."""
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    return convert_namespace_to_omegaconf(args).model


class _Kept(logging.Handler):
    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def run(name, *words):
    """Run fairseq-NAME in this process, on the CPU; what it logged and printed.

    Without a data loader's process: one that is not at its end is waited for, five seconds, whenever Python finds it.
    """
    import importlib

    module = importlib.import_module(f"fairseq_cli.{name}")
    command = [f"fairseq-{name}", *map(str, words), *([] if name == "preprocess" else ["--cpu", "--num-workers", "0"])]
    kept, printed, root = _Kept(), io.StringIO(), logging.getLogger()
    root.addHandler(kept)
    level, seed = root.level, torch.get_rng_state()
    root.setLevel(logging.INFO)
    try:
        with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(printed):
            module.cli_main()
    finally:
        root.removeHandler(kept)
        root.setLevel(level)
        torch.set_rng_state(seed)
    return "\n".join([*kept.lines, printed.getvalue()])


WORDS = [f"w{i}" for i in range(16)]


def monolingual(folder, sizes=(("train", 120), ("valid", 20), ("test", 20))):
    """Binary data of one language, whose words follow each other in a row: w3 w4 w5. A dict.txt beside it."""
    chance = random.Random(2)
    raw = folder / "raw"
    raw.mkdir(parents=True)
    for split, size in sizes:
        lines = []
        for _ in range(size):
            start = chance.randrange(16)
            lines.append(" ".join(WORDS[(start + i) % 16] for i in range(chance.randint(3, 9))))
        (raw / split).write_text("".join(f"{line}\n" for line in lines))
    prefixes = [word for split, _ in sizes for word in (f"--{split}pref", raw / split)]
    run("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin", "--workers", 1)
    return folder / "bin"


#: what every short training has in common
TRAINING = (
    "--optimizer adam --lr 0.005 --max-update 12 --batch-size 16 --seed 3 --no-progress-bar --log-format json "
    "--log-interval 1 --num-workers 0 --required-batch-size-multiple 1 --validate-interval 100 "
    "--disable-validation --no-epoch-checkpoints"
).split()


def labelled(folder, dictionary, sizes=(("train", 64), ("valid", 20))):
    """Sentences for ``sentence_prediction``: label 1 where the first word comes again."""
    chance = random.Random(3)
    (folder / "raw").mkdir(parents=True)
    for split, size in sizes:
        lines = [[chance.choice(WORDS) for _ in range(chance.randint(3, 8))] for _ in range(size)]
        labels = [int(line[0] in line[1:]) for line in lines]
        (folder / f"raw/{split}.input0").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"raw/{split}.label").write_text("".join(f"{label}\n" for label in labels))
    for name, given in (("input0", ["--srcdict", dictionary]), ("label", [])):
        prefixes = [word for split, _ in sizes for word in (f"--{split}pref", folder / f"raw/{split}.{name}")]
        run("preprocess", "--only-source", *prefixes, "--destdir", folder / "bin" / name, "--workers", 1, *given)
    return folder / "bin"


def whole_words(path):
    """Codes of byte-pair encoding that leave every word of ``WORDS`` whole."""
    merges = [f"1 {word[2:]}</w>" for word in WORDS if len(word) > 2]
    merges += [f"w {word[1:]}</w>" for word in WORDS]
    path.write_text("\n".join(["#version: 0.2", *merges, ""]))
    return path


def parallel(folder, dictionary, sizes=(("train", 64), ("valid", 20))):
    """Binary data for translation from de to en, which turns sentences round; both sides share a dictionary."""
    chance = random.Random(4)
    (folder / "raw").mkdir(parents=True)
    for split, size in sizes:
        lines = [[chance.choice(WORDS) for _ in range(chance.randint(2, 7))] for _ in range(size)]
        (folder / f"raw/{split}.de").write_text("".join(" ".join(line) + "\n" for line in lines))
        (folder / f"raw/{split}.en").write_text("".join(" ".join(reversed(line)) + "\n" for line in lines))
    prefixes = [word for split, _ in sizes for word in (f"--{split}pref", folder / f"raw/{split}")]
    same = ["--srcdict", dictionary, "--tgtdict", dictionary]
    run("preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", folder / "bin", "--workers", 1, *same)
    return folder / "bin"


def script_output(name, *words):
    """Run a script of scripts/; its output and status."""
    command = ["bash", REPO / "scripts" / name, *words]
    return warm.run(list(map(str, command)), capture_output=True, text=True, check=False)
