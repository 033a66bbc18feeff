#!/usr/bin/env bash
# Multi30k, real image captions: multi30k.sh de-en|en-de|en-fr [--raw DIR]; --help lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/corpus.sh" multi30k "$@"
