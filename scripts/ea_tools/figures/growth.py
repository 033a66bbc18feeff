"""Draw how time and memory of a training step grow with the sentences' length, ours and stock.

scripts/benchmark_training.sh --growth --output growth.json
scripts/plot_growth.sh growth.json --out growth.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

from ea_tools.common import UserError, replacing, reporting

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy

# Okabe and Ito's colours, which colour-blind people can tell apart; the markers tell them apart in print.
STYLES = {"ours": ("#0072B2", "o", "-"), "stock": ("#D55E00", "s", "--")}


def main(arguments=None):
    """Command line: read the results of benchmark_training.sh --growth and draw them."""
    parser = argparse.ArgumentParser(
        prog="plot_growth.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, metavar="FILE", help="JSON of benchmark_training.sh --growth")
    parser.add_argument("--out", type=Path, metavar="FILE", help=".png, .svg or .pdf (default: FILE's name with .png)")
    args = parser.parse_args(arguments)
    out = args.out or args.results.with_suffix(".png")
    if out.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--out {out}: its name should end in .png, .svg or .pdf")
    with reporting("plot_growth"):
        found = read(args.results)
        with replacing(out) as temporary:
            draw(found, temporary, out.suffix[1:])
    print(f"written: {out}")


def read(path):
    """What benchmark_training.sh --growth wrote."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["benchmark"] != "growth":
            raise UserError(f"{path}: of the benchmark {found['benchmark']!r}, not of benchmark_training.sh --growth")
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path}: not a result of benchmark_training.sh --growth") from None
    return found


def draw(found, path, form):
    """A row for each pair of models and precision: time on the left, memory on the right."""
    pairs = {}
    for result in found["results"]:
        pairs.setdefault((result["size"], result["precision"]), []).append(result)
    figure, grid = plt.subplots(
        len(pairs), 2, figsize=(11, 0.8 + 4.2 * len(pairs)), squeeze=False, layout="constrained"
    )
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
    tokens = found["results"][0]["batches"][0]
    figure.suptitle(
        f"One training step against sentence length, about {tokens['sentences'] * tokens['target']:,} tokens a batch\n"
        f"{found['device']}, {found['threads']} thread{'s' if found['threads'] > 1 else ''}",
        fontsize=12,
    )
    figure.savefig(path, dpi=150, format=form)
    plt.close(figure)


def draw_time(ax, results):
    """Median and quartiles of seconds; beside ours, its speed as a share of stock's."""
    lengths = [result["length"] for result in results]
    for name, (colour, marker, line) in STYLES.items():
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


def draw_memory(ax, results):
    """Peak memory beyond what the process held before the first step; beside ours, its multiple of stock's."""
    lengths = [result["length"] for result in results]
    used = {
        name: numpy.array([result["memory"][name]["peak"] - result["memory"][name]["before"] for result in results])
        for name in STYLES
    }
    for name, (colour, marker, line) in STYLES.items():
        ax.plot(lengths, used[name] / 2**20, color=colour, marker=marker, linestyle=line)
    for length, ours, stock in zip(lengths, used["ours"], used["stock"], strict=True):
        note(ax, length, ours / 2**20, f"{ours / stock:.2f}")
    ax.set_ylabel("MiB")
    ax.set_title("peak memory of the step (figures: ours / stock's)", fontsize=10)


def note(ax, x, y, text):
    """A small figure above a point."""
    ax.annotate(text, (x, y), textcoords="offset points", xytext=(-2, 6), ha="right", fontsize=9, color="#0072B2")


def finish(ax, results):
    """Both axes in powers; the lengths that were measured as ticks."""
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    lengths = [result["length"] for result in results]
    ax.set_xticks(lengths, map(str, lengths))
    ax.minorticks_off()
    ax.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    ax.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:,.0f}"))
    ax.margins(x=0.08, y=0.12)
    ax.set_xlabel("source and target length, tokens")
    ax.grid(alpha=0.3)


if __name__ == "__main__":
    main()
