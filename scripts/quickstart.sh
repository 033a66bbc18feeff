#!/usr/bin/env bash
# From nothing to BLEU in a few minutes, on a CPU: sets up .venv if needed, prepares a German-English corpus, trains
# ea_transformer_lite on it, averages its checkpoints, translates held-out sentences with beam 5 and scores them.
#
#   scripts/quickstart.sh [--help]
#
# Needs no network after set-up. Leaves data/sample and runs/quickstart; it keeps finished parts.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

case ${1:-} in
    "") ;;
    -h | --help) usage; exit 0 ;;
    *) die "takes no argument '$1'; see --help" ;;
esac

run=runs/quickstart
require_setup
cd "$repo"   # what is printed can be pasted there

echo "== data: German and English from a grammar"
bash data-prep/sample.sh

echo "== training: ea_transformer_lite, two to four minutes; the whole log is in runs/quickstart/train.log"
train=(bash scripts/train.sh sample ea_transformer_lite --run "$run" --no-tensorboard --gpus 0)
if [[ -t 1 && -t 2 ]]; then "${train[@]}"; else "${train[@]}" | { grep --line-buffered -oE 'epoch [0-9]+(,| of) .*' || true; }; fi

echo "== translation and scores: 500 held-out sentences, the average of the checkpoints, beam 5"
bash scripts/evaluate.sh --data data/sample --run "$run"

echo
echo "== some of them"
for line in 1 2 3 4 5; do
    for kind in "source data/sample/raw/test.de" "model $run/eval/test.hyp.txt" "reference data/sample/raw/test.en"; do
        printf '%-10s %s\n' "${kind%% *}" "$(sed -n "${line}p" "${kind#* }")"
    done
    echo
done

echo "next: more sentences of this kind; or a model of your own text, by README.md, \"Train on your own data\""
echo "  echo 'Heute danken sie einem Mann.' | bash scripts/translate.sh --run $run"
