"""How fast data preparation is: each step against the library's own command, and the whole on one and two processes.

    python data-prep/measure.py libraries --source TEXT.de --target TEXT.en [--lines N]
    python data-prep/measure.py scale     --source TEXT.de --target TEXT.en [--lines N ...] [--workers N ...]
    python data-prep/measure.py roundtrip --source TEXT.de --target TEXT.en

The text is repeated up to N lines (pairs). `libraries` compares outputs byte for byte, and counts CPU time, start-up
included, since other work on the machine changes the wall clock. Normalised text differs by design (see
moses.Normalizer). `roundtrip` takes text that is tokenised and lower-cased, detokenises it, gives every sentence its
capital back, and counts the lines that come out the same when tokenised again. docs/data.md has the results.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial
from itertools import cycle, islice, zip_longest
from pathlib import Path

from sacremoses import MosesDetokenizer

from prep import binary, moses, rules, subwords
from prep.corpus import Corpus, Part, Rules
from prep.parallel import chunks, ordered_map
from prep.pipeline import Pipeline
from prep.stages import NAMES, STAMP
from prep.text import count_lines

MERGES = 10_000
BIN = Path(sys.executable).parent


def cpu_seconds(work: Callable[[], None]) -> float:
    """CPU time of `work` in a process of its own, and of the processes that it starts."""
    child = os.fork()
    if not child:
        try:
            work()
            code = 0
        except BaseException as error:
            print(error, file=sys.stderr)
            code = 1
        os._exit(code)
    _, status, usage = os.wait4(child, 0)
    if status:
        sys.exit("a measured step failed")
    return usage.ru_utime + usage.ru_stime


def command(arguments: list, given: Path, result: Path) -> None:
    with given.open("rb") as stdin, result.open("wb") as stdout:
        subprocess.run(arguments, stdin=stdin, stdout=stdout, stderr=subprocess.DEVNULL, check=True)


def ours(step: str, given: Path, result: Path, *arguments: str) -> None:
    """Our way, started like the library's: as a command."""
    subprocess.run([sys.executable, __file__, "step", step, given, result, *arguments], check=True)


def run_step(step: str, given: Path, result: Path, arguments: list[str]) -> None:
    """One step on one file, in this process: what `ours` starts."""
    if step == "learn":
        words = Counter()
        for _, (of_chunk,) in ordered_map(subwords.count_words, chunks([given], step, 0), 1):
            words.update(of_chunk)
        subwords.learn(words, MERGES, result)
        return
    work = {
        "normalise": lambda lang: rules.Normalise((lang,)),
        "tokenise": lambda lang: rules.Tokenise((lang,), Rules(split_dashes=True)),
        "apply": lambda codes: subwords.Apply(Path(codes), [None]),
    }[step](*arguments)
    with result.open("wb") as file:
        for _, (lines,) in ordered_map(work, chunks([given], step, 0), 1):
            file.writelines(lines)


def libraries(source: Path, lines: int, lang: str, folder: Path) -> None:
    """Prints lines per CPU second of each step, ours and the library's, on `lines` lines in language `lang`."""
    raw, normal, tokens, split = (folder / name for name in ("raw", "normal", "tokens", "split"))
    repeat(source, lines, raw)
    (folder / "learnt").mkdir()
    code = folder / "learnt/code"
    moses = [BIN / "sacremoses", "-l", lang, "-j", "1"]
    bpe = BIN / "subword-nmt"
    steps = [
        ("tokenise", raw, tokens, [lang], [*moses, "tokenize", "-a"]),
        ("normalise", raw, normal, [lang], [*moses, "normalize", "-c"]),
        ("learn", tokens, code, [], [bpe, "learn-bpe", "-s", str(MERGES)]),
        ("apply", tokens, split, [str(code)], [bpe, "apply-bpe", "-c", code]),
    ]
    for step, given, result, arguments, words in steps:
        place = code.parent if step == "learn" else result
        own = cpu_seconds(partial(ours, step, given, place, *arguments))
        library = cpu_seconds(partial(command, words, given, folder / "theirs"))
        show(step, lines, own, library, compared(result, folder / "theirs"))
    for part in ("train", "valid"):
        for side in ("a", "b"):
            shutil.copy(split, folder / f"{part}.{side}")
    own = cpu_seconds(
        partial(subprocess.run, [sys.executable, __file__, "step", "binarise", folder, folder], check=True)
    )
    preprocess = [BIN / "fairseq-preprocess", "--joined-dictionary", "--source-lang", "a", "--target-lang", "b"]
    preprocess += ["--trainpref", folder / "train", "--validpref", folder / "valid", "--destdir", folder / "fairseq"]
    library = cpu_seconds(partial(command, preprocess, split, folder / "theirs"))
    names = [f"{part}.a-b.{side}.{kind}" for part in ("train", "valid") for side in "ab" for kind in ("bin", "idx")]
    same = all((folder / name).read_bytes() == (folder / "fairseq" / name).read_bytes() for name in names)
    show("binarise", 4 * lines, own, library, "same" if same else "OTHER")


def run_binarise(folder: Path) -> None:
    part = (Part("x.{lang}"),)
    for side in "ab":
        (folder / f"x.{side}").touch()
    pipeline = Pipeline(Corpus("x", "a", "b", part, Rules(), part), folder, folder / "out")
    pipeline.folder["filter"] = folder
    counts = sum(
        (
            of_chunk
            for _, of_chunk in ordered_map(binary.count_subwords, chunks(pipeline.text("filter", "train"), "", 0), 1)
        ),
        Counter(),
    )
    words = binary.dictionary(counts)
    for split in ("train", "valid"):
        pipeline._binarise(folder, split, binary.Encode(word for word, _ in words))


def compared(ours: Path, library: Path) -> str:
    if ours.read_bytes() == library.read_bytes():
        return "same"
    different = sum(a != b for a, b in zip(ours.open("rb"), library.open("rb"), strict=True))
    return f"{different:,} lines differ"


def show(step: str, lines: int, own: float, library: float, same: str) -> None:
    print(f"{step:<10} {lines / own:>10,.0f} {lines / library:>10,.0f} {library / own:>8.2f}   {same}", flush=True)


def repeat(source: Path, lines: int, result: Path) -> None:
    with source.open("rb") as given, result.open("wb") as file:
        file.writelines(islice(cycle(given.readlines()), lines))


def scale(source: Path, target: Path, sizes: list[int], workers: list[int], folder: Path) -> None:
    """Prints what every stage takes on a corpus of each size, with each number of processes."""
    languages = source.suffix[1:], target.suffix[1:]
    print("     pairs processes  stage      seconds   CPU s   of it main   lines/s lines/CPU s    MiB")
    for size in sizes:
        raw = folder / f"raw{size}"
        raw.mkdir()
        for path, lang in zip((source, target), languages, strict=True):
            repeat(path, size, raw / f"train.{lang}")
        part = (Part("train.{lang}"),)
        corpus = Corpus("scale", *languages, part, Rules(
            split_dashes=True, normalise=True, filter_on="subwords", max_ratio=1.5, max_length=250, valid_every=1000,
            merges=MERGES,
        ))  # fmt: skip
        for processes in workers:
            pipeline = Pipeline(corpus, raw, folder / f"out{size}-{processes}", processes)
            cpu_seconds(partial(quietly, pipeline))  # a process of its own, so that peak memory is this run's alone
            total = Counter()
            for name in NAMES:
                took = json.loads((pipeline.folder[name] / STAMP).read_text(encoding="utf-8"))["took"]
                total.update(took)
                row(size, processes, name, took)
            row(size, processes, "all", {**total, "peak_mib": took["peak_mib"]})
            shutil.rmtree(pipeline.out)
            shutil.rmtree(pipeline.work)


def quietly(pipeline: Pipeline) -> None:
    """Run a pipeline without its progress and its report; what it raises is for the caller to show."""
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        pipeline.run()


def roundtrip(text: Path, lang: str) -> None:
    """Prints how many lines survive being detokenised and tokenised again, and what differs in the others."""
    tokenizer, detokenizer = moses.Tokenizer(lang), MosesDetokenizer(lang)
    lines = text.read_bytes().decode().split("\n")[:-1]
    different = []
    for line in lines:
        words = line.split()  # lower-casing took away what tells the end of a sentence from an abbreviation
        befores = ["", *words[:-1]]
        words = [word.capitalize() if before == "." else word for before, word in zip(befores, words, strict=True)]
        again = tokenizer.tokenize(detokenizer.detokenize(words), return_str=True).lower()
        if again != line:
            different.append((line.split(), again.split()))
    same = len(lines) - len(different)
    print(f"{text}: {same:,} of {len(lines):,} lines the same, {same / len(lines):.2%}")
    for ours, again in different[:20]:
        at = next(i for i, (a, b) in enumerate(zip_longest(ours, again)) if a != b)
        print(f"  {' '.join(ours[max(0, at - 2) : at + 3])}  ->  {' '.join(again[max(0, at - 2) : at + 3])}")


def row(size: int, processes: int, name: str, took: dict) -> None:
    seconds, cpu, main_cpu = took["seconds"], took["cpu_seconds"], took["main_cpu_seconds"]
    print(
        f"{size:>10,} {processes:>9}  {name:<9} {seconds:>8.1f} {cpu:>7.1f} {main_cpu:>12.1f} "
        f"{2 * size / seconds:>9,.0f} {2 * size / max(cpu, 0.01):>11,.0f} {took['peak_mib']:>6.0f}",
        flush=True,
    )


def main() -> None:
    if sys.argv[1:2] == ["step"]:
        step, given, result, *arguments = sys.argv[2:]
        if step == "binarise":
            run_binarise(Path(given))
        else:
            run_step(step, Path(given), Path(result), arguments)
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["libraries", "scale", "roundtrip"])
    parser.add_argument("--source", type=Path, required=True, metavar="TEXT.XX")
    parser.add_argument("--target", type=Path, required=True, metavar="TEXT.YY")
    parser.add_argument("--lines", type=int, nargs="+", default=[50_000], metavar="N")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], metavar="N")
    args = parser.parse_args()
    if args.what == "roundtrip":
        for path in (args.source, args.target):
            roundtrip(path, path.suffix[1:])
        return
    with tempfile.TemporaryDirectory() as folder:
        if args.what == "scale":
            scale(args.source, args.target, args.lines, args.workers, Path(folder))
        else:
            print(f"{'step':<10} {'ours':>10} {'library':>10} {'ratio':>8}   output   (lines per CPU second)")
            for path in (args.source, args.target):
                number = f"{path.suffix[1:]}, {args.lines[0]:,} lines, {count_lines(path):,} of them different"
                print(f"-- {number}")
                (Path(folder) / path.suffix).mkdir()
                libraries(path, args.lines[0], path.suffix[1:], Path(folder) / path.suffix)


if __name__ == "__main__":
    main()
