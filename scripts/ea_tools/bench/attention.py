"""Measure the operation alone: time, share of the floor; options.attention names the candidates."""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ea_fairseq.attention import DecoderAttention, EncoderSelfAttention, EvolvingMultiheadAttention, Padding
from ea_fairseq.graphs import Graph
from ea_fairseq.recording import capturing
from ea_tools.bench import common, options
from evolving_attention.evolution import Geometry
from evolving_attention.kernels import refusals
from evolving_attention.masks import combine

# Axes: B batch, K heads, T target (query) length, S source (key) length, D head dimension, C = K x D. Here T = S = N.
KINDS = {"encoder": Geometry.ENCODER_SELF, "decoder": Geometry.DECODER_SELF, "cross": Geometry.ENCODER_DECODER}
Results = tuple[Tensor, ...]
Path = Callable[[], Results]  # one way to compute the attention of a problem
SHORTEST_TIMING = 0.02  # seconds; shorter calls are repeated


@dataclass
class Problem:
    """One attention layer's inputs."""

    kind: str
    attention: EvolvingMultiheadAttention
    q: Tensor  # N x B x C, before scaling
    k: Tensor  # N x B x C
    v: Tensor  # N x B x C
    previous: Tensor | None  # B x K x N x N, in the encoder
    padding: Tensor  # B x N, True = masked
    future: Tensor | None  # N x N, True = masked, in the decoder's self-attention
    gradients: list[Tensor]  # of the context, and in the encoder of the map that the next layer takes

    @property
    def inputs(self) -> list[Tensor]:
        """The inputs of which gradients are computed."""
        tensors = [self.q, self.k, self.v, self.previous, *self.attention.evolution.parameters()]
        return [tensor for tensor in tensors if tensor is not None]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: time, print, and keep everything in --output."""
    args = options.attention(arguments)
    lengths = options.LENGTHS[: options.LENGTHS.index(args.longest) + 1]

    def cases(device: str) -> Iterator[tuple[str, str, int, int]]:
        for precision in args.precision:
            peaks = machine(device, common.DTYPES[precision])
            print(f"{precision}: copies {peaks['bytes'] / 1e9:,.0f} GB/s, products {peaks['flops'] / 1e9:,.0f} GFLOP/s")
            yield from itertools.product([precision], KINDS, args.heads, lengths)

    common.run("attention", args, cases, measure, report)


def measure(
    args: argparse.Namespace, device: str, precision: str, kind: str, heads: int, length: int
) -> dict[str, Any]:
    """Times, memory and floor of all paths on one problem."""
    peaks = machine(device, common.DTYPES[precision])
    batch = max(1, args.tokens // length)
    problem = make_problem(device, common.DTYPES[precision], kind, heads, length, batch, args.kernel_size)
    runs = {name: PATHS[name](problem) for name in dict.fromkeys(["plain", *args.paths])}
    results = {name: results_of(run, problem) for name, run in runs.items() if name != "sdpa"}
    worst = {name: largest_difference(one, results["plain"]) for name, one in results.items()}
    loops = {  # how many calls make up one timing
        which: max(1, round(SHORTEST_TIMING / fastest(partial(call, runs["plain"], problem), 3, device)))
        for which, call in PASSES.items()
    }
    paths = {name: partial(repeat, runs[name], problem, loops) for name in args.paths}
    label = f"{kind} K={heads} N={length} {precision}"
    times = common.interleave(paths, list(PASSES), args.repetitions, device, label)
    return {
        **{"kind": kind, "heads": heads, "length": length, "batch": batch, "precision": precision},
        "machine": peaks,
        "paths": {
            name: {
                which: {
                    "milliseconds": common.spread([1e3 * row[number] / loops[which] for row in table]),
                    "floor": least(problem, name, peaks)[which],
                }
                for number, which in enumerate(PASSES)
            }
            for name, table in times["seconds"].items()
        },
        "difference_from_plain": worst,
        "calls_per_timing": loops,
        "times": times,
    }


def make_problem(
    device: str, dtype: torch.dtype, kind: str, heads: int, length: int, batch: int, kernel_size: int = 3
) -> Problem:
    """Random inputs; half of the sentences end in padding, up to a fifth of their length."""
    chance = torch.Generator().manual_seed(common.SEED)
    dim = heads * options.HEAD_DIM[heads]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=chance).to(device, dtype)

    torch.manual_seed(common.SEED)
    settings = {"alpha": 0.5, "beta": 0.1, "kernel_size": kernel_size}
    if kind == "encoder":
        attention = EncoderSelfAttention(dim, heads, **settings)
    else:
        cross = kind == "cross"
        attention = DecoderAttention(
            KINDS[kind], dim, heads, **settings, self_attention=not cross, encoder_decoder_attention=cross
        )
    q, k, v = (random(length, batch, dim).requires_grad_() for _ in range(3))
    maps = batch, heads, length, length
    padded = torch.randint(0, length // 5 + 1, (batch, 1), generator=chance) * (torch.arange(batch) % 2)[:, None]
    future = torch.ones(length, length, dtype=torch.bool, device=device).triu(1) if kind == "decoder" else None
    return Problem(
        kind,
        attention.to(device, dtype),
        *(q, k, v),
        previous=random(*maps).requires_grad_() if kind == "encoder" else None,
        padding=(torch.arange(length) >= length - padded).to(device),
        future=future,
        gradients=[random(length, batch, dim), *([random(*maps)] if kind == "encoder" else [])],
    )


def ours(problem: Problem) -> Path:
    """The model's own attention, its projections taken out."""
    attention = problem.attention
    for projection, given in zip(("q_proj", "k_proj", "v_proj"), (problem.q, problem.k, problem.v), strict=True):
        getattr(attention, projection).forward = lambda _, given=given: given
    attention.out_proj = cast(nn.Linear, nn.Identity())
    q, k = problem.q.detach(), problem.k.detach()  # inputs of the projections

    def run() -> Results:
        if problem.kind == "encoder":
            return attention(q, problem.padding, previous=problem.previous, keep_map=True)
        padding = problem.padding if problem.kind == "decoder" else Padding(problem.padding, problem.padding)
        context, _ = attention(q, k, k, padding, need_weights=False, attn_mask=problem.future)
        return (context,)

    return run


def plain(problem: Problem) -> Path:
    """Section by section as the paper has it."""
    return partial(composition, problem)


def composition(problem: Problem) -> Results:
    """Context, and in the encoder the map, by PyTorch's operations one by one."""
    q, k, v = split_heads(problem)
    logits = (q * q.size(3) ** -0.5) @ k.transpose(2, 3)  # B x K x T x S
    masked = cast(torch.Tensor, combine(problem.padding, problem.future)[0])
    hidden = masked | problem.padding[:, None, :, None]
    a_logit = problem.attention.evolution(logits, hidden, problem.previous)
    scores = a_logit.masked_fill(masked, torch.finfo(a_logit.dtype).min)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).type_as(v)
    context = merge_heads(weights @ v)
    return (context,) if problem.previous is None else (context, a_logit)


def sdpa(problem: Problem) -> Path:
    """Stock attention: nothing evolves, no maps go in or out."""

    def run() -> Results:
        q, k, v = split_heads(problem)
        masked = cast(torch.Tensor, combine(problem.padding, problem.future)[0])
        return (merge_heads(F.scaled_dot_product_attention(q, k, v, attn_mask=~masked)),)

    return run


PATHS = {"ours": ours, "plain": plain, "sdpa": sdpa}


def split_heads(problem: Problem) -> Iterator[Tensor]:
    """q, k, v: N x B x C -> B x K x N x D"""
    return map(problem.attention.split_heads, (problem.q, problem.k, problem.v))


def merge_heads(x: Tensor) -> Tensor:
    """B x K x T x D -> T x B x C"""
    batch, heads, length, dim = x.shape
    return x.permute(2, 0, 1, 3).reshape(length, batch, heads * dim)


def forward(run: Path, problem: Problem) -> Results:
    """As in decoding."""
    problem.attention.eval()
    with torch.no_grad():
        return run()


def forward_backward(run: Path, problem: Problem) -> Results:
    """As in training, without dropout; gives all gradients."""
    problem.attention.train()
    outputs = run()
    return torch.autograd.grad(outputs, problem.inputs, problem.gradients[: len(outputs)], allow_unused=True)


def recorded(run: Path, problem: Problem, graph: Graph) -> Callable[[int], int]:
    """A function that repeats forward and backward so many times, by a graph.

    Raises:
        RuntimeError: the plain composition would have been recorded in a kernel's place.
    """
    untried = len(refusals.untried)
    with capturing():
        with graph.aside():
            forward_backward(run, problem)
        with graph.capture():
            kept = problem, forward_backward(run, problem)  # a replay reads and writes this memory
    if len(refusals.untried) > untried:
        raise RuntimeError(f"a kernel had no trial before the capture: {refusals.untried[-1]}")

    def replays(count: int) -> int:
        for _ in range(count):
            graph.replay()
        return len(kept)

    return replays


PASSES = {"forward": forward, "forward + backward": forward_backward}


def results_of(run: Path, problem: Problem) -> list[Tensor]:
    """Outputs and gradients of a path, to be compared."""
    return [*forward(run, problem), *forward_backward(run, problem)]


def largest_difference(results: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of outputs and gradients, each as a share of its largest value; NaN where one is."""
    shares = [(one - other).abs().max() / other.abs().max() for one, other in zip(results, expected, strict=True)]
    return float(torch.stack(shares).max())  # not Python's max, which may pass over a NaN


def fastest(call: Callable[[], Any], count: int, device: str) -> float:
    """Seconds of the fastest of `count` calls."""
    return min(common.timed(lambda _: call(), None, device)[0] for _ in range(count))


def repeat(run: Path, problem: Problem, loops: Mapping[str, int], which: str) -> int:
    """One timing; gives the number of target tokens."""
    for _ in range(loops[which]):
        PASSES[which](run, problem)
    return loops[which] * problem.q.size(0) * problem.q.size(1)


def least(problem: Problem, path: str, peaks: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """`floor` of a path, with the milliseconds that this machine needs for it at its best."""
    length, batch, _ = problem.q.shape
    heads, kernel_size = problem.attention.num_heads, problem.attention.evolution.kernel_size
    kernel_size, maps = (0, False) if path == "sdpa" else (kernel_size, problem.kind == "encoder")
    counts = floor(batch, heads, length, options.HEAD_DIM[heads], kernel_size, problem.q.itemsize, maps, problem.kind)
    return {
        which: {**count, "milliseconds": 1e3 * max(count[unit] / peaks[unit] for unit in peaks)}
        for which, count in counts.items()
    }


def floor(
    batch: int, heads: int, length: int, head_dim: int, kernel_size: int, width: int, maps: bool, kind: str
) -> dict[str, dict[str, int]]:
    """{pass: {"bytes", "flops"}} that no implementation goes below.

    Bytes and FLOPs are separate bounds: an implementation that stores no maps between the passes computes them twice.

    Args:
        kernel_size: 0 without a convolution.
        width: bytes of a number.
        maps: whether maps come from the layer before and go to the next. Others need never leave the processor.
    """
    vectors = batch * heads * length * head_dim * width  # one of q, k, v, context, and of their gradients
    map_bytes = batch * heads * length * length * width if maps else 0
    # forward: q, k, v and the map before in; context and map out
    read_write = 4 * vectors + 2 * map_bytes
    # backward: q, k, v, the map before, and the gradients of context and map in; gradients of q, k, v, map before out
    read_write_back = 7 * vectors + 3 * map_bytes

    # In the decoder's self-attention half of the map is the future, and taps above the kernel's diagonal are removed.
    pixels = length * (length + 1) // 2 if kind == "decoder" else length**2
    taps = kernel_size * (kernel_size + 1) // 2 if kind == "decoder" else kernel_size**2
    # a pixel: its dot product, its convolution, its share of the context; 2 FLOPs are a multiply-add
    flops = 2 * batch * heads * pixels * (head_dim + heads * taps + head_dim)
    return {
        "forward": {"bytes": read_write, "flops": flops},
        # a product has two gradients, each a product of the same size
        "forward + backward": {"bytes": read_write + read_write_back, "flops": 3 * flops},
    }


@functools.cache
def machine(device: str, dtype: torch.dtype) -> dict[str, float]:
    """{"bytes", "flops"} a second that this machine reaches in a copy and in a matrix product; the best of ten."""
    size = 8192 if device == "cuda" else 1024
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    long = torch.empty(2**28 if device == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(long)

    return {
        "bytes": 2 * long.numel() / fastest(lambda: target.copy_(long), 10, device),
        "flops": 2 * size**3 / fastest(lambda: a @ b, 10, device),
    }


def report(result: Mapping[str, Any]) -> None:
    """Print one problem's results, a line for each path."""
    print("\n{kind} attention, K = {heads}, N = {length}, B = {batch}, {precision}".format(**result))
    print(f"  {'':<9}" + "".join(f"{which + ' ms':>22} {'floor':>6}" for which in PASSES))
    for name, passes in result["paths"].items():
        line = f"  {name:<9}"
        for cost in passes.values():
            milliseconds = cost["milliseconds"]["median"]
            share = cost["floor"]["milliseconds"] / milliseconds
            line += f"{milliseconds:22.2f} {share:6.0%}"
        print(line)
