#!/usr/bin/env bash
# A small German-English corpus, made offline from a grammar; --help lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/corpus.sh" sample "$@"
