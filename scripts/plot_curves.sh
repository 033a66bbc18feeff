#!/usr/bin/env bash
# Learning curves of runs: losses and validation BLEU, the seeds of a model as one line.
# For example: scripts/plot_curves.sh runs/iwslt14-de-en-*
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool figures.curves "$@"
