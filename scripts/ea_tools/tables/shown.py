"""The tables of README.md and docs/ that no file in recipes/tables gives: speeds, and README's scores.

scripts/reproduce.sh pages --collect writes them between their marks, from results/ alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ea_artifacts.files import read_json
from ea_tools.tables import table as tables
from ea_tools.tables.page import gather, markdown_table, pages, show_in, spread
from ea_tools.tables.records import Records

Result = Mapping[str, Any]  # of a benchmark

SIZES = ("lite", "base")
BATCHES = [(beam, batch) for beam in (1, 5) for batch in ("1", "8", "32")]


def write(folder: Path) -> None:
    """Write every table into the pages that have its marks."""
    for page in pages(folder):
        changed = [name for name, lines in TABLES.items() if show_in(page, name, "\n".join(lines(folder)))]
        if changed:
            print(f"brought up to date: {page}: {', '.join(changed)}")


def readme(folder: Path) -> list[str]:
    """The scores of the four systems: on Multi30k 2016, and on IWSLT'14's test."""
    systems = ["Transformer", "EA-Transformer", "Conv-Transformer", "EA-Conv-Transformer"]
    lite = [f"{system}-Lite" for system in systems]
    relative = [f"{system}, relative positions" for system in ("EA", "Conv", "EA-Conv")]
    rows = {
        "Multi30k De-En, small, 1,500 updates": ("multi30k-laptop-systems", lite),
        "the same, with relative positions": ("multi30k-laptop-systems", ["Relative positions alone", *relative]),
        "Multi30k En-De, a published recipe": ("multi30k-published", systems),
        "the published recipe, with R-Drop": ("multi30k-published", [f"{system}, R-Drop" for system in systems]),
        "IWSLT'14 De-En, 42,373 of 160,239 pairs, small": ("iwslt14-subset", lite),
        "the same pairs, with relative positions": ("iwslt14-subset", ["Relative positions", *relative]),
    }
    shown = []
    for label, (name, models) in rows.items():
        table = tables.read(name)
        entries = gather(table, Records(folder), table.seeds, f"beam5.average{table.average}")
        scores = (entries[model, table.columns[0].label].values for model in models)
        shown.append([label, *(spread(values) if values else "not run" for values in scores)])
    return markdown_table(["BLEU (Multi30k: test of 2016)", "Transformer", "EA", "Conv", "EA-Conv"], shown)


def results(folder: Path, *names: str) -> list[Result]:
    """The results of benchmarks, results/speed/NAME.json."""
    return [result for name in names for result in read_json(folder / "speed" / f"{name}.json")["results"]]


def pick(found: Iterable[Result], **wanted: Any) -> Result:
    """The result with these settings."""
    return next(one for one in found if wanted.items() <= one.items())


def quartiles(of: Mapping[str, float]) -> str:
    """0.97 (0.95 .. 0.98)"""
    return "{median:.2f} ({q1:.2f} .. {q3:.2f})".format(**of)


def ratio(result: Result) -> str:
    """Ours against stock's."""
    return quartiles(result["ratio"])


def mebibytes(result: Result) -> str:
    """Peak memory of ours and of stock."""
    return " / ".join(f"{round(result['memory'][model]['peak'] / 2**20):,}" for model in ("ours", "stock"))


def training(folder: Path) -> Iterator[tuple[str, list[Result]]]:
    """A label, and the results of lite and base."""
    for threads, label in (("1-thread", "one thread"), ("2-threads", "two threads")):
        yield label, results(folder, *(f"training-{size}-{threads}" for size in SIZES))


def decoding(folder: Path) -> Iterator[tuple[str, list[Result]]]:
    """The same."""
    for beam, batch in BATCHES:
        sentences = "one sentence at a time" if batch == "1" else f"{batch} sentences"
        found = [one for one in results(folder, "decoding") if (one["beam"], one["batch"]) == (beam, batch)]
        yield f"{'greedy' if beam == 1 else f'beam {beam}'}, {sentences}", found


def speed(folder: Path) -> list[str]:
    """Ours against stock's in float32; of products in bfloat16 the ratio of medians of the same batches."""
    candidates = {training: {"ours": ", fairseq's Adam", "ours, flat_adam": ", one call"}, decoding: {"ours": ""}}
    rows = []
    for kind, names in candidates.items():
        for (label, found), (name, said) in itertools.product(kind(folder), names.items()):
            plain, rounded = ([pick(found, precision=one, size=size) for size in SIZES] for one in ("fp32", "bf16"))
            medians = [
                a["tokens_per_second"][name]["median"] / b["tokens_per_second"]["stock"]["median"]
                for a, b in zip(rounded, plain, strict=True)
            ]
            of_stock = (quartiles(one["ratios"][name]) for one in plain)
            rows.append([f"{kind.__name__}, {label}{said}", *of_stock, *(f"{median:.2f}" for median in medians)])
    return markdown_table(["ours", "`lite`", "`base`", *(f"`{size}`, `--precision bf16`" for size in SIZES)], rows)


def memory(folder: Path) -> list[str]:
    """Peak memory of training."""
    rows = [
        [label, *(mebibytes(pick(found, precision="fp32", size=size)) for size in SIZES)]
        for label, found in training(folder)
    ]
    return markdown_table(["training's peak memory, MiB, ours / stock", "`lite`", "`base`"], rows)


def growth(folder: Path) -> list[str]:
    """Speed and memory by the length of sentences."""
    found = results(folder, "growth")
    rows = [["speed, ours / stock", *(f"{one['ratio']['median']:.2f}" for one in found)]]
    rows.append(["peak memory, ours / stock, MiB", *map(mebibytes, found)])
    return markdown_table(["tokens in a sentence", *(f"{one['length']:,}" for one in found)], rows)


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
    return markdown_table(
        ["sacreBLEU, translated in float32 -> by products in bfloat16", "Multi30k 2016", "2017"], rows
    )


def on_a_gpu(folder: Path) -> list[str]:
    """Speed and memory on an H200."""
    in_bf16, in_fp16, alone, full, lite, large, peak = results(
        folder, "h200-training", "h200-decoding", "h200-training-16384", "h200-memory"
    )
    rows = [
        ["training, 4,096 tokens a batch", "not run", ratio(in_bf16)],
        ["training, 4,096 tokens, float16", "not run", ratio(in_fp16)],
        ["training, 16,384 tokens", "not run", ratio(large)],
        ["decoding, beam 5, one sentence at a time", ratio(lite), ratio(alone)],
        ["decoding, beam 5, 12,000 tokens at once", "not run", ratio(full)],
        ["training's peak memory, 4,096 tokens, MiB, ours / stock", "not run", mebibytes(peak)],
    ]
    return markdown_table(["ours, bfloat16", "`lite`", "`base`"], rows)


def attention(folder: Path) -> list[str]:
    """One attention alone, by the length of sentences."""
    found, rows = results(folder, "attention"), []
    names = {"encoder": "encoder", "decoder": "decoder", "cross": "encoder-decoder"}
    for heads, kind in [(heads, kind) for heads in (4, 8) for kind in names]:
        paths = [
            {path: passes["forward + backward"] for path, passes in one["paths"].items()}
            for one in found
            if (one["kind"], one["heads"]) == (kind, heads)
        ]
        times = [{path: cost["milliseconds"]["median"] for path, cost in one.items()} for one in paths]
        label = f"{names[kind]}, K = {heads}"
        for path, other in (("plain", "plain composition"), ("sdpa", "stock attention")):
            rows.append([f"{label}: {other} / ours", *(f"{one[path] / one['ours']:.2f}" for one in times)])
        shares = (a["ours"]["floor"]["milliseconds"] / b["ours"] for a, b in zip(paths, times, strict=True))
        rows.append([f"{label}: ours, share of the floor", *(f"{share:.0%}" for share in shares)])
    first, *lengths = (f"{length:,}" for length in sorted({one["length"] for one in found}))
    return markdown_table(["forward + backward, sentences of N tokens", f"N = {first}", *lengths], rows)


def exported(size: str, names: tuple[str, ...], folder: Path) -> list[str]:
    """Exported models against stock's in fairseq."""
    paths = ("ours", "exported", "exported int8", "ctranslate2", "ctranslate2 int8")
    rows = []
    for beam, batch in BATCHES:
        ratios = pick(results(folder, *names), beam=beam, batch=batch)["ratios"]
        rows.append([f"{beam}, {batch}", *(f"{ratios[path]['median']:.2f}" for path in paths)])
    head = [f"`{size}`: beam, sentences", "EA in fairseq", "exported", "exported, int8"]
    return markdown_table([*head, "CTranslate2, plain", "CTranslate2, plain, int8"], rows)


#: the name of its marks -> a table's lines, by the folder of results
TABLES: dict[str, Callable[[Path], list[str]]] = {
    "scores": readme,
    "speed": speed,
    "memory": memory,
    "growth": growth,
    "bfloat16": bfloat16,
    "gpu": on_a_gpu,
    "attention": attention,
    "exported lite": partial(exported, "lite", ("exported",)),
    "exported base": partial(exported, "base", ("exported-base", "exported-base-beam-1", "exported-base-32")),
}
