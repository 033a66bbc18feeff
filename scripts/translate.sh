#!/usr/bin/env bash
# Translate raw text, one line in, one line out.
# For example: scripts/translate.sh --run runs/NAME < input > output
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool translating.translate "$@"
