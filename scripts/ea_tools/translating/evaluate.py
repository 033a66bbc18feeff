"""Translate a prepared split with a trained run and score it; scripts/evaluate.sh is how it is called.

Two kinds of BLEU come out, and they are not comparable with each other:
  sacreBLEU       detokenised translations against the raw references: what to report today
  tokenised BLEU  Moses tokens on both sides: what the papers' tables hold; for En-De also with compounds split
Where the model was trained on lower-cased text all scores ignore case, and their signatures say so.

Results are named by their settings, RUN/eval/test.beam5.average10.json and .hyp.txt, so that none overwrites another;
the last of a split is test.json and test.hyp.txt, too. Those of other data than the run's have their name in front:
law.test.beam5.average10.json, law.test.json. Results of COMET and --against stay where the same translations are made
again without them.
"""

from __future__ import annotations

import argparse
import contextlib
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

from ea_data.command_line import Parser
from ea_data.languages import base_language
from ea_tools import metrics as scores
from ea_tools.checkpoints import EPOCH, UPDATE, load, longest, numbered, section, settings
from ea_tools.common import REPO, UserError, finite, portable, positive, read_json, replacing, reporting, write_json
from ea_tools.preparation import FOLDER, Preparation, of_model, require_same
from ea_tools.preparation import digest as preparation_digest
from ea_tools.text import Words, as_written, digest, read_lines, read_prep
from ea_tools.text import references as read_references
from ea_tools.training import average
from ea_tools.training.provenance import provenance
from ea_tools.training.recipes import parse_flags
from ea_tools.training.run_folder import LAST, finished, updates
from ea_tools.translating import exported
from ea_tools.translating.exported import is_export
from ea_tools.translating.translators import add_precision, parse_both, program


@dataclass(frozen=True)
class Search:
    """The settings of the search."""

    beam: int
    lenpen: float
    flags: Sequence[str] = ()  # of fairseq-generate
    precision: str = "fp32"


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: translate, score, print, and keep the result in RUN/eval."""
    args = parse(arguments)
    with reporting("evaluate"):
        evaluate(args)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; what stands after -- goes to fairseq-generate as it is."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="evaluate.sh",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Flags after -- go to fairseq-generate, for example: -- --batch-size 64 --cpu",
    )
    parser.add_argument("--data", required=True, type=Path, metavar="DIR", help="prepared data, data/NAME")
    parser.add_argument("--run", required=True, type=Path, metavar="DIR", help="a run, runs/NAME, or an export")
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
        "--against",
        type=Path,
        metavar="RUN",
        help="a paired test against this run or export, which has been evaluated before",
    )
    parser.add_argument(
        "--other-settings",
        action="store_true",
        help="let --against be the last evaluation of that run, whatever its beam, average and so on",
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
    parser.add_argument(
        "--lenpen", type=finite, default=1.0, help="length penalty; above 1 favours longer (default: 1)"
    )
    add_precision(parser)
    args, flags = parse_both(parser, arguments)
    args.command = ["scripts/evaluate.sh", *arguments]
    args.generate_flags = flags
    return args


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Translate and score one split; returns what goes into the JSON file."""
    prep = read_prep(args.data)
    references, tokenised_references = read_references(_reference_file(args.data, args.subset, prep), prep)
    empty = sum(not line.strip() for line in references)
    tokenizer = args.tok or scores.tokenizer_for(prep["target_lang"])
    scores.check_tokenizer(tokenizer, prep["target_lang"])
    if args.comet:
        scores.comet_command()
    if not args.run.is_dir():
        raise UserError(f"--run {args.run}: no such folder")
    data = prep.get("name", args.data.name)
    split = split_name(args.run, data, args.subset)
    baseline = read_baseline(args, data, references) if args.against else None
    model = translate_export(args, split) if is_export(args.run) else translate_run(args, prep, split, len(references))
    too_long = count_longer(args.data, prep, args.subset, model.lengths)
    output, preparation = model.output, model.preparation
    hypotheses = in_order(output, len(references), left_out=too_long[1])
    prep = preparation.prep
    words = Words(prep, prep["target_lang"])
    detokenised = [words.detokenize(line) for line in hypotheses]
    check_references(output, tokenised_references, prep["lowercase"], f"{args.subset!r} in {args.data}")

    result = {
        "data": data,
        "preparation": preparation_digest(preparation.folder),
        "run": str(args.run),
        "subset": args.subset,
        "sentences": len(references),
        "cut": too_long[0],  # sources longer than the model reads: the rest of them is left out, as in translate.sh
        "empty_references": empty,
        "left_out": too_long[1],  # sentences with such a reference, which fairseq does not take: empty translations
        "direction": f"{prep['source_lang']}-{prep['target_lang']}",
        **model.description,
        "settings_name": settings_name(args),
        "beam": args.beam,
        "lenpen": args.lenpen,
        "scores": scores.score(
            tokenised=None if prep["tokenizer"] == "none" else hypotheses,
            detokenised=detokenised,
            references=references,
            tokenised_references=tokenised_references,
            lowercase=prep["lowercase"],
            tokenizer=tokenizer,
            compounds=[base_language(prep[side]) for side in ("source_lang", "target_lang")] == ["en", "de"],
        ),
        "tokenizer": tokenizer,
        "references": digest(references),
        "speed": speed(output),
        "command": portable(args.command),
        "generate_command": portable(model.command),
        **provenance(model.on_cpu),
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
    results, name = args.run / "eval", f"{split}.{settings_name(args)}"
    result |= _kept(results / name, result, detokenised)
    for stem in (name, split):
        with replacing(results / f"{stem}.hyp.txt") as temporary:
            temporary.write_text("".join(f"{line}\n" for line in detokenised), encoding="utf-8")
        write_json(results / f"{stem}.json", result)
    report(result, results / f"{name}.json", split)
    return result


@dataclass(frozen=True)
class Translated:
    """A model's translations of a split."""

    output: list[str]  # of fairseq-generate: lines H, T and messages
    preparation: Preparation
    lengths: tuple[int, int]  # how many subwords the model reads and writes
    description: dict[str, Any]  # of the model, for the record
    command: list[str]
    on_cpu: bool


def translate_run(args: argparse.Namespace, prep: dict[str, Any], split: str, sentences: int) -> Translated:
    """The split by fairseq-generate with a run's checkpoint."""
    checkpoint, averaged = choose_checkpoint(args.run, args.checkpoint, args.best, args.average)
    for path in checkpoint.split(":"):
        state = load(path)
        preparation = of_model(Path(path), state, args.run, args.data)
    search = Search(args.beam, args.lenpen, args.generate_flags, args.precision)
    lengths = (longest(state, "source"), longest(state, "target"))
    command = generate_command(args.data, prep, checkpoint, args.subset, search, lengths)
    output = generate(command, args.run / "eval", split, sentences)
    # Other checkpoints than averaged ones need not be the run's last.
    still_training = unfinished(last_state(args.run, state)) if averaged else None
    description = {**describe(state), "checkpoint": checkpoint, "averaged": averaged, "unfinished": still_training}
    return Translated(output, preparation, lengths, description, command, "--cpu" in search.flags)


def translate_export(args: argparse.Namespace, split: str) -> Translated:
    """The split by an exported model."""
    exported.refuse(args, "average", "best", "checkpoint")
    settings = exported.search_settings(args.beam, args.lenpen, args.generate_flags)
    translator = exported.load(args.run)
    preparation = Preparation(args.run, translator.text.prep)
    require_same(preparation, args.data, args.run)
    batch = int(parse_flags(args.generate_flags).get("batch-size", [exported.BATCH])[-1])
    output = exported.generate(translator, args.data, args.subset, settings, batch)
    write_output(args.run / "eval", split, output)
    known = translator.description
    description = {name: known[name] for name in (*DESCRIBED, "checkpoint", "averaged", "int8")}
    lengths = tuple(most - 1 for most in known["max_positions"])
    return Translated(output, preparation, lengths, description, ["python", "-m", "ea_runtime", str(args.run)], True)


def split_name(run: Path, data: str, subset: str) -> str:
    """The name of a split in a run's results: "test", or "law.test" of other data than the run's own."""
    kept = (run if is_export(run) else run / FOLDER) / "PREP.json"
    own = read_prep(kept.parent).get("name", data) if kept.is_file() else data
    return subset if data == own else f"{data}.{subset}"


def _kept(path: Path, result: dict[str, Any], translations: Sequence[str]) -> dict[str, Any]:
    """What an earlier result, of the same translations and references, has that this one was not asked for."""
    file, text = Path(f"{path}.json"), Path(f"{path}.hyp.txt")
    if not (file.exists() and text.exists()) or read_lines(text) != list(translations):
        return {}
    earlier = read_json(file)
    if earlier.get("references") != result["references"]:
        return {}
    found = {"against": earlier["against"]} if "against" in earlier and "against" not in result else {}
    if "comet" in earlier["scores"] and "comet" not in result["scores"]:
        found["scores"] = {**result["scores"], "comet": earlier["scores"]["comet"]}
    return found


#: Flags of fairseq-generate that change how fast it is, and where, but not what is asked of it.
SPEED_FLAGS = {"cpu", "max-tokens", "batch-size", "num-workers", "log-format"}


def settings_name(args: argparse.Namespace) -> str:
    """The settings of a translation as part of a file name: "beam5.average10"."""
    parts = [f"beam{args.beam}"]
    if args.lenpen != 1:
        parts.append(f"lenpen{args.lenpen:g}")
    if args.tok:
        parts.append(f"tok-{args.tok}")
    if is_export(args.run):
        parts.append(_exported_name(args.run))
    elif args.best:
        parts.append("best")
    elif args.checkpoint:
        parts.append("+".join(_checkpoint_name(Path(path), args.run) for path in args.checkpoint.split(":")))
    else:
        parts.append(f"average{args.average or 10}")
    if args.precision != "fp32":
        parts.append(args.precision)
    given = parse_flags(args.generate_flags).items()
    others = sorted((name, values) for name, values in given if name not in SPEED_FLAGS)
    if others:
        parts.append("flags-" + hashlib.sha256(json.dumps(others).encode()).hexdigest()[:6])
    return ".".join(parts)


def _exported_name(folder: Path) -> str:
    """The name of the run's own evaluation with the checkpoint that was exported, so that the two can be compared."""
    name = Path(read_json(folder / "model.json")["checkpoint"]).stem
    return name.removeprefix("checkpoint_") if name == "checkpoint_best" else name


def _checkpoint_name(path: Path, run: Path) -> str:
    """A checkpoint in a file name: by its own name where it is the run's, else with a digest of where it is."""
    if path.parent.resolve() == run.resolve():
        # --average 10 and --best are called average10 and best, and need not be of these files.
        return f"file-{path.stem}" if re.fullmatch(r"average\d+|best", path.stem) else path.stem
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]}"


#: what a record says about a model
DESCRIBED = ("arch", "settings", "training_seed", "updates")


def describe(state: dict) -> dict[str, Any]:
    """A score's record of the model: architecture, its own settings, how it was trained."""
    values = (
        settings(state).get("arch"),
        {name: value for name, value in settings(state).items() if name.startswith("ea_")},
        section(state, "common").get("seed"),
        (state.get("optimizer_history") or [{}])[-1].get("num_updates"),
    )
    return dict(zip(DESCRIBED, values, strict=True))


def last_state(run: Path, averaged: dict) -> dict:
    """The checkpoint at which a run stands, which may be in the middle of an epoch, after all that were `averaged`."""
    with contextlib.suppress(UserError):  # there is none, or a torn one
        return load(run / LAST)
    return averaged


def unfinished(state: dict) -> str | None:
    """The updates of a training that had not ended; None where it was, or where the checkpoint does not tell."""
    if "train_iterator" not in state.get("extra_state", {}):
        return None
    optimization, checkpoints = section(state, "optimization"), section(state, "checkpoint")
    limits = {
        "max-update": optimization.get("max_update"),
        "max-epoch": optimization.get("max_epoch"),
        "patience": checkpoints.get("patience"),
    }
    if finished(state, {name: [str(limit or 0)] for name, limit in limits.items()}):
        return None
    wanted = f" of {limits['max-update']:,}" if limits["max-update"] else ""
    return f"{updates(state):,}{wanted} updates"


def _reference_file(data: Path, subset: str, prep: dict) -> Path:
    """The raw references of a split, or an error that names the splits there are."""
    language = prep["target_lang"]
    path = data / "raw" / f"{subset}.{language}"
    if not path.is_file():
        there = sorted(path.stem for path in (data / "raw").glob(f"*.{language}"))
        raise UserError(f"--subset {subset}: {path} does not exist; there are: {', '.join(there) or 'none'}")
    return path


def read_baseline(args: argparse.Namespace, data: str, references: Sequence[str]) -> list[str]:
    """The translations of --against: of the same text, and made with the same settings unless others are asked for."""
    folder = args.against / "eval"
    split = split_name(args.against, data, args.subset)
    stem = split if args.other_settings else f"{split}.{settings_name(args)}"
    if not all((folder / f"{stem}.{kind}").exists() for kind in ("json", "hyp.txt")):
        there = sorted(path.stem for path in folder.glob(f"{split}.*.json"))
        raise UserError(
            f"--against {args.against}: {folder / stem}.json does not exist; evaluate that run first, with the same "
            "settings" + (f". There are: {', '.join(there)}; --other-settings takes the last of them" if there else "")
        )
    result = read_json(folder / f"{stem}.json")
    if result.get("references") != digest(references):
        raise UserError(f"--against {args.against}: its {args.subset} has other references, of {result['data']}")
    return read_lines(folder / f"{stem}.hyp.txt")


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
        there = max(epochs, updates)
        hint = f"--average {there} takes what there is, and --best the best one" if there else "has it been trained?"
        raise UserError(
            f"{run}: {wanted} checkpoints to average are wanted; there are {epochs} by epoch, {updates} by update"
            f"; {hint}"
        )
    by_epoch = epochs >= wanted
    paths = average.select([run], wanted if by_epoch else None, None if by_epoch else wanted)
    output, state = run / f"average{wanted}.pt", average.average(paths)
    if not average.holds(output, state):  # a score never changes which checkpoint is the run's model
        output = run / "eval" / output.name
        average.save(state, output)
    return str(output), [str(path) for path in paths]


def count_longer(data: Path, prep: dict, subset: str, lengths: tuple[int, int]) -> tuple[int, int]:
    """How many sentences of a split have a source, and a target, of more subwords than `lengths`."""
    from ea_data.binary import count_lengths

    source, target = prep["source_lang"], prep["target_lang"]
    indices = (data / f"{subset}.{source}-{target}.{language}.idx" for language in (source, target))
    counts = [count_lengths(path) if path.is_file() else () for path in indices]
    of_source, of_target = (int(sum(side[most + 1 :])) for side, most in zip(counts, lengths, strict=True))
    return of_source, of_target


def generate_command(
    data: Path, prep: dict, checkpoint: str, subset: str, search: Search, lengths: tuple[int, int]
) -> list[str]:
    """The words of fairseq-generate. `lengths` are how many subwords the model reads and writes."""
    return [
        *program("fairseq-generate", search.precision, search.flags),
        *(str(data), "--user-dir", str(REPO / "ea_fairseq"), "--task", "translation"),
        *("--source-lang", prep["source_lang"], "--target-lang", prep["target_lang"]),
        *("--path", checkpoint, "--gen-subset", subset),
        *("--beam", str(search.beam), "--lenpen", str(search.lenpen), "--post-process", prep["bpe"]),
        # By default this fairseq drops the last batch unless it holds a multiple of 8 sentences.
        *("--required-batch-size-multiple", "1"),
        # Source text is cut to what the model reads, as translate.sh does. By default fairseq stops at a longer one.
        *("--truncate-source", "--skip-invalid-size-inputs-valid-test"),
        *("--max-source-positions", str(lengths[0] + 1), "--max-target-positions", str(lengths[1] + 1)),
        *search.flags,
    ]


def generate(command: Sequence[str], results: Path, split: str, sentences: int) -> list[str]:
    """Run fairseq-generate. Its output lines are returned, then its messages; RESULTS/generate-SPLIT.* keep both."""
    print("+", shlex.join(command), file=sys.stderr)
    results.mkdir(exist_ok=True)
    log = results / f"generate-{split}.log"
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
    write_output(results, split, output)
    return output + messages


def write_output(results: Path, split: str, output: Sequence[str]) -> None:
    """Keep a translation's output as RESULTS/generate-SPLIT.txt."""
    with replacing(results / f"generate-{split}.txt") as temporary:
        temporary.write_text("".join(f"{line}\n" for line in output), encoding="utf-8")


def in_order(output: Iterable[str], sentences: int, left_out: int = 0) -> list[str]:
    """The hypotheses in fairseq-generate's output, in the order of the sentence ids 0 .. sentences - 1.

    `left_out` sentences, no more and no less, may have none, for fairseq did not take them: theirs are empty.
    """
    hypotheses = {}
    for line in output:
        if match := re.match(r"H-(\d+)\t[^\t]*\t?(.*)", line):
            number = int(match[1])
            if number in hypotheses:
                raise UserError(f"sentence {number} has more than one hypothesis (was --nbest given?)")
            hypotheses[number] = match[2]
    missing = sorted(set(range(sentences)) - set(hypotheses))
    surplus = sorted(set(hypotheses) - set(range(sentences)))
    if len(missing) != left_out:
        raise UserError(
            f"{len(missing)} of {sentences} sentences have no hypothesis"
            + (f", the first is {missing[0]}" if missing else "")
            + (f"; {left_out} were expected to have none" if left_out else "")
        )
    if surplus:
        raise UserError(f"there are hypotheses for {len(surplus)} sentences beyond the {sentences} references")
    return [hypotheses.get(number, "") for number in range(sentences)]


def check_references(output: Iterable[str], references: Sequence[str], lowercase: bool, name: str) -> None:
    """The raw references must be the text that was made binary: compare them with what fairseq read back.

    Args:
        output: of fairseq-generate.
        references: the raw references, in tokens.
        name: their name in messages.
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


def report(result: dict[str, Any], written: Path, split: str) -> None:
    """Print the result as people read it, and where it was written."""
    print(f"\n{result['data']} {result['direction']}, {result['subset']}: {result['sentences']} sentences")
    bits = "" if "int8" not in result else ", exported in 8 bits" if result["int8"] else ", exported"
    print(f"  {result['arch']}, {result['checkpoint']}{bits}, beam {result['beam']}, lenpen {result['lenpen']:g}")
    if result.get("cut"):
        print(f"  {result['cut']} source sentences are longer than the model reads: the rest of each was left out")
    if result.get("left_out"):
        print(f"  {result['left_out']} sentences count as not translated: their references are too long for fairseq")
    if result.get("empty_references"):
        print(
            f"  warning: {result['empty_references']} references are empty: BLEU counts their translations as wrong, "
            "and chrF leaves them out"
        )
    for name, score in result["scores"].items():
        interval = f" ± {score['interval']['half_width']:.2f}" if "interval" in score else ""
        print(f"  {scores.LABELS[name] + ' ':.<22} {score['score']:6.2f}{interval:7}  {score['signature']}")
    against = result.get("against", {})
    if against.get("identical"):
        print(f"  the translations are identical to those of {against['run']}, line for line")
    for name in (name for name in scores.LABELS if name in against and not against["identical"]):
        test = against[name]
        print(
            f"  {scores.LABELS[name]} against {against['run']}: {test['difference']:+.2f}, "
            f"p = {test['p']:.3f} (paired bootstrap)  {test['signature']}"
        )
    print(f"  written: {written}, .hyp.txt beside it; as the last of its split also {split}.json, .hyp.txt")


if __name__ == "__main__":
    main()
