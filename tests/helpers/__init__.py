"""Helpers of all tests. With them, the processes that tests start find the packages that pyproject.toml names."""

import os
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
#: the trained model that comes with the repository, in 8 bits
PRETRAINED = REPO / "pretrained/multi30k-de-en"
os.environ["PYTHONPATH"] = os.pathsep.join(str(REPO / name) for name in ("", "scripts", "data-prep", "tests"))
