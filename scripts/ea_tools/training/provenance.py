"""The place, time and versions of a computation: every record of a run and of a score holds them."""

import datetime
import os
import platform
import re
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from ea_artifacts.command import REPO

#: folders that scripts write, as git's words for exclusion: changes there are results, not other code
WRITTEN = (":!results", ":!docs", ":!*.md")
PACKAGES = "torch fairseq-fixed sacrebleu sacremoses subword-nmt sentencepiece numpy onnxruntime ctranslate2".split()


def provenance(on_cpu: bool = False) -> dict:
    """Commit, device, versions and time, as they go into a JSON record; `on_cpu` where a GPU is there but not used."""
    return {
        "commit": git_commit(),
        "device": device(on_cpu),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "date": now(),
    }


def now() -> str:
    """The present time, to the second, with its time zone."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def git_commit() -> str | None:
    """The commit of this repository, and whether code differs from it; None without git or outside a repository."""
    if not shutil.which("git"):
        return None

    def git(*words: str) -> str:
        return subprocess.run(["git", "-C", str(REPO), *words], capture_output=True, text=True, check=False).stdout

    top = git("rev-parse", "--show-toplevel").strip()
    if not top or Path(top).resolve() != REPO:  # no repository, or one that ours lies in as a copy
        return None
    commit = git("rev-parse", "HEAD").strip()
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    return commit + (" with local changes" if changed else "") or None


def device(on_cpu: bool = False) -> str:
    """The name of the GPU, or the CPU's with its cores and the threads that PyTorch takes."""
    import torch

    if torch.cuda.is_available() and not on_cpu:
        return torch.cuda.get_device_name()
    cpuinfo = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)", cpuinfo.read_text()) if cpuinfo.exists() else []
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    return f"CPU, {names[0] if names else platform.processor()}, {cores} cores, {threads} thread{'s'[: threads != 1]}"


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
