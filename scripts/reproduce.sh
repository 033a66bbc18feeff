#!/usr/bin/env bash
# Fill a table of the papers, or one of your own: train and score the missing runs, then write its page.
# For example: scripts/reproduce.sh table6 --seeds 1 2 3
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool tables.reproduce "$@"
