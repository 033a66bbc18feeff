#!/usr/bin/env bash
# Train every combination of some flags' values, score each on the validation set, train the best with other seeds.
# For example: scripts/sweep.sh iwslt14-de-en ea_transformer_lite --grid ea-alpha 0 0.1 0.5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool tables.sweep "$@"
