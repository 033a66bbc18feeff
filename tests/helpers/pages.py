"""The blocks of shell in README and docs/, and the commands in them."""

import importlib
import json
import re
import shlex
import sys

from helpers import REPO, warm

PAGES = [REPO / "README.md", REPO / "CONTRIBUTING.md", *sorted((REPO / "docs").glob("*.md"))]
FAIRSEQ = ("fairseq-train", "fairseq-generate", "fairseq-interactive", "fairseq-eval-lm", "fairseq-preprocess")
FENCED = r"^ *```(\w*)\n(.*?)^ *```$"
PROMPT = r"(?:node\d\$|srun) (.*)"
INDENTED = r"(?:^    +\S.*\n)+"


def blocks(text, *languages):
    """The fenced blocks of these languages; without a language those of shell, and indented ones too."""
    found = [
        (match.start(), match[2])
        for match in re.finditer(FENCED, text, re.M | re.S)
        if match[1] in (languages or ("", "bash", "sh"))
    ]
    if not languages:
        rest = re.sub(FENCED, lambda match: "\n" * len(match[0]), text, flags=re.M | re.S)
        found += [(match.start(), match[0]) for match in re.finditer(INDENTED, rest, re.M)]
    return [block for _, block in sorted(found)]


def lines(block):
    """The lines of a block of shell, continued ones as one; where some have a prompt, those are the commands."""
    joined = [line.strip() for line in block.replace("\\\n", " ").splitlines()]
    return [match[1] for line in joined if (match := re.match(PROMPT, line))] or joined


def spans(text):
    """Code within lines."""
    rest = re.sub(FENCED, "", text, flags=re.M | re.S)
    return [span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", re.sub(r"^    +\S.*\n", "", rest, flags=re.M))]


def commands(line):
    """Those of our commands, and of fairseq's, that a line of shell runs, as words."""
    try:
        words = shlex.split(line, comments=True)
    except ValueError:  # not a line of shell
        return
    command = []
    for word in [*words, ";"]:
        if word.rstrip(";") in ("", "|", "&&", "||", "do", "done", "then"):
            if command and is_command(command[0]):
                yield command
            command = []
        elif word.startswith("$(") or (not command and (word == "bash" or re.fullmatch(r"[A-Z_]+=.*", word))):
            continue
        else:
            command.append(word.removesuffix(";"))


def is_command(word):
    return word in FAIRSEQ or re.fullmatch(r"(\./)?(scripts|data-prep)/\S+\.sh", word) is not None


def run_blocks():
    """Run the blocks on standard input, [[language, text], ...] as JSON; print the output of those that fail.

    This process imports the libraries once. A block of plain commands has them forked, another one is bash's.
    """
    for name in ("matplotlib.figure", "torch", "fairseq", "sacrebleu", "sacremoses"):
        importlib.import_module(name)
    faults = []
    for language, block in json.load(sys.stdin):
        for command in [["python", "-c", block]] if language == "python" else _words(block):
            done = warm.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                faults.append(f"{command}\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
                break
    json.dump(faults, sys.stdout)


def _words(block):
    """The words of each line of a block of plain commands; of another block bash's, which runs it."""
    bare = re.sub(r"(^|\s)#.*|'[^']*'", " ", block)
    if re.search(r"[|<>$;&*(`~{[]|^ *(cd|export|for|if) |^\w+=", bare, re.M):
        return [["bash", "-euo", "pipefail", "-c", block]]
    return [words for line in block.splitlines() if (words := shlex.split(line, comments=True))]
