# Sourced by the corpora beside it, which only differ in name: source corpus.sh NAME ARGS...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"
require_setup
exec "$python" -P -m ea_data.prepare "$@"
