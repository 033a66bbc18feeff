#!/usr/bin/env bash
# Your own parallel text, as fairseq's binary data; --help lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/corpus.sh" custom "$@"
