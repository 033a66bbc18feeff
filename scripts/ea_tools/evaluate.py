"""Translate a prepared split with a trained run and score it; scripts/evaluate.sh is how it is called.

Two kinds of BLEU come out, and they are not comparable with each other:
  sacreBLEU       detokenised translations against the raw references: what to report today
  tokenised BLEU  Moses tokens on both sides: what the papers' tables hold; for En-De also with compounds split
Where the model was trained on lower-cased text all scores ignore case, and their signatures say so.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ea_tools import average, scores
from ea_tools.checkpoints import EPOCH, UPDATE, check_dictionaries, load, numbered, section, settings
from ea_tools.common import REPO, UserError, portable, positive, replacing, reporting
from ea_tools.provenance import provenance
from ea_tools.text import Words, as_written, read_lines, read_prep
from ea_tools.text import references as read_references


@dataclass(frozen=True)
class Search:
    """How translations are looked for."""

    beam: int
    lenpen: float
    flags: Sequence[str] = ()  # of fairseq-generate


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: translate, score, print, and keep the result in RUN/eval/SUBSET.json."""
    args = parse(arguments)
    with reporting("evaluate"):
        evaluate(args)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; what stands after -- goes to fairseq-generate as it is."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(
        prog="evaluate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- go to fairseq-generate, for example: -- --batch-size 64 --cpu",
    )
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="prepared data, data/NAME")
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="the run's folder, runs/NAME")
    parser.add_argument("--subset", default="test", metavar="SPLIT", help="valid, test, test1, ... (default: test)")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--average",
        type=positive,
        metavar="N",
        help="translate with the average of the last N checkpoints, by epoch or by update (default: 10)",
    )
    which.add_argument("--best", action="store_true", help="translate with the run's checkpoint_best.pt")
    which.add_argument(
        "--checkpoint", metavar="FILE[:FILE...]", help="translate with this checkpoint, or with an ensemble of several"
    )
    parser.add_argument(
        "--against", type=Path, metavar="RUN", help="a paired test against this run, which has been evaluated before"
    )
    parser.add_argument(
        "--tok", metavar="NAME", help="sacreBLEU's tokeniser (default: sacreBLEU's own for the target language)"
    )
    parser.add_argument(
        "--comet",
        metavar="MODEL",
        help="score with COMET too, for example Unbabel/wmt22-comet-da; needs comet-score",
    )
    parser.add_argument("--beam", type=positive, default=5, help="(default: 5)")
    parser.add_argument("--lenpen", type=float, default=1.0, help="length penalty; above 1 favours longer (default: 1)")
    args = parser.parse_args(arguments[:end])
    args.command = ["scripts/evaluate.sh", *arguments]
    args.generate_flags = arguments[end + 1 :]
    return args


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Translate and score one split; returns what goes into the JSON file."""
    prep = read_prep(args.data)
    references, tokenised_references = read_references(_reference_file(args.data, args.subset, prep), prep)
    tokenizer = args.tok or scores.tokenizer_for(prep["target_lang"])
    scores.check_tokenizer(tokenizer, prep["target_lang"])
    if args.comet:
        scores.comet_command()
    if not args.run.is_dir():
        raise UserError(f"--run {args.run}: no such folder")
    baseline = read_baseline(args.against, args.subset, references) if args.against else None
    checkpoint, averaged = choose_checkpoint(args.run, args.checkpoint, args.best, args.average)
    for path in checkpoint.split(":"):
        state = load(path)
        check_dictionaries(args.data, prep, path, state)

    results = args.run / "eval"
    search = Search(args.beam, args.lenpen, args.generate_flags)
    command = generate_command(args.data, prep, checkpoint, args.subset, search)
    output = generate(command, results, args.subset, len(references))
    hypotheses = in_order(output, len(references))
    words = Words(prep, prep["target_lang"])
    detokenised = [words.detokenize(line) for line in hypotheses]
    check_references(output, tokenised_references, prep["lowercase"], f"{args.subset!r} in {args.data}")

    result = {
        "data": prep.get("name", args.data.name),
        "run": str(args.run),
        "subset": args.subset,
        "sentences": len(references),
        "direction": f"{prep['source_lang']}-{prep['target_lang']}",
        **describe(state),
        "checkpoint": checkpoint,
        "averaged": averaged,
        "beam": search.beam,
        "lenpen": search.lenpen,
        "scores": scores.score(
            tokenised=None if prep["tokenizer"] == "none" else hypotheses,
            detokenised=detokenised,
            references=references,
            tokenised_references=tokenised_references,
            lowercase=prep["lowercase"],
            tokenizer=tokenizer,
            compounds=(prep["source_lang"], prep["target_lang"]) == ("en", "de"),
        ),
        "tokenizer": tokenizer,
        "references": digest(references),
        "speed": speed(output),
        "command": portable(args.command),
        "generate_command": portable(command),
        **provenance("--cpu" in search.flags),
    }
    if args.comet:
        sources = as_written(args.data / "raw" / f"{args.subset}.{prep['source_lang']}", prep, prep["source_lang"])
        gpu = not result["device"].startswith("CPU")
        result["scores"]["comet"] = scores.comet(args.comet, sources, detokenised, references, gpu)
    if baseline:
        difference = scores.compare(
            system=detokenised,
            baseline=baseline,
            references=references,
            lowercase=prep["lowercase"],
            tokenizer=tokenizer,
        )
        result["against"] = {"run": str(args.against), **difference}
    with replacing(results / f"{args.subset}.hyp.txt") as temporary:
        temporary.write_text("".join(f"{line}\n" for line in detokenised), encoding="utf-8")
    with replacing(results / f"{args.subset}.json") as temporary:
        temporary.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    report(result, results)
    return result


def describe(state: dict) -> dict[str, Any]:
    """What a record of a score says about the model: architecture, its own settings, how it was trained."""
    return {
        "arch": settings(state).get("arch"),
        "settings": {name: value for name, value in settings(state).items() if name.startswith("ea_")},
        "training_seed": section(state, "common").get("seed"),
        "updates": (state.get("optimizer_history") or [{}])[-1].get("num_updates"),
    }


def _reference_file(data: Path, subset: str, prep: dict) -> Path:
    """The raw references of a split, or an error that names the splits there are."""
    language = prep["target_lang"]
    path = data / "raw" / f"{subset}.{language}"
    if not path.is_file():
        there = sorted(path.stem for path in (data / "raw").glob(f"*.{language}"))
        raise UserError(f"--subset {subset}: {path} does not exist; there are: {', '.join(there) or 'none'}")
    return path


def digest(lines: Sequence[str]) -> str:
    """By this two results are known to have the same references."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def read_baseline(run: Path, subset: str, references: Sequence[str]) -> list[str]:
    """The translations of the run given by --against, which must be of the same text."""
    record, text = (run / "eval" / f"{subset}.{kind}" for kind in ("json", "hyp.txt"))
    if not (record.exists() and text.exists()):
        raise UserError(f"--against {run}: {record} does not exist; evaluate that run first")
    result = json.loads(record.read_text(encoding="utf-8"))
    if result.get("references") != digest(references):
        raise UserError(f"--against {run}: its {subset} has other references, of {result['data']}")
    return read_lines(text)


def choose_checkpoint(run: Path, given: str | None, best: bool, count: int | None) -> tuple[str, list[str]]:
    """The checkpoint (or a:b:c) to translate with, and the files it is the average of ([] where it is none).

    Args:
        given: a file, or several with colons between them.
        best: take checkpoint_best.pt.
        count: otherwise, how many of the last checkpoints are averaged; 10 where it is None.
    """
    if given or best:
        return given or str(run / "checkpoint_best.pt"), []
    wanted = count or 10
    files = list(run.iterdir())
    epochs, updates = len(numbered(files, EPOCH)), len(numbered(files, UPDATE))
    if max(epochs, updates) < wanted:
        hint = "" if count else f"; --average {max(epochs, updates, 1)} takes what there is"
        raise UserError(
            f"{run}: {wanted} checkpoints to average are wanted; there are {epochs} by epoch, {updates} by update"
            f"{hint if epochs or updates else ''}"
        )
    by_epoch = epochs >= wanted
    paths = average.select([run], wanted if by_epoch else None, None if by_epoch else wanted)
    output = run / f"average{wanted}.pt"
    print(f"averaging the last {wanted} checkpoints by {'epoch' if by_epoch else 'update'}", file=sys.stderr)
    average.save(average.average(paths), output)
    return str(output), [str(path) for path in paths]


def generate_command(data: Path, prep: dict, checkpoint: str, subset: str, search: Search) -> list[str]:
    """The words of fairseq-generate."""
    return [
        str(Path(sys.executable).with_name("fairseq-generate")),
        *(str(data), "--user-dir", str(REPO / "ea_fairseq"), "--task", "translation"),
        *("--source-lang", prep["source_lang"], "--target-lang", prep["target_lang"]),
        *("--path", checkpoint, "--gen-subset", subset),
        *("--beam", str(search.beam), "--lenpen", str(search.lenpen), "--post-process", prep["bpe"]),
        # By default this fairseq drops the last batch unless it holds a multiple of 8 sentences.
        *("--required-batch-size-multiple", "1"),
        *search.flags,
    ]


def generate(command: Sequence[str], results: Path, subset: str, sentences: int) -> list[str]:
    """Run fairseq-generate. Its output lines are returned, then its messages; RESULTS/generate-SUBSET.* keep both."""
    print("+", shlex.join(command), file=sys.stderr)
    results.mkdir(exist_ok=True)
    log = results / f"generate-{subset}.log"
    output = []
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"},
        ) as process,
        tqdm(total=sentences, unit=" sentences", mininterval=0.1 if sys.stderr.isatty() else 10) as progress,
    ):
        for line in process.stdout:
            output.append(line.decode("utf-8").rstrip("\n"))
            progress.update(line.startswith(b"H-"))
    messages = read_lines(log)
    if process.returncode:
        last = next((line for line in reversed(messages) if line.strip()), "it said nothing")
        raise UserError(f"fairseq-generate ended with status {process.returncode}: {last}\nits messages: {log}")
    with replacing(results / f"generate-{subset}.txt") as temporary:
        temporary.write_text("".join(f"{line}\n" for line in output), encoding="utf-8")
    return output + messages


def in_order(output: Iterable[str], sentences: int) -> list[str]:
    """The hypotheses in fairseq-generate's output, in the order of the sentence ids 0 .. sentences - 1."""
    hypotheses = {}
    for line in output:
        if match := re.match(r"H-(\d+)\t[^\t]*\t?(.*)", line):
            number = int(match[1])
            if number in hypotheses:
                raise UserError(f"sentence {number} has more than one hypothesis (was --nbest given?)")
            hypotheses[number] = match[2]
    missing = sorted(set(range(sentences)) - set(hypotheses))
    surplus = sorted(set(hypotheses) - set(range(sentences)))
    if missing:
        raise UserError(f"{len(missing)} of {sentences} sentences have no hypothesis, the first is {missing[0]}")
    if surplus:
        raise UserError(f"there are hypotheses for {len(surplus)} sentences beyond the {sentences} references")
    return [hypotheses[number] for number in range(sentences)]


def check_references(output: Iterable[str], references: Sequence[str], lowercase: bool, name: str) -> None:
    """The raw references must be the text that was made binary: compare them with what fairseq read back.

    Args:
        output: of fairseq-generate.
        references: the raw references, in tokens.
        name: what the messages call them.
    """
    targets = {int(m[1]): m[2] for line in output if (m := re.match(r"T-(\d+)\t(.*)", line)) and "<<unk>>" not in m[2]}
    different = [
        number
        for number, target in sorted(targets.items())
        if target.split() != (references[number].lower() if lowercase else references[number]).split()
    ]
    if not different:
        return
    first = different[0]
    message = (
        f"{len(different)} of {len(targets)} raw references of {name} are not the text of the "
        f"binary data, first line {first + 1}:\n  raw:    {references[first]}\n  binary: {targets[first]}"
    )
    if len(different) > len(targets) // 10:
        raise UserError(message)
    print(f"evaluate: warning: {message}", file=sys.stderr)


def speed(output: Iterable[str]) -> dict[str, float] | None:
    """What fairseq-generate says about its own speed, or None."""
    for line in output:
        if match := re.search(r"Translated [\d,]+ sentences .* in ([\d.]+)s \(([\d.]+) sentences/s, ([\d.]+)", line):
            seconds, sentences, tokens = map(float, match.groups())
            return {"seconds": seconds, "sentences_per_second": sentences, "tokens_per_second": tokens}
    return None


def report(result: dict[str, Any], results: Path) -> None:
    """Print the result as people read it."""
    print(f"\n{result['data']} {result['direction']}, {result['subset']}: {result['sentences']} sentences")
    print(f"  {result['arch']}, {result['checkpoint']}, beam {result['beam']}, lenpen {result['lenpen']:g}")
    for name, score in result["scores"].items():
        interval = f" ± {score['interval']['half_width']:.2f}" if "interval" in score else ""
        print(f"  {scores.LABELS[name] + ' ':.<22} {score['score']:6.2f}{interval:7}  {score['signature']}")
    for name in (name for name in scores.LABELS if name in result.get("against", {})):
        test = result["against"][name]
        print(
            f"  {scores.LABELS[name]} against {result['against']['run']}: {test['difference']:+.2f}, "
            f"p = {test['p']:.3f} (paired bootstrap)  {test['signature']}"
        )
    print(f"  written: {results / result['subset']}.json, .hyp.txt")


if __name__ == "__main__":
    main()
