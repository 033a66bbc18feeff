"""Fill a table: train and evaluate the models that are missing, then write results/TABLE.md and .png.

Finished runs stay; interrupted ones go on. Cells without a run say "not run". Flags of the launch go to every training:
--gpus 0, --precision bf16. Flags that make another model belong into the rows of a table of your own.

Without a GPU, each core trains one run, on one thread. The scores of finished runs are kept in results/scores.jsonl,
from which --collect writes the table, on a fresh clone, too. A run that was made elsewhere is brought in by putting
its run.json, log.jsonl and eval/ into its folder below --runs, before --collect. The TABLE "pages" stands for the
tables of speed and of scores that README.md and docs/ show besides; "scores" computes each score of results/ again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import os
import queue
import shlex
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from ea_artifacts.command import REPO, Parser, UserError, hint, parse_flags, positive, reporting
from ea_artifacts.files import read_json
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import AVERAGED
from ea_tools.tables import page, rescore, shown
from ea_tools.tables import table as tables
from ea_tools.tables.records import Records, opened
from ea_tools.tables.table import Row, Table, check_flags
from ea_tools.training import launch, recipes, train


@dataclass(frozen=True)
class Cell:
    """One model to train: a row on a recipe with a seed."""

    name: str  # for people
    label: str  # of the row
    run: str  # RECIPE/NAME
    folder: Path
    data: Path
    scores: list[tuple[str, str]]  # splits, with the name that evaluate.sh gives to the search and the average
    commands: list[list[str]]  # train, then translate and score each split


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: run the missing cells, one after another or side by side, then collect."""
    args, extra = parse(arguments)
    with reporting("reproduce"):
        if args.table == "pages":
            shown.write(args.results)
            return
        if args.table == "scores":
            print(rescore.check(Records(args.results)))
            return
        table = tables.read(args.table)
        rows = [row for row in table.rows if not args.rows or any(word in row.label for word in args.rows)]
        if not rows:
            raise UserError(f"--rows {' '.join(args.rows)}: the table has {', '.join(row.label for row in table.rows)}")
        if unknown := set(args.recipes) - set(table.recipes):
            raise UserError(f"--recipes {' '.join(sorted(unknown))}: the table has {', '.join(table.recipes)}")
        failed = fill(table, rows, args.seeds or table.seeds, args, extra, args.recipes)
    end("reproduce", failed)


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """The options, and flags of the launch for every training."""
    parser = Parser(
        prog="reproduce.sh",
        usage="reproduce.sh TABLE [options] [train.sh's flags of the launch]",
        description=__doc__,
        allow_abbrev=False,
    )
    add, words = parser.add_argument, f"{', '.join(tables.names())}, pages, scores, or a .toml file of your own"
    add("table", metavar="TABLE", help=words)
    seeds = "to run (default: the table's, which are always shown)"
    add("--seeds", type=int, nargs="+", metavar="N", help=seeds)
    add("--recipes", nargs="+", default=[], metavar="NAME", help="only these recipes' columns")
    add("--rows", nargs="+", metavar="LABEL", help="only rows with one of these words in the label")
    args, extra = parse_with(parser, arguments, "reproduce")
    allowed = ["none"] if args.table in ("pages", "scores") else sorted(recipes.LAUNCH)
    for name in parse_flags(extra):
        if name not in allowed:
            parser.error(f"--{name}: expected flags of the launch alone, for all rows; {hint(name, allowed)}")
    return args, extra


def parse_with(
    parser: argparse.ArgumentParser, arguments: Sequence[str] | None, folder: str
) -> tuple[argparse.Namespace, list[str]]:
    """The options of a command that trains the cells of a table, and flags for every training run.

    Args:
        parser: has the command's own options, --seeds among them.
        folder: in runs/, for the runs.
    """
    add = parser.add_argument
    add("--average", type=positive, metavar="N", help=f"checkpoints averaged (default: the table's, or {AVERAGED})")
    add("--gpus-per-run", type=positive, metavar="N", help="run cells side by side on N free GPUs each")
    at_once = "runs at once: of one thread on the CPU (default: one per core), or on the same GPUs (default: 1)"
    add("--at-once", type=positive, metavar="N", help=at_once)
    add("--runs", type=Path, default=REPO / "runs" / folder, metavar="DIR", help=f"default: runs/{folder}")
    add("--results", type=Path, default=REPO / "results", metavar="DIR", help="where reports go (default: results)")
    add("--collect", action="store_true", help="run nothing, write the report from what there is")
    add("--dry-run", action="store_true", help="print what would be run")
    args, extra = parser.parse_known_args(sys.argv[1:] if arguments is None else arguments)
    try:
        check_flags("--", parse_flags(extra))
    except UserError as error:
        parser.error(str(error))
    return args, extra


def fill(
    table: Table,
    rows: Sequence[Row],
    seeds: Sequence[int],
    args: argparse.Namespace,
    extra: Sequence[str] = (),  # words for every training, about its launch
    only: Sequence[str] = (),  # recipes; empty for all
) -> list[str]:
    """Run the missing cells of these rows, and write the page; returns the failed cells.

    The page shows the table's own seeds besides. Cells are in the order of seeds, and kept when they are finished.
    """
    chosen = only or table.recipes
    each = [cell_of(table, row, recipe, seed, args, extra) for seed in seeds for recipe in chosen for row in rows]
    cells = list({cell.run: cell for cell in each}.values())
    on_cpu = parse_flags([*rows[0].flags, *extra]).get("gpus") == ["0"]
    failed = [] if args.collect else run_missing(cells, args, on_cpu)
    if not args.dry_run:
        with opened(args.results) as records:
            for cell in cells:
                for subset, settings in cell.scores:
                    records.keep(cell.folder, cell.run, subset, settings)
            entries = page.gather(table, records, dict.fromkeys([*table.seeds, *seeds]), args.average)
        page.write(table, entries, args.results)
    return failed


def cell_of(table: Table, row: Row, recipe: str, seed: int, args: argparse.Namespace, extra: Sequence[str]) -> Cell:
    """The cell of a table, with its commands."""
    run, data = table.run(row, recipe, seed), recipes.read(recipe).data
    folder, name = args.runs / run, f"{row.label}, {recipe}, seed {seed}"
    training = [recipe, row.arch, *row.flags, *extra, "--seed", str(seed), "--run", str(folder)]
    evaluate = [f"{REPO}/scripts/evaluate.sh", "--data", str(data), "--run", str(folder)]
    # Rows that differ in the average alone share the run.
    same = [other for other in table.rows if (other.arch, other.learnt) == (row.arch, row.learnt)]
    averages = dict.fromkeys(table.averaged(other, args.average) for other in same)
    pairs = list(itertools.product(averages, table.subsets(recipe)))
    scoring = [[*evaluate, "--average", str(average), "--subset", subset] for average, subset in pairs]
    scores = [(subset, tables.settings(average)) for average, subset in pairs]
    return Cell(name, row.label, run, folder, data, scores, [[f"{REPO}/scripts/train.sh", *training], *scoring])


def end(command: str, failed: Sequence[str]) -> None:
    """End the program with a status that says whether cells failed, and their names."""
    if failed:
        sys.exit(f"{command}: these failed; run the same command again, it goes on:\n  " + "\n  ".join(failed))


def run_missing(cells: Sequence[Cell], args: argparse.Namespace, on_cpu: bool) -> list[str]:
    """Run the cells that have no result yet; returns those that failed, and faults of data, as text.

    Raises:
        UserError: no cell is done, and none has its data.
    """
    missing, without_data, records = [], Counter[str](), Records(args.results)
    for cell in cells:
        if is_done(cell, records):
            say(f"done already: {cell.name}")
            continue
        try:
            if not args.dry_run:
                Preparation.at(cell.data)
            missing.append(cell)
        except UserError as error:  # it names the command that makes the data
            without_data[str(error)] += 1
    if without_data and without_data.total() == len(cells):
        raise UserError("\n".join(without_data))
    for fault, count in without_data.items():
        say(f"{count} cells are not run: {fault}")
    check(missing, args)
    if args.dry_run:
        for command in (command for cell in missing for command in cell.commands):
            print(shlex.join(command))
        return []
    free, ending = queue.SimpleQueue[dict[str, str]](), threading.Event()
    environments = slots(args, on_cpu)
    for environment in environments:
        free.put(environment)

    def run(cell: Cell) -> bool:
        slot = free.get()
        try:
            return run_cell(cell, slot, len(environments) > 1, ending)
        finally:
            free.put(slot)

    with ThreadPoolExecutor(len(environments)) as pool:
        try:
            outcomes = pool.map(run, missing)
            went_well = list(tqdm(outcomes, total=len(missing), unit=" cells", disable=not missing))
        finally:  # at Ctrl-C and SIGTERM the runs end, too; they go on when the command is given again
            ending.set()
    return [*without_data, *(cell.name for cell, well in zip(missing, went_well, strict=True) if not well)]


def is_done(cell: Cell, records: Records) -> bool:
    """Whether each split of a cell has an evaluation by its settings, in the records or its run.

    One from before the end of its training is made again.
    """
    for subset, settings in cell.scores:
        row, last = records.rows.get((cell.run, subset, settings)), cell.folder / f"eval/{subset}.{settings}.json"
        evaluations = [*([row] if row else []), *([read_json(last)] if last.exists() else [])]
        if all(evaluation.get("unfinished") for evaluation in evaluations):
            return False
    return True


def check(cells: Iterable[Cell], args: argparse.Namespace) -> None:
    """Refuse a row that train.sh would refuse, before the first of them is started."""
    gpus = ["--gpus", str(args.gpus_per_run)] if args.gpus_per_run else []
    for label, cell in {cell.label: cell for cell in cells}.items():
        printed = io.StringIO()
        try:
            with contextlib.redirect_stderr(printed):
                train.prepare([*cell.commands[0][1:], *gpus, "--dry-run"])
        except (UserError, SystemExit) as error:  # the latter from argparse, which has printed the reason
            reason = error if isinstance(error, UserError) else printed.getvalue().strip()
            raise UserError(f"{label}: {reason}") from None


def slots(args: argparse.Namespace, on_cpu: bool) -> list[dict[str, str]]:
    """The environments in which cells run side by side: one thread each on the CPU, or a few GPUs each.

    Several may share the same GPUs, as small models do. Empty ones are for the whole machine.
    """
    count, size = 0 if on_cpu else launch.gpus()[0], args.gpus_per_run
    if not count:
        one_thread = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        if size:
            raise UserError(f"--gpus-per-run {size}: the runs are on the CPU, where --at-once N says how many")
        return [one_thread] * (args.at_once or len(os.sched_getaffinity(0)))
    if not size:
        return [{}] * (args.at_once or 1)
    gpus = free_gpus()
    if len(gpus) < size:
        raise UserError(f"--gpus-per-run {size}: {len(gpus)} GPUs are free; wait, or give fewer")
    groups = [",".join(gpus[first : first + size]) for first in range(0, len(gpus) - size + 1, size)]
    return [{"CUDA_VISIBLE_DEVICES": group, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"} for group in groups] * (
        args.at_once or 1
    )


def free_gpus() -> list[str]:
    """The numbers of the GPUs in CUDA_VISIBLE_DEVICES on which nothing runs, by nvidia-smi."""

    def ask(what: str) -> list[str]:
        command = ["nvidia-smi", f"--query-{what}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()

    busy = {line.strip() for line in ask("compute-apps=gpu_uuid")}
    gpus = [line.split(", ") for line in ask("gpu=index,uuid")]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    allowed = {name.strip() for name in visible.split(",")} if visible is not None else {index for index, _ in gpus}
    return [index for index, uuid in gpus if uuid not in busy and {index, uuid} & allowed]


def run_cell(cell: Cell, slot: dict[str, str], quiet: bool, ending: threading.Event) -> bool:
    """Run one cell's commands until one fails; says whether all went well. Side by side they write to a file."""
    cell.folder.mkdir(parents=True, exist_ok=True)
    with (cell.folder / "reproduce.log").open("a") if quiet else contextlib.nullcontext() as output:
        for command in cell.commands:
            say(f"+ {shlex.join(command)}{f' >> {shlex.quote(output.name)}' if output else ''}")
            with subprocess.Popen(command, env={**os.environ, **slot}, stdout=output, stderr=output) as process:
                while process.poll() is None:
                    if ending.wait(0.1):
                        process.terminate()
                        return False
            if process.returncode:
                say(f"failed: {cell.name}" + (f"; see {output.name}" if output else ""))
                return False
    return True


def say(text: str) -> None:
    """Print a line on standard error, above the progress bar."""
    tqdm.write(text, file=sys.stderr)
