"""The flags of the benchmarks. They are read before PyTorch is imported, which takes seconds."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Callable, Sequence
from pathlib import Path

from ea_artifacts.command import REPO, Parser, UserError, at_least, positive
from ea_artifacts.files import replaceable

#: Pairs of models, ours and stock, as words after --arch: the papers' two sizes, fairseq's other Transformers, and the
#: papers' other translation systems.
PAIRS = {
    "lite": {"ours": "ea_transformer_lite", "stock": "transformer_lite"},
    "base": {"ours": "ea_transformer_base", "stock": "transformer"},
    "bart_base": {"ours": "ea_bart_base", "stock": "bart_base"},
    **{
        name: {"ours": system, "stock": "transformer_lite"}
        for name, system in {
            "pa": "pa_transformer_lite",
            "pa3": "pa_transformer_lite --ea-conv-layers 3",
            "res": "res_transformer_lite",
            "realformer": "res_transformer_lite --ea-rule realformer",
            "conv": "conv_transformer_lite",
            "pa_conv": "pa_conv_transformer_lite",
            "ea_conv": "ea_conv_transformer_lite",
            "relative": "ea_transformer_lite --ea-relative-positions 8",
            "multiplicative": "ea_transformer_lite --ea-score multiplicative",
            "additive": "ea_transformer_lite --ea-score additive",
            "concatenative": "ea_transformer_lite --ea-score concatenative",
        }.items()
    },
}
PRECISIONS = ("fp32", "bf16", "fp16")
LENGTHS = (16, 32, 64, 128, 256, 512, 1024, 2048)
HEAD_DIM = {4: 40, 8: 64, 12: 64, 16: 64}  # by number of heads: lite, base, RoBERTa and BART: base, large
PATHS = ("ours", "plain", "sdpa")
#: scripts/gpu_report.sh's steps in their order, and about how many seconds of an H100 each needs: guesses, not measured
GPU_STEPS = {
    "equality": 120,
    "capture": 60,
    "base": 60,
    "lite": 45,
    "kernels": 20,
    "attention": 30,
    "base-16384": 60,
    "base-fp16": 60,
    "decoding": 60,
}


def attention(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The operation alone, from projected queries, keys and values to the context: time, share of the floor.

      ours   the model's attention between its projections, by the path that it takes here.
      plain  the same as a composition of PyTorch's operations: products, evolution, mask, softmax.
      sdpa   torch's scaled_dot_product_attention with the same mask: stock attention, which evolves nothing.

    The floor is a lower bound for every implementation. It reads every input, writes every output and computes every
    product once, as fast as a copy and a matrix product are on this machine. A batch holds --tokens / N sentences of N
    tokens; half of them end in padding. Forward is measured without gradients, as in decoding. A RoBERTa has the
    encoder's attention, a language model the decoder's.

        scripts/benchmark_attention.sh --threads 2 --longest 256
        scripts/benchmark_attention.sh --precision fp32 bf16 fp16 --heads 4 8
    """
    parser = _parser("attention", attention)
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"], help="(default: fp32)")
    parser.add_argument("--heads", nargs="+", type=int, choices=HEAD_DIM, default=[4, 8], help="K (default: 4 8)")
    parser.add_argument("--longest", type=int, choices=LENGTHS, default=1024, help="N, in tokens (default: 1024)")
    parser.add_argument("--tokens", type=positive, default=4096, metavar="N", help="of a batch (default: 4096)")
    parser.add_argument("--kernel-size", type=positive, default=3, metavar="N", help="odd (default: 3)")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS), help="(default: all)")
    args = parser.parse_args(arguments)
    if args.kernel_size % 2 == 0:
        parser.error(f"--kernel-size {args.kernel_size} is not odd")
    return args


def _file(text: str) -> Path:
    """An argparse type: the name of a file. A folder would be refused only when a result is there."""
    try:
        replaceable(Path(text))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


def _sentences(text: str) -> str:
    """A number of sentences, or "full"."""
    return text if text == "full" else str(positive(text))


def decoding(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The speed of decoding, ours and fairseq's Transformer: fairseq-generate without its start-up.

    Both models stand in one process and take turns on the same batches. Tokens are those of the best hypotheses, as
    fairseq-generate counts them. Models with random weights end no sentence: each gets as many steps as the targets of
    its batch have tokens on average. On a GPU ours takes turns with and without CUDA graphs. --exported adds our
    model exported, in float32 and in 8 bits. It adds CTranslate2 with the plain one, where that is installed.

        scripts/benchmark_decoding.sh --size lite --threads 2
        scripts/benchmark_decoding.sh --size base --beam 5 --batch 1 8 32
    """
    parser = _parser("decoding", decoding)
    _add_models(parser)
    parser.add_argument("--beam", nargs="+", type=positive, default=[1, 5], metavar="N", help="(default: 1 5)")
    batch = "sentences at once, or full for 12,000 tokens (default: 1 full)"
    parser.add_argument("--batch", nargs="+", type=_sentences, default=["1", "full"], metavar="N", help=batch)
    parser.add_argument("--exported", action="store_true", help="also exported models, and CTranslate2 if it is there")
    return parser.parse_args(arguments)


def training(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The speed of training, ours and fairseq's Transformer: forward, backward and optimizer, by fairseq's own trainer.

    Both models stand in one process and take turns on the same batches, with the recipe's flags. Ours takes turns with
    --optimizer flat_adam, too, as in scripts/train.sh. On a GPU so do stock with flat_adam, and ours with captured
    steps; a turn is then all batches in a row. A process for each model measures its peak memory, over many
    batches of many shapes, as in a real epoch. With --growth, batches of one length each, from 16 to 2048 tokens,
    replace those that are as long as IWSLT'14's.

        scripts/benchmark_training.sh --size lite --threads 2 --max-tokens 2048
        scripts/benchmark_training.sh --size lite base --precision fp32 bf16 fp16
        scripts/benchmark_training.sh --growth --output growth.json
    """
    parser = _parser("training", training)
    _add_models(parser)
    recipe = "flags of training (default: iwslt14-de-en)"
    parser.add_argument("--recipe", default="iwslt14-de-en", metavar="NAME", help=recipe)
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of a batch (default: the recipe's)")
    memory = "to measure memory on; 0: do not (default: 60)"
    parser.add_argument("--memory-batches", type=at_least(0), default=60, metavar="N", help=memory)
    parser.add_argument("--growth", action="store_true", help="batches of one length each")
    longest = "where --growth ends, in tokens (default: 2048)"
    parser.add_argument("--longest", type=int, choices=LENGTHS, default=2048, help=longest)
    args = parser.parse_args(arguments)
    if args.growth and args.output == parser.get_default("output"):
        args.output = args.output.with_name("benchmark_growth.json")
    return args


def gpu_report(arguments: Sequence[str] | None) -> argparse.Namespace:
    """All that needs an NVIDIA GPU, in ten minutes, the most important first.

      equality    captured steps and eager ones; the kernels and the plain composition; decoding with and without graphs
      capture     seconds for all shapes of a recipe, and peak memory
      base, lite  training with 4,096 tokens in bfloat16: stock, stock with our optimizer, ours eager, ours captured
      kernels     the kernels inside a replay
      attention   the operation alone, in a graph: ours, the plain composition, and stock attention
      base-16384, base-fp16   training with 16,384 tokens, and in float16
      decoding    one sentence, beam 5: with graphs, without, and stock

    Each row appears on the screen and is written to --output at once, so a run that is cut off keeps its rows. A step
    that fails stops no other. A step that no longer fits into --minutes is left out. Exit status 1: a step failed, or
    numbers differ that should be equal. Without .venv the script takes python3, if it has torch and fairseq.

        scripts/gpu_report.sh
        scripts/gpu_report.sh --only equality capture --minutes 4
    """
    parser = Parser(prog="gpu_report.sh", description=inspect.getdoc(gpu_report), allow_abbrev=False)
    parser.add_argument(
        "--minutes", type=at_least(0, float), default=10.0, metavar="N", help="for all steps (default: 10)"
    )
    steps = f"{', '.join(GPU_STEPS)} (default: all)"
    parser.add_argument("--only", nargs="+", choices=GPU_STEPS, default=list(GPU_STEPS), metavar="STEP", help=steps)
    parser.add_argument("--dry-run", action="store_true", help="tiny models on a CPU, with a stand-in for CUDA graphs")
    output = REPO / "results" / "gpu_report.json"
    parser.add_argument("--output", type=_file, default=output, metavar="FILE", help="JSON (default: %(default)s)")
    return parser.parse_args(arguments)


def _parser(name: str, options: Callable) -> argparse.ArgumentParser:
    """An argument parser with the options that all benchmarks have.

    Args:
        name: of the file of results.
        options: whose docstring describes the benchmark.
    """
    parser = Parser(prog=f"benchmark_{name}.sh", description=inspect.getdoc(options), allow_abbrev=False)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="(default: a GPU if any)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads (default: PyTorch's choice)")
    parser.add_argument("--repetitions", type=positive, default=7, metavar="N", help="timings each (default: 7)")
    output, times = REPO / "results" / f"benchmark_{name}.json", "JSON with every time (default: %(default)s)"
    parser.add_argument("--output", type=_file, default=output, metavar="FILE", help=times)
    return parser


def _add_models(parser: argparse.ArgumentParser) -> None:
    """Which pairs of whole models, and their precision."""
    sizes = f"pairs of models: {', '.join(PAIRS)} (default: lite)"
    parser.add_argument("--size", nargs="+", choices=PAIRS, default=["lite"], metavar="PAIR", help=sizes)
    precision = "on a CPU bf16 is that of matrix products alone (default: fp32)"
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=["fp32"], help=precision)
    parser.add_argument("--batches", type=positive, default=10, metavar="N", help="how many to time (default: 10)")
