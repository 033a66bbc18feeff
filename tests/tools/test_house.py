"""The house: doors that open at once, plans that import nothing heavy, imports that run one way, no circle."""

import ast
import re
import resource
import subprocess
import sys

import pytest
from helpers import REPO

HEAVY = ("torch", "fairseq", "matplotlib", "sacrebleu", "sacremoses", "sentencepiece", "subword_nmt")
DOORS = {
    path.name: re.search(r'^tool (.+) "\$@"$', text, re.M)[1].split()
    for path in sorted((REPO / "scripts").glob("*.sh"))
    if re.search(r"^tool ", text := path.read_text(), re.M)
}
# Runs a command as its door does, and says at the end which of the heavy libraries it has imported.
IMPORTED = """
import runpy, sys
try:
    runpy.run_module("ea_tools.{module}", run_name="__main__", alter_sys=True)
finally:
    print("IMPORTED", *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def imports(module, *arguments):
    """The heavy libraries that a command has imported when it ends."""
    code = IMPORTED.format(module=f"{module}.__main__" if module == "bench" else module, heavy=HEAVY)
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split()[1:])


def test_every_command_has_a_door():
    assert {
        "train.sh",
        "evaluate.sh",
        "translate.sh",
        "average_checkpoints.sh",
        "benchmark_training.sh",
    } <= DOORS.keys()
    commands = {module for module, *_ in DOORS.values()}
    folder = REPO / "scripts" / "ea_tools"
    mains = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert mains - commands <= {"training.fairseq_train", "translating.fairseq_bf16"}, (
        "only what commands themselves start has no door"
    )
    assert commands <= mains


@pytest.mark.parametrize("door", DOORS)
def test_help_takes_less_than_a_second(door):
    module, *words = DOORS[door]
    assert imports(module, *words, "--help") == set()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["bash", REPO / "scripts" / door, "--help"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert f"usage: {door}" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_a_door_opens_in_any_folder_whatever_lies_there(tmp_path):
    (tmp_path / "argparse.py").write_text("raise SystemExit('imported from where one is')")
    result = subprocess.run(
        ["bash", REPO / "scripts" / "train.sh", "--help"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_plan_of_a_training_imports_nothing_heavy():
    assert imports("training.train", "sample", "ea_transformer_lite", "--dry-run", "--gpus", 0) == set()


def test_curves_need_matplotlib_alone(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "".join(f'{{"epoch": 1, "train_loss": "{9 - n}", "train_num_updates": "{n}"}}\n' for n in range(1, 5))
    )
    assert imports("figures.curves", log, "--out", tmp_path / "curves.png") == {"matplotlib"}
    assert (tmp_path / "curves.png").exists()


def modules(*folders):
    """{dotted name: its syntax tree} of the Python files below these folders of the repository."""
    return {
        ".".join(path.relative_to(REPO / folder).with_suffix("").parts).removesuffix(".__init__"): ast.parse(
            path.read_text()
        )
        for folder in folders
        for path in (REPO / folder).rglob("*.py")
    }


def imported(name, tree, is_package):
    """The dotted names that a module imports anywhere in it, as far as they may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".") if is_package else name.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{prefix}.{alias.name}" for alias in node.names)
            yield prefix


def graph(*folders):
    trees = modules(*folders)
    packages = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    return {
        name: {other for other in imported(name, tree, name in packages) if other in trees and other != name}
        for name, tree in trees.items()
    }


@pytest.mark.parametrize("folder", ["scripts", "data-prep"])
def test_no_module_imports_itself_by_way_of_others(folder):
    """Also not in functions or for type hints."""
    left = graph(folder)
    packages = {name for name in left if any(other.startswith(f"{name}.") for other in left)}
    left = {name: others - packages for name, others in left.items() if name not in packages}
    assert len(left) > 5
    while free := [name for name, others in left.items() if not others & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {left}"


def test_dependencies_run_one_way():
    """Commands, ea_tools, then ea_fairseq and ea_data, which know neither ea_tools nor each other."""
    tops = {
        folder: {
            name.split(".")[0] for module, tree in modules(folder).items() for name in imported(module, tree, False)
        }
        for folder in ("ea_fairseq", "data-prep/ea_data")
    }
    assert "torch" in tops["ea_fairseq"] and "numpy" in tops["data-prep/ea_data"]
    assert not tops["ea_fairseq"] & {"ea_tools", "ea_data"}
    assert not tops["data-prep/ea_data"] & {"ea_tools", "ea_fairseq", "torch"}  # fairseq itself has GPT-2's subwords


def test_no_code_changes_where_modules_are_found():
    files = [
        path for folder in ("scripts", "data-prep", "ea_fairseq", "tests") for path in (REPO / folder).rglob("*.py")
    ]
    assert len(files) > 80
    word = "sys" + ".path"
    assert not [path for path in files if word in path.read_text()]
