"""What fairseq-train takes flags for. In a process of its own, for importing fairseq takes seconds and much memory.

Standard input: {"names": [...], "commands": [...]} as JSON, as `values` gets them. Standard output: a list for each
command, of the values that it gives to the flags called `names`. A command that fairseq refuses ends it with one line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ea_tools.common import UserError
from ea_tools.training import flag_faults

Command = tuple[Sequence[str], Sequence[str]]  # the words, and the names of flags that may be left out


def values(names: Sequence[str], commands: Sequence[Command]) -> list[list[Any]]:
    """For each command line of fairseq-train the values of the flags called `names`, None where it has no such flag.

    Raises:
        UserError: fairseq refuses one of them.
    """
    request = json.dumps({"names": list(names), "commands": list(commands)})
    answer = subprocess.run(
        [sys.executable, "-P", "-m", __name__], input=request, capture_output=True, text=True, check=False
    )
    if answer.returncode:
        raise UserError(answer.stderr.strip().rpartition("\n")[2])
    return json.loads(answer.stdout.splitlines()[-1])


def parsed(names: Sequence[str], commands: Sequence[Command]) -> list[list[Any]]:
    """`values` in this process."""
    answers = []
    for words, optional in commands:
        args, _ = flag_faults.parse_without(words, optional)
        answers.append([getattr(args, name.replace("-", "_"), None) for name in names])
    return answers


if __name__ == "__main__":
    try:
        print(json.dumps(parsed(**json.load(sys.stdin)), default=str))
    except UserError as refused:
        sys.exit(str(refused))
