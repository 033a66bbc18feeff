#!/usr/bin/env bash
# One language of prepared parallel text, for fairseq's language_modeling, masked_lm and denoising; --help says how.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"
require_setup
exec "$python" -P -m ea_data.one_side "$@"
