"""Fill a table: train and evaluate the models that are missing, then write results/TABLE.md and .png.

scripts/reproduce.sh is how it is called. What is finished is not done again; what was interrupted goes on. Cells that
nobody ran say so. Flags of fairseq-train go to every training run: --max-update 1500

Without a GPU as many runs go at once as there are cores, each on one thread. The small files of a finished run are kept
in results/runs, from which --collect writes the table, on a fresh clone, too. A run that was made elsewhere is brought
in by putting its files there.
"""

import argparse
import contextlib
import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import torch
from tqdm import tqdm

from ea_tools import recipes, records, tables
from ea_tools.common import REPO, UserError, positive, reporting
from ea_tools.table_report import gather, write
from ea_tools.tables import Cell, Table


def main(arguments=None):
    """Command line: run the missing cells, one after another or on the GPUs that are free, then collect."""
    args, extra = parse(arguments)
    with reporting("reproduce"):
        table = tables.read(args.table)
        args.seeds = args.seeds or table.seeds
        cells = wanted(table, args, extra)
        failed = [] if args.collect else run_missing(table, cells, args, extra)
        if args.dry_run:
            return
        keep(table, cells, args.results)
        write(table, gather(table, args.results / "runs", args.seeds, extra), args.results, extra)
    if failed:
        sys.exit("reproduce: these failed; run the same command again, it goes on:\n  " + "\n  ".join(failed))


def parse(arguments):
    """Our own options, and flags for every training run."""
    there = ", ".join(sorted(path.stem for path in tables.FOLDER.glob("*.toml")))
    parser = argparse.ArgumentParser(
        prog="reproduce.sh",
        usage="reproduce.sh TABLE [options] [fairseq-train flags]",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("table", metavar="TABLE", help=f"{there}, or a .toml file of your own")
    parser.add_argument("--seeds", type=int, nargs="+", metavar="N", help="(default: the table's)")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these recipes' columns")
    parser.add_argument("--rows", nargs="+", metavar="LABEL", help="only rows with one of these words in the label")
    add_run_options(parser, "reproduce")
    args, extra = parser.parse_known_args(arguments)
    try:
        if "seed" in recipes.parse_flags(extra):
            parser.error("--seed: use --seeds")
    except UserError as error:
        parser.error(str(error))
    return args, extra


def add_run_options(parser: argparse.ArgumentParser, folder: str) -> None:
    """The options of every command that trains the cells of a table, whose runs go to runs/`folder`."""
    add = parser.add_argument
    add("--average", type=positive, default=10, metavar="N", help="checkpoints averaged (default: 10)")
    add("--gpus-per-run", type=positive, metavar="N", help="run cells side by side on N free GPUs each")
    add("--at-once", type=positive, metavar="N", help="runs at once on the CPU, of one thread (default: one per core)")
    add("--nice", type=int, default=0, metavar="N", help="priority of the runs: 19 is the lowest (default: 0)")
    add("--runs", type=Path, default=REPO / "runs" / folder, metavar="DIR", help="where runs go")
    add("--results", type=Path, default=REPO / "results", metavar="DIR", help="where reports go")
    add("--collect", action="store_true", help="run nothing, write the report from what there is")
    add("--dry-run", action="store_true", help="print what would be run")


# --- running ----------------------------------------------------------------------------------------------------------


def wanted(table, args, extra):
    """The cells that the command line asks for, a whole seed before the next one."""
    names = list(dict.fromkeys(column.recipe for column in table.columns))
    if args.recipes and (unknown := set(args.recipes) - set(names)):
        raise UserError(f"--recipes {' '.join(sorted(unknown))}: the table has {', '.join(names)}")
    rows = [row for row in table.rows if not args.rows or any(word in row.label for word in args.rows)]
    if not rows:
        raise UserError(f"--rows {' '.join(args.rows)}: the table has {', '.join(row.label for row in table.rows)}")
    names = [name for name in names if not args.recipes or name in args.recipes]
    return [table.cell(row, name, seed, args.runs, extra) for seed in args.seeds for name in names for row in rows]


def run_missing(table, cells, args, extra):
    """Run the cells that have no result yet; returns those that failed, as text."""
    missing = []
    for cell in cells:
        data = recipes.read(cell.recipe).data
        if all(records.read(_scored(cell, args), subset) for subset in table.subsets(cell.recipe)):
            say(f"done already: {cell}")
        elif not (data / "PREP.json").exists() and not args.dry_run:
            say(f"not run: {cell}: {data} is not prepared, see data-prep/")
        else:
            missing.append(cell)
    if args.dry_run:
        for cell in missing:
            for command in commands(table, cell, args, extra):
                print(shlex.join(command))
        return []
    free = slots(args.gpus_per_run, cpu_runs(args, extra))
    places = queue.SimpleQueue()
    for slot in free:
        places.put(slot)
    side_by_side = len(free) > 1

    def run(cell):
        slot = places.get()
        try:
            return None if run_cell(table, cell, args, extra, slot, side_by_side) else str(cell)
        finally:
            places.put(slot)

    with _ending_the_runs(), ThreadPoolExecutor(len(free)) as pool:
        outcomes = list(tqdm(pool.map(run, missing), total=len(missing), unit=" cells", disable=not missing))
    return [outcome for outcome in outcomes if outcome]


def _scored(cell: Cell, args: argparse.Namespace) -> Path:
    """The folder that holds a cell's scores: its record if there is one, else its run."""
    record = args.results / "runs" / cell.folder.parent.name / cell.folder.name
    return record if record.exists() else cell.folder


def cpu_runs(args: argparse.Namespace, extra: list[str]) -> int:
    """How many runs go at once on the CPU; 0 where they run on GPUs."""
    if torch.cuda.is_available() and recipes.parse_flags(extra).get("gpus") != ["0"]:
        return 0
    return args.at_once or len(os.sched_getaffinity(0))


_running: set[subprocess.Popen] = set()
_ending = threading.Event()


@contextlib.contextmanager
def _ending_the_runs() -> Iterator[None]:
    """Let no run outlive this process where it is told to end; they go on when the command is given again."""

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


def slots(gpus_per_run: int | None, on_cpu: int) -> list[dict[str, str]]:
    """The environments in which cells run side by side: `on_cpu` of one thread each, or a few GPUs each.

    A single empty one is one cell after another on all that there is.
    """
    if on_cpu:
        return [{"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}] * on_cpu
    if not gpus_per_run:
        return [{}]
    gpus = free_gpus()
    groups = [gpus[i : i + gpus_per_run] for i in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]
    if not groups:
        raise UserError(f"--gpus-per-run {gpus_per_run}: {len(gpus)} GPUs are free")
    return [{"CUDA_VISIBLE_DEVICES": ",".join(group)} for group in groups]


def free_gpus():
    """The numbers of the GPUs on which nothing runs, as nvidia-smi tells it."""

    def ask(what):
        command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
        with contextlib.suppress(FileNotFoundError):
            return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")
        return []

    busy = {line.strip() for line in ask("compute-apps=gpu_uuid")}
    gpus = [line.split(", ") for line in ask("gpu=index,uuid") if ", " in line]
    return [index for index, uuid in gpus if uuid not in busy]


def commands(table, cell, args, extra):
    """What makes one cell: train, then translate and score each split."""
    scripts, data = REPO / "scripts", str(recipes.read(cell.recipe).data)
    own = {**recipes.parse_flags(cell.row.flags), **recipes.parse_flags(extra), "seed": [str(cell.seed)]}
    train = [str(scripts / "train.sh"), cell.recipe, cell.row.arch, "--run", str(cell.folder)]
    evaluate = [str(scripts / "evaluate.sh"), "--data", data, "--run", str(cell.folder), "--average", str(args.average)]
    return [
        [*train, *recipes.spell_flags(own)],
        *([*evaluate, "--subset", subset] for subset in table.subsets(cell.recipe)),
    ]


def run_cell(
    table: Table, cell: Cell, args: argparse.Namespace, extra: list[str], slot: dict[str, str], quiet: bool
) -> bool:
    """Run one cell's commands until one fails; says whether all went well. Side by side they write to a file."""
    environment, lower = {**os.environ, **slot}, ["nice", "-n", str(args.nice)] if args.nice else []
    cell.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((cell.folder / "reproduce.log").open("a")) if quiet else None
        for command in commands(table, cell, args, extra):
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


def say(text):
    tqdm.write(text, file=sys.stderr)


# --- collecting -------------------------------------------------------------------------------------------------------


def keep(table: Table, cells: list[Cell], results: Path) -> None:
    """Copy the small files of the cells that are finished to results/runs."""
    for cell in cells:
        for subset in table.subsets(cell.recipe):
            records.keep(cell.folder, results / "runs" / cell.folder.parent.name / cell.folder.name, subset)


if __name__ == "__main__":
    main()
