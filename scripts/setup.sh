#!/usr/bin/env bash
# Make .venv in this repository with everything that requirements.txt pins.
#
#   scripts/setup.sh [--examples] [--help]
#
# --examples also installs the packages of examples/, which some tests need too.
# Needs Python 3.11 to 3.13 and, on all but 3.12, a C++ compiler: fairseq is built from source there, about two minutes.
# The interpreter is $PYTHON if set, else the first of python3, python3.12, python3.11, python3.13 of these versions.
# pip's own variables apply, for example PIP_INDEX_URL, or PIP_EXTRA_INDEX_URL for a CPU-only PyTorch.
# Safe to run again: it returns quickly if nothing has changed, and completes an installation that was cut off.
set -euo pipefail

case ${1:-} in
    "" | --examples) ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "setup.sh takes no argument '$1'; see --help" >&2; exit 2 ;;
esac

repo=$(CDPATH= cd -- "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=$repo/.venv
[[ ${PYTHON:-} != */* || $PYTHON == /* ]] || PYTHON=$PWD/$PYTHON   # relative to where one is now
cd "$repo"   # Python imports what lies in the folder that one is in
stamp=$venv/.requirements   # a copy of requirements.txt, written when all of it has been installed

supported() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12), (3, 13)))' 2> /dev/null; }

# Not --quiet: pip shows the size of each download, a bar at a terminal, and that a compilation is still running.
pip=("$venv/bin/python" -m pip --disable-pip-version-check install --constraint "$repo/requirements.txt")
export PIP_USE_PEP517=1   # else pip announces that another way of building, antlr4's, will go
examples() {
    "${pip[@]}" --requirement "$repo/examples/requirements.txt"
    "${pip[@]}" --no-deps --requirement "$repo/examples/time_series/requirements.txt"
}

if [[ -x $venv/bin/python && -f $stamp && $(< "$repo/requirements.txt") == $(< "$stamp") ]]; then
    [[ ${1:-} != --examples ]] || examples
    exit 0
fi
[[ ! -f $stamp ]] || echo "requirements.txt has changed since the last set-up"

python=
for candidate in ${PYTHON:+"$PYTHON"} python3 python3.12 python3.11 python3.13; do
    if supported "$candidate"; then python=$candidate; break; fi
    if [[ $candidate == "${PYTHON:-}" ]]; then break; fi
done
if [[ -z $python ]]; then
    found=$("${PYTHON:-python3}" --version 2>&1) || found="no usable '${PYTHON:-python3}'"
    echo "setup.sh: Python 3.11, 3.12 or 3.13 is needed, found: $found." >&2
    echo "Install one of them, or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh" >&2
    exit 1
fi

if [[ -e $venv ]] && ! supported "$venv/bin/python"; then
    echo "setup.sh: $venv is not an environment of Python 3.11, 3.12 or 3.13; move it away and run this again." >&2
    exit 1
fi

echo "setting up $venv with $("$python" --version); the first time takes some ten minutes"
# A set-up that was killed may have left an environment without pip.
"$venv/bin/python" -m pip --version > /dev/null 2>&1 || "$python" -m venv "$venv"

# Without build isolation, so that a source build of fairseq uses this torch instead of fetching a second one.
echo "== 1/2: PyTorch (0.2 GB for CPUs, several GB with CUDA) and the build requirements"
build=(setuptools wheel)
if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info[:2] == (3, 12))'; then
    build+=(numpy cython ninja)
fi
"${pip[@]}" torch "${build[@]}"
echo "== 2/2: fairseq and the rest (compiling fairseq takes about two minutes; Python 3.12 uses a wheel)"
# Without dependencies: requirements.txt has all of them but torchaudio.
"${pip[@]}" --no-build-isolation --no-deps --requirement "$repo/requirements.txt"

"$venv/bin/python" -W ignore -c 'import logging; logging.disable(); import fairseq, sacrebleu, sacremoses, subword_nmt, sentencepiece' 
cp "$repo/requirements.txt" "$stamp"
[[ ${1:-} != --examples ]] || examples
echo "set-up done"
