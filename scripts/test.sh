#!/usr/bin/env bash
# Lint, then the whole test suite; sets up .venv first if needed.
#
#   scripts/test.sh [pytest arguments]     for example: scripts/test.sh -m "not slow" -x
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit 0; fi

require_setup
cd "$repo"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
"$python" -m pytest "$@"
