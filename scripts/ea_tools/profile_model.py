"""Parameters and FLOPs of an architecture, counted as in the papers' table 5.

Parameters are without embeddings, output projection and the head of a masked language model. FLOPs are 2 x
multiply-adds of one forward pass, a sentence or a pair of sentences at a time, without those. Any model flag of
fairseq-train may follow: --ea-kernel-size 5
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ea_artifacts.command import Parser, UserError, positive, quiet, reporting
from ea_tools.sides import TASKS, arguments, sides_of
from ea_tools.training import flag_faults

if TYPE_CHECKING:
    from torch import nn

WORDS = 1000  # of the vocabulary: any number, neither count depends on it


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the counts of one architecture."""
    quiet()
    args, flags = parse(arguments)
    with reporting("profile_model"):
        counts = profile(args.arch, flags, args.src_len, args.tgt_len)
    print(f"{args.arch} {' '.join(flags)}".strip())
    print(f"  parameters  {counts['parameters']:>14,}  without embeddings and output projection")
    lengths = {"encoder": f"{args.src_len} source", "decoder": f"{args.tgt_len} target"}
    read = " and ".join(lengths[part] for part in counts["flops_by_part"])
    print(f"  FLOPs       {counts['flops']:>14,}  {read} tokens")
    for name, count in counts["flops_by_part"].items():
        print(f"    {name:<9} {count:>14,}")


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest for the model."""
    parser = Parser(prog="profile_model.sh", description=__doc__, allow_abbrev=False)
    parser.add_argument("--arch", required=True, help="ea_transformer_lite, transformer, ...")
    parser.add_argument("--src-len", type=positive, default=30, metavar="N", help="source tokens (default: 30)")
    parser.add_argument("--tgt-len", type=positive, default=30, metavar="N", help="target tokens (default: 30)")
    return parser.parse_known_args(arguments)


def profile(arch: str, flags: Sequence[str] = (), src_len: int = 30, tgt_len: int = 30) -> dict[str, Any]:
    """{"parameters", "flops", "flops_by_part"} of an architecture with these model flags."""
    flag_faults.check_architecture(arch, "--arch ", translates=False)
    try:
        model = build(arch, flags)
        flops = count_flops(model, src_len, tgt_len)
    except (AssertionError, ValueError) as error:
        raise UserError(f"--arch {arch} {' '.join(flags)}: fairseq builds no such model: {error}") from error
    except TypeError as error:
        raise UserError(f"--arch {arch}: is no Transformer, whose parts could be counted: {error}") from error
    except IndexError as error:
        raise UserError(f"--arch {arch}: has fewer positions than --src-len or --tgt-len asks for: {error}") from error
    return {"parameters": count_parameters(model), "flops": sum(flops.values()), "flops_by_part": flops}


def build(arch: str, flags: Sequence[str] = ()) -> nn.Module:
    """The model as fairseq-train would build it, on a vocabulary of WORDS words."""
    import ea_fairseq  # noqa: F401  (registers the architectures; first, for fairseq is less talkative then)

    # isort: split
    from fairseq.data import Dictionary
    from fairseq.models import ARCH_MODEL_NAME_REGISTRY, ARCH_MODEL_REGISTRY, MODEL_DATACLASS_REGISTRY

    model_class = ARCH_MODEL_REGISTRY[arch]
    args, _ = flag_faults.parse(["data", "--arch", arch, "--task", TASKS[sides_of(model_class)], *flags])
    # fairseq-train's own way from flags to settings, through Hydra, takes most of a second.
    form = MODEL_DATACLASS_REGISTRY.get(ARCH_MODEL_NAME_REGISTRY[arch])
    words = Dictionary()
    for number in range(WORDS):
        words.add_symbol(str(number))
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, max_positions=lambda: 512)
    return model_class.build_model(form.from_namespace(args) if form else args, task)


def count_parameters(model: nn.Module) -> int:
    """The parameters that do not depend on the vocabulary: without embeddings and output projection."""
    left_out = ("embed_tokens.", "embed_positions.", "output_projection.", "adaptive_softmax.", "lm_head.")
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in left_out))


def count_flops(model: nn.Module, src_len: int, tgt_len: int) -> dict[str, int]:
    """{"encoder": ..., "decoder": ...}, whichever the model has, of a forward pass over one sentence or pair."""
    import torch
    from fairseq.modules import LayerDropModuleList
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # The counter sees neither the fused kernel that fairseq's encoder takes in evaluation, nor PyTorch's fused
    # attention on the CPU.
    model.train()
    for module in model.modules():
        if isinstance(module, LayerDropModuleList):
            module.p = 0  # count every layer
    sides = sides_of(type(model))
    source, target = torch.full((1, src_len), 10), torch.full((1, tgt_len), 10)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**arguments(sides, source, target))
    counts = counter.get_flop_counts()
    name = type(model).__name__
    return {part: sum(counts.get(f"{name}.{part}", {}).values()) for part in sides}
