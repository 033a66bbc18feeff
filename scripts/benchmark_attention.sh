#!/usr/bin/env bash
# Time the attention alone, ours against the plain composition and fairseq's, over sentence lengths.
#
#   scripts/benchmark_attention.sh [--threads 2] [--longest 256] [--precision fp32 bf16 fp16]
#
# All flags: scripts/benchmark_attention.sh --help; results: docs/performance.md
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool bench attention "$@"
