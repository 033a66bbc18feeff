"""Every block of commands in README and docs/ runs as written, in a fresh clone, one page after the other.

The clone's recipes describe models of two layers a side and 16 numbers a token, trained for ten updates, and its sample
corpus has 60 pairs. Commands that need the network, hours or a GPU are not run: a dry run or the parser checks them.
"""

import contextlib
import gzip
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fairseq import options
from helpers import REPO, pages, warm

from ea_data import prepare

pytestmark = pytest.mark.slow

FIRST = ("README.md", "training.md")  # what these leave behind is used by the others
SMALL = "max-update = 10\nvalidate-interval = 5\nmax-target-positions = 60\n" + "\n".join(
    f"{side}-layers = 2\n{side}-embed-dim = 16\n{side}-ffn-embed-dim = 16" for side in ("encoder", "decoder")
)
#: file of the clone, text, its replacement
SMALLER = [
    ("recipes/base.toml", "[flags]\n", f"[flags]\n{SMALL}\n"),
    ("docs/attention.md", "--layer 1 6", "--layer 1 2"),
    ("docs/attention.md", "--layer 5", "--layer 2"),
]
#: folders that pages name -> what stands for them
STAND_INS = {
    "data/multi30k-de-en": "data/mine",
    "runs/en-de": "runs/mine",
    "runs/multi30k-de-en-ea_transformer_lite": "runs/mine",
    "runs/multi30k-de-en-transformer_lite": "runs/mine-baseline",
    "runs/reproduce/multi30k-laptop-de-en/ea_transformer_lite-seed1": "runs/mine",
    "runs/reproduce/multi30k-laptop-de-en/transformer_lite-seed1": "runs/mine-baseline",
}
#: flags at the end of fairseq-train's, by the architecture
TRAINING = {
    "ea_transformer_base": "--encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --decoder-embed-dim 16 "
    "--decoder-ffn-embed-dim 16 --max-target-positions 60 --max-update 3 --cpu",
    "ea_transformer_lm_base": "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-input-dim 16 "
    "--decoder-output-dim 16 --decoder-layers 1 --optimizer adam --lr 1e-3 --max-tokens 1000 --max-update 3 --cpu",
}
# test.sh is the command of this suite, and test_packaging.py tests installation.
SKIPPED = r"scripts/test\.sh|pip install"
# These need the network, hours, or a server, which does not end. Others need a model or files that only such commands
# make, or name files of the reader.
PARSED = r"iwslt14-de-en|multi30k\.sh|benchmark_|gpu_report|examples\.glue|data-bin|\.\.\. |DIR/|RUN|DATA|bertviz"
PARSED += r"|serve\(|--eval-bleu-args|runs/cmlm"
DRY = r"scripts/(sweep|reproduce)\.sh|scripts/train\.sh (?!--data)"


@pytest.fixture
def clone(tmp_path):
    """The tracked files of this repository, not those that commands of pages leave, and programs that start warm."""
    clone = tmp_path / "ea-fairseq"
    listed = subprocess.run(["git", "-C", REPO, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (REPO / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / name, clone / name)
    for name, written, otherwise in SMALLER:
        text = (clone / name).read_text()
        assert text.count(written) == 1, name
        (clone / name).write_text(text.replace(written, otherwise))
    for file in (clone / "data-prep/sample").iterdir():
        lines = gzip.decompress(file.read_bytes()).splitlines(keepends=True)
        most = 60 if file.name.startswith("train") else 20
        file.write_bytes(gzip.compress(b"".join(lines[:most])))
        for folder, first in (("corpus", most), ("law", most + 1)):
            (clone / folder).mkdir(exist_ok=True)
            (clone / folder / file.stem).write_bytes(b"".join(lines[first : 2 * most + 20 : 2]))
    shutil.copy(clone / "law" / "train.en", clone / "mono.en")
    for name in ("letters.de", "test.de"):
        shutil.copy(clone / "law" / "valid.de", clone / name)
    shutil.copy(clone / "law" / "valid.en", clone / "sentences.txt")
    # Not below tmp_path: the name of a socket has at most 107 bytes.
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, warm_environment(clone, f"{folder}/socket"):
        yield clone


@contextlib.contextmanager
def warm_environment(clone, address):
    """The clone's .venv, whose programs let a server fork that knows the modules of the clone alone."""
    programs = clone / ".venv" / "bin"
    programs.mkdir(parents=True)
    shutil.copy(clone / "requirements.txt", clone / ".venv" / ".requirements")
    for name in ("python", *pages.FAIRSEQ):
        words = warm.client_words(address, [str(Path(sys.executable).with_name(name))])
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n')
        (programs / name).chmod(0o755)
    code = "import sys; from helpers import warm; warm.serve(sys.argv[1])"
    command = [sys.executable, "-P", "-c", code, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(clone)) as server:
        assert server.stdout.readline() == b"ready\n"
        yield
        server.terminate()


def environment(clone):
    python_path = os.pathsep.join(str(clone / name) for name in ("", "scripts", "data-prep", "tests"))
    path = f"{clone / '.venv' / 'bin'}:{os.environ['PATH']}"
    return {**warm.ENVIRONMENT, "PATH": path, "PYTHONPATH": python_path}


def sorted_out(block):
    """The lines of a block that are run, and those of which there is a dry run. The others' words are parsed."""
    run, dry = [], []
    for line in pages.lines(block):
        line = re.sub(r"\[(--\w+)\]", r"\1", line)  # [--json]
        if re.search(SKIPPED, line):
            continue
        if re.search(PARSED, line):
            parse(line)
        elif re.search(DRY, line):
            dry.append(f"{line.partition('#')[0].strip()} --dry-run")
        elif "fairseq-train" in line:
            arch = re.search(r"--arch (\S+)", line)[1]
            run.append(f"{line.removesuffix('...')} {TRAINING[arch]}")
        else:
            run.append(line)
    return run, dry


def parse(line):
    """Give the words of a command to its `parse` function, if it has one; dots are left out."""
    for name, *words in pages.commands(re.sub(r'"\$\(.*\)"', str(REPO / "ea_fairseq"), line)):
        words = [word for word in words if word != "..."]
        if name == "fairseq-train":
            options.parse_args_and_arch(options.get_training_parser(), words)
        elif "custom.sh --" in line:
            prepare.parse("custom", words)
        elif door := warm.DOOR.search((REPO / name).read_text()):
            module = importlib.import_module(f"ea_tools.{door[1]}")
            if hasattr(module, "parse"):
                module.parse(words)


def fault(clone, *command):
    """The output of a command that fails, else 0."""
    done = subprocess.run(command, cwd=clone, env=environment(clone), capture_output=True, text=True, check=False)
    return done.returncode and f"{command[-1]}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}"


def test_the_blocks_of_all_pages_run_as_written(clone):
    shell, python, dry = [], [], {}
    for page in sorted(pages.PAGES, key=lambda page: (page.name not in FIRST, page.name)):
        text = (clone / page.relative_to(REPO)).read_text()
        for block in pages.blocks(text):
            if any(list(pages.commands(line)) for line in pages.lines(block)):
                run, of_block = sorted_out(block)
                shell.append("\n".join(run))
                dry |= dict.fromkeys(of_block)
        python += [block for block in pages.blocks(text, "python") if not block.startswith(" ")]  # a part
    python.append("\n".join(pages.blocks((REPO / "evolving_attention/README.md").read_text(), "python")))  # one program
    assert len(shell) > 30
    faults = [fault(clone, "bash", "-euo", "pipefail", "-c", "\n".join(dry))]  # no data are there yet
    for name, stand_in in STAND_INS.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).symlink_to(clone / stand_in)
    faults += [fault(clone, "bash", "-euo", "pipefail", "-c", block) for block in shell]
    for block in python:
        compile(block, "a page", "exec")
        # Hugging Face's library comes with scripts/setup.sh --examples.
        without = "transformers" in block and not importlib.util.find_spec("transformers")
        faults += [] if without or re.search(PARSED, block) else [fault(clone, "python", "-c", block)]
    assert not list(filter(None, faults)), "\n\n".join(filter(None, faults))
