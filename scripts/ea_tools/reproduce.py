"""Fill a table: train and evaluate the models that are missing, then write results/TABLE.md and .png.

scripts/reproduce.sh is how it is called. What is finished is not done again; what was interrupted goes on. Cells that
nobody ran say so. Flags of fairseq-train go to every training run: --max-update 1500
"""

import argparse
import contextlib
import json
import logging
import os
import queue
import shlex
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from tqdm import tqdm

from ea_tools import recipes, tables
from ea_tools.common import REPO, UserError, positive, replacing, reporting
from ea_tools.profile_model import profile
from ea_tools.scores import LABELS, compare
from ea_tools.text import read_lines, read_prep

logging.getLogger("matplotlib").setLevel(logging.WARNING)  # fairseq has everybody tell all that they do


def main(arguments=None):
    """Command line: run the missing cells, one after another or on the GPUs that are free, then collect."""
    args, extra = parse(arguments)
    with reporting("reproduce"):
        table = tables.read(args.table)
        cells = wanted(table, args, extra)
        failed = [] if args.collect else run_missing(table, cells, args, extra)
        if args.dry_run:
            return
        write(table, gather(table, args, extra), args.results)
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
    parser.add_argument("--seeds", type=int, nargs="+", default=[1], metavar="N", help="(default: 1)")
    parser.add_argument("--recipes", nargs="+", metavar="NAME", help="only these recipes' columns")
    parser.add_argument("--rows", nargs="+", metavar="LABEL", help="only rows with one of these words in the label")
    parser.add_argument("--average", type=positive, default=10, metavar="N", help="checkpoints averaged (default: 10)")
    parser.add_argument("--gpus-per-run", type=positive, metavar="N", help="run cells side by side on N free GPUs each")
    parser.add_argument("--runs", type=Path, default=REPO / "runs" / "reproduce", metavar="DIR", help="where runs go")
    parser.add_argument("--results", type=Path, default=REPO / "results", metavar="DIR", help="where tables go")
    parser.add_argument("--collect", action="store_true", help="run nothing, write the table from what there is")
    parser.add_argument("--dry-run", action="store_true", help="print what would be run")
    args, extra = parser.parse_known_args(arguments)
    try:
        if "seed" in recipes.parse_flags(extra):
            parser.error("--seed: use --seeds")
    except UserError as error:
        parser.error(str(error))
    return args, extra


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
        if all(result(cell, subset) for subset in table.subsets(cell.recipe)):
            say(f"done already: {cell}")
        elif not (data / "PREP.json").exists() and not args.dry_run:
            say(f"not run: {cell}: {data} is not prepared, see data-prep/")
        else:
            missing.append(cell)
    free = slots(args.gpus_per_run)
    if args.dry_run:
        for cell in missing:
            for command in commands(table, cell, args, extra):
                print(shlex.join(command))
        return []
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

    with ThreadPoolExecutor(len(free)) as pool:
        outcomes = list(tqdm(pool.map(run, missing), total=len(missing), unit=" cells", disable=not missing))
    return [outcome for outcome in outcomes if outcome]


def slots(gpus_per_run):
    """The values of CUDA_VISIBLE_DEVICES under which cells run side by side; [None] is one after another on all."""
    if not gpus_per_run:
        return [None]
    gpus = free_gpus()
    groups = [gpus[i : i + gpus_per_run] for i in range(0, len(gpus) - gpus_per_run + 1, gpus_per_run)]
    if not groups:
        raise UserError(f"--gpus-per-run {gpus_per_run}: {len(gpus)} GPUs are free")
    return [",".join(group) for group in groups]


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


def run_cell(table, cell, args, extra, slot, quiet):
    """Run one cell's commands until one fails; says whether all went well. Side by side they write to a file."""
    environment = {**os.environ, **({"CUDA_VISIBLE_DEVICES": slot} if slot else {})}
    cell.folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context((cell.folder / "reproduce.log").open("a")) if quiet else None
        for command in commands(table, cell, args, extra):
            say("+ " + shlex.join(command))
            if subprocess.run(command, env=environment, stdout=output, stderr=output, check=False).returncode:
                say(f"failed: {cell}" + (f"; see {output.name}" if output else ""))
                return False
    return True


def say(text):
    tqdm.write(text, file=sys.stderr)


# --- collecting -------------------------------------------------------------------------------------------------------


def result(cell, subset):
    """What evaluate.sh wrote for one split of a cell, or None."""
    path = cell.folder / "eval" / f"{subset}.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def gather(table, args, extra):
    """{(row label, column label): {"scores": {seed: ...}, "mean", "deviation", "difference", "p", "paper", ...}}."""
    found = {}
    for row in table.rows:
        for column in table.columns:
            results = {}
            for seed in args.seeds:
                cell = table.cell(row, column.recipe, seed, args.runs, extra)
                if (one := result(cell, column.subset)) and column.score in one["scores"]:
                    results[seed] = {**one, "folder": cell.folder}
            found[row.label, column.label] = _summary(results, column, row)
    for row in table.rows:
        for column in table.columns:
            if row.baseline:
                mine, theirs = found[row.label, column.label], found[row.baseline, column.label]
                mine.update(_against(mine["results"], theirs["results"], column))
    return found


def _summary(results, column, row):
    scores = [one["scores"][column.score]["score"] for one in results.values()]
    return {
        "results": results,
        "mean": statistics.mean(scores) if scores else None,
        "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        "paper": row.published(column),
    }


def _against(mine, theirs, column):
    """Difference from the baseline over the seeds that both have, and the p of each seed's paired bootstrap test."""
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds:
        return {}
    differences = [mine[s]["scores"][column.score]["score"] - theirs[s]["scores"][column.score]["score"] for s in seeds]
    data = recipes.read(column.recipe).data
    p = []
    with contextlib.suppress(UserError):  # without the data there are no references to test with
        prep = read_prep(data)
        references = read_lines(data / "raw" / f"{column.subset}.{prep['target_lang']}")
        for seed in seeds:
            texts = [read_lines(one[seed]["folder"] / "eval" / f"{column.subset}.hyp.txt") for one in (mine, theirs)]
            p.append(compare(*texts, references, prep["lowercase"], ["sacrebleu"])["sacrebleu"]["p"])
    return {"difference": statistics.mean(differences), "p": p}


def write(table, found, folder):
    """results/TABLE.md and, where there is anything to show, results/TABLE.png."""
    folder.mkdir(parents=True, exist_ok=True)
    picture = any(cell["mean"] is not None for cell in found.values())
    text = markdown(table, found, f"{table.name}.png" if picture else None)
    with replacing(folder / f"{table.name}.md") as temporary:
        temporary.write_text(text, encoding="utf-8")
    if picture:
        with replacing(folder / f"{table.name}.png") as temporary:
            draw(table, found, temporary)
    print(text)
    print(f"written: {folder / table.name}.md" + (", .png" if picture else ""))


def markdown(table, found, picture):
    """The table, what its numbers are, and where each came from."""
    head = ["Model", "Parameters", "FLOPs", *(column.label for column in table.columns)]
    lines = [f"# {table.title}", "", markdown_row(head), markdown_row(["---"] + ["---:"] * (len(head) - 1))]
    for row in table.rows:
        size = profile(row.arch, row.flags)
        counts = [f"{size['parameters']:,}", f"{size['flops'] / 1e6:,.1f} M"]
        lines.append(
            markdown_row([row.label, *counts, *(_cell(found[row.label, column.label]) for column in table.columns)])
        )
    scores = ", ".join(f"{column.label}: {LABELS[column.score]}" for column in table.columns)
    lines += [
        "",
        f"Scores are {scores}. Mean ± standard deviation over the seeds, where there are several. Δ is the difference "
        "from the row's baseline over the seeds that both have, with each seed's p of sacreBLEU's paired bootstrap "
        'test on detokenised text. In brackets: the paper\'s number. "not run": nobody has run it. Parameters are '
        "without embeddings and output projection; FLOPs for 30 source and 30 target tokens.",
        "",
    ]
    if picture:
        lines += [f"![{table.title}]({picture})", ""]
    return "\n".join([*lines, *provenance(table, found)]) + "\n"


def markdown_row(cells):
    return "| " + " | ".join(cells) + " |"


def _cell(cell):
    paper = f" [{cell['paper']:.2f}]" if cell["paper"] is not None else ""
    if cell["mean"] is None:
        return "not run" + paper
    text = f"{cell['mean']:.2f}" + (f" ± {cell['deviation']:.2f}" if cell["deviation"] is not None else "")
    if "difference" in cell:
        p = f" (p {', '.join(f'{p:.3f}' for p in cell['p'])})" if cell["p"] else ""
        text += f", Δ {cell['difference']:+.2f}{p}"
    return text + paper


def provenance(table, found):
    """The lines of a report that say of every score how and where it was made."""
    lines = ["## Where the numbers come from", ""]
    for row in table.rows:
        for column in table.columns:
            for seed, one in found[row.label, column.label]["results"].items():
                score, raw = one["scores"][column.score], one["scores"]["sacrebleu"]
                lines.append(
                    f"- {row.label}, {column.label}, seed {seed}: {score['score']:.2f}, `{score['signature']}`; "
                    f"sacreBLEU {raw['score']:.2f}, `{raw['signature']}`; "
                    f"{one.get('updates') or '?'} updates, average of {len(one['averaged']) or 'one'} checkpoints; "
                    f"{one['device']}; commit {(one['commit'] or 'unknown')[:10]}; {one['date']}; "
                    f"{_trained_by(one['folder'])}`{one['command']}`"
                )
    return lines if len(lines) > 2 else [*lines, "Nothing has been run yet."]


def _trained_by(folder):
    record = folder / "run.json"
    return f"`{json.loads(record.read_text(encoding='utf-8'))['command']}`; " if record.exists() else ""


def draw(table, found, path):
    """A panel for each column: points with the deviation over seeds; a diamond is the paper's number."""
    count, labels = len(table.columns), [row.label for row in table.rows]
    size = (2.2 + 2.4 * count, 1.2 + 0.35 * len(labels))
    figure, panels = plt.subplots(1, count, figsize=size, sharey=True, squeeze=False)
    for panel, column in zip(panels[0], table.columns, strict=True):
        for height, label in enumerate(labels):
            cell = found[label, column.label]
            if cell["mean"] is not None:
                panel.errorbar(cell["mean"], height, xerr=cell["deviation"], fmt="o", color="#4c78a8", capsize=3)
            if cell["paper"] is not None:
                panel.plot(cell["paper"], height, "D", color="#e45756", fillstyle="none")
        if not panel.has_data():
            panel.text(0.5, 0.5, "not run", ha="center", va="center", color="grey", transform=panel.transAxes)
            panel.set_xticks([])
        panel.set_yticks(range(len(labels)), labels)
        panel.set_ylim(len(labels) - 0.5, -0.5)
        panel.grid(axis="x", alpha=0.3)
        panel.set_title(column.label)
        panel.set_xlabel(LABELS[column.score])
    figure.suptitle("dot: measured here, diamond: the paper", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=150, format="png")
    plt.close(figure)


if __name__ == "__main__":
    main()
