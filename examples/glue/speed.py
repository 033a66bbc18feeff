"""Time a training step of a BERT by attention: transformers' sdpa and eager, and ours. Ratios are to sdpa.

    python -m examples.glue.speed --size lite

Sizes: lite is 6 layers of 256 with 8 heads, base is BERT-Base. Rows have 128 tokens and no padding. The ways take turns
in one run, and each has the median of its steps. On a CPU the times are processor time, summed over threads, since
other programs disturb the clock on the wall.
"""

import time

import numpy as np
import torch
from transformers import BertConfig, BertModel

from ea_artifacts.command import Parser, positive
from evolving_attention.huggingface import evolve

SIZES = {
    "lite": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8, "intermediate_size": 1024},
    "base": {},
}
WAYS = ("sdpa", "eager", "evolving")


def build(size: str, way: str, dropout: float) -> BertModel:
    """A model with random weights; evolving: alpha = beta = 0.1."""
    stock = "eager" if way == "evolving" else way
    config = BertConfig(**SIZES[size], attention_probs_dropout_prob=dropout, attn_implementation=stock)
    model = BertModel(config).train()
    return evolve(model, alpha=0.1, beta=0.1) if way == "evolving" else model


def step(model: BertModel, words: torch.Tensor) -> float:
    """Seconds of one step forward and backward. words: B x T."""
    clock = time.perf_counter if words.is_cuda else time.process_time
    began = clock()
    model.zero_grad()
    state = model(words).last_hidden_state
    # Not the state's own mean square, which the last layer norm makes constant.
    (state * torch.randn_like(state)).sum().backward()
    if words.is_cuda:
        torch.cuda.synchronize()
    return clock() - began


def main(words: list[str] | None = None) -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="lite", help="(default: lite)")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="rows of 128 tokens (default: 8)")
    parser.add_argument("--steps", type=positive, default=10, metavar="N", help="of each way (default: 10)")
    parser.add_argument("--dropout", type=float, default=0.1, metavar="P", help="of attention (default: 0.1, as BERT)")
    args = parser.parse_args(words)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    models = {way: build(args.size, way, args.dropout).to(device) for way in WAYS}
    rows = torch.randint(1000, (args.batch, 128), device=device)
    times = np.array([[step(model, rows) for model in models.values()] for _ in range(args.steps + 1)])
    medians = np.median(times[1:], axis=0)  # the first round is warm-up
    machine = f"{device}, {torch.get_num_threads()} threads"
    print(f"{args.size}, {args.batch} x 128 tokens, {machine}, dropout {args.dropout}")
    for way, seconds in zip(WAYS, medians, strict=True):
        print(f"{way:9} {1000 * seconds:8.1f} ms  {seconds / medians[0]:.2f} of sdpa")


if __name__ == "__main__":
    main()
