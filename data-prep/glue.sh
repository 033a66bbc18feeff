#!/usr/bin/env bash
# One task of GLUE as data of fairseq's sentence_prediction: glue.sh TASK [--raw DIR] [--gpt2 DIR]; --help for the rest.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

require_setup
exec "$python" -P -m ea_data.glue "$@"
