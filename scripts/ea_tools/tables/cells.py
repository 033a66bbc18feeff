"""The cells of a table: train and score those without a result, side by side, and keep their records."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tqdm import tqdm

from ea_artifacts.command import REPO, UserError, parse_flags, positive
from ea_artifacts.files import read_json
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import AVERAGED
from ea_tools.tables import page, records
from ea_tools.tables.table import Row, Table, check_flags, check_seeds
from ea_tools.training import launch, recipes, train


@dataclass(frozen=True)
class Cell:
    """One model to train: a row on a recipe with a seed."""

    table: Table
    row: Row
    recipe: str
    seed: int

    @property
    def run(self) -> str:
        """The run's name, RECIPE/NAME."""
        return self.table.run(self.row, self.recipe, self.seed)

    @property
    def subsets(self) -> list[str]:
        """The splits to score."""
        return self.table.subsets(self.recipe)

    def __str__(self) -> str:
        return f"{self.row.label}, {self.recipe}, seed {self.seed}"


def parse(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, folder: str
) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command that trains the cells of a table, and flags for every training run.

    Args:
        parser: has the command's own options, --seeds among them.
        folder: in runs/, for the runs.
    """
    add = parser.add_argument
    add("--average", type=positive, default=AVERAGED, metavar="N", help=f"checkpoints averaged (default: {AVERAGED})")
    add("--gpus-per-run", type=positive, metavar="N", help="run cells side by side on N free GPUs each")
    at_once = "runs at once: of one thread on the CPU (default: one per core), or on the same GPUs (default: 1)"
    add("--at-once", type=positive, metavar="N", help=at_once)
    add("--nice", type=int, default=0, metavar="N", help="priority of the runs: 19 is the lowest (default: 0)")
    add("--runs", type=Path, default=REPO / "runs" / folder, metavar="DIR", help=f"default: runs/{folder}")
    add("--results", type=Path, default=REPO / "results", metavar="DIR", help="where reports go (default: results)")
    add("--collect", action="store_true", help="run nothing, write the report from what there is")
    add("--dry-run", action="store_true", help="print what would be run")
    args, extra = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    try:
        check_flags("--", parse_flags(extra))
        if args.seeds:
            check_seeds("--seeds", args.seeds)
    except UserError as error:
        parser.error(str(error))
    return args, extra


def fill(
    table: Table, rows: Sequence[Row], seeds: Sequence[int], args: argparse.Namespace, only: Sequence[str] = ()
) -> list[str]:
    """Run the missing cells of these rows, and of `only` these recipes, and write the page; returns the failed cells.

    The page shows the table's own seeds besides. Cells are in the order of seeds, and kept when they are finished.
    """
    names = [name for name in table.recipes if not only or name in only]
    chosen = [Cell(table, row, name, seed) for seed in seeds for name in names for row in rows]
    failed = [] if args.collect else run_missing(chosen, args)
    if args.dry_run:
        return failed
    with records.opened(args.results) as kept:
        for cell in chosen:
            for subset in cell.subsets:
                kept.keep(args.runs / cell.run, cell.run, subset, settings(args))
        shown = dict.fromkeys([*table.seeds, *seeds])
        entries = page.gather(table, kept, shown, settings(args))
    page.write(table, entries, args.results)
    return failed


def end(command: str, failed: Sequence[str]) -> None:
    """End the program with a status that says whether cells failed, and their names."""
    if failed:
        sys.exit(f"{command}: these failed; run the same command again, it goes on:\n  " + "\n  ".join(failed))


def settings(args: argparse.Namespace) -> str:
    """The name that evaluate.sh gives to the settings in `commands`: its default beam, and --average."""
    return f"beam5.average{args.average}"


def check(cells: Iterable[Cell], args: argparse.Namespace) -> None:
    """Refuse a row that train.sh would refuse, before the first of them is started."""
    gpus = ["--gpus", str(args.gpus_per_run)] if args.gpus_per_run else []
    for cell in {cell.row.label: cell for cell in cells}.values():
        words, printed = commands(cell, args)[0][1:], io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                train.prepare([*words, *gpus, "--dry-run"])
        except (UserError, SystemExit) as error:  # the latter from argparse, which has printed the reason
            reason = error if isinstance(error, UserError) else printed.getvalue().strip()
            raise UserError(f"{cell.row.label}: {reason}") from None


def run_missing(cells: Iterable[Cell], args: argparse.Namespace) -> list[str]:
    """Run the cells that have no result yet; returns those that failed, and faults of data, as text.

    Raises:
        UserError: no cell is done, and none has its data.
    """
    missing, done, without_data, kept = [], 0, Counter[str](), records.Records(args.results)
    for cell in cells:
        if all(is_done(cell, subset, kept, args) for subset in cell.subsets):
            say(f"done already: {cell}")
            done += 1
            continue
        try:
            if not args.dry_run:
                Preparation.at(recipes.read(cell.recipe).data)
            missing.append(cell)
        except UserError as error:  # it names the command that makes the data
            without_data[str(error)] += 1
    if without_data and not missing and not done:
        raise UserError("\n".join(without_data))
    for fault, count in without_data.items():
        say(f"{count} cells are not run: {fault}")
    check(missing, args)
    if args.dry_run:
        for cell in missing:
            for command in commands(cell, args):
                print(shlex.join(command))
        return []
    environments = slots(args.gpus_per_run, cpu_runs(missing, args), args.at_once or 1)
    free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
    for environment in environments:
        free.put(environment)

    def run(cell: Cell) -> str | None:
        slot = free.get()
        try:
            went_well = run_cell(cell, args, slot, quiet=len(environments) > 1)
        finally:
            free.put(slot)
        return None if went_well else str(cell)

    with _ending_the_runs(), ThreadPoolExecutor(len(environments)) as pool:
        outcomes = list(tqdm(pool.map(run, missing), total=len(missing), unit=" cells", disable=not missing))
    return [*without_data, *filter(None, outcomes)]


def is_done(cell: Cell, subset: str, kept: records.Records, args: argparse.Namespace) -> bool:
    """Whether a cell has an evaluation of this split, in the records or its run.

    An evaluation by other settings, or from before the end of its training, is made again where the run's checkpoints
    are still there; else it stays.
    """
    folder, last = args.runs / cell.run, args.runs / cell.run / "eval" / f"{subset}.json"
    row = kept.find(cell.run, subset, settings(args))
    evaluations = [*([row] if row else []), *([read_json(last)] if last.exists() else [])]
    if any(one["settings_name"] == settings(args) and not one.get("unfinished") for one in evaluations):
        return True
    if not evaluations or any(folder.glob("checkpoint*.pt")):
        return False
    first = evaluations[0]
    early = f", before the end of its training ({first['unfinished']})" if first.get("unfinished") else ""
    say(
        f"note: {cell}: the evaluation of {subset} is by {first['settings_name']}{early}, and there are no checkpoints "
        f"to make one by {settings(args)}; to train it from nothing, remove its row from {args.results}/scores.jsonl"
    )
    return True


def cpu_runs(cells: Sequence[Cell], args: argparse.Namespace) -> int:
    """The number of runs side by side on the CPU; 0 where they run on GPUs."""
    if parse_flags(cells[0].table.extra if cells else []).get("gpus") != ["0"] and launch.gpus()[0]:
        return 0
    return args.at_once or len(os.sched_getaffinity(0))


_running: set[subprocess.Popen] = set()
_ending = threading.Event()


@contextlib.contextmanager
def _ending_the_runs() -> Iterator[None]:
    """At SIGTERM, end the runs too; they go on when the command is given again."""

    def end(signum: int, frame: FrameType | None) -> None:
        _ending.set()
        for process in list(_running):
            process.terminate()
        sys.exit(128 + signum)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _ending.clear()


def slots(gpus_per_run: int | None, on_cpu: int, on_gpus: int = 1) -> list[dict[str, str]]:
    """The environments in which cells run side by side: `on_cpu` of one thread each, or a few GPUs each.

    `on_gpus` of them share the same GPUs, as small models may. Empty ones are for the whole machine.
    """
    if on_cpu and gpus_per_run:
        raise UserError(f"--gpus-per-run {gpus_per_run}: the runs are on the CPU, where --at-once N says how many")
    if on_cpu:
        return [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}] * on_cpu
    if not gpus_per_run:
        return [{}] * on_gpus
    gpus = free_gpus()
    groups = [gpus[i : i + gpus_per_run] for i in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]
    if not groups:
        raise UserError(
            f"--gpus-per-run {gpus_per_run}: expected at least {gpus_per_run} free GPUs, found {len(gpus)}; "
            "wait, or give fewer"
        )
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for group in groups] * on_gpus


def free_gpus() -> list[str]:
    """The numbers of the GPUs in CUDA_VISIBLE_DEVICES on which nothing runs, by nvidia-smi."""

    def ask(what: str) -> list[str]:
        command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
        with contextlib.suppress(FileNotFoundError):
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        return []

    busy = {line.strip() for line in ask("compute-apps=gpu_uuid")}
    gpus = [line.split(", ") for line in ask("gpu=index,uuid") if ", " in line]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    allowed = {name.strip() for name in visible.split(",")} if visible is not None else {index for index, _ in gpus}
    return [index for index, uuid in gpus if uuid not in busy and {index, uuid} & allowed]


def commands(cell: Cell, args: argparse.Namespace) -> list[list[str]]:
    """The commands of one cell: train, then translate and score each split."""
    scripts, data, run = REPO / "scripts", str(recipes.read(cell.recipe).data), str(args.runs / cell.run)
    train = [str(scripts / "train.sh"), cell.recipe, cell.row.arch, "--run", run]
    evaluate = [str(scripts / "evaluate.sh"), "--data", data, "--run", run, "--average", str(args.average)]
    return [
        [*train, *cell.row.flags, *cell.table.extra, "--seed", str(cell.seed)],
        *([*evaluate, "--subset", subset] for subset in cell.subsets),
    ]


def run_cell(cell: Cell, args: argparse.Namespace, slot: dict[str, str], quiet: bool) -> bool:
    """Run one cell's commands until one fails; says whether all went well. Side by side they write to a file."""
    environment, lower = {**os.environ, **slot}, ["nice", "-n", str(args.nice)] if args.nice else []
    folder = args.runs / cell.run
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((folder / "reproduce.log").open("a")) if quiet else None
        for command in commands(cell, args):
            if _ending.is_set():
                return False
            say("+ " + shlex.join(command))
            with subprocess.Popen([*lower, *command], env=environment, stdout=output, stderr=output) as process:
                _running.add(process)
                if _ending.is_set():  # since it was looked at above
                    process.terminate()
                process.wait()
                _running.discard(process)
            if process.returncode:
                say(f"failed: {cell}" + (f"; see {output.name}" if output else ""))
                return False
    return True


def say(text: str) -> None:
    """Print a line on standard error, above the progress bar."""
    tqdm.write(text, file=sys.stderr)
