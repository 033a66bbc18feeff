"""`python -m ea_tools NAME ARGUMENTS...`: the commands behind scripts/*.sh, each the `main` of a module."""

import importlib
import sys

if __name__ == "__main__":
    importlib.import_module(f"ea_tools.{sys.argv.pop(1)}").main()
