"""Measure everything that needs an NVIDIA GPU, section by section, in under ten minutes.

Run the same command again and it goes on: each section keeps what it has measured in OUTPUT/SECTION.json, number by
number, and what is there is not measured again. To measure a section once more, delete its file, and of multi30k
OUTPUT/runs too; to measure what failed, add --again. OUTPUT/report.md has the tables; what has not been measured stands
there as "not run", and what ran without the kernels says so.

  kernels   the GPU's kernels against the plain composition in float64: values and gradients, every rule and geometry
  training  updates by fairseq's own trainer, ours beside fairseq's Transformer
  decoding  beam search, the same
  memory    the most that training takes
  attention the operation alone, N = 16 to 1,024: ours, plain, torch.compile of plain, and stock attention
  multi30k  a training on Multi30k by the published recipe, as far as the time goes, and its BLEU if it ends

    scripts/gpu_report.sh
    scripts/gpu_report.sh --only kernels training --minutes 5
    scripts/gpu_report.sh --rehearse --output /tmp/rehearsal

--rehearse goes through everything on the CPU, with tiny sizes and float32 in the place of every precision. Its numbers
mean nothing.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ea_data.command_line import Parser
from ea_tools.bench.gpu_sections import SECTIONS, Plan, Section, noting_refusals
from ea_tools.common import REPO, UserError, replacing, reporting, write_json

#: seconds that a process has to end by itself when its time is over
GRACE = 20
#: a section's process ends so when the GPU can no longer be used, which another process can
GPU_IS_LOST = 3


def main(arguments: list[str] | None = None) -> None:
    """Command line: a process for each section, one after the other, then the tables."""
    args = parse(arguments)
    with reporting("gpu_report"):
        plan = Plan(args.rehearse, args.data, args.output)
        if args.work:
            sys.exit(work(args.work, plan, args.output, time.monotonic() + args.seconds))
        if not args.rehearse:
            check_gpu(args.output, plan)
        if args.again:
            forget_failures(args.only, args.output, plan)
        start = time.monotonic()
        end = start + 60 * args.minutes
        shares = {name: section.share for name, section in SECTIONS.items() if name in args.only}
        so_far, failed = 0.0, []
        for name, share in shares.items():
            so_far += share / sum(shares.values())
            try:
                run_section(name, args, start + so_far * (end - start - GRACE))
            except UserError as error:  # the others may do better
                failed.append(str(error))
        report = args.output / "report.md"
        with replacing(report) as temporary:
            temporary.write_text(markdown(args.output, plan), encoding="utf-8")
        print(f"written: {report}")
        if failed:
            raise UserError("; ".join(failed))


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="gpu_report.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--minutes", type=float, default=9, help="how long this call may take (default: 9)")
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="(default: results/gpu, for a rehearsal results/gpu-rehearsal)"
    )
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS), metavar="SECTION")
    parser.add_argument("--data", type=Path, metavar="DIR", help="prepared data of multi30k (default: the recipe's)")
    parser.add_argument("--again", action="store_true", help="measure what failed once more")
    parser.add_argument("--rehearse", action="store_true", help="try the program on the CPU; the numbers mean nothing")
    parser.add_argument("--work", choices=SECTIONS, help=argparse.SUPPRESS)  # the process that measures a section
    parser.add_argument("--seconds", type=float, help=argparse.SUPPRESS)  # how long it may take
    args = parser.parse_args(arguments)
    if args.minutes <= 0:
        parser.error(f"--minutes {args.minutes:g}: more than 0 are wanted")
    args.output = args.output or REPO / "results" / ("gpu-rehearsal" if args.rehearse else "gpu")
    return args


def check_gpu(output: Path, plan: Plan) -> None:
    """Refuse where there is no GPU, or where what is there already was measured on another one."""
    import torch

    if not torch.cuda.is_available():
        raise UserError("PyTorch sees no GPU here; --rehearse tries the program without one")
    here = torch.cuda.get_device_name()
    for name in SECTIONS:
        for cell in read(output / f"{name}.json", plan)["cells"].values():
            before = cell.get("origin", {}).get("gpu", {}).get("name", here)
            if before != here:
                path = output / f"{name}.json"
                raise UserError(f"{path} was measured on {before}, and this is {here}: choose another --output")


def forget_failures(sections: Iterable[str], output: Path, plan: Plan) -> None:
    for name in sections:
        path = output / f"{name}.json"
        content = read(path, plan)
        cells = {key: cell for key, cell in content["cells"].items() if "failed" not in cell}
        if cells != content["cells"]:
            write_json(path, {**content, "cells": cells})


# ---- sections as files and processes


def run_section(section: str, args: argparse.Namespace, end: float) -> None:
    """Have a process measure what a section lacks until `end`, and another one where it ended too early."""
    path, plan = args.output / f"{section}.json", Plan(args.rehearse, args.data, args.output)
    log = path.with_suffix(".log")
    forget_what_was_running(path, plan)  # when somebody stopped this program
    while (lacking := missing(section, plan, read(path, plan))) and (left := end - time.monotonic()) > 0:
        print(f"{section}: {len(lacking)} to measure, {left:.0f} s; what it says is in {log}", flush=True)
        status = run_process(section, args, left, log)
        if status is None:
            forget_what_was_running(path, plan)
        if not status:
            return
        note_what_was_running(path, plan, f"the process ended with status {status}: see {log.name}")
        if missing(section, plan, read(path, plan)) == lacking:
            raise UserError(f"{section}: it cannot start: the end of {log} says why")


def run_process(section: str, args: argparse.Namespace, seconds: float, log: Path) -> int | None:
    """The status with which a section's process ended; None where it did not end in time, and was killed."""
    command = [sys.executable, "-P", "-m", "ea_tools.bench.gpu_report", "--work", section]
    command += ["--seconds", f"{seconds:.0f}", "--output", str(args.output)]
    command += ["--data", str(args.data)] if args.data else []
    command += ["--rehearse"] if args.rehearse else []
    interpreter = {"TRITON_INTERPRET": "1"} if args.rehearse and section == "kernels" else {}
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **interpreter})
        try:
            return process.wait(seconds + GRACE / 2)
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()  # it has ended, or its time is over, or someone stops this program
            process.wait()


def read(path: Path, plan: Plan) -> dict:
    """A section's file, or what stands there before anything is measured."""
    if not path.exists():
        return {"rehearsal": plan.rehearsal, "cells": {}, "running": None}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: {error}; delete the file to measure this section once more") from None
    if content["rehearsal"] != plan.rehearsal:
        raise UserError(f"{path} is {'' if content['rehearsal'] else 'not '}of a rehearsal; choose another --output")
    return content


def missing(section: str, plan: Plan, content: dict) -> list[str]:
    """The cells that are not there, or that say that they are not finished."""
    cells = content["cells"]
    return [name for name in cells_of(section, plan) if not cells.get(name, {"finished": False}).get("finished", True)]


def forget_what_was_running(path: Path, plan: Plan) -> None:
    """Its time was over: it is measured next time."""
    content = read(path, plan)
    if content["running"]:
        write_json(path, {**content, "running": None})


def note_what_was_running(path: Path, plan: Plan, reason: str) -> None:
    """It ended its process, and would do so again."""
    content = read(path, plan)
    if name := content["running"]:
        write_json(path, {**content, "cells": {**content["cells"], name: {"failed": reason}}, "running": None})


def work(section: str, plan: Plan, output: Path, end: float) -> int:
    """Measure what a section lacks, in this process, and write each result at once; gives the exit status."""
    from ea_tools.common import quiet

    quiet()
    path = output / f"{section}.json"
    content, here = read(path, plan), origin(plan)
    cells = cells_of(section, plan)
    for name in missing(section, plan, content):
        if time.monotonic() >= end:
            break
        write_json(path, {**content, "running": name})
        start = time.monotonic()
        try:
            with noting_refusals(plan) as refused:
                result = cells[name](end - start)
            result["without_kernels"] = sorted({*refused, *result.get("without_kernels", [])})
        except Exception as error:  # whatever it is, other cells may do better
            from evolving_attention.kernels.gpu import summary

            result = {"failed": summary(error)}
        content["cells"][name] = {**result, "seconds": time.monotonic() - start, "origin": here}
        content["running"] = None
        write_json(path, content)
        print(f"{name}: {content['cells'][name]['seconds']:.1f} s {result.get('failed', '')}", flush=True)
        if any(words in result.get("failed", "") for words in ("CUDA error", "[CUDA]", "broke the device")):
            return GPU_IS_LOST
    return 0


def origin(plan: Plan) -> dict:
    """Where and with what something is measured: the next call may be on other code, or another machine."""
    import torch

    from ea_tools.training.provenance import provenance

    facts = {**provenance(on_cpu=plan.rehearsal), "cuda": torch.version.cuda}
    if not plan.rehearsal:
        properties = torch.cuda.get_device_properties(0)
        facts["gpu"] = {
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
        }
    return facts


def cells_of(section: str, plan: Plan) -> dict[str, Callable[[float], dict]]:
    """All that a section measures, by name; each gets the seconds that are left."""
    return dict(SECTIONS[section].cells(plan))


# ---- tables


def markdown(output: Path, plan: Plan) -> str:
    """All sections as tables; what is not there is "not run"."""
    measured = {name: read(output / f"{name}.json", plan)["cells"] for name in SECTIONS}
    lines = ["# A rehearsal on the CPU: these numbers mean nothing" if plan.rehearsal else "# Measured on a GPU", ""]
    origins = [cell["origin"] for cells in measured.values() for cell in cells.values() if "origin" in cell]
    places = sorted(set(map(place, origins)))
    several = len(places) > 1
    lines += [f"- {f'[{number}] ' if several else ''}{words}" for number, words in enumerate(places, 1)]
    for name, section in SECTIONS.items():
        lines += [
            "",
            f"## {section.title}",
            "",
            f"| {' | '.join(section.columns)} |",
            "|---" * len(section.columns) + "|",
        ]
        for cell in cells_of(name, plan):
            found = measured[name].get(cell)
            lines.append(f"| {cell}{marks(found, places)} | {' | '.join(row(section, found))} |")
    if any("failed" in cell for cells in measured.values() for cell in cells.values()):
        lines += ["", "What failed is measured once more by `--again`."]
    return "\n".join([*lines, ""])


def marks(cell: dict | None, places: list[str]) -> str:
    """What has to be said of a cell beside its name: where it was measured, where there are several, and how."""
    said = ""
    if cell and "origin" in cell and len(places) > 1:
        said += f" [{places.index(place(cell['origin'])) + 1}]"
    if cell and cell.get("without_kernels"):
        said += ", **without kernels**"
    return said


def place(origin: dict) -> str:
    return "{device}, PyTorch {versions[torch]}, CUDA {cuda}, commit {commit}".format(**origin)


def row(section: Section, cell: dict | None) -> list[str]:
    """A cell's columns after the first."""
    empty = [""] * (len(section.columns) - 2)
    if cell is None or "why" in cell:
        return [f"not run{': ' + cell['why'] if cell else ''}", *empty]
    if "failed" in cell:
        return [f"failed: {cell['failed']}".replace("|", "/"), *empty]
    return section.row(cell)


if __name__ == "__main__":
    main()
