#!/usr/bin/env bash
# Time beam search and greedy decoding, ours beside fairseq's Transformer, on the same batches in turns.
#
#   scripts/benchmark_decoding.sh [--size lite base] [--data data/NAME] [--beam 1 5] [--exported]
#
# All flags: scripts/benchmark_decoding.sh --help; results: docs/performance.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool bench decoding "$@"
