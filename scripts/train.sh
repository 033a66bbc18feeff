#!/usr/bin/env bash
# Train a recipe with an architecture, on the GPUs that there are or on the CPU; run it again and it goes on.
# For example: scripts/train.sh iwslt14-de-en ea_transformer_lite
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool training.train "$@"
