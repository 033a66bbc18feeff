#!/usr/bin/env bash
# Time training, ours beside fairseq's Transformer, on the same batches in turns; its peak memory; growth with length.
#
#   scripts/benchmark_training.sh [--size lite base] [--precision fp32 bf16 fp16] [--growth] [--output FILE.json]
#
# All flags: scripts/benchmark_training.sh --help; results: docs/performance.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool bench training "$@"
