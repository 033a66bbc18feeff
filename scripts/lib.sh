# Shared by the shell scripts here and in data-prep/: source it, do not run it.
# Gives: repo (the repository's root), python (its interpreter), die, usage, require_setup.

repo=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=$repo/.venv/bin/python

die() {
    echo "${0##*/}: $*" >&2
    exit 1
}

# Print the comment block at the head of the calling script as its help text.
usage() {
    awk 'NR > 1 { if (!/^#/) exit; sub(/^# ?/, ""); print }' "$0"
}

require_setup() {
    bash "$repo/scripts/setup.sh"
}
