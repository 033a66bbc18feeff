#!/usr/bin/env bash
# Time the attention alone, ours against the plain composition and stock attention.
# For example: scripts/benchmark_attention.sh --threads 2 --longest 256
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool bench.start attention "$@"
