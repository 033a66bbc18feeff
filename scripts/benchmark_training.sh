#!/usr/bin/env bash
# Time training and measure its memory, ours beside fairseq's Transformer, on the same batches in turns.
# For example: scripts/benchmark_training.sh --size lite base --threads 2
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool bench.start training "$@"
