"""What fairseq-train takes flags for. In a process of its own, for importing fairseq takes seconds and much memory.

Standard input: {"names": [...], "commands": [[word, ...], ...]} as JSON. Standard output: a list for each command, of
the values that it gives to the flags called `names`. A command that fairseq refuses ends it with one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ea_tools import flag_faults
from ea_tools.common import UserError


def values(names: Sequence[str], commands: Sequence[Sequence[str]]) -> list[list[Any]]:
    """For each command line of fairseq-train the values of the flags called `names`, None where it has no such flag.

    Raises:
        UserError: fairseq refuses one of them.
    """
    request = json.dumps({"names": list(names), "commands": [list(words) for words in commands]})
    answer = subprocess.run(
        [sys.executable, "-P", "-m", __name__], input=request, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise UserError(answer.stderr.strip().rpartition("\n")[2])
    return json.loads(answer.stdout.splitlines()[-1])


def parsed(names: Sequence[str], commands: Sequence[Sequence[str]]) -> list[list[Any]]:
    """`values` in this process."""
    import ea_fairseq  # noqa: F401  (registers the architectures)

    answers = []
    for words in commands:
        flag_faults.check_architecture(words[words.index("--arch") + 1], "ARCH ")
        args = flag_faults.parse(words)
        answers.append([getattr(args, name.replace("-", "_"), None) for name in names])
    return answers


if __name__ == "__main__":
    try:
        print(json.dumps(parsed(**json.load(sys.stdin)), default=str))
    except UserError as refused:
        sys.exit(str(refused))
