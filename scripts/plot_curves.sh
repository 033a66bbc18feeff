#!/usr/bin/env bash
# Learning curves of runs: losses and validation BLEU against updates, epochs and hours, the seeds of a model as one line.
#
#   scripts/plot_curves.sh RUN... [--out results/curves.png] [--x updates epochs hours]
#
# For example: scripts/plot_curves.sh runs/iwslt14-de-en-*
# All options: scripts/plot_curves.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool figures.curves "$@"
