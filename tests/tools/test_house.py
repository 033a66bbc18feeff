"""Structure: commands start fast, plans import nothing heavy, imports have one direction, functions have type hints."""

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
#: what commands themselves start; what docs/production.md starts by `python -m`
WITHOUT_DOOR = {"training.fairseq_train", "bench.server_load"}
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
    assert {"train.sh", "evaluate.sh", "translate.sh", "benchmark_training.sh"} <= DOORS.keys()
    commands = {module for module, *_ in DOORS.values()}
    folder = REPO / "scripts" / "ea_tools"
    mains = {
        ".".join(path.relative_to(folder).with_suffix("").parts).removesuffix(".__main__")
        for path in folder.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text()
    }
    assert mains - commands <= WITHOUT_DOOR
    assert commands <= mains


@pytest.mark.parametrize("door", DOORS)
def test_help_takes_less_than_a_second_in_any_folder_whatever_lies_there(door, tmp_path):
    module, *words = DOORS[door]
    assert imports(module, *words, "--help") == set()
    (tmp_path / "argparse.py").write_text("raise SystemExit('imported from where one is')")
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = ["bash", REPO / "scripts" / door, "--help"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert f"usage: {door}" in result.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1


def test_a_plan_of_a_training_imports_nothing_heavy():
    assert imports("training.train", "sample", "ea_transformer_lite", "--dry-run", "--gpus", 0) == set()


def test_curves_need_matplotlib_alone(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        "".join(f'{{"epoch": 1, "train_loss": "{9 - n}", "train_num_updates": "{n}"}}\n' for n in range(1, 5))
    )
    assert imports("figures.curves", log, "--out", tmp_path / "curves.png") == {"matplotlib"}
    assert (tmp_path / "curves.png").exists()


#: folder -> the modules of ours outside of it that its modules may import
PACKAGES = {
    "evolving_attention": (),
    "ea_artifacts": (),
    "ea_runtime": ("ea_artifacts",),
    "ea_fairseq": ("evolving_attention", "ea_artifacts", "ea_runtime"),
    "data-prep/ea_data": ("ea_artifacts", "ea_runtime"),
    "scripts/ea_tools": ("evolving_attention", "ea_artifacts", "ea_runtime", "ea_fairseq", "ea_data"),
    "examples": ("evolving_attention", "ea_artifacts"),
}


def imported(path):
    """The dotted names that a file imports from outside of its folder, anywhere in it, such as "os.path.join"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", PACKAGES)
def test_dependencies_run_one_way(package):
    """Commands, tools, fairseq, evolving_attention; all may use ea_artifacts, ea_runtime; nothing uses examples.

    test_packaging.py compares imports from outside, fairseq for example, with the requirements.
    """
    names = {name for path in (REPO / package).rglob("*.py") for name in imported(path)}
    assert names
    others = {path.split("/")[-1] for path in PACKAGES} - {package.split("/")[-1]}
    assert not [name for name in names if name.split(".")[0] in others and not name.startswith(PACKAGES[package])]


def test_no_code_changes_where_modules_are_found():
    files = [path for folder in (*PACKAGES, "tests") for path in (REPO / folder).rglob("*.py")]
    assert len(files) > 80
    word = "sys" + ".path"
    assert not [path for path in files if word in path.read_text()]
