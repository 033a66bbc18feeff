#!/usr/bin/env bash
# Draw a model's attention maps for a sentence, beside the parts that they are mixed of.
# For example: scripts/plot_attention.sh --run runs/m30k --source "Zwei Hunde spielen." --out maps.png maps.html
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool maps.draw "$@"
