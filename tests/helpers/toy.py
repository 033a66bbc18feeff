"""Tests of the scripts need a prepared data folder and a trained run: here are tiny ones."""

import random
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

from helpers import REPO, data_toy, warm
from helpers.warm import ENVIRONMENT

TINY = [
    *("--encoder-embed-dim", "16", "--encoder-ffn-embed-dim", "16", "--encoder-attention-heads", "2"),
    *("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "16", "--decoder-attention-heads", "2"),
    *("--encoder-layers", "2", "--decoder-layers", "1", "--share-all-embeddings"),
]
NOUNS = "dog cat house tree book lamp garden bird".split()
GERMAN = "Hund Katze Haus Baum Buch Lampe Garten Vogel".split()


def sentences(count, seed):
    """Pairs like ("Hund Katze, Haus.", "the dog, the cat, the house.")."""
    rng = random.Random(seed)
    for _ in range(count):
        words = rng.choices(range(len(NOUNS)), k=rng.randint(1, 5))
        yield ", ".join(GERMAN[w] for w in words) + ".", ", ".join("the " + NOUNS[w] for w in words) + "."


def prepare(folder, train=120, valid=12, test=10, separate_dictionaries=False):
    """Prepare made-up text in `folder` by data-prep/custom.sh."""
    raw = folder.with_name(f"{folder.name}.raw")
    for seed, (split, count) in enumerate((("train", train), ("valid", valid), ("test", test))):
        for language, lines in zip(("de", "en"), zip(*sentences(count, seed), strict=True), strict=True):
            data_toy.write(raw / f"{split}.{language}", lines)
    dictionaries = ["--separate-dictionaries"] * separate_dictionaries
    data_toy.custom(raw, folder, "--merges", 20, "--lowercase", "--max-ratio", 9, "--name", folder.name, *dictionaries)
    return folder


def train(data, run, *flags, arch="ea_transformer_base"):
    """A few epochs of fairseq-train, on the CPU."""
    fairseq(
        *("train", data, "--save-dir", run, "--arch", arch, *TINY, "--cpu"),
        *("--max-tokens", 400, "--optimizer", "adam", "--lr", 0.01, "--criterion", "label_smoothed_cross_entropy"),
        *("--max-epoch", 3, "--no-progress-bar", *flags),
    )
    return run


def fairseq(name, *args, check=True, timeout=300, cold=False):
    """Run ``fairseq-NAME --user-dir ea_fairseq ARGS`` in another process; stdout and stderr together."""
    user_dir = [] if name == "preprocess" else ["--user-dir", REPO / "ea_fairseq"]
    command = [Path(sys.executable).parent / f"fairseq-{name}", *args, *user_dir]
    result = (subprocess if cold else warm).run(
        [str(word) for word in command],
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout,
        env=warm.ENVIRONMENT,
    )
    assert not check or result.returncode == 0, result.stdout
    return result


def tool(name):
    """The words that start the command ea_tools NAME, as its door in scripts/ does."""
    return [sys.executable, "-P", "-m", "ea_tools", name]


def script(name, *arguments, cold=False, **options):
    """Run scripts/NAME.sh, or the command ea_tools NAME without its door; its output and status. See warm.py."""
    command = ["bash", REPO / "scripts" / name] if name.endswith(".sh") else tool(name)
    return (subprocess if cold else warm).run(
        [*command, *map(str, arguments)],
        **{"capture_output": True, "text": True, "check": False, "env": ENVIRONMENT, **options},
    )


def runtime(folder, *flags, text=""):
    """Run `python -m ea_runtime FOLDER` on a text, or on bytes; its output, of the same type, and its status."""
    options = {"capture_output": True, "text": isinstance(text, str), "cwd": REPO, "env": ENVIRONMENT}
    return subprocess.run([sys.executable, "-m", "ea_runtime", folder, *flags], input=text, check=False, **options)


def done(name, *arguments, **options):
    """`script`, of a command that has to succeed."""
    result = script(name, *arguments, **options)
    assert result.returncode == 0, result.stderr[-3000:]
    return result


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """One prepared folder for all the tests of a session; no test writes to it."""
    return prepare(tmp_path_factory.mktemp("prepared") / "toy-de-en")


@pytest.fixture(scope="session")
def run(data, tmp_path_factory):
    """One run with three epochs' checkpoints; tests may add files to it and must not change those."""
    return train(data, tmp_path_factory.mktemp("runs") / "toy")


@pytest.fixture(scope="session")
def exported_run(data, run, tmp_path_factory):
    """A copy of that run, and an export of the average of its last two checkpoints; tests may add files to them."""
    from ea_artifacts.preparation import Preparation
    from ea_tools.translating import export

    folder = tmp_path_factory.mktemp("exported_run")
    Preparation.at(data).keep(shutil.copytree(run, folder / "run"))
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("default")
        for hidden in (DeprecationWarning, ResourceWarning):  # as by Python itself
            warnings.simplefilter("ignore", hidden)
        export.main(["--run", str(folder / "run"), "--average", "2", "--out", str(folder / "float32")])
    assert [str(warning.message) for warning in shown] == [], "a user cannot change their causes"
    return folder


class Payload:
    """Unpickles, where nothing stops it, to a call that creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (Path(self.path),))


def save_model(data, path, arch, *flags, size=TINY):
    """A checkpoint as fairseq writes it, with random weights: made in a moment."""
    from helpers.models import model_args

    args = model_args(arch, *size, "--source-lang", "de", "--target-lang", "en", *flags)
    return save_untrained(args, data, path)


def made_checkpoint(path, updates, **extra_state):
    """A checkpoint as fairseq lays it out, of no use but to be found."""
    import torch

    state = {
        "model": {"w": torch.full((64,), float(updates))},
        "optimizer_history": [{"num_updates": 0}, {"num_updates": updates}],  # of a run that was resumed
        "last_optimizer_state": {},
        "extra_state": {"val_loss": 1.0, "best": 1.0, "train_iterator": {"epoch": 1}, **extra_state},
    }
    torch.save(state, path)
    return path


def untrained_run(data, folder, arch, *flags, size=TINY):
    """A run with random weights and all that its model needs."""
    from ea_artifacts.preparation import Preparation

    folder.mkdir()
    save_model(data, folder / "checkpoint_last.pt", arch, *flags, size=size)
    Preparation.at(data).keep(folder)
    return folder


def save_untrained(args, data, path):
    """A checkpoint of the model that a command line describes, on these data."""
    import torch
    from fairseq import tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from omegaconf import OmegaConf

    from helpers.models import amplify_

    args.data = str(data)
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    torch.manual_seed(1)
    model = amplify_(task.build_model(cfg.model))
    state = {"cfg": OmegaConf.to_container(cfg), "args": None, "model": model.state_dict(), "extra_state": {}}
    state["optimizer_history"] = [{"optimizer_name": "FairseqAdam", "num_updates": 1, "lr_scheduler_state": {}}]
    torch.save(state, path)
    return path


@pytest.fixture(scope="session")
def checkpoints(data, tmp_path_factory):
    """Three models of the same data, as files: evolving, stock, and one without encoder-decoder convolution."""
    folder = tmp_path_factory.mktemp("checkpoints")
    short = ("--max-source-positions", "12", "--max-target-positions", "12")
    return SimpleNamespace(
        evolving=save_model(data, folder / "evolving.pt", "ea_transformer_base", *short),
        stock=save_model(data, folder / "stock.pt", "transformer", *short),
        mixed=save_model(data, folder / "mixed.pt", "ea_transformer_base", *short, "--ea-cross-beta", "0"),
    )
