"""A training on the CPU keeps freed memory for its next step."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import resource, sys
from ea_tools.training.memory import keep_freed_memory
print(int(keep_freed_memory()) if "keep" in sys.argv else 0)
def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    block = b"x" * (int(sys.argv[1]) << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
pages()
print(pages())
"""


def pages_of_a_second_block(*words, mebibytes=64, **environment):
    """Whether the C library was asked; how many pages the system gave for a block as large as one freed before."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    run = [sys.executable, "-c", PROGRAM, str(mebibytes), *words]
    result = subprocess.run(run, env={**given, **environment}, capture_output=True, text=True, check=True)
    asked, pages = map(int, result.stdout.split())
    return asked, pages


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this counts as Linux does")
def test_a_freed_block_is_used_again():
    asked, pages = pages_of_a_second_block("keep", mebibytes=2100)  # more than mallopt's largest number
    if not asked:
        pytest.skip("this C library has no mallopt")
    assert pages < 100
    assert pages_of_a_second_block()[1] > 1000, "without it, the system has to give all of them again"
    assert pages_of_a_second_block("keep", MALLOC_ARENA_MAX="2")[0] == 0, "the user has decided"
