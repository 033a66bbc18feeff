#!/usr/bin/env bash
# Fill a table of the papers, or one of your own: train and evaluate the missing runs, then write results/TABLE.md.
#
#   scripts/reproduce.sh table5 | table6 | multi30k-laptop | ... | FILE.toml  [options] [fairseq-train flags]
#
# For example: scripts/reproduce.sh table6 --seeds 1 2 3
#              scripts/reproduce.sh multi30k-laptop --nice 19      # on the CPU each core trains one run
# Run it again and it goes on. All options: scripts/reproduce.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool tables.reproduce "$@"
