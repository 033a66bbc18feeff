#!/usr/bin/env bash
# Train a recipe with an architecture, on the machine's GPUs or its CPU; run it again to resume.
# For example: scripts/train.sh iwslt14-de-en ea_transformer_lite
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool training.train "$@"
