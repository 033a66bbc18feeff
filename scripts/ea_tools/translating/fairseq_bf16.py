"""fairseq-generate with matrix products in a CPU's units for bfloat16, as evaluate.sh --precision bf16 calls it."""

import sys
from pathlib import Path

from fairseq_cli.generate import cli_main

# The printed command can be given anywhere, without scripts/lib.sh.
sys.path.extend(str(Path(__file__).parents[3] / folder) for folder in (".", "scripts", "data-prep"))

from ea_tools.training.products import use_bf16_products

if __name__ == "__main__":
    use_bf16_products()
    cli_main()
