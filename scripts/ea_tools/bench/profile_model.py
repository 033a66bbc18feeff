"""Parameters and FLOPs of an architecture, counted as in the papers' table 5.

Parameters are without embeddings, output projection and the head of a masked language model. FLOPs are 2 x
multiply-adds of one forward pass, a sentence or a pair of sentences at a time, without those. Any model flag of
fairseq-train may follow: --ea-kernel-size 5
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from ea_data.command_line import Parser
from ea_tools.common import REPO, UserError, quiet, reporting, write_json
from ea_tools.maps.sides import TASKS, arguments, sides_of
from ea_tools.training import flag_faults

if TYPE_CHECKING:  # imported where a model is built: sizes that are known already need neither
    from torch import nn

WORDS = 1000  # of the vocabulary: any number, neither count depends on it


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: print the counts of one architecture."""
    quiet()
    args, flags = parse(arguments)
    with reporting("profile_model"):
        counts = profile(args.arch, flags, args.src_len, args.tgt_len)
    if args.json:
        print(json.dumps(counts))
        return
    print(f"{args.arch} {' '.join(flags)}".strip())
    print(f"  parameters  {counts['parameters']:>14,}  without embeddings and output projection")
    lengths = {"encoder": f"{args.src_len} source", "decoder": f"{args.tgt_len} target"}
    read = " and ".join(lengths[part] for part in counts["flops_by_part"])
    print(f"  FLOPs       {counts['flops']:>14,}  {read} tokens")
    for name, count in counts["flops_by_part"].items():
        print(f"    {name:<9} {count:>14,}")


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Our own options, and the rest for the model."""
    parser = Parser(
        prog="profile_model.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--arch", required=True, help="ea_transformer_lite, transformer, ...")
    parser.add_argument("--src-len", type=int, default=30, metavar="N", help="source tokens (default: 30)")
    parser.add_argument("--tgt-len", type=int, default=30, metavar="N", help="target tokens (default: 30)")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args, flags = parser.parse_known_args(arguments)
    for name in ("src_len", "tgt_len"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    import ea_fairseq  # noqa: F401  (registers the architectures; first, for fairseq is less talkative then)

    # isort: split
    from fairseq.models import ARCH_MODEL_REGISTRY

    if args.arch not in ARCH_MODEL_REGISTRY:
        known = ("ea_", "transformer", "roberta", "bart")
        ours = sorted(name for name in ARCH_MODEL_REGISTRY if name.startswith(known))
        parser.error(f"there is no --arch {args.arch}; some that there are: {', '.join(ours)}")
    return args, flags


def profile(arch: str, flags: Sequence[str] = (), src_len: int = 30, tgt_len: int = 30) -> dict[str, Any]:
    """{"arch", "parameters", "flops", "flops_by_part", ...} of an architecture with these model flags."""
    try:
        model = build(arch, flags)
        flops = count_flops(model, src_len, tgt_len)
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"--arch {arch}: only what is made and called as fairseq's Transformers are can be counted: {error}"
        ) from error
    except (AssertionError, ValueError) as error:
        raise UserError(f"--arch {arch} {' '.join(flags)}: fairseq builds no such model: {error}") from error
    return {
        "arch": arch,
        "flags": list(flags),
        "src_len": src_len,
        "tgt_len": tgt_len,
        "parameters": count_parameters(model),
        "flops": sum(flops.values()),
        "flops_by_part": flops,
    }


def sizes(models: Sequence[tuple[str, Sequence[str]]]) -> list[dict[str, Any]]:
    """The result of `profile` for each (architecture, flags). It is counted once, and then read from the user's cache.

    The cache is one file for each state of ea_fairseq and of the pinned requirements, so that it cannot be out of date.
    """
    state = hashlib.sha256()
    for path in [REPO / "requirements.txt", *sorted((REPO / "ea_fairseq").rglob("*.py"))]:
        state.update(path.read_bytes())
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ea_fairseq"
    cache = folder / f"sizes-{state.hexdigest()[:16]}.json"
    known = {}
    with contextlib.suppress(OSError, ValueError):
        known = json.loads(cache.read_text(encoding="utf-8"))
    keys = [" ".join([arch, *flags]) for arch, flags in models]
    missing = {key: model for key, model in zip(keys, models, strict=True) if key not in known}
    if missing:
        quiet()
        known |= {key: profile(*model) for key, model in missing.items()}
        with contextlib.suppress(OSError):  # without a cache it is only slower
            write_json(cache, known)
    return [known[key] for key in keys]


def build(arch: str, flags: Sequence[str] = ()) -> nn.Module:
    """The model as fairseq-train would build it, on a vocabulary of WORDS words."""
    import ea_fairseq  # noqa: F401  (registers the architectures; first, for fairseq is less talkative then)

    # isort: split
    from fairseq.data import Dictionary
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf
    from fairseq.models import ARCH_MODEL_REGISTRY, build_model

    task_name = TASKS[sides_of(ARCH_MODEL_REGISTRY[arch])]
    args = flag_faults.parse(["data", "--arch", arch, "--task", task_name, *flags])
    args.ea_plain = True  # the counter does not see into kernels
    words = Dictionary()
    for number in range(WORDS):
        words.add_symbol(str(number))
    task = SimpleNamespace(source_dictionary=words, target_dictionary=words, max_positions=lambda: 512)
    with without_drawing():
        return build_model(convert_namespace_to_omegaconf(args).model, task)


def without_drawing() -> AbstractContextManager[object]:
    """Inside, weights stay the memory that they were given: to draw them takes most of a large model's time."""
    import torch
    from torch.overrides import TorchFunctionMode

    class WithoutDrawing(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            if function in (torch.Tensor.uniform_, torch.Tensor.normal_):
                return args[0]
            return function(*args, **kwargs or {})

    return WithoutDrawing()


def count_parameters(model: nn.Module) -> int:
    """Without embeddings and what makes words again of the last layer's output, which depend on the vocabulary."""
    left_out = ("embed_tokens.", "embed_positions.", "output_projection.", "adaptive_softmax.", "lm_head.")
    return sum(p.numel() for name, p in model.named_parameters() if not any(part in name for part in left_out))


def count_flops(model: nn.Module, src_len: int, tgt_len: int) -> dict[str, int]:
    """{"encoder": ..., "decoder": ...}, whichever the model has, of a forward pass over one sentence or pair."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    # In training mode, for fairseq's encoder leaves for one fused kernel in evaluation; and with PyTorch's plain
    # attention, for the counter sees neither that kernel nor the fused attention on the CPU.
    model.train()
    sides = sides_of(type(model))
    source, target = torch.full((1, src_len), 10), torch.full((1, tgt_len), 10)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(**arguments(sides, source, target))
    counts = counter.get_flop_counts()
    name = type(model).__name__
    return {part: sum(counts.get(f"{name}.{part}", {}).values()) for part in sides}


if __name__ == "__main__":
    main()
