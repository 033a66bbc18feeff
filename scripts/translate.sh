#!/usr/bin/env bash
# Translate raw text: tokenise, split into subwords, beam search, put together again. One line in, one line out.
#
#   scripts/translate.sh --run runs/NAME < input > output
#   scripts/translate.sh --run runs/NAME --input FILE --output FILE
#   scripts/translate.sh --run EXPORT < input > output
#
# All options: scripts/translate.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool translating.translate "$@"
