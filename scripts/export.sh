#!/usr/bin/env bash
# Export a trained model: a folder that translates without PyTorch and fairseq.
# For example: scripts/export.sh --run runs/quickstart --out exported --int8
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool translating.export "$@"
