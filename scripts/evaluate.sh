#!/usr/bin/env bash
# Translate a prepared split with a trained run and score it: average, beam search, BLEU in two kinds.
#
#   scripts/evaluate.sh --data data/NAME --run runs/NAME [--subset test] [--average N | --checkpoint FILE]
#                       [--beam 5] [--lenpen 1] [-- fairseq-generate flags]
#   scripts/evaluate.sh --data data/NAME --run EXPORT [--against RUN_OR_EXPORT]
#
# For example: scripts/evaluate.sh --data data/multi30k-de-en --run runs/m30k --average 10 -- --batch-size 64
# Results go to RUN/eval/SUBSET.SETTINGS.json: the scores, their signatures and where they came from; .hyp.txt holds
# the translations; the last of a split is SUBSET.json, too. All flags: scripts/evaluate.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool translating.evaluate "$@"
