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
from fairseq.models import ARCH_MODEL_REGISTRY
from helpers import REPO
from helpers.pages import FENCED, PAGES, blocks, commands, lines, spans

from ea_tools.training import recipes

FOLDERS = ("scripts/", "data-prep/", "recipes/", "tests/", "ea_fairseq/", "docs/")
LINKED = [*PAGES, *(REPO / name for name in ("CHANGELOG.md", "evolving_attention/README.md", "pretrained/README.md"))]
LINKED += sorted((REPO / "examples").glob("*/README.md"))
#: commands that hand on unknown flags to fairseq-train
HAND_ON = ("train.sh", "sweep.sh", "profile_model.sh", "reproduce.sh")
PARSERS = {
    "fairseq-train": options.get_training_parser,
    "fairseq-generate": options.get_generation_parser,
    "fairseq-interactive": options.get_interactive_generation_parser,
    "fairseq-eval-lm": options.get_eval_lm_parser,
    "fairseq-preprocess": options.get_preprocessing_parser,
}
#: what decides which flags fairseq-train has, and what that is where a command does not say
DECIDES = {"task": "translation", "criterion": "label_smoothed_cross_entropy", "optimizer": "adam",
           "lr-scheduler": "inverse_sqrt"}  # fmt: skip
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")


def commands_of(text):
    """The commands of ours, and of fairseq's, in a page, as words."""
    code = [line for block in blocks(text) for line in lines(block)]
    return [command for line in [*code, *spans(text)] for command in commands(line)]


@functools.cache
def helped(script):
    """The flags in the help of a script."""
    result = subprocess.run(["bash", REPO / script, "--help"], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return {*FLAG.findall(result.stdout), "--help"}


@functools.cache
def fairseqs(name, *words):
    """The flags of one of fairseq's commands, with what decides them."""
    if name == "fairseq-preprocess":
        return set(PARSERS[name]()._option_string_actions)
    parser = PARSERS[name]()
    options.parse_args_and_arch(parser, ["data", *words], parse_known=True)  # adds flags to the parser
    return set(parser._option_string_actions)


def known_to_fairseq(name, command):
    given = dict(zip(command, [*command[1:], ""], strict=True))
    if name != "fairseq-train":
        task = given.get("--task", "language_modeling" if name == "fairseq-eval-lm" else "translation")
        bpe = ("--bpe", given["--bpe"]) if "--bpe" in given else ()  # it has flags, too
        return fairseqs(name, "--path", "x", "--task", task, *bpe)
    arch = given.get("--arch") or next(
        (word for word in command[1:] if re.match("(ea_|pa_|res_|conv_)?[a-z]+_", word)), ""
    )
    arch = arch if arch in ARCH_MODEL_REGISTRY else "ea_transformer_base"
    decided = {name: given.get(f"--{name}", default) for name, default in DECIDES.items()}
    if "roberta" in arch and "--task" not in given:
        decided |= {"task": "sentence_prediction", "criterion": "sentence_prediction"}
    return fairseqs(name, "--arch", arch, *(word for flag, value in decided.items() for word in (f"--{flag}", value)))


def faults(command):
    """The mistakes in a command line, in words."""
    script, *rest = command
    if "--" in rest:  # behind it are flags of fairseq's
        behind = rest[rest.index("--") + 1 :]
        program = "fairseq-interactive" if script.endswith("translate.sh") else "fairseq-generate"
        return [*faults([script, *rest[: rest.index("--")]]), *faults([program, *behind])]
    flags = [FLAG.match(word)[0] for word in rest if FLAG.match(word)]
    flags += [f"--{name}" for before, name in itertools.pairwise(rest) if before == "--grid"]
    missing = [word for word in (script, *rest) if word.startswith(FOLDERS) and not (REPO / word).exists()]
    if missing:
        return [f"{word} is not there" for word in missing if "NAME" not in word and "*" not in word]
    if script in PARSERS:
        known = known_to_fairseq(script, command)
    else:
        if not os.access(REPO / script, os.X_OK):
            return [f"{script} cannot be executed"]
        known = helped(script)
        if not known.issuperset(flags) and script.endswith(HAND_ON):
            known = known | known_to_fairseq("fairseq-train", command)
    wrong = [f"{script} has no {flag}" for flag in flags if flag not in known]
    names = recipes.names() if script.endswith(("/train.sh", "/sweep.sh")) else []
    if names and rest and re.fullmatch(r"[a-z][\w-]*", rest[0]) and rest[0] not in names:
        wrong.append(f"there is no recipe {rest[0]}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.slow
def test_commands_of_a_page_can_be_run(page):
    found = [(shlex.join(command), faults(command)) for command in commands_of(page.read_text())]
    assert not [(command, wrong) for command, wrong in found if wrong]
    assert len(found) > 8 or page.name not in ("README.md", "training.md", "data.md")


@functools.cache
def all_flags():
    """The flags of every script here and of fairseq's commands, with any architecture, task and so on."""
    scripts = [path for folder in ("scripts", "data-prep") for path in sorted((REPO / folder).glob("*.sh"))]
    known = {flag for path in scripts if os.access(path, os.X_OK) and path.name != "lib.sh" for flag in helped(path)}
    runtime = [sys.executable, "-m", "ea_runtime", "--help"]
    known |= {*FLAG.findall(subprocess.run(runtime, cwd=REPO, capture_output=True, text=True, check=True).stdout)}
    for arch in ("ea_transformer_base", "ea_roberta", "ea_transformer_lm", "ea_bart"):
        known |= known_to_fairseq("fairseq-train", ["fairseq-train", "--arch", arch])
    rdrop = ["--criterion", "label_smoothed_cross_entropy_with_rdrop"]
    for chosen in (rdrop, ["--task", "masked_lm"]):
        known |= known_to_fairseq("fairseq-train", ["fairseq-train", *chosen])
    return known.union(*(known_to_fairseq(name, [name]) for name in PARSERS if name != "fairseq-train"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
@pytest.mark.slow
def test_flags_in_the_text_of_a_page_are_there(page):
    """`--like-this 3`, alone in a line of text or in a table: some command has it."""
    text = re.sub(FENCED, "", page.read_text(), flags=re.M | re.S)
    flags = {flag for span in re.findall(r"`(--[^`*]+)`", text) for flag in FLAG.findall(span)}
    assert not flags - all_flags()


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
