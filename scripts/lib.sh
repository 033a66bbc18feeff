# Shared by the shell scripts here and in data-prep/: source it, do not run it.
# Gives: repo (the repository's root), python (its interpreter), die, usage, require_setup, show, fairseq_command.

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

# Print a command, quoted so that it can be pasted, then run it.
show() {
    printf '+' >&2
    printf ' %q' "$@" >&2
    printf '\n' >&2
    "$@"
}

# fairseq_command train ARGS...: print and run fairseq-train ARGS... of this repository's environment.
fairseq_command() {
    local name=$1
    shift
    show "$repo/.venv/bin/fairseq-$name" "$@"
}
