# Shared by the shell scripts here and in data-prep/: source it, do not run it.
# Gives: repo (the repository's root), python (its interpreter), die, usage, require_setup, tool; and the environment below.

# Without CDPATH, for with it cd prints the folder that it goes to.
repo=$(CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$repo/.venv/bin/python

# Python finds ea_fairseq, ea_tools and ea_data by this path: none of them is installed.
export PYTHONPATH=$repo:$repo/scripts:$repo/data-prep${PYTHONPATH:+:$PYTHONPATH}

# PyTorch's threads wait for each other many times a step. By default they wait in a loop for milliseconds, which takes the
# processor from threads that have work, on a machine that is busy. Here they go to sleep after about the time that waking up
# takes: docs/performance.md has the cost.
[[ ${OMP_WAIT_POLICY:-} ]] || export GOMP_SPINCOUNT=${GOMP_SPINCOUNT:-1000}

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# Print the comment block at the head of the calling script as its help text.
usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
}

# Set-up prints to standard error: a command's standard output is its result.
require_setup() {
    bash "$repo/scripts/setup.sh" >&2
}

# tool NAME ARGS...: become the command ea_tools NAME. -P: the folder that one is in has no say in what Python imports.
tool() {
    require_setup
    exec "$python" -P -m ea_tools "$@"
}
