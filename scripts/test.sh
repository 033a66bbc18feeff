#!/usr/bin/env bash
# Lint, types, then the test suite, on all cores; sets up .venv first if needed.
#
#   scripts/test.sh                        everything
#   scripts/test.sh --quick                a look at every file: no slow test, the others with their first parameters only
#   scripts/test.sh tests/model -x         one folder; any arguments of pytest
#
# The tests of the attention page need Chromium and chromedriver; without them they are skipped, and the last lines say so.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then usage; exit 0; fi

require_setup
cd "$repo"
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy   # pyproject.toml names the packages
# A process for each core, and a thread for each process: threads that wait for each other are slower. Each process has
# its share of the tests in their order, because neighbours share expensive fixtures; an idle one takes tests from others.
cores=$(env -u OMP_NUM_THREADS -u OMP_THREAD_LIMIT nproc)   # it would count the threads of a process
export OMP_NUM_THREADS=1
exec "$python" -m pytest --numprocesses "$cores" --dist worksteal "$@"
