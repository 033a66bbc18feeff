# Sourced by the corpora beside it, which only differ in name: source corpus.sh NAME ARGS...
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

for argument in "$@"; do
    if [[ $argument == -h || $argument == --help ]]; then
        [[ -x $python ]] || python=${PYTHON:-python3}
        PYTHONSAFEPATH=1 exec "$python" -m ea_data.prepare "$1" --help
    fi
done
require_setup
exec "$python" -P -m ea_data.prepare "$@"
