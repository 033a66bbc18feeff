#!/usr/bin/env bash
# Attention maps as numbers, for each kind of attention and each layer; docs/attention.md has their meaning.
# For example: scripts/map_statistics.sh --run runs/NAME --compare runs/BASELINE --data data/NAME
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
tool maps.statistics "$@"
