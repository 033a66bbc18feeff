"""The documentation: its links lead somewhere, its commands exist and take the flags that they are given."""

import functools
import itertools
import os
import re
import shlex
import subprocess
import sys

import pytest
from fairseq import options
from helpers import REPO
from helpers.pages import FAIRSEQ, FENCED, PAGES, blocks, commands, lines, spans

from ea_tools.training import recipes

FOLDERS = ("scripts/", "data-prep/", "recipes/", "tests/", "ea_fairseq/", "docs/")
LINKED = [*PAGES, *(REPO / name for name in ("CHANGELOG.md", "evolving_attention/README.md", "pretrained/README.md"))]
LINKED += sorted((REPO / "examples").glob("*/README.md"))
#: commands that hand on unknown flags to fairseq-train
HAND_ON = ("train.sh", "sweep.sh", "profile_model.sh", "reproduce.sh")
#: fairseq's commands, with words that decide which flags they have
PARSERS = [
    (options.get_training_parser, "--arch ea_transformer_base --criterion label_smoothed_cross_entropy_with_rdrop"),
    (options.get_training_parser, "--arch ea_transformer_base --optimizer adam --lr-scheduler inverse_sqrt"),
    (options.get_training_parser, "--arch ea_roberta --task sentence_prediction --criterion sentence_prediction"),
    (options.get_training_parser, "--arch ea_roberta --task masked_lm --criterion masked_lm"),
    (options.get_training_parser, "--arch ea_transformer_lm --task language_modeling"),
    (options.get_training_parser, "--arch ea_bart"),
    (options.get_generation_parser, "--path x"),
    (options.get_interactive_generation_parser, "--path x --bpe subword_nmt"),
    (options.get_eval_lm_parser, "--path x"),
]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


@functools.cache
def fairseqs():
    """The flags of fairseq's commands."""
    known = {*options.get_preprocessing_parser()._option_string_actions}
    for make, words in PARSERS:
        parser = make()
        options.parse_args_and_arch(parser, ["data", *words.split()], parse_known=True)  # adds flags to the parser
        known.update(parser._option_string_actions)
    return known


@functools.cache
def helped(*command):
    """The flags in the help of a command."""
    result = subprocess.run([*command, "--help"], cwd=REPO, capture_output=True, text=True, check=True)
    return {*FLAG.findall(result.stdout), "--help"}


def faults(command):
    """The mistakes in a command line, in words."""
    script, *rest = command
    if missing := [word for word in (script, *rest) if word.startswith(FOLDERS) and not (REPO / word).exists()]:
        return [f"{word} is not there" for word in missing if "NAME" not in word and "*" not in word]
    if script not in FAIRSEQ and not os.access(REPO / script, os.X_OK):
        return [f"{script} cannot be executed"]
    flags = [FLAG.match(word)[0] for word in rest if FLAG.match(word)]
    flags += [f"--{name}" for before, name in itertools.pairwise(rest) if before == "--grid"]
    known = set() if script in FAIRSEQ else helped("bash", script)
    if script in FAIRSEQ or script.endswith(HAND_ON) or "--" in rest:  # behind it are flags of fairseq's
        known = known | fairseqs()
    wrong = [f"{script} has no {flag}" for flag in flags if flag not in known]
    is_named = script.endswith(("/train.sh", "/sweep.sh")) and rest and re.fullmatch(r"[a-z][\w-]*", rest[0])
    return [*wrong, f"there is no recipe {rest[0]}"] if is_named and rest[0] not in recipes.names() else wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.slow
def test_commands_and_flags_of_a_page_are_there(page):
    """Commands in blocks and in lines; and each flag that stands alone in a line, `--like-this 3`: some command has it.

    test_docs_run.py gives the flags of a block to their own command.
    """
    text = page.read_text()
    code = [*(line for block in blocks(text) for line in lines(block)), *spans(text)]
    found = [command for line in code for command in commands(line)]
    assert not [(shlex.join(command), wrong) for command in found if (wrong := faults(command))]
    assert len(found) > 8 or page.name not in ("README.md", "training.md", "data.md")
    scripts = [path for folder in ("scripts", "data-prep") for path in sorted((REPO / folder).glob("*.sh"))]
    known = fairseqs() | helped(sys.executable, "-m", "ea_runtime")
    known = known.union(*(helped("bash", str(path)) for path in scripts if os.access(path, os.X_OK)))
    alone = re.findall(r"`(--[^`*]+)`", re.sub(FENCED, "", text, flags=re.M | re.S))
    assert not {flag for span in alone for flag in FLAG.findall(span)} - known


def anchors(page):
    """The names by which GitHub links to the headings of a page."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", LINKED, ids=lambda page: str(page.relative_to(REPO)))
def test_links_of_a_page_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            dead.append(link)
    assert not dead
