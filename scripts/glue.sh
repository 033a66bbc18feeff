#!/usr/bin/env bash
# Fine-tune on a task of GLUE, pick on its development set, and report GLUE's metric over seeds.
#
#   scripts/glue.sh TASK ARCH [--checkpoint model.pt] [--seeds 1 2 3] [--alpha 0.1 0.2] [fairseq-train flags]
#   scripts/glue.sh --table
#
# For example: scripts/glue.sh CoLA ea_roberta_large --checkpoint roberta.large/model.pt --seeds 1 2 3 4 5
# The data come from data-prep/glue.sh TASK. All options: scripts/glue.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool glue "$@"
