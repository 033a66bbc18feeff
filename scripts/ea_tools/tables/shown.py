"""The tables of README.md and docs/ that no file in recipes/tables gives: speeds, and README's scores.

scripts/reproduce.sh pages --collect writes them between their marks, from results/ alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ea_artifacts.files import read_json
from ea_tools.tables import table as tables
from ea_tools.tables.page import gather, markdown_table, pages, show_in, spread
from ea_tools.tables.records import Records

SIZES = ("lite", "base")
#: a label -> the files of results/speed with the times of lite and base
TRAINING: dict[str, tuple[str, ...]] = {
    "one thread": ("training-lite-1-thread", "training-base-1-thread"),
    "two threads": ("training-lite-2-threads", "training-base-2-threads"),
}
#: a label -> beam and sentences a batch
DECODING = {
    "greedy, one sentence at a time": (1, "1"),
    "greedy, 8 sentences": (1, "8"),
    "greedy, 32 sentences": (1, "32"),
    "beam 5, one sentence at a time": (5, "1"),
    "beam 5, 8 sentences": (5, "8"),
    "beam 5, 32 sentences": (5, "32"),
}
SYSTEMS = ["Transformer", "EA-Transformer", "Conv-Transformer", "EA-Conv-Transformer"]
LITE = [f"{system}-Lite" for system in SYSTEMS]
RELATIVE = [f"{system}, relative positions" for system in ("EA", "Conv", "EA-Conv")]
#: a label -> a table of recipes/tables and four of its rows
SCORES = {
    "Multi30k De-En, small, 1,500 updates": ("multi30k-laptop-systems", LITE),
    "the same, with relative positions": ("multi30k-laptop-systems", ["Relative positions alone", *RELATIVE]),
    "Multi30k En-De, a published recipe": ("multi30k-published", SYSTEMS),
    "Multi30k En-Fr, the same recipe": ("multi30k-published-en-fr", SYSTEMS),
    "En-De, with R-Drop": ("multi30k-published", [f"{system}, R-Drop" for system in SYSTEMS]),
    "IWSLT'14 De-En, 42,373 of 160,239 pairs, small": ("iwslt14-subset", LITE),
    "the same pairs, with relative positions": ("iwslt14-subset", ["Relative positions", *RELATIVE]),
}


def write(folder: Path) -> None:
    """Write every table into the pages that have its marks."""
    written = {name: lines(folder) for name, lines in TABLES.items()}
    for page in pages(folder):
        if changed := [name for name, lines in written.items() if show_in(page, name, lines)]:
            print(f"brought up to date: {page}: {', '.join(changed)}")


def scores(folder: Path) -> list[str]:
    """The four systems on Multi30k 2016, and on IWSLT'14's test."""
    records, rows = Records(folder), []
    for label, (name, models) in SCORES.items():
        table = tables.read(name)
        entries = gather(table, records, table.seeds)
        values = (entries[model, table.columns[0].label].values for model in models)
        rows.append([label, *(spread(of_seeds) if of_seeds else "not run" for of_seeds in values)])
    return markdown_table(["BLEU (Multi30k: test of 2016)", "Transformer", "EA", "Conv", "EA-Conv"], rows)


class Benchmark:
    """The results of benchmarks, results/speed/NAME.json."""

    def __init__(self, folder: Path, *names: str) -> None:
        self.results = [one for name in names for one in read_json(folder / f"speed/{name}.json")["results"]]

    def pick(self, **wanted: Any) -> Mapping[str, Any]:
        """The result with these settings."""
        return next(one for one in self.results if wanted.items() <= one.items())


def quartiles(ratio: Mapping[str, float]) -> str:
    """0.97 (0.95 .. 0.98)"""
    return "{median:.2f} ({q1:.2f} .. {q3:.2f})".format(**ratio)


def mebibytes(result: Mapping[str, Any]) -> str:
    """Peak memory of ours and of stock."""
    return " / ".join(f"{round(result['memory'][model]['peak'] / 2**20):,}" for model in ("ours", "stock"))


def speed(folder: Path) -> list[str]:
    """Ours against stock's in float32; of products in bfloat16 the ratio of medians of the same batches."""
    kinds: list[tuple[str, tuple[str, ...], dict[str, Any], str]] = []
    for label, files in TRAINING.items():
        kinds += [(f"training, {label}, fairseq's Adam", files, {}, "ours")]
        kinds += [(f"training, {label}, one call", files, {}, "ours, flat_adam")]
    for label, (beam, batch) in DECODING.items():
        kinds += [(f"decoding, {label}", ("decoding",), {"beam": beam, "batch": batch}, "ours")]
    rows = []
    for label, files, settings, name in kinds:
        benchmark = Benchmark(folder, *files)
        plain, rounded = (
            [benchmark.pick(precision=one, size=size, **settings) for size in SIZES] for one in ("fp32", "bf16")
        )
        medians = [
            a["tokens_per_second"][name]["median"] / b["tokens_per_second"]["stock"]["median"]
            for a, b in zip(rounded, plain, strict=True)
        ]
        rows.append([label, *(quartiles(one["ratios"][name]) for one in plain), *(f"{one:.2f}" for one in medians)])
    return markdown_table(["ours", "`lite`", "`base`", *(f"`{size}`, `--precision bf16`" for size in SIZES)], rows)


def memory(folder: Path) -> list[str]:
    """Peak memory of training."""
    rows = [
        [label, *(mebibytes(Benchmark(folder, *files).pick(precision="fp32", size=size)) for size in SIZES)]
        for label, files in TRAINING.items()
    ]
    return markdown_table(["training's peak memory, MiB, ours / stock", "`lite`", "`base`"], rows)


def growth(folder: Path) -> list[str]:
    """Speed and memory by the length of sentences."""
    results = Benchmark(folder, "growth").results
    rows = [["speed, ours / stock", *(f"{one['ratio']['median']:.2f}" for one in results)]]
    rows.append(["peak memory, ours / stock, MiB", *map(mebibytes, results)])
    return markdown_table(["tokens in a sentence", *(f"{one['length']:,}" for one in results)], rows)


def bfloat16(folder: Path) -> list[str]:
    """Scores of translations by products in bfloat16 against those by float32."""
    rows = []
    for (run, subset, settings), row in Records(folder).rows.items():
        if settings == "beam5.average10.bf16":
            test = row["against"]["sacrebleu"]
            trained = " trained with `--precision bf16`" if "precisionbf16" in run else ""
            if subset == "test":
                rows.append([f"{row['direction'].title()}, `{row['arch']}`{trained}, seed {row['training_seed']}"])
            after = test["baseline"] + test["difference"]
            rows[-1].append(f"{test['baseline']:.2f} -> {after:.2f} (p {test['p']:.2f})")
    head = ["sacreBLEU, translated in float32 -> by products in bfloat16", "Multi30k 2016", "2017"]
    return markdown_table(head, rows)


def on_a_gpu(folder: Path) -> list[str]:
    """Speed and memory on an H200."""
    files = ("h200-training", "h200-decoding", "h200-training-16384", "h200-memory")
    in_bf16, in_fp16, alone, full, lite, large, peak = Benchmark(folder, *files).results
    rows = [
        ["training, 4,096 tokens a batch", "not run", quartiles(in_bf16["ratio"])],
        ["training, 4,096 tokens, float16", "not run", quartiles(in_fp16["ratio"])],
        ["training, 16,384 tokens", "not run", quartiles(large["ratio"])],
        ["decoding, beam 5, one sentence at a time", quartiles(lite["ratio"]), quartiles(alone["ratio"])],
        ["decoding, beam 5, 12,000 tokens at once", "not run", quartiles(full["ratio"])],
        ["training's peak memory, 4,096 tokens, MiB, ours / stock", "not run", mebibytes(peak)],
    ]
    return markdown_table(["ours, bfloat16", "`lite`", "`base`"], rows)


def attention(folder: Path) -> list[str]:
    """One attention alone, by the length of sentences."""
    benchmark, rows = Benchmark(folder, "attention"), []
    lengths = sorted({one["length"] for one in benchmark.results})
    names = {"encoder": "encoder", "decoder": "decoder", "cross": "encoder-decoder"}
    for label, kind, heads in [(f"{names[kind]}, K = {heads}", kind, heads) for heads in (4, 8) for kind in names]:
        paths = [benchmark.pick(kind=kind, heads=heads, length=length)["paths"] for length in lengths]
        costs = [{path: passes["forward + backward"] for path, passes in one.items()} for one in paths]
        times = [{path: cost["milliseconds"]["median"] for path, cost in one.items()} for one in costs]
        for path, other in (("plain", "plain composition"), ("sdpa", "stock attention")):
            rows.append([f"{label}: {other} / ours", *(f"{one[path] / one['ours']:.2f}" for one in times)])
        shares = (a["ours"]["floor"]["milliseconds"] / b["ours"] for a, b in zip(costs, times, strict=True))
        rows.append([f"{label}: ours, share of the floor", *(f"{share:.0%}" for share in shares)])
    first, *others = (f"{length:,}" for length in lengths)
    return markdown_table(["forward + backward, sentences of N tokens", f"N = {first}", *others], rows)


def exported(size: str, names: tuple[str, ...], folder: Path) -> list[str]:
    """Exported models against stock's in fairseq."""
    paths = ("ours", "exported", "exported int8", "ctranslate2", "ctranslate2 int8")
    benchmark = Benchmark(folder, *names)
    rows = []
    for beam, batch in DECODING.values():
        ratios = benchmark.pick(beam=beam, batch=batch)["ratios"]
        rows.append([f"{beam}, {batch}", *(f"{ratios[path]['median']:.2f}" for path in paths)])
    head = [f"`{size}`: beam, sentences", "EA in fairseq", "exported", "exported, int8"]
    return markdown_table([*head, "CTranslate2, plain", "CTranslate2, plain, int8"], rows)


#: the name of its marks -> a table's lines, by the folder of results
TABLES: dict[str, Callable[[Path], list[str]]] = {
    "scores": scores,
    "speed": speed,
    "memory": memory,
    "growth": growth,
    "bfloat16": bfloat16,
    "gpu": on_a_gpu,
    "attention": attention,
    "exported lite": partial(exported, "lite", ("exported",)),
    "exported base": partial(exported, "base", ("exported-base", "exported-base-beam-1", "exported-base-32")),
}
