#!/usr/bin/env bash
# WMT'14 English-German, as fairseq's binary data; --help lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/corpus.sh" wmt14-en-de "$@"
