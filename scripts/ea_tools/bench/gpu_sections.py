"""What scripts/gpu_report.sh measures, section by section, and how a number becomes a row of a table.

Modules that need torch are imported where they are used: the program that starts the processes needs none of them.
"""

import contextlib
import gc
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ea_tools.common import REPO

if TYPE_CHECKING:
    from evolving_attention.kernels import Call

PRECISIONS = ("bf16", "fp16", "fp32")


@dataclass(frozen=True)
class Plan:
    """What is measured: on the GPU, or small and on the CPU where the program is only tried."""

    rehearsal: bool
    data: Path | None = None  # of multi30k; None: the recipe's
    output: Path = REPO / "results" / "gpu"

    @property
    def device(self) -> str:
        return "cpu" if self.rehearsal else "cuda"

    @property
    def sizes(self) -> tuple[str, ...]:
        return ("lite",) if self.rehearsal else ("base", "lite")

    @property
    def precisions(self) -> tuple[str, ...]:
        """By which fairseq's models are measured; it does not train in half precision on a CPU."""
        return ("fp32",) if self.rehearsal else PRECISIONS

    @property
    def corpus(self) -> list[str]:
        """Flags that say which sentences: a rehearsal has no time to make many."""
        return ["--data", str(self.data)] if self.rehearsal and self.data else []

    @property
    def common(self) -> list[str]:
        """Flags of all benchmarks."""
        return ["--device", self.device, "--repetitions", "1" if self.rehearsal else "3"]

    @property
    def recipe(self) -> str:
        return "sample" if self.rehearsal else "multi30k-tiny-en-de"


@dataclass(frozen=True)
class Section:
    """One table of the report."""

    title: str
    share: float  # of the time that there is; what a section leaves goes to those after it
    cells: Callable[[Plan], Iterator[tuple[str, Callable[[float], dict]]]]  # all to measure, what matters most first
    columns: tuple[str, ...]
    row: Callable[[dict], list[str]]  # the columns after the first


# ---- the kernels

#: (rule, geometry, whether there is a previous map) in words and as names of evolution.py
SUMS = {
    "evolving, encoder": ("evolving", "ENCODER_SELF", True),
    "evolving, encoder's first layer": ("evolving", "ENCODER_SELF", False),
    "evolving, decoder": ("evolving", "DECODER_SELF", False),
    "evolving, encoder-decoder": ("evolving", "ENCODER_DECODER", False),
    "predictive": ("predictive", "ENCODER_SELF", True),
    "residual and realformer": ("residual", "ENCODER_SELF", True),  # of the same code: other constants
}


def kernels_cells(plan: Plan) -> Iterator[tuple[str, Callable[[float], dict]]]:
    """The sums in every type for 8 heads; then what else selects other code."""
    if plan.rehearsal:
        options = {"heads": 1, "kernel_size": 1, "length": 3}
        for words in ("evolving, decoder", "residual and realformer"):
            yield f"{words}, fp32", partial(compare_kernels, plan, words, "fp32", **options)
        return
    for precision in PRECISIONS:
        for words in SUMS:
            yield f"{words}, {precision}", partial(compare_kernels, plan, words, precision)
        for words in list(SUMS)[:4]:  # as base and lite call them, which the other sections measure
            yield f"{words}, no dropout, {precision}", partial(compare_kernels, plan, words, precision, dropout=0.0)
    others = {
        "learnt shares": {"learn": True},
        "given logits": {"given": True},
        "4 heads": {"heads": 4, "width": 40},
        "16 heads": {"heads": 16},
        "1 head": {"heads": 1},
        "k = 5": {"kernel_size": 5},
        "k = 1": {"kernel_size": 1},
        "1,000 tokens": {"length": 1000},
    }
    for precision in PRECISIONS:
        for name, options in others.items():
            words = "evolving, encoder"
            yield f"{words}, {name}, {precision}", partial(compare_kernels, plan, words, precision, **options)


def compare_kernels(
    plan: Plan,
    words: str,
    precision: str,
    _seconds: float,
    heads: int = 8,
    kernel_size: int = 3,
    length: int = 30,
    width: int = 64,
    learn: bool = False,
    given: bool = False,
    dropout: float = 0.1,
) -> dict:
    """How far the kernels are from float64, of each result its largest number, beside what passes their own trial."""
    import torch

    from ea_tools.bench.common import DTYPES
    from evolving_attention.evolution import Evolution, Geometry
    from evolving_attention.kernels import Call
    from evolving_attention.kernels.gpu import trial as gpu_trial

    rule, geometry, has_previous = SUMS[words]
    device, dtype = plan.device, DTYPES[precision]
    vectors = torch.ones(1, heads, length, width, device=device, dtype=dtype, requires_grad=True)
    maps = torch.ones(1, heads, length, length, device=device, dtype=dtype)
    mask = torch.zeros(1, 1, 1, length, device=device, dtype=torch.bool)
    options = {"rule": rule, "first": not has_previous, "learn_mix": learn}
    evolution = Evolution(Geometry[geometry], heads, kernel_size, 0.5, 0.1, **options).to(device, dtype)
    conv = evolution.conv
    call = Call(
        *(vectors, vectors, vectors, width**-0.5, evolution.geometry, kernel_size),
        coefficients=evolution.coefficients(has_previous),
        weight=None if conv is None else conv.weight,
        bias=None if conv is None else conv.bias,
        given=maps if given else None,
        **{"hidden": mask, "masked": mask, "previous": maps if has_previous else None},
        **{"dropout": dropout, "keep_map": dropout > 0 or geometry == "ENCODER_SELF"},
    )
    variant = gpu_trial.Variant.of(call)
    if length > 30:  # else the trial takes a smaller problem that gets the same blocks
        variant = variant._replace(rows=length, columns=length)
    errors, tolerance = gpu_trial.errors(variant), gpu_trial.tolerance(variant)
    return {"errors": errors, "tolerance": tolerance, "passed": all(error <= tolerance for error in errors.values())}


@contextlib.contextmanager
def noting_refusals(plan: Plan) -> Iterator[set[str]]:
    """Collect what ran without the kernels, because their trial failed or there are none: its speed is not theirs."""
    from evolving_attention.kernels import gpu

    refused = set()
    if plan.rehearsal:  # where there is no GPU, no kernels are wanted
        yield refused
        return
    if gpu._kernels() is None:
        yield {"all: there are no kernels here"}
        return
    from evolving_attention.kernels.gpu import trial as gpu_trial

    passed = gpu_trial.passed

    def noting(call: "Call", may_try: bool) -> bool:
        verdict = passed(call, may_try)
        if not verdict:
            refused.add(str(gpu_trial.Variant.of(call)))
        return verdict

    gpu_trial.passed = noting
    try:
        yield refused
    finally:
        gpu_trial.passed = passed


# ---- training, decoding, memory, the operation alone: see the benchmarks


def training_cells(plan: Plan) -> Iterator[tuple[str, Callable[[float], dict]]]:
    for size in plan.sizes:
        for precision in plan.precisions:
            yield f"{size}, {precision}", partial(time_training, plan, size, precision)


def training_flags(plan: Plan) -> list[str]:
    small = ["--max-tokens", "60", "--batches", "1"] if plan.rehearsal else ["--batches", "6"]
    return [*plan.common, *plan.corpus, *small, "--memory-batches", "0"]


def time_training(plan: Plan, size: str, precision: str, _seconds: float) -> dict:
    """Updates on IWSLT'14's lengths, ours and fairseq's, turn by turn."""
    from ea_tools.bench import common, options, training

    args = options.training(training_flags(plan))
    return training.measure(args, [], common.prepare(args), size, precision)


def decoding_cells(plan: Plan) -> Iterator[tuple[str, Callable[[float], dict]]]:
    for size in plan.sizes:
        for precision in plan.precisions:
            for batch in ("full", "1"):
                words = "full batches" if batch == "full" else "one sentence at a time"
                yield f"{size}, {precision}, {words}", partial(time_decoding, plan, size, precision, batch)


def decoding_flags(plan: Plan) -> list[str]:
    small = ["--max-tokens", "40", "--batches", "1"] if plan.rehearsal else ["--batches", "3"]
    return [*plan.common, *plan.corpus, *small]


def time_decoding(plan: Plan, size: str, precision: str, batch: str, _seconds: float) -> dict:
    """Beam search with five beams, ours and fairseq's, turn by turn."""
    from ea_tools.bench import common, decoding, options

    args = options.decoding(decoding_flags(plan))
    beam = 2 if plan.rehearsal else 5
    return decoding.measure(args, common.prepare(args), size, precision, beam, batch)


def memory_cells(plan: Plan) -> Iterator[tuple[str, Callable[[float], dict]]]:
    for size in plan.sizes:
        for precision in plan.precisions:
            yield f"{size}, {precision}", partial(weigh_training, plan, size, precision)


def weigh_training(plan: Plan, size: str, precision: str, _seconds: float) -> dict:
    """The most memory that PyTorch's allocator gives out while each model alone trains on batches of many lengths."""
    from ea_tools.bench import common, options, training

    batches = "2" if plan.rehearsal else "20"
    args = options.training([*training_flags(plan), "--memory-batches", batches])
    device = common.prepare(args)
    memory = {}
    for name, arch in options.PAIRS[size].items():
        forget_memory(plan)
        memory[name] = training.memory(args, device, arch, precision, None)
    return {"architectures": options.PAIRS[size], "memory": memory}


def forget_memory(plan: Plan) -> None:
    """Give back what the model before took, and count from here on."""
    import torch

    gc.collect()
    if not plan.rehearsal:
        torch._C._cuda_clearCublasWorkspaces()  # which PyTorch counts, and the next model would be charged with
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def attention_cells(plan: Plan) -> Iterator[tuple[str, Callable[[float], dict]]]:
    """bf16 first, every other length first; torch.compile takes long, and is asked for a few of them."""
    if plan.rehearsal:
        for kind in ("encoder", "decoder"):
            yield f"{kind}, K = 4, fp32, N = 16", partial(time_attention, plan, kind, 4, "fp32", 16, "ours plain sdpa")
        return
    for precision in PRECISIONS:
        for heads in (8, 4):
            for lengths in ((16, 64, 256, 1024), (32, 128, 512)):
                for kind in ("encoder", "decoder", "cross"):
                    for length in lengths:
                        name = f"{kind}, K = {heads}, {precision}, N = {length}"
                        yield name, partial(time_attention, plan, kind, heads, precision, length, "ours plain sdpa")
        for length in (64, 256, 1024):
            name = f"torch.compile, encoder, K = 8, {precision}, N = {length}"
            yield name, partial(time_attention, plan, "encoder", 8, precision, length, "ours compiled")


def attention_flags(plan: Plan, paths: str) -> list[str]:
    return [*plan.common, *(["--tokens", "48"] if plan.rehearsal else []), "--paths", *paths.split()]


def time_attention(plan: Plan, kind: str, heads: int, precision: str, length: int, paths: str, _seconds: float) -> dict:
    """Forward, and forward and backward, in time, memory and share of the floor."""
    from ea_tools.bench import attention, common, options

    args = options.attention(attention_flags(plan, paths))
    device = common.prepare(args)
    peaks = attention.machine(device, common.DTYPES[precision])
    return attention.measure(args, device, precision, kind, heads, length, peaks)


# ---- a whole training


def multi30k_cells(plan: Plan) -> Iterator[tuple[str, Callable[[float], dict]]]:
    for name, arch in (("ours", "ea_transformer_base"), ("stock", "transformer")):
        yield name, partial(train_recipe, plan, arch)


def train_recipe(plan: Plan, arch: str, seconds: float) -> dict:
    """Train until the recipe's end or the end of the time, and score what has been trained to its end."""
    from ea_tools.training import recipes

    data = plan.data or recipes.read(plan.recipe).data
    if not (data / "PREP.json").is_file():
        return {"finished": False, "why": f"no prepared data in {data}: see docs/data.md"}
    run = (plan.output / "runs" / f"{plan.recipe}-{arch}").resolve()
    end = time.monotonic() + seconds
    flags = ["--gpus", "0", *REHEARSED] if plan.rehearsal else ["--gpus", "1"]
    train = ["training.train", plan.recipe, arch, "--data", data, "--run", run, "--no-tensorboard", *flags]
    status, said = command(train, seconds)
    result = {"run": run, "architecture": arch, **progress(run), "without_kernels": refusals(run)}
    if status is None:
        return {**result, "finished": False}
    if status:
        return {**result, "failed": f"train.sh ended with status {status}: {last_line(said)}"}
    averaged = ["--average", "1" if plan.rehearsal else "10"]
    status, said = command(["translating.evaluate", "--data", data, "--run", run, *averaged], end - time.monotonic())
    if status is None:
        return {**result, "finished": False}
    if status:
        return {**result, "failed": f"evaluate.sh ended with status {status}: {last_line(said)}"}
    scores = json.loads((run / "eval" / "test.json").read_text(encoding="utf-8"))["scores"]
    return {**result, "scores": scores, "finished": True}


#: A model and a training of seconds.
REHEARSED = (
    "--encoder-embed-dim 16 --encoder-ffn-embed-dim 16 --encoder-attention-heads 2 --encoder-layers 1 "
    "--decoder-embed-dim 16 --decoder-ffn-embed-dim 16 --decoder-attention-heads 2 --decoder-layers 1 --max-epoch 1"
).split()


def command(words: list, seconds: float) -> tuple[int | None, str]:
    """Run a command of ours; its status, None where its time was over, and what it said, which is also printed."""
    words = [sys.executable, "-P", "-m", f"ea_tools.{words[0]}", *map(str, words[1:])]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        said, _ = process.communicate(timeout=max(1.0, seconds))
        status = process.returncode
    except subprocess.TimeoutExpired:
        process.terminate()  # scripts/train.sh goes on from the last epoch
        said, _ = process.communicate()
        status = None
    print(said, flush=True)
    return status, said


def progress(run: Path) -> dict:
    """What the run's log tells: updates, words a second, and the loss on the validation set.

    The words are those of all epochs that ended, and the seconds the training's alone, as fairseq measures them.
    """
    from ea_tools.training import logs

    log = run / "log.jsonl"
    entries = logs.entries_of(log.read_text(encoding="utf-8", errors="replace")) if log.exists() else []
    scores = {"updates": float(entries[-1][1])} if entries else {}
    words, seconds, before = 0.0, 0.0, 0
    for tag, update, numbers in entries:
        if tag == "valid":
            scores["validation_loss"] = numbers["loss"]
        elif tag == "train":
            words += numbers["wpb"] * (update - before)
            seconds += numbers["train_wall"]
            before = update
    return {**scores, "words_per_second": words / seconds} if seconds else scores


def refusals(run: Path) -> list[str]:
    """The lines of a run's log that say that no kernel did something."""
    log = run / "train.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return [line for line in text.splitlines() if "takes its slower way" in line]


def last_line(said: str) -> str:
    return next((line for line in reversed(said.splitlines()) if line.strip()), "it said nothing")


# ---- rows of tables


def kernels_row(cell: dict) -> list[str]:
    errors = cell["errors"]
    worst = max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))  # nothing is larger than a NaN
    wrong = "" if cell["passed"] else " **wrong**"
    return [f"{errors[worst]:.1e}{wrong}", f"{cell['tolerance']:.0e}", worst]


def speed_row(cell: dict) -> list[str]:
    ratio, speeds = cell["ratio"], cell["tokens_per_second"]
    return [
        f"{ratio['median']:.2f}",
        f"{ratio['q1']:.2f} .. {ratio['q3']:.2f}",
        *(f"{speeds[name]['median']:,.0f}" for name in ("ours", "stock")),
    ]


def memory_row(cell: dict) -> list[str]:
    ours, stock = (cell["memory"][name]["peak"] for name in ("ours", "stock"))
    return [f"{ours / 2**20:,.0f}", f"{stock / 2**20:,.0f}", f"{ours / stock:.2f}"]


def attention_row(cell: dict) -> list[str]:
    paths = {name: passes["forward + backward"] for name, passes in cell["paths"].items()}
    if "ours" not in paths:
        return [f"failed: {cell['cannot_run'].get('ours')}", "", "", "", ""]
    ours = paths["ours"]["milliseconds"]["median"]

    def ratio(name: str) -> str:
        if name in cell["cannot_run"]:
            return "failed"
        return f"{paths[name]['milliseconds']['median'] / ours:.2f}" if name in paths else "not run"

    share = paths["ours"]["floor"]["milliseconds"] / ours
    return [f"{ours:.3f}", ratio("plain"), ratio("compiled"), ratio("sdpa"), f"{share:.0%}"]


def multi30k_row(cell: dict) -> list[str]:
    numbers = [cell.get(name) for name in ("updates", "words_per_second", "validation_loss")]
    bleu = cell.get("scores", {}).get("tokenised_bleu", {}).get("score")
    cells = ["not run" if number is None else f"{number:,g}" for number in numbers]
    return [*cells, "not run" if bleu is None else f"{bleu:.2f}"]


SPEED_COLUMNS = ("model", "ours / stock, speed", "quartiles", "ours, tokens/s", "stock, tokens/s")
ATTENTION_COLUMNS = (
    *("what", "ours, ms", "plain / ours", "torch.compile / ours", "stock attention / ours", "ours, of the floor"),
)

SECTIONS = {
    "kernels": Section(
        "The kernels against the plain composition in float64",
        0.2,
        kernels_cells,
        ("what", "largest error", "allowed", "worst result"),
        kernels_row,
    ),
    "training": Section("Training", 0.25, training_cells, SPEED_COLUMNS, speed_row),
    "decoding": Section("Decoding, beam 5", 0.12, decoding_cells, SPEED_COLUMNS, speed_row),
    "memory": Section(
        "Peak memory of training",
        0.1,
        memory_cells,
        ("model", "ours, MiB", "stock, MiB", "ours / stock"),
        memory_row,
    ),
    "attention": Section(
        "The operation alone, forward and backward", 0.18, attention_cells, ATTENTION_COLUMNS, attention_row
    ),
    "multi30k": Section(
        "Multi30k by the published recipe",
        0.15,
        multi30k_cells,
        ("model", "updates", "words/s", "validation loss", "BLEU"),
        multi30k_row,
    ),
}
