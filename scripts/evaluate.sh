#!/usr/bin/env bash
# Translate a prepared split with a trained run or an export, and score it.
# For example: scripts/evaluate.sh --data data/multi30k-de-en --run runs/m30k -- --batch-size 64
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool translating.evaluate "$@"
