#!/usr/bin/env bash
# Time beam search and greedy decoding, ours beside fairseq's Transformer, on the same batches in turns.
# For example: scripts/benchmark_decoding.sh --size lite base --beam 1 5
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool bench.start decoding "$@"
