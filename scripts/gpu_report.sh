#!/usr/bin/env bash
# Measure everything that needs an NVIDIA GPU, in under ten minutes; run it again and it goes on with what is missing.
#
#   scripts/gpu_report.sh [--minutes 9] [--output results/gpu] [--only SECTION...] [--rehearse]
#
# Leaves OUTPUT/SECTION.json with every number, and OUTPUT/report.md with tables: the kernels' numbers against the plain
# composition's, the operation alone, training and decoding beside fairseq's Transformer, peak memory, and a training on
# Multi30k by the published recipe. To measure a section once more, delete its file. All flags: scripts/gpu_report.sh --help
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

tool bench.gpu_report "$@"
