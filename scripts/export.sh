#!/usr/bin/env bash
# Export a trained translation model: a folder that translates without PyTorch and fairseq.
#
#   scripts/export.sh --run RUN --out DIR [--average N | --checkpoint FILE] [--int8]
#
# For example: scripts/export.sh --run runs/quickstart --out exported
#              echo "Guten Morgen!" | python -m ea_runtime exported
# All options: scripts/export.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool translating.export "$@"
