"""fairseq-generate or fairseq-interactive with matrix products in a CPU's units for bfloat16.

The first word is the program's name; the others are its own. scripts/evaluate.sh and translate.sh call it for
--precision bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from ea_tools.training.products import use_bf16_products


def main(words: Sequence[str]) -> None:
    """Become the program that `words` start."""
    use_bf16_products()
    sys.argv = list(words)  # fairseq reads its flags there
    import_module(f"fairseq_cli.{words[0].removeprefix('fairseq-')}").cli_main()


if __name__ == "__main__":
    main(sys.argv[1:])
