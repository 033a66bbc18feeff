"""`pip install` gives evolving_attention and ea_fairseq anywhere; the Dockerfile names files that exist."""

import ast
import importlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from helpers import REPO
from packaging.requirements import Requirement

PROJECT = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]


PACKAGES = {"evolving_attention", "ea_artifacts", "ea_fairseq", "ea_runtime"}
#: what each package may import from outside, whether at once or when it is needed
EXTRAS = {
    extra: [requirement for line in lines if (requirement := Requirement(line)).name != "ea-fairseq"]
    for extra, lines in PROJECT["optional-dependencies"].items()
}
DEPENDENCIES = {
    "evolving_attention": EXTRAS["torch"] + EXTRAS["huggingface"],
    "ea_artifacts": EXTRAS["torch"] + EXTRAS["runtime"],
    "ea_fairseq": EXTRAS["torch"] + EXTRAS["fairseq"],
    "ea_runtime": EXTRAS["runtime"] + EXTRAS["serve"],
}


def test_nothing_is_installed_that_no_extra_names():
    """Else the runtime would bring PyTorch."""
    assert PROJECT["dependencies"] == []


@pytest.mark.parametrize("package", sorted(PACKAGES))
def test_dependencies_are_what_a_package_imports_and_allow_the_versions_of_the_requirements(package):
    files = [REPO / "requirements.txt", REPO / "examples" / "requirements.txt"]
    lines = (line.split("#")[0].split(";")[0].strip() for path in files for line in path.read_text().splitlines())
    pinned = dict(line.split("==") for line in lines if line)
    for requirement in DEPENDENCIES[package]:
        assert requirement.specifier.contains(pinned[requirement.name]), requirement
    used = set()
    for path in (REPO / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                used |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                used.add(node.module.split(".")[0])
    # Triton comes with PyTorch, where it has a GPU
    outside = used - sys.stdlib_module_names - {"triton"} - PACKAGES
    names = {"fairseq": "fairseq-fixed", "subword_nmt": "subword-nmt"}
    assert {names.get(name, name) for name in outside} <= {requirement.name for requirement in DEPENDENCIES[package]}


@pytest.mark.slow
def test_an_installed_package_is_a_user_dir(tmp_path):
    """Built as pip builds it, unpacked elsewhere: all modules, the kernel's source, and fairseq uses it."""
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPO / name, tmp_path)
    for package in PACKAGES:
        shutil.copytree(REPO / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    for room in ("tests", "results", "data"):  # what must not be taken for a package
        (tmp_path / room).mkdir()
        (tmp_path / room / "__init__.py").touch()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
    subprocess.run([*pip, "--no-index", "--wheel-dir", tmp_path / "wheels", tmp_path], check=True, capture_output=True)
    version = re.search(r"^version: (.*)$", (REPO / "CITATION.cff").read_text(), re.MULTILINE)[1]
    assert f"\n## {version}\n" in (REPO / "CHANGELOG.md").read_text()
    wheel = tmp_path / "wheels" / f"ea_fairseq-{version}-py3-none-any.whl"
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert {path.name for path in site.iterdir() if path.suffix != ".dist-info"} == PACKAGES
    kinds = ("*.py", "*.c", "*.h", "*.html", "*.yaml", "py.typed")
    source = {path.relative_to(REPO) for name in PACKAGES for kind in kinds for path in (REPO / name).rglob(kind)}
    assert {path for path in source if not (site / path).is_file()} == set()
    code = (  # torch._dynamo: each command would wait a second for the compiler
        "import ea_fairseq, ea_runtime, sys; from types import SimpleNamespace; from fairseq import utils; "
        "utils.import_user_module(SimpleNamespace(user_dir=ea_fairseq.__path__[0])); "
        "from fairseq.models import ARCH_MODEL_REGISTRY; print(ea_fairseq.__path__[0], 'ea_transformer_lite' in "
        "ARCH_MODEL_REGISTRY, 'torch._dynamo' in sys.modules, ea_fairseq.__version__, ea_runtime.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-P", "-c", code],
        capture_output=True, text=True, cwd="/", env={"PYTHONPATH": str(site), "PATH": "/usr/bin:/bin"}, check=False,
    )  # fmt: skip
    assert done.stdout.split() == [str(site / "ea_fairseq"), "True", "False", version, version], done.stderr


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    import ea_fairseq

    text = ("ea_fairseq.translator", "ea_runtime.translator", "ea_runtime.text")
    for missing, modules, use in (
        ("fairseq", ["ea_fairseq"], lambda: importlib.import_module("ea_fairseq")),
        ("sacremoses", text, lambda: ea_fairseq.load),
    ):
        with monkeypatch.context() as without:
            without.setitem(sys.modules, missing, None)
            without.delattr(ea_fairseq, "translator", raising=False)
            for module in modules:
                without.delitem(sys.modules, module, raising=False)
            with pytest.raises(ModuleNotFoundError, match=f"pip install .*{missing}") as error:
                use()
        named = {word.split("==")[0] for word in str(error.value).partition("pip install ")[2].split()}
        assert named <= {requirement.name for requirement in DEPENDENCIES["ea_fairseq"] + EXTRAS["runtime"]}


def test_what_the_dockerfile_names_is_there():
    """There is no Docker in tests. test_setup.py sets up with no more files than are copied before."""
    text = (REPO / "Dockerfile").read_text()
    assert re.search(r"^FROM python:(3\.\d+)-", text, re.MULTILINE)[1] in ("3.11", "3.12", "3.13")
    names = [*re.findall(r"^COPY (\S+) ", text, re.MULTILINE), *re.findall(r"scripts/\w+\.sh", text)]
    assert len(names) > 4 and all((REPO / name).exists() for name in names)
