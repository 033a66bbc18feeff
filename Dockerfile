# The quickstart in a container: a small corpus, training, beam search and BLEU, on the CPU.
#
#   docker build --tag ea-fairseq .
#   docker run --rm ea-fairseq                                  # the quickstart
#   docker run --rm -it --volume "$PWD/runs:/ea-fairseq/runs" ea-fairseq bash
#
# For a GPU, build with --build-arg TORCH_INDEX=https://pypi.org/simple and run with --gpus all.
FROM python:3.12-slim-bookworm

# A C compiler for the CPU's kernel, which is compiled at its first use.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc g++ libc6-dev && rm -rf /var/lib/apt/lists/*

WORKDIR /ea-fairseq
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

# Packages first: they are not installed again when only the code has changed.
COPY requirements.txt ./
COPY scripts/setup.sh scripts/
RUN PIP_NO_CACHE_DIR=1 PIP_EXTRA_INDEX_URL="$TORCH_INDEX" bash scripts/setup.sh

COPY . .
CMD ["bash", "scripts/quickstart.sh"]
