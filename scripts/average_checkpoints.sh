#!/usr/bin/env bash
# Average the weights of a run's last checkpoints; the flags are those of fairseq's script of this name.
#
#   scripts/average_checkpoints.sh --inputs runs/NAME --num-epoch-checkpoints 10 --output runs/NAME/average10.pt
#
# All flags: scripts/average_checkpoints.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool training.average "$@"
