"""The tables of speed in docs/performance.md and docs/kernels.md agree with the records in results/."""

import json

import pytest
from helpers import REPO

from ea_tools.bench.common import show
from ea_tools.tables.page import markdown_table
from ea_tools.tables.records import Records

NAMES = {"encoder": "encoder", "decoder": "decoder", "cross": "encoder-decoder"}
WHICH = "forward + backward"
#: translated in both precisions: direction, architecture, how it was trained, seed
TRANSLATED = [
    ("en-fr", "transformer_lite", "", 1),
    ("en-fr", "ea_transformer_lite", "", 1),
    ("de-en", "ea_transformer_lite", " trained with `--precision bf16`", 1),
    ("de-en", "ea_transformer_lite", " trained with `--precision bf16`", 2),
]


def results(name):
    return json.loads((REPO / "results" / name).read_text())["results"]


def row(*cells):
    return markdown_table(cells, [])[0]


def ratio(result):
    return show(result["ratio"])


def mebibytes(result):
    ours, stock = (round(result["memory"][model]["peak"] / 2**20) for model in ("ours", "stock"))
    return f"{ours:,} / {stock:,}"


def training(threads, precision="fp32"):
    """Results of training of lite and of base."""
    for size in ("lite", "base"):
        kept = results(f"speed/training-{size}-{threads}.json")
        yield next(each for each in kept if each["precision"] == precision)


def decoding(beam, batch, precision="fp32"):
    """Results of decoding by lite and by base."""
    wanted = (beam, str(batch), precision)
    kept = [
        each for each in results("speed/decoding.json") if (each["beam"], each["batch"], each["precision"]) == wanted
    ]
    return [next(each for each in kept if each["size"] == size) for size in ("lite", "base")]


def in_bf16(measured, *which):
    """Ours by products in bfloat16 against stock's float32, of lite and of base: medians of the same batches."""
    for ours, stock in zip(measured(*which, "bf16"), measured(*which), strict=True):
        yield f"{ours['tokens_per_second']['ours']['median'] / stock['tokens_per_second']['stock']['median']:.2f}"


def translated_in_bf16(run):
    """sacreBLEU of a run's translations of both tests, by float32 and by products in bfloat16."""
    for subset in ("test", "test1"):
        test = Records(REPO / "results").rows[run, subset, "beam5.average10.bf16"]["against"]["sacrebleu"]
        yield f"{test['baseline']:.2f} -> {test['baseline'] + test['difference']:.2f} (p {test['p']:.2f})"


def rows_of_the_gpu():
    """Results of lite, where there are any, and of base on an H200."""
    in_bf16, in_fp16 = results("speed/h200-training.json")
    yield row("training, 4,096 tokens a batch", "not run", ratio(in_bf16))
    yield row("training, 4,096 tokens, float16", "not run", ratio(in_fp16))
    yield row("training, 16,384 tokens", "not run", ratio(*results("speed/h200-training-16384.json")))
    alone, full, lite = results("speed/h200-decoding.json")
    yield row("decoding, beam 5, one sentence at a time", ratio(lite), ratio(alone))
    yield row("decoding, beam 5, 12,000 tokens at once", "not run", ratio(full))
    (memory,) = results("speed/h200-memory.json")
    yield row("training's peak memory, 4,096 tokens, MiB, ours / stock", "not run", mebibytes(memory))


def rows_of_performance():
    yield from rows_of_the_gpu()
    for threads, label in (("1-thread", "one thread"), ("2-threads", "two threads")):
        kept = list(training(threads))
        yield row(f"training, {label}", *map(ratio, kept), *in_bf16(training, threads))
        yield row(label, *map(mebibytes, kept))
    for beam, search in ((1, "greedy"), (5, "beam 5")):
        for batch in (1, 8, 32):
            sentences = "one sentence at a time" if batch == 1 else f"{batch} sentences"
            label = f"decoding, {search}, {sentences}"
            yield row(label, *map(ratio, decoding(beam, batch)), *in_bf16(decoding, beam, batch))
    for direction, arch, trained, seed in TRANSLATED:
        pair = direction.title()
        yield row(
            f"{pair}, `{arch}`{trained}, seed {seed}",
            *translated_in_bf16(f"multi30k-laptop-{direction}/{arch}{'-precisionbf16' if trained else ''}-seed{seed}"),
        )
    growth = results("speed/growth.json")
    yield row("speed, ours / stock", *(f"{each['ratio']['median']:.2f}" for each in growth))
    yield row("peak memory, ours / stock, MiB", *map(mebibytes, growth))


def rows_of_kernels():
    alone = results("speed/attention.json")  # in the order of their lengths
    for heads in (4, 8):
        for kind, name in NAMES.items():
            paths = [each["paths"] for each in alone if (each["kind"], each["heads"]) == (kind, heads)]
            times = [{path: each[path][WHICH]["milliseconds"]["median"] for path in each} for each in paths]
            label = f"{name}, K = {heads}"
            yield row(f"{label}: plain composition / ours", *(f"{each['plain'] / each['ours']:.2f}" for each in times))
            yield row(f"{label}: stock attention / ours", *(f"{each['sdpa'] / each['ours']:.2f}" for each in times))
            floors = [each["ours"][WHICH]["floor"]["milliseconds"] for each in paths]
            shares = (floor / each["ours"] for floor, each in zip(floors, times, strict=True))
            yield row(f"{label}: ours, share of the floor", *(f"{share:.0%}" for share in shares))


@pytest.mark.parametrize(
    ("page", "rows"), [("docs/performance.md", rows_of_performance), ("docs/kernels.md", rows_of_kernels)]
)
def test_a_pages_rows_are_those_of_the_records(page, rows):
    lines = (REPO / page).read_text().splitlines()
    missing = [line for line in rows() if line not in lines]
    assert not missing, f"{page} lacks\n" + "\n".join(missing)


RECORDS = {
    "docs/performance.md": ["speed/training-[bl]*", "speed/decoding", "speed/growth"],
    "docs/kernels.md": ["speed/attention"],
}


@pytest.mark.parametrize(("page", "records"), RECORDS.items())
def test_a_page_names_the_commits_of_the_records(page, records):
    files = [path for pattern in records for path in (REPO / "results").glob(f"{pattern}.json")]
    commits = {json.loads(path.read_text())["commit"] for path in files}
    text = (REPO / page).read_text()
    assert all(commit[:7] in text and len(commit) == 40 for commit in commits), commits
