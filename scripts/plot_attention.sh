#!/usr/bin/env bash
# Draw a model's attention maps for a sentence, beside the parts that they are mixed of.
#
#   scripts/plot_attention.sh --run runs/NAME --source TEXT [--target TEXT] [--compare runs/BASELINE]
#                             [--kind encoder|decoder|cross] [--layer N] [--head N] [--out FILE.png|.svg|.html|.npz ...]
#
# For example: scripts/plot_attention.sh --run runs/m30k --source "Zwei Hunde spielen." --out maps.png maps.html
# The .html page shows all layers and heads in any browser. All flags: scripts/plot_attention.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool maps.draw "$@"
