#!/usr/bin/env bash
# One language of a prepared folder of parallel text, as data for fairseq's language_modeling, masked_lm and denoising.
#
#   data-prep/one-side.sh FOLDER LANGUAGE OUT
#
# For example: data-prep/one-side.sh data/multi30k-de-en en data/multi30k-en
# The binary data are the same files under the names that those tasks look for; FOLDER stays as it is.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../scripts/lib.sh"

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
    usage
    exit
fi
[[ $# == 3 ]] || die "wanted: FOLDER LANGUAGE OUT; see --help"
folder=$1 language=$2 out=${3%/}
[[ -n $out && ! -e $out ]] || die "$3: is there already; delete it, or name another"
[[ -f $folder/PREP.json ]] || die "$folder/PREP.json: no such file; is $folder a folder made by data-prep/?"
[[ -f $folder/dict.$language.txt ]] || die "$folder: has no dict.$language.txt; its languages are" \
    "$(CDPATH= cd -- "$folder" && echo dict.*.txt)"

require_setup
temporary=$out.tmp.$$
trap 'rm -rf "$temporary"' EXIT
mkdir -p "$temporary"
cp "$folder/dict.$language.txt" "$temporary/dict.txt"
for file in "$folder"/*."$language".bin "$folder"/*."$language".idx; do
    name=${file##*/}
    cp "$file" "$temporary/${name%%.*}.${name##*.}"
done
for file in code sentencepiece.bpe.model "vocabulary.$language"; do
    [[ ! -f $folder/$file ]] || cp "$folder/$file" "$temporary/"
done
"$python" -P -c '
import json, sys
prep = json.load(open(sys.argv[1], encoding="utf-8"))
kept = {name: prep[name] for name in ("name", "tokenizer", "escape", "unicode", "lowercase", "bpe", "rules", "languages") if name in prep}
print(json.dumps({**kept, "source_lang": sys.argv[2], "target_lang": sys.argv[2]}, indent=1))
' "$folder/PREP.json" "$language" > "$temporary/PREP.json"
mv "$temporary" "$out"
echo "$out: ready"
