#!/usr/bin/env bash
# Measure everything that needs an NVIDIA GPU, step by step. Run it again to do the steps that are not done.
#
#   scripts/gpu_report.sh [--output results/gpu] [--only STEP...] [--dry-run]
#
# Each step writes OUTPUT/STEP.log, whose last line is "done" at its end; a benchmark also writes OUTPUT/STEP.json.
# Delete a log to repeat its step. A step that fails stops no other. Use another --output for another GPU or commit.
#
#   kernels     tests of the kernels: values and gradients, compared with the plain composition
#   training    updates and peak memory, ours beside fairseq's Transformer
#   decoding    beam search with 5 beams, ours beside fairseq's Transformer
#   attention   the operation alone: ours, the plain composition, and stock attention
#   compiled    torch.compile of the plain composition, for a few lengths
#   corpus      the generated corpus of data-prep/sample.sh, for the next steps
#   fp16, bf16  a short training in each precision; its BLEU is in OUTPUT/run-STEP/eval
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/lib.sh"

all=(kernels training decoding attention compiled corpus fp16 bf16)
output=$repo/results/gpu
only=()
dry_run=

while (($#)); do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --output) output=$(realpath -m -- "${2:?--output needs a folder}"); shift 2 ;;
        --dry-run) dry_run=1; shift ;;
        --only)
            shift
            while (($#)) && [[ $1 != -* ]]; do
                [[ " ${all[*]} " == *" $1 "* ]] || die "--only $1: there is no such step; choose from ${all[*]}"
                only+=("$1")
                shift
            done
            ((${#only[@]})) || die "--only: name steps; choose from ${all[*]}"
            ;;
        *) die "unknown argument '$1'; see --help" ;;
    esac
done
((${#only[@]})) || only=("${all[@]}")

benchmark() {   # NAME FILE FLAGS...: one command; what all benchmarks here have in common
    commands=("scripts/benchmark_$1.sh --device cuda --repetitions 3 --output ${output@Q}/$2.json ${*:3}")
}

# Set `commands` to the shell commands that a step runs in the repository's folder.
plan() {
    local models="--size base lite --precision bf16 fp16 fp32"
    case $1 in
        kernels) commands=("${python@Q} -m pytest -q -n 8 tests/kernels/test_gpu.py") ;;
        training) benchmark training "$1" "$models" --batches 6 --memory-batches 20 ;;
        decoding) benchmark decoding "$1" "$models" --beam 5 --batch 1 full --batches 3 ;;
        attention) benchmark attention "$1" --precision bf16 fp16 fp32 --paths ours plain sdpa ;;
        compiled)
            benchmark attention "$1" --precision bf16 --kind encoder --heads 8 --longest 256 --paths ours compiled
            ;;
        corpus) commands=("data-prep/sample.sh") ;;
        fp16 | bf16)
            local run="--run ${output@Q}/run-$1"
            commands=(
                "scripts/train.sh sample ea_transformer_lite --gpus 1 --precision $1 --no-tensorboard $run"
                "scripts/evaluate.sh --data data/sample $run"
            )
            ;;
    esac
}

cd "$repo"
if [[ ! $dry_run ]]; then
    require_setup
    "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())" || die "PyTorch sees no GPU here"
    mkdir -p "$output"
fi

failed=()
trap 'exit 130' INT
for step in "${only[@]}"; do
    log=$output/$step.log
    if [[ -f $log && $(tail -n 1 "$log") == "done" ]]; then
        echo "$step: done before, see $log"
        continue
    fi
    plan "$step"
    script=$(printf '%s &&\n' "${commands[@]}")$'\necho done'
    if [[ $dry_run ]]; then
        printf '%s\n' "${commands[@]}"
    elif echo "$step: its output goes to $log" && ! bash -c "$script" > "$log" 2>&1; then
        echo "$step: failed; the end of $log says why" >&2
        failed+=("$step")
    fi
done
((${#failed[@]} == 0)) || die "failed: ${failed[*]}"
