#!/usr/bin/env bash
# Parameters and FLOPs of an architecture, counted as in the papers' tables.
# For example: scripts/profile_model.sh --arch ea_transformer_lite --ea-kernel-size 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool profile_model "$@"
