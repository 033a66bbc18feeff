"""Structure: commands start fast, plans import nothing heavy, imports have one direction, functions have type hints."""

import ast
import graphlib
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
    runpy.run_module("ea_tools", run_name="__main__", alter_sys=True)
finally:
    print("IMPORTED", *(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)
"""


def imports(module, *arguments):
    """The heavy libraries that a command has imported when it ends."""
    command = [sys.executable, "-P", "-c", IMPORTED.format(heavy=HEAVY), module, *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split()[1:])


def test_every_command_has_a_door():
    assert {"train.sh", "evaluate.sh", "translate.sh", "benchmark_training.sh"} <= DOORS.keys()
    commands = {
        word if word == module else f"bench.{word}" for module, *words in DOORS.values() for word in (module, *words)
    }
    folder = REPO / "scripts" / "ea_tools"
    mains = {
        ".".join(path.relative_to(folder).with_suffix("").parts)
        for path in folder.rglob("*.py")
        if re.search("^def main", path.read_text(), re.M)
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
    log.write_text("".join(f'{{"tag": "train", "loss": {9 - n}, "num_updates": {n}}}\n' for n in range(1, 5)))
    assert imports("figures.curves", log, "--out", tmp_path / "curves.png") == {"matplotlib"}
    assert (tmp_path / "curves.png").exists()


#: folder -> the folder that its modules are imported from, and the modules of ours that these may import
PACKAGES = {
    "evolving_attention": (".", set()),
    "ea_artifacts": (".", set()),
    "ea_runtime": (".", {"ea_artifacts"}),
    "ea_fairseq": (".", {"evolving_attention", "ea_artifacts", "ea_runtime"}),
    "data-prep/ea_data": ("data-prep", {"ea_artifacts", "ea_runtime"}),
    "scripts/ea_tools": ("scripts", {"evolving_attention", "ea_artifacts", "ea_runtime", "ea_fairseq", "ea_data"}),
    "examples": (".", {"evolving_attention", "ea_artifacts"}),
}
each_package = pytest.mark.parametrize("package", PACKAGES)


def modules(package):
    """{dotted name: its syntax tree} of the Python files of a package."""
    root = REPO / PACKAGES[package][0]
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in (REPO / package).rglob("*.py")
    }


def imported(name, tree, is_package):
    """The dotted names that a module imports anywhere in it: modules, or what is in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = name.split(".") if is_package else name.split(".")[:-1]
            base = parts[: len(parts) - node.level + 1] if node.level else []
            prefix = [*base, *([node.module] if node.module else [])]
            yield from (".".join([*prefix, alias.name]) for alias in node.names)


def graph(package):
    """{module: all dotted names that it imports}"""
    trees = modules(package)
    packages = {name for name in trees if any(other.startswith(f"{name}.") for other in trees)}
    return {name: set(imported(name, tree, name in packages)) for name, tree in trees.items()}


def executed(name, importer, known):
    """The modules that an import of a name executes: its own, and the ``__init__`` of other packages around it."""
    parts = name.split(".")
    around = [module for end in range(len(parts), 0, -1) if (module := ".".join(parts[:end])) in known]
    return {module for module in around if module == around[0] or not f"{importer}.".startswith(f"{module}.")}


@each_package
def test_no_module_imports_itself_by_way_of_others(package):
    """Also not in functions, for type hints, or by way of an ``__init__``."""
    names = graph(package)
    imports_of = {
        name: set().union(*(executed(each, name, names) for each in others)) for name, others in names.items()
    }
    assert imports_of
    graphlib.TopologicalSorter(imports_of).prepare()  # its error names a circle


@each_package
def test_dependencies_run_one_way(package):
    """Commands, tools, fairseq, evolving_attention; all may use ea_artifacts, ea_runtime; nothing uses examples.

    test_packaging.py compares imports from outside, fairseq for example, with the requirements.
    """
    names = {name for others in graph(package).values() for name in others}
    others = {path.split("/")[-1] for path in PACKAGES} - {package.split("/")[-1]}
    ours = {name for name in names if name.split(".")[0] in others and name != "ea_runtime"}
    assert not [name for name in ours if not name.startswith(tuple(PACKAGES[package][1]))]


PRIVATE = r"\btorch(\.\w+)*\._[a-z]|\b_(forward|backward)_(pre_)?hooks\b|\b(numpy|np)\._[a-z]|\bforward_ad\._"


@each_package
def test_private_names_of_libraries_stand_in_one_file(package):
    found = [path for path in (REPO / package).rglob("*.py") if re.search(PRIVATE, path.read_text())]
    assert len(found) <= 1


def test_no_code_changes_where_modules_are_found():
    files = [path for folder in (*PACKAGES, "tests") for path in (REPO / folder).rglob("*.py")]
    assert len(files) > 80
    word = "sys" + ".path"
    assert not [path for path in files if word in path.read_text()]
