"""Draw how time and memory of a training step grow with the sentences' length, ours and stock.

scripts/benchmark_training.sh --growth --output growth.json
scripts/plot_growth.sh growth.json --out growth.png
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ea_data.command_line import Parser
from ea_tools.common import UserError, read_json, replacing, reporting
from ea_tools.figures import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LOOKS = {
    name: (style.COLOURS[number], style.MARKERS[number], style.LINES[number])
    for number, name in enumerate(("ours", "stock"))
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: read the results of benchmark_training.sh --growth and draw them."""
    parser = Parser(prog="plot_growth.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="FILE", help="JSON of benchmark_training.sh --growth")
    parser.add_argument(
        "--out",
        type=style.output(style.SUFFIXES),
        metavar="FILE",
        help=".png, .svg or .pdf (default: FILE's name with .png)",
    )
    args = parser.parse_args(arguments)
    with reporting("plot_growth"):
        record = read(args.results)
        out = args.out or args.results.with_suffix(".png")
        with replacing(out) as temporary:
            draw(record, temporary, out.suffix[1:])
    print(f"written: {out}")


def read(path: Path) -> dict[str, Any]:
    """The records of benchmark_training.sh --growth."""
    record = None
    with contextlib.suppress(UserError):
        record = read_json(path)
    if not (isinstance(record, dict) and record.get("benchmark") == "growth" and record.get("results")):
        raise UserError(f"{path}: not a result of benchmark_training.sh --growth; run that command once more")
    return record


def draw(record: dict[str, Any], path: Path, form: str) -> None:
    """A row for each pair of models and precision: time on the left, memory on the right."""
    pairs = {}
    for result in record["results"]:
        pairs.setdefault((result["size"], result["precision"]), []).append(result)
    figure, grid = style.panels(len(pairs), 2, (11, 0.8 + 4.2 * len(pairs)))
    for axes, ((_, precision), results) in zip(grid, pairs.items(), strict=True):
        draw_time(axes[0], results)
        finish(axes[0], results)
        axes[0].legend(title=precision, loc="upper left")
        measured = [result for result in results if "memory" in result]
        if measured:
            draw_memory(axes[1], measured)
            finish(axes[1], measured)
        else:
            axes[1].set_axis_off()
            axes[1].text(0.5, 0.5, "memory: not measured", ha="center", transform=axes[1].transAxes)
    tokens = record["results"][0]["batches"][0]
    figure.suptitle(
        f"One training step against sentence length, about {tokens['sentences'] * tokens['target']:,} tokens a batch\n"
        f"{record['device']}",
        fontsize=12,
    )
    style.save(figure, path, form)


def draw_time(ax: Axes, results: Sequence[dict]) -> None:
    """Median and quartiles of seconds; beside ours, its speed as a share of stock's."""
    import numpy

    lengths = [result["length"] for result in results]
    for name, (colour, marker, line) in LOOKS.items():
        low, middle, high = 1e3 * numpy.percentile(
            [numpy.ravel(result["times"]["seconds"][name]) for result in results], (25, 50, 75), axis=1
        )
        label = results[0]["architectures"][name]
        ax.plot(lengths, middle, color=colour, marker=marker, linestyle=line, label=label)
        ax.fill_between(lengths, low, high, color=colour, alpha=0.2, linewidth=0)
        if name == "ours":
            for length, height, result in zip(lengths, middle, results, strict=True):
                note(ax, length, height, f"{result['ratio']['median']:.2f}")
    ax.set_ylabel("milliseconds")
    ax.set_title("time, its quartiles shaded (figures: our speed / stock's)", fontsize=10)


def draw_memory(ax: Axes, results: Sequence[dict]) -> None:
    """Peak memory beyond the process's before the first step; beside ours, its multiple of stock's."""
    import numpy

    lengths = [result["length"] for result in results]
    used = {
        name: numpy.array([result["memory"][name]["peak"] - result["memory"][name]["before"] for result in results])
        for name in LOOKS
    }
    for name, (colour, marker, line) in LOOKS.items():
        ax.plot(lengths, used[name] / 2**20, color=colour, marker=marker, linestyle=line)
    for length, ours, stock in zip(lengths, used["ours"], used["stock"], strict=True):
        note(ax, length, ours / 2**20, f"{ours / stock:.2f}")
    ax.set_ylabel("MiB")
    ax.set_title("peak memory of the step (figures: ours / stock's)", fontsize=10)


def note(ax: Axes, x: float, y: float, text: str) -> None:
    """A small figure above a point."""
    above = {"textcoords": "offset points", "xytext": (-2, 6), "ha": "right"}
    ax.annotate(text, (x, y), **above, fontsize=9, color=style.COLOURS[0])


def finish(ax: Axes, results: Sequence[dict]) -> None:
    """Both axes in powers; the lengths that were measured as ticks."""
    from matplotlib.ticker import LogLocator, StrMethodFormatter

    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = [result["length"] for result in results]
    ax.set_xticks(lengths, map(str, lengths))
    ax.minorticks_off()
    ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.margins(x=0.08, y=0.12)
    ax.set_xlabel("source and target length, tokens")
    ax.grid(alpha=0.3)


if __name__ == "__main__":
    main()
