"""The runtime's own packages are enough: it translates without PyTorch and fairseq, and is small and quick to start."""

import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from helpers import PRETRAINED, REPO
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = [Requirement(one).name for one in PROJECT["optional-dependencies"]["runtime"]]
#: most megabytes installed, and in memory; most seconds to the first translation
SIZE, MEMORY, START = 200, 250, 2.0

CODE = """
import pathlib, re, sys, time
begin = time.process_time()
from ea_runtime import Translator
print(Translator(sys.argv[1], threads=1).translate("Haus, Hund.", max_len_b=20))
print(time.process_time() - begin)
print(int(re.search(r"VmHWM:\\s+(\\d+)", pathlib.Path("/proc/self/status").read_text())[1]) / 1024)
print(*{name.partition(".")[0] for name in sys.modules} & {"torch", "fairseq", "ea_fairseq", "ea_tools", "onnx"})
"""


def with_dependencies(names):
    """Distributions and all that they need here, extras left out."""
    found, waiting = {}, list(names)
    while waiting:
        name = waiting.pop().lower()
        if name in found:
            continue
        found[name] = metadata.distribution(name)
        needs = map(Requirement, found[name].requires or [])
        waiting += [need.name for need in needs if need.marker is None or need.marker.evaluate({"extra": ""})]
    return found.values()


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder that holds what pip would install: links to the files of these packages alone."""
    site = tmp_path_factory.mktemp("environment") / "site"
    for distribution in with_dependencies(EXTRAS):
        for file in distribution.files:
            source = Path(distribution.locate_file(file))
            if ".." not in file.parts and source.is_file() and "__pycache__" not in file.parts:
                (site / file).parent.mkdir(parents=True, exist_ok=True)
                (site / file).symlink_to(source.resolve())
    for package in ("ea_artifacts", "ea_runtime"):
        shutil.copytree(REPO / package, site / package, ignore=shutil.ignore_patterns("__pycache__"))
    return site


def test_it_is_small(site):
    size = sum(path.stat().st_size for path in site.rglob("*") if path.is_file()) / 1e6
    assert 50 < size < SIZE


def test_it_translates_soon_and_in_little_memory(site, tmp_path):
    # -S: nothing of the interpreter's own packages
    command = [sys.executable, "-S", "-c", CODE, PRETRAINED]
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    translation, seconds, memory, imported = done.stdout.split("\n")[:4]
    assert translation
    assert float(seconds) < START
    assert float(memory) < MEMORY
    assert imported == ""
