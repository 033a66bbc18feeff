#!/usr/bin/env bash
# Parameters and FLOPs of an architecture, counted as in the papers' tables.
#
#   scripts/profile_model.sh --arch ea_transformer_lite [--src-len 30] [--tgt-len 30] [--json] [model flags]
#
# All flags: scripts/profile_model.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool bench.profile_model "$@"
