"""How fast training is, ours and fairseq's Transformer: forward, backward and optimizer, by fairseq's own trainer.

Both models stand in one process and take turns on the same batches, with the recipe's flags. Peak memory is measured in
a process of its own for each model, over many batches of many shapes, as in a real epoch. With --growth, batches of
sentences of one length each, from 16 to 1024 tokens, take the place of the corpus; scripts/plot_growth.sh draws them.

    scripts/benchmark_training.sh --size lite --threads 2 --max-tokens 2048
    scripts/benchmark_training.sh --size lite base --precision fp32 bf16 fp16
    scripts/benchmark_training.sh --growth --output growth.json
"""

import argparse
import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy
import torch
from fairseq.trainer import Trainer
from tqdm import tqdm

from ea_tools.bench.common import (
    PAIRS,
    add_corpus_options,
    calls,
    configuration,
    corpus,
    describe,
    interleave,
    make_task,
    parser,
    pick,
    prepare,
    quiet,
    random_sentences,
    record,
    report_speeds,
    speeds,
    write,
)
from ea_tools.common import UserError, positive, reporting
from ea_tools.recipes import read, spell_flags

LENGTHS = [16, 32, 64, 128, 256, 512, 1024]


def main(arguments=None):
    """Command line: time, measure memory, print, and keep everything in --output."""
    arguments = sys.argv[1:] if arguments is None else [str(word) for word in arguments]
    args = parse(arguments)
    with reporting("benchmark_training"):
        device = prepare(args)
        if args.memory_of:
            print(json.dumps(memory(args, device, **json.loads(args.memory_of))))
            return
        results = []
        for size in args.size:
            for precision in args.precision:
                for length in LENGTHS[: LENGTHS.index(args.longest) + 1] if args.growth else [None]:
                    results.append(measure(args, arguments, device, size, precision, length))
                    write(args.output, record("growth" if args.growth else "training", args, device, results))
    print(f"written: {args.output}")


def parse(arguments):
    found = parser(__doc__, "training")
    found.add_argument(
        "--size", nargs="+", choices=PAIRS, default=["lite"], help="which pair of models (default: lite)"
    )
    found.add_argument(
        "--precision", nargs="+", choices=("fp32", "bf16", "fp16"), default=["fp32"], help="(default: fp32)"
    )
    found.add_argument(
        "--recipe", default="iwslt14-de-en", metavar="NAME", help="flags of training (default: iwslt14-de-en)"
    )
    found.add_argument("--max-tokens", type=positive, metavar="N", help="tokens of a batch (default: the recipe's)")
    add_corpus_options(found)
    found.add_argument(
        "--memory-batches",
        type=int,
        default=60,
        metavar="N",
        help="to measure memory on; 0: do not (default: 60)",
    )
    found.add_argument("--growth", action="store_true", help="one length after another, in the place of a corpus")
    found.add_argument(
        "--longest", type=int, choices=LENGTHS, default=1024, help="where --growth ends, in tokens (default: 1024)"
    )
    found.add_argument("--memory-of", help=argparse.SUPPRESS)  # the process that measures memory: model and precision
    args = found.parse_args(arguments)
    if args.growth and args.output == found.get_default("output"):
        args.output = args.output.with_name("benchmark_growth.json")
    if args.memory_batches < 0:
        found.error(f"--memory-batches {args.memory_batches}: a number of batches, or 0 for none, is wanted")
    if "fp16" in args.precision and (args.device == "cpu" or not torch.cuda.is_available()):
        found.error("--precision fp16 needs a GPU")
    return args


def measure(args, arguments, device, size, precision, length=None):
    """Speed and memory of one pair of models; `length`: on sentences of so many tokens."""
    trainers = {name: trainer(args, arch, device, precision) for name, arch in PAIRS[size].items()}
    batches = choose(args, trainers["ours"].task, length, args.batches)
    label = f"{size} {precision}" + (f", {length} tokens" if length else "")
    steps = {name: training_step(found) for name, found in trainers.items()}
    with tqdm(total=calls(2, len(batches), args.repetitions), desc=label, unit=" steps", mininterval=1) as progress:
        times = interleave(steps, batches, args.repetitions, device, progress)
    result = {
        "size": size,
        "precision": precision,
        "length": length,
        "architectures": PAIRS[size],
        "batches": [describe(batch) for batch in batches],
        **speeds(times),
        "times": times,
    }
    if args.memory_batches:
        result["memory"] = {
            name: memory_alone(arguments, arch=arch, precision=precision, length=length)
            for name, arch in tqdm(PAIRS[size].items(), desc=f"{label}, memory", unit=" models")
        }
    report_speeds(label, result, device)
    for name, used in result.get("memory", {}).items():
        print(
            f"  {PAIRS[size][name]:<20} {used['peak'] / 2**20:>8,.0f} MiB at most, {used['before'] / 2**20:,.0f} before"
        )
    return result


def trainer(args, arch, device, precision):
    """fairseq's trainer with everything as the recipe has it."""
    recipe = read(args.recipe)
    flags = [*spell_flags(recipe.flags_for(arch)), "--max-tokens", args.max_tokens or recipe.batch.tokens]
    config = configuration(arch, *flags, data=args.data or "data", device=device, precision=precision)
    torch.manual_seed(args.seed)
    task = make_task(args, config)
    found = Trainer(config, task, task.build_model(config.model), task.build_criterion(config.criterion))
    found.save_checkpoint = lambda *_: None  # a step that fails would leave a checkpoint before it says why
    return found


def training_step(trainer):
    def step(batch):
        trainer.train_step([batch])
        return batch["ntokens"]

    return step


def choose(args, task, length, count):
    """The batches to time: `count` of the corpus, or one of sentences of `length` tokens, end of sentence included."""
    max_tokens = args.max_tokens or read(args.recipe).batch.tokens
    if length:
        sentences = max(1, max_tokens // length)
        dataset = random_sentences(task, numpy.full((sentences, 2), length - 1), args.seed)
        return [dataset.collater([dataset[index] for index in range(sentences)])]
    return pick(corpus(args, task, "train"), count, args.seed, max_tokens=max_tokens)


def memory_alone(arguments, **what):
    """`memory` in a fresh process, for memory that one model has had is no measure for the next."""
    command = [sys.executable, "-P", "-m", "ea_tools.bench.training", *arguments, "--memory-of", json.dumps(what)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise UserError(f"the process that measures the memory of {what} ended: {said[-1]}")
    return json.loads(result.stdout.splitlines()[-1])


def memory(args, device, arch, precision, length):
    """{"peak", "before"}: bytes at most while training, and before the first step. On the CPU: of the whole process."""
    found = trainer(args, arch, device, precision)
    # A GPU's allocator is asked for its own count; three steps of one shape are enough for the optimizer to exist.
    batches = choose(args, found.task, length, args.memory_batches) * (3 if length else 1)
    before = torch.cuda.memory_allocated() if device == "cuda" else resident("VmRSS")
    step, peak = training_step(found), 0
    for batch in batches:
        if device == "cuda":
            with fairseq_keeps_peak():
                step(batch)
            peak = max(peak, torch.cuda.max_memory_allocated())
        else:
            step(batch)
    return {"peak": peak or resident("VmHWM"), "before": before, "steps": len(batches)}


@contextmanager
def fairseq_keeps_peak():
    """fairseq's trainer starts the count of the peak afresh when it logs; not here."""
    reset, torch.cuda.reset_peak_memory_stats = torch.cuda.reset_peak_memory_stats, lambda *_: None
    try:
        yield
    finally:
        torch.cuda.reset_peak_memory_stats = reset


def resident(field):
    """Bytes of this process in memory: now (VmRSS) or at most so far (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise UserError(f"/proc/self/status has no {field}; --memory-batches 0 leaves memory out")


if __name__ == "__main__":
    quiet()
    main()
