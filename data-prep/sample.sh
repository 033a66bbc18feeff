#!/usr/bin/env bash
# A small German-English corpus, made offline from a grammar: sample.sh [options]; --help lists them.
source "$(dirname "${BASH_SOURCE[0]}")/recipe.sh" sample "$@"
