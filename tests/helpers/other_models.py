"""fairseq's commands in this process, and tiny data to train models on."""

import contextlib
import importlib
import io
import logging
import random
import sys
from unittest import mock

import torch

from helpers.models import BART, LM, ROBERTA, build  # noqa: F401  (others take them from here)

WORDS = [f"w{i}" for i in range(16)]
#: the flags of every short training
TRAINING = (
    "--optimizer adam --lr 0.005 --max-update 12 --batch-size 16 --seed 3 --no-progress-bar --log-format json "
    "--log-interval 1 --num-workers 0 --required-batch-size-multiple 1 --validate-interval 100 "
    "--disable-validation --no-epoch-checkpoints"
).split()


def run(name, *words):
    """Run fairseq-NAME in this process, on the CPU: its log and its output.

    No process loads data: Python waits five seconds for one that is not at its end.
    """
    module = importlib.import_module(f"fairseq_cli.{name}")
    command = [f"fairseq-{name}", *map(str, words), *([] if name == "preprocess" else ["--cpu", "--num-workers", "0"])]
    text, root = io.StringIO(), logging.getLogger()
    handler, level, seed = logging.StreamHandler(text), root.level, torch.get_rng_state()
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    try:
        with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(text):
            module.cli_main()
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        torch.set_rng_state(seed)
    return text.getvalue()


def preprocess(folder, make, *flags, seed=1, train=64, valid=20, test=20):
    """Binary data in ``folder``, made of random text in ``folder``/raw.

    make: a source of random numbers -> one line of each file, by the end of its name.
    """
    chance, prefixes = random.Random(seed), []
    (folder / "raw").mkdir(parents=True)
    for split, size in {"train": train, "valid": valid, "test": test}.items():
        rows = [make(chance) for _ in range(size)]
        for end in rows[0]:
            (folder / "raw" / f"{split}{end}").write_text("".join(f"{row[end]}\n" for row in rows))
        prefixes += [f"--{split}pref", folder / "raw" / f"{split}"]
    run("preprocess", *prefixes, "--destdir", folder, "--workers", 1, *flags)
    return folder


def monolingual(folder):
    """Text of one language, whose words follow each other: w3 w4 w5. Its dictionary is dict.txt."""

    def make(chance):
        start = chance.randrange(16)
        return {"": " ".join(WORDS[(start + i) % 16] for i in range(chance.randint(3, 9)))}

    return preprocess(folder, make, "--only-source", train=120)


def reversed_pair(chance):
    """A source of 1 to 9 words, and a target that turns it round."""
    words = [chance.choice(WORDS) for _ in range(chance.randint(1, 9))]
    return {".de": " ".join(words), ".en": " ".join(reversed(words))}
