#!/usr/bin/env bash
# Draw how time and memory of a training step grow with the sentences' length, ours and stock.
#
#   scripts/plot_growth.sh results/growth.json [--out FILE.png|.svg|.pdf]
#
# benchmark_training.sh --growth writes the numbers. All flags: scripts/plot_growth.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool figures.growth "$@"
