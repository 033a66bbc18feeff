#!/usr/bin/env bash
# Attention maps as numbers, for each kind of attention and each layer: entropy, similarity to the layer before, shares of
# skip connection and convolution, alignment error rate. A table, a plot, two models beside each other.
#
#   scripts/map_statistics.sh --run runs/NAME [--compare runs/BASELINE] --data data/NAME [--subset test] [--sentences N]
#                             [--gold ALIGNMENTS] [--out FILE.md|.png|.svg|.json ...]
#
# All flags: scripts/map_statistics.sh --help; meaning of the numbers: docs/attention.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool maps.statistics "$@"
