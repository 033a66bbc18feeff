#!/usr/bin/env bash
# Measure and check everything that needs an NVIDIA GPU, the most important first, in at most ten minutes.
# For example: scripts/gpu_report.sh --minutes 5 --output results/h100.json
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
# A rented machine may have its own PyTorch, and no network to set up another.
if [[ ! -e $repo/.venv ]] && python3 -c '
import importlib.util, sys
sys.exit(not all(map(importlib.util.find_spec, ("torch", "fairseq"))))'; then
    exec python3 -P -m ea_tools bench.start gpu_report "$@"
fi
tool bench.start gpu_report "$@"
