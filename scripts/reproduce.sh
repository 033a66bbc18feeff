#!/usr/bin/env bash
# Fill a table of the papers, or one of your own: train and evaluate what is missing, then write results/TABLE.md.
#
#   scripts/reproduce.sh table5 | table6 | multi30k | FILE.toml  [options] [fairseq-train flags]
#
# For example: scripts/reproduce.sh table6 --seeds 1 2 3
#              scripts/reproduce.sh multi30k --recipes multi30k-de-en --max-update 1500
# Run it again and it goes on. All options: scripts/reproduce.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool reproduce "$@"
