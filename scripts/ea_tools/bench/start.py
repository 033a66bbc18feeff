"""The command of scripts/benchmark_NAME.sh and scripts/gpu_report.sh: `python -m ea_tools bench.start NAME FLAGS...`"""

import importlib
import sys

from ea_artifacts.command import quiet
from ea_tools.bench import options


def main() -> None:
    """Read the flags, which may be --help, before anything that takes seconds is imported; then run the benchmark."""
    name, *arguments = sys.argv[1:]
    door = name if name == "gpu_report" else f"benchmark_{name}"
    sys.argv = [f"scripts/{door}.sh", *arguments]  # the command line, in records
    getattr(options, name)(arguments)
    quiet()
    importlib.import_module(f"ea_tools.bench.{name}").main(arguments)
