"""What the tests share: tiny vocabularies, batches and models, built through fairseq's own parser."""

import gc
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fairseq import options
from fairseq.data import Dictionary
from fairseq.models import ARCH_MODEL_REGISTRY
from helpers import warm
from helpers.interpreter import import_triton
from helpers.toy import checkpoints, data, run  # noqa: F401  (fixtures, made once for all the tests of a process)

import ea_fairseq  # noqa: F401  (registers the architectures)
from ea_fairseq import evolution, kernels

import_triton()
warm.collect_rarely()

REPO = Path(__file__).parents[1]
TINY = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 24 --encoder-attention-heads 4 --encoder-layers 3 "
    "--decoder-attention-heads 4 --decoder-layers 2 --dropout 0"
).split()


def pytest_addoption(parser):
    parser.addoption(
        "--quick", action="store_true", help="no slow test, and every other one with its first parameters only"
    )


def pytest_collection_finish(session):
    gc.freeze()  # the libraries and the tests themselves are looked at by no collection


def pytest_collection_modifyitems(config, items):
    if config.getoption("--quick"):
        first = {}
        for item in items:
            if not item.get_closest_marker("slow"):
                first.setdefault((item.path, getattr(item, "originalname", item.name)), item)
        config.hook.pytest_deselected(items=[item for item in items if item not in first.values()])
        items[:] = first.values()


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(params=["kernel", "plain"])
def each_way(request, monkeypatch):
    """Once by the CPU's kernel, once by the plain composition: promises hold on both."""
    if request.param == "plain":
        monkeypatch.setattr(kernels, "attend", lambda call: None)
    else:
        assert kernels.cpu.knows(small_call()), "no kernel to test: is there a C compiler?"


def small_call():
    """A call that the CPU's kernel knows: one sentence of one token, one head."""
    one, coefficients = torch.ones(1, 1, 1, 1), evolution.LOGITS_ONLY
    return kernels.Call(one, one, one, 1.0, evolution.Geometry.ENCODER_SELF, 3, coefficients)


def dictionary(size=20):
    words = Dictionary()
    for i in range(size):
        words.add_symbol(f"w{i}")
    return words


def model_args(arch, *flags):
    """Parse flags as fairseq-train does."""
    parser = options.get_training_parser()
    return options.parse_args_and_arch(parser, ["data", "--arch", arch, "--task", "translation", *map(str, flags)])


def build(arch="ea_transformer_base", *flags, size=TINY, train=False, dtype=torch.float32):
    """A model with random weights, convolutions included, on a task that is only a pair of dictionaries."""
    args = model_args(arch, *size, *flags)
    words = dictionary()
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    model = ARCH_MODEL_REGISTRY[arch].build_model(args, task).to(dtype)
    model.train(train)
    return model


def amplify_(model, factor=4.0):
    """Make maps matter: with fresh weights attention is nearly uniform, and its errors nearly invisible."""
    for name, parameter in model.named_parameters():
        if "q_proj.weight" in name or "k_proj.weight" in name or "evolution" in name:
            parameter.data *= factor
    return model


def batch(lengths, *, left_pad=False, eos_first=False, words=20, seed=1):
    """B x longest token ids, each sentence ending in (or with eos_first starting with) the end-of-sentence symbol."""
    symbols = dictionary(words)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.full((len(lengths), max(lengths)), symbols.pad())
    for row, length in zip(tokens, lengths, strict=True):
        sentence = torch.randint(symbols.nspecial, len(symbols), (length,), generator=generator)
        sentence[0 if eos_first else -1] = symbols.eos()
        row[slice(-length, None) if left_pad else slice(length)] = sentence
    return tokens


def fairseq(name, *args, check=True, timeout=300, cold=False):
    """Run ``fairseq-NAME --user-dir ea_fairseq ARGS`` in a process of its own; stdout and stderr together."""
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


#: what every short training here has in common: fairseq's usual recipe, on the CPU
TRAINING = (
    "--task translation --optimizer adam --lr 0.002 --lr-scheduler inverse_sqrt --warmup-updates 10 "
    "--criterion label_smoothed_cross_entropy --label-smoothing 0.1 --max-tokens 200 --seed 3 --cpu --no-progress-bar "
    "--log-format json --log-interval 1 --num-workers 0 --dropout 0.1 --share-all-embeddings "
    "--required-batch-size-multiple 1"
).split()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """Binary data: sentences of 1 to 9 words, to be turned round. 200 for training, 30 for validation, 10 for test."""
    folder = tmp_path_factory.mktemp("corpus")
    chance = random.Random(1)
    for split, size in (("train", 200), ("valid", 30), ("test", 10)):
        with (folder / f"{split}.de").open("w") as source, (folder / f"{split}.en").open("w") as target:
            for _ in range(size):
                words = [f"w{chance.randrange(16)}" for _ in range(chance.randint(1, 9))]
                print(*words, file=source)
                print(*reversed(words), file=target)
    prefixes = [word for split in ("train", "valid", "test") for word in (f"--{split}pref", folder / split)]
    binary = folder / "bin"
    fairseq("preprocess", "-s", "de", "-t", "en", *prefixes, "--destdir", binary, "--joined-dictionary", "--workers", 1)
    return binary
