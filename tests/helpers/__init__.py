"""Helpers of all tests. Importing it lets the processes that tests start find what pyproject.toml makes importable here."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join(str(REPO / name) for name in ("", "scripts", "data-prep", "tests"))
