"""The flags that evaluate.sh and translate.sh share, the precision of a translation, and fairseq-generate's start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ea_tools.common import REPO, UserError, finite, positive
from ea_tools.training.launch import Launch, choose_precision, gpus

#: fairseq's flags whose values are printed and recorded -> where they come from instead.
SETTLED = {
    **{"--path": "--checkpoint", "--gen-subset": "--subset", "--beam": "--beam", "--lenpen": "--lenpen"},
    **{"--input": "--input", "--nbest": "--nbest of translate.sh; evaluate.sh scores the best alone"},
    **dict.fromkeys(("--source-lang", "--target-lang", "-s", "-t", "--task", "--user-dir"), "the run"),
    **dict.fromkeys(("--fp16", "--bf16", "--memory-efficient-fp16", "--memory-efficient-bf16"), "--precision"),
    **dict.fromkeys(("--post-process", "--remove-bpe", "--results-path"), "the run"),
}


def parse_both(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the flags behind -- , which go to fairseq's program as they are.

    A flag of ``SETTLED`` among those is a usage error.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    args, flags = parser.parse_args(arguments[:end]), list(arguments[end + 1 :])
    for flag in flags:
        name = flag.partition("=")[0]
        # fairseq takes the beginning of a flag for the flag
        meant = [full for full in SETTLED if full == name or (len(name) > 4 and full.startswith(name))]
        if meant:
            parser.error(f"-- {flag}: this is not for fairseq alone; it comes from {SETTLED[meant[0]]}")
    return args, flags


def add_search(parser: argparse.ArgumentParser) -> None:
    """Add the search's own flags and --precision."""
    parser.add_argument("--beam", type=positive, default=5, help="(default: 5)")
    penalty = "length penalty; above 1 favours longer (default: 1)"
    parser.add_argument("--lenpen", type=finite, default=1.0, help=penalty)
    precision = "fp16: on a GPU; bf16: matrix products on a CPU that has units for it (default: fp32)"
    parser.add_argument("--precision", choices=("fp32", "fp16", "bf16"), default="fp32", help=precision)


def choose_device(precision: str, flags: Sequence[str] = ()) -> str:
    """The device of a model, "cuda" or "cpu", by the flags of fairseq's program; it refuses a missing precision."""
    launch = Launch(gpus=0 if "--cpu" in flags else gpus()[0])
    choose_precision(precision, launch)
    if precision == "bf16" and launch.gpus:
        raise UserError("--precision bf16: a GPU translates in fp32 and fp16; take fp16, or add -- --cpu")
    return "cuda" if launch.gpus else "cpu"


def fairseq_generate(precision: str, flags: Sequence[str] = ()) -> list[str]:
    """The words that start fairseq-generate; `flags` go to it, and may hold --cpu."""
    itself = [str(Path(sys.executable).with_name("fairseq-generate"))]
    choose_device(precision, flags)
    if precision == "fp32":
        return itself
    if precision == "fp16":
        return [*itself, "--fp16"]
    # -P: files beside the script are not imported.
    return [sys.executable, "-P", str(REPO / "scripts" / "ea_tools" / "translating" / "fairseq_bf16.py")]
