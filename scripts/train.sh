#!/usr/bin/env bash
# Train a recipe with an architecture, on the GPUs that there are or on the CPU; run it again and it goes on.
#
#   scripts/train.sh RECIPE ARCH [options] [fairseq-train flags]
#   scripts/train.sh --data data/mine ARCH [options] [fairseq-train flags]
#
# For example: scripts/train.sh iwslt14-de-en ea_transformer_lite
#              scripts/train.sh wmt14-en-de ea_transformer_base --dry-run --gpus 4
# All options: scripts/train.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool training.train "$@"
