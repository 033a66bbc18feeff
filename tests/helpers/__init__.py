"""Helpers of all tests. With them, the processes that tests start find the packages that pyproject.toml names."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
os.environ["PYTHONPATH"] = os.pathsep.join(str(REPO / name) for name in ("", "scripts", "data-prep", "tests"))
