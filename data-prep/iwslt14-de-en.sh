#!/usr/bin/env bash
# IWSLT'14 German-English, TED talks, as fairseq's binary data; --help lists the options.
source "$(dirname "${BASH_SOURCE[0]}")/corpus.sh" iwslt14-de-en "$@"
