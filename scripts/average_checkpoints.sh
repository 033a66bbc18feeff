#!/usr/bin/env bash
# Average the weights of a run's last checkpoints, with the flags of fairseq's script of this name.
# For example: scripts/average_checkpoints.sh --inputs RUN --num-epoch-checkpoints 5 --output RUN/average5.pt
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool training.average "$@"
