"""Translate a prepared split with a trained run and score it.

Two kinds of BLEU come out, and they are not comparable with each other.
sacreBLEU: detokenised translations against the raw references. Report this one today.
tokenised BLEU: Moses tokens on both sides, as in the papers' tables; for En-De also with compounds split. Exact match,
for text that came in tokens: percent of equal lines, as for code.
All scores of a model of lower-cased text ignore case, and their signatures say so.

Results are named by their settings, RUN/eval/test.beam5.average10.json and .hyp.txt, so that none overwrites another;
test.json and test.hyp.txt hold the latest of a split. Results on other data than the run's have the data's name in
front: law.test.beam5.average10.json, law.test.json. Scoring the same translations again without --comet keeps
their COMET score.
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
from ea_data.preparation import Preparation
from ea_tools import metrics
from ea_tools.checkpoints import is_export, load, longest, section, settings
from ea_tools.common import REPO, UserError, portable, positive, read_json, replacing, reporting, say, write_json
from ea_tools.preparation import of_model, require_same
from ea_tools.text import as_written, digest, read_lines, references
from ea_tools.training import average
from ea_tools.training.provenance import provenance
from ea_tools.training.recipes import parse_flags
from ea_tools.training.run_folder import AVERAGED, LAST, finished, updates
from ea_tools.translating import exported
from ea_tools.translating.translators import add_search, choose_device, fairseq_generate, parse_both


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: translate, score, print, and keep the result in RUN/eval."""
    args = parse(arguments)
    with reporting("evaluate"):
        evaluate(args)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; the words after -- go to fairseq-generate."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="evaluate.sh",
        description=__doc__,
        epilog="Flags after -- go to fairseq-generate, for example: -- --batch-size 64 --cpu",
    )
    add = parser.add_argument
    add("--data", required=True, type=Path, metavar="DIR", help="prepared data, data/NAME")
    add("--run", required=True, type=Path, metavar="DIR", help="a run, runs/NAME, or an export")
    add("--subset", default="test", metavar="SPLIT", help="valid, test, test1, ... (default: test)")
    which = parser.add_mutually_exclusive_group()
    averaged = f"translate with the average of the last N checkpoints, by epoch or update (default: at most {AVERAGED})"
    which.add_argument("--average", type=positive, metavar="N", help=averaged)
    which.add_argument("--best", action="store_true", help="translate with the run's checkpoint_best.pt")
    several = "translate with this checkpoint, or with an ensemble of several"
    which.add_argument("--checkpoint", metavar="FILE[:FILE...]", help=several)
    add("--against", type=Path, metavar="RUN", help="a paired test against this run or export; evaluate it before")
    any_settings = "let --against be the last evaluation of that run, whatever its settings"
    add("--other-settings", action="store_true", help=any_settings)
    add("--tok", metavar="NAME", help="sacreBLEU's tokeniser (default: sacreBLEU's own for the target language)")
    add("--comet", metavar="MODEL", help="score with COMET too, for example Unbabel/wmt22-comet-da; needs comet-score")
    add_search(parser)
    args, args.generate_flags = parse_both(parser, arguments)
    args.command = ["scripts/evaluate.sh", *arguments]
    return args


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Translate and score one split; returns the content of the JSON file."""
    from ea_runtime.text import words_of

    data = Preparation.at(args.data)
    prep, (source, target) = data.prep, data.languages
    written, tokens = references(reference_file(args.data, args.subset, target), prep)
    tokenizer = args.tok or metrics.tokenizer_for(target)
    metrics.check_tokenizer(tokenizer, target)
    if args.comet:
        metrics.comet_command()
    if not args.run.is_dir():
        raise UserError(f"--run {args.run}: no such folder")
    if not (args.average or args.best or args.checkpoint or is_export(args.run)):  # the model that training settled on
        args.average = len(average.last(args.run, AVERAGED)) or AVERAGED
    name = prep.get("name", args.data.name)
    split = split_name(args.run, name, args.subset)
    baseline = read_baseline(args, name, written) if args.against else None
    results, stem = args.run / "eval", f"{split}.{settings_name(args)}"
    refuse_other_text(results / f"{stem}.json", digest(written))
    translate = translate_export if is_export(args.run) else translate_run
    model = translate(args, data, split, len(written))
    cut, left_out = count_longer(data, args.subset, model.lengths)
    hypotheses = in_order(model.output, len(written), left_out)
    check_references(model.output, tokens, prep["lowercase"], f"{args.subset!r} in {args.data}")
    detokenised = list(map(words_of(prep, target).detokenize, hypotheses))
    metric_options = {"references": written, "lowercase": prep["lowercase"], "tokenizer": tokenizer}
    result = {
        "data": name,
        "preparation": model.preparation.digest(),
        "run": str(args.run),
        "subset": args.subset,
        "sentences": len(written),
        "cut": cut,  # sources longer than the model reads: the rest of them is left out, as in translate.sh
        "empty_references": sum(not line.strip() for line in written),
        "left_out": left_out,  # sentences whose reference is too long for fairseq: empty translations
        "direction": f"{source}-{target}",
        **model.description,
        "settings_name": settings_name(args),
        "beam": args.beam,
        "lenpen": args.lenpen,
        "scores": metrics.compute(
            tokenised=None if prep["tokenizer"] == "none" else hypotheses,
            detokenised=detokenised,
            tokenised_references=tokens,
            compounds=(base_language(source), base_language(target)) == ("en", "de"),
            exact=prep["tokenizer"] == "given",
            **metric_options,
        ),
        "tokenizer": tokenizer,
        "references": digest(written),
        "speed": speed(model.output),
        "command": portable(args.command),
        "generate_command": portable(model.command),
        **provenance(model.on_cpu),
    }
    if args.comet:
        sources = as_written(args.data / "raw" / f"{args.subset}.{source}", prep, source)
        gpu = not result["device"].startswith("CPU")
        result["scores"]["comet"] = metrics.comet(args.comet, sources, detokenised, written, gpu)
    if baseline:
        difference = metrics.compare(system=detokenised, baseline=baseline, **metric_options)
        result["against"] = {"run": str(args.against), **difference}
    if not args.comet and (comet := comet_of_before(results / stem, result, detokenised)):
        result["scores"]["comet"] = comet
    for place in (stem, split):
        write_lines(results / f"{place}.hyp.txt", detokenised)
        write_json(results / f"{place}.json", result)
    report(result)
    print(f"  written: {results / stem}.json, .hyp.txt beside it; as the last of its split also {split}.json, .hyp.txt")
    return result


def split_name(run: Path, data: str, subset: str) -> str:
    """The name of a split in a run's results: "test", or "law.test" of other data than the run's own."""
    preparation = Preparation.at(run) if is_export(run) else Preparation.kept_by(run)
    own = preparation.prep.get("name", data) if preparation else data
    return subset if data == own else f"{data}.{subset}"


def refuse_other_text(result: Path, references: str) -> None:
    """Refuse to write over the result of another text whose data have the same name."""
    if result.exists() and read_json(result).get("references", references) != references:
        raise UserError(
            f"{result}: is of other references, though the data's name is the same; prepare these data with another "
            "--name, or remove that file"
        )


def comet_of_before(path: Path, result: dict[str, Any], translations: Sequence[str]) -> dict[str, Any] | None:
    """The score of COMET in an earlier result of the same translations and references; None where there is none."""
    file, text = Path(f"{path}.json"), Path(f"{path}.hyp.txt")
    if not (file.exists() and text.exists()) or read_lines(text) != list(translations):
        return None
    earlier = read_json(file)
    return earlier["scores"].get("comet") if earlier.get("references") == result["references"] else None


# ---- the model's translations


@dataclass(frozen=True)
class Translated:
    """A model's translations of a split."""

    output: list[str]  # of fairseq-generate: lines H, T and messages
    preparation: Preparation
    lengths: tuple[int, int]  # the most subwords that the model reads and writes
    description: dict[str, Any]  # of the model, as the record has it
    command: list[str]
    on_cpu: bool


def translate_run(args: argparse.Namespace, data: Preparation, split: str, sentences: int) -> Translated:
    """The split by fairseq-generate with a run's checkpoint."""
    checkpoint, averaged = choose_checkpoint(args.run, args.checkpoint, args.best, args.average)
    for path in checkpoint.split(":"):
        state = load(path)
        preparation = of_model(Path(path), state, args.run, data)
    lengths = (longest(state, "source"), longest(state, "target"))
    command = generate_command(args, data, checkpoint, lengths)
    output = generate(command, args.run / "eval", split, sentences)
    # Other checkpoints than averaged ones need not be the run's last.
    still_training = unfinished(args.run, state) if averaged else None
    description = {**describe(state), "checkpoint": checkpoint, "averaged": averaged, "unfinished": still_training}
    return Translated(output, preparation, lengths, description, command, "--cpu" in args.generate_flags)


def translate_export(args: argparse.Namespace, data: Preparation, split: str, sentences: int) -> Translated:
    """The split by an exported model."""
    exported.refuse(args, "average", "best", "checkpoint")
    search = exported.search_settings(args.beam, args.lenpen, args.generate_flags)
    translator = exported.load(args.run)
    preparation = Preparation(args.run, translator.text.prep)
    require_same(preparation, data, args.run)
    output = exported.generate(translator, args.data, args.subset, search, exported.batch_size(args.generate_flags))
    write_lines(args.run / "eval" / f"generate-{split}.txt", output)
    stated = translator.description
    description = {name: stated[name] for name in (*DESCRIBED, "checkpoint", "averaged", "int8")}
    lengths = tuple(most - 1 for most in stated["max_positions"])
    return Translated(output, preparation, lengths, description, ["python", "-m", "ea_runtime", str(args.run)], True)


def choose_checkpoint(run: Path, given: str | None, best: bool, count: int | None) -> tuple[str, list[str]]:
    """The checkpoint (or a:b:c) to translate with, and the files it is the average of ([] where it is none).

    Args:
        given: a file, or several with colons between them.
        best: take checkpoint_best.pt.
        count: otherwise, how many of the last checkpoints are averaged; AVERAGED where it is None.
    """
    if given or best:
        return given or str(run / "checkpoint_best.pt"), []
    wanted = count or AVERAGED
    paths = average.last(run, wanted)
    if (there := len(paths)) < wanted:
        hint = f"give --average {there}, or --best for the best one" if there else "train it first"
        if (kept := run / f"average{wanted}.pt").exists():  # and the checkpoints that it is made of were removed
            hint = f"give --checkpoint {kept}"
        raise UserError(f"{run}: expected {wanted} checkpoints to average, found {there}; {hint}")
    output, state = run / f"average{wanted}.pt", average.average(paths)
    if not average.holds(output, state):  # a score never changes which checkpoint is the run's model
        output = run / "eval" / output.name
        average.save(state, output)
    return str(output), [str(path) for path in paths]


#: the entries of a record that describe a model
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


def unfinished(run: Path, averaged: dict) -> str | None:
    """The updates of a training that has not ended; None where it has, or where its checkpoints do not tell.

    `averaged` is the average of checkpoints that may be older than the end of a training in the middle of an epoch.
    """
    state = averaged
    with contextlib.suppress(UserError):  # there is no last checkpoint, or a torn one
        state = load(run / LAST)
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
    planned = f" of {limits['max-update']:,}" if limits["max-update"] else ""
    return f"{updates(state):,}{planned} updates"


def reference_file(data: Path, subset: str, language: str) -> Path:
    """The raw references of a split, or an error that names the splits there are."""
    path = data / "raw" / f"{subset}.{language}"
    if not path.is_file():
        there = sorted(path.stem for path in (data / "raw").glob(f"*.{language}"))
        raise UserError(f"--subset {subset}: {path} does not exist; there are: {', '.join(there) or 'none'}")
    return path


def read_baseline(args: argparse.Namespace, data: str, references: Sequence[str]) -> list[str]:
    """The translations of --against: of the same text and, without --other-settings, made with the same settings."""
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


def settings_name(args: argparse.Namespace) -> str:
    """The settings of a translation as part of a file name: "beam5.average10"."""
    parts = [f"beam{args.beam}"]
    if args.lenpen != 1:
        parts.append(f"lenpen{args.lenpen:g}")
    if args.tok:
        parts.append(f"tok-{args.tok}")
    if is_export(args.run):
        parts += _exported_name(args)
    elif args.best:
        parts.append("best")
    elif args.checkpoint:
        parts.append("+".join(_checkpoint_name(Path(path), args.run) for path in args.checkpoint.split(":")))
    else:
        parts.append(f"average{args.average or AVERAGED}")
    if args.precision != "fp32":
        parts.append(args.precision)
    given = parse_flags(args.generate_flags).items()
    others = sorted((name, values) for name, values in given if name not in exported.OF_THE_WORK)
    if others:
        parts.append("flags-" + hashlib.sha256(json.dumps(others).encode()).hexdigest()[:6])
    return ".".join(parts)


def _exported_name(args: argparse.Namespace) -> list[str]:
    """The name of the run's own evaluation with the checkpoint that was exported, so that the two can be compared.

    In 8 bits a translation depends on its batch.
    """
    described, size = read_json(args.run / "model.json"), exported.batch_size(args.generate_flags)
    name = Path(described["checkpoint"]).stem
    of_batch = [f"batch{size}"] if described["int8"] and size != exported.BATCH else []
    return [name.removeprefix("checkpoint_") if name == "checkpoint_best" else name, *of_batch]


def _checkpoint_name(path: Path, run: Path) -> str:
    """A checkpoint in a file name: by its own name where it is the run's, else with a digest of where it is."""
    if path.parent.resolve() == run.resolve():
        # --average 10 and --best are called average10 and best, and need not be of these files.
        return f"file-{path.stem}" if re.fullmatch(r"average\d+|best", path.stem) else path.stem
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]}"


def count_longer(data: Preparation, subset: str, lengths: tuple[int, int]) -> tuple[int, int]:
    """How many sentences of a split have a source, and a target, of more subwords than `lengths`."""
    from ea_data.binary import count_lengths

    stem = f"{subset}.{'-'.join(data.languages)}"
    counts = [count_lengths(data.folder / f"{stem}.{language}.idx") for language in data.languages]
    of_source, of_target = (int(sum(side[most + 1 :])) for side, most in zip(counts, lengths, strict=True))
    return of_source, of_target


def generate_command(
    args: argparse.Namespace, data: Preparation, checkpoint: str, lengths: tuple[int, int]
) -> list[str]:
    """The words of fairseq-generate. `lengths` are the most subwords that the model reads and writes."""
    source, target = data.languages
    # A CPU is as fast with small batches, and progress is shown batch by batch. By default a batch has 12,000 tokens.
    on_cpu = choose_device(args.precision, args.generate_flags) == "cpu"
    return [
        *fairseq_generate(args.precision, args.generate_flags),
        *(str(data.folder), "--user-dir", str(REPO / "ea_fairseq"), "--task", "translation"),
        *("--source-lang", source, "--target-lang", target),
        *("--path", checkpoint, "--gen-subset", args.subset),
        *("--beam", str(args.beam), "--lenpen", str(args.lenpen), "--post-process", data.prep["bpe"]),
        # By default this fairseq drops the last batch unless it holds a multiple of 8 sentences.
        *("--required-batch-size-multiple", "1"),
        # Long source text is cut, as in translate.sh. By default fairseq stops at it.
        *("--truncate-source", "--skip-invalid-size-inputs-valid-test"),
        *("--max-source-positions", str(lengths[0] + 1), "--max-target-positions", str(lengths[1] + 1)),
        *(("--batch-size", str(exported.BATCH)) if on_cpu else ()),
        *args.generate_flags,
    ]


def generate(command: Sequence[str], results: Path, split: str, sentences: int) -> list[str]:
    """Run fairseq-generate. Its output lines are returned, then its messages; RESULTS/generate-SPLIT.* keep both."""
    say(f"+ {shlex.join(command)}")
    results.mkdir(exist_ok=True)
    log = results / f"generate-{split}.log"
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "utf-8"}
    output = []
    with (
        log.open("w", encoding="utf-8") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=environment) as process,
        tqdm(total=sentences, unit=" sentences", mininterval=0.1 if sys.stderr.isatty() else 10) as progress,
    ):
        for line in process.stdout:
            output.append(line.decode("utf-8").rstrip("\n"))
            progress.update(line.startswith(b"H-"))
    messages = read_lines(log)
    if process.returncode:
        last = next((line for line in reversed(messages) if line.strip()), "no message")
        raise UserError(f"fairseq-generate ended with status {process.returncode}: {last}\nits messages: {log}")
    write_lines(results / f"generate-{split}.txt", output)
    return output + messages


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write a text file, which appears under its name only when it is whole."""
    with replacing(path) as temporary:
        temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


# ---- fairseq-generate's output


def in_order(output: Iterable[str], sentences: int, left_out: int = 0) -> list[str]:
    """The hypotheses in fairseq-generate's output, in the order of the sentence ids 0 .. sentences - 1.

    Exactly `left_out` sentences, which are too long for fairseq, have none: theirs are empty.
    """
    matches = [match for line in output if (match := re.match(r"H-(\d+)\t[^\t]*\t?(.*)", line))]
    hypotheses = {int(match[1]): match[2] for match in matches}
    expected = sentences - left_out
    if not len(matches) == len(hypotheses) == expected or not hypotheses.keys() <= set(range(sentences)):
        missing = next((number for number in range(sentences) if number not in hypotheses), "none")
        raise UserError(
            f"fairseq-generate: expected one hypothesis for each of {expected} of {sentences} sentences, found "
            f"{len(matches)} for {len(hypotheses)} sentences (first sentence without one: {missing}); leave out flags "
            "such as --nbest"
        )
    return [hypotheses.get(number, "") for number in range(sentences)]


def check_references(output: Iterable[str], tokens: Sequence[str], lowercase: bool, name: str) -> None:
    """The raw references must be the text that was made binary: compare them with the targets that fairseq read.

    Args:
        output: of fairseq-generate.
        tokens: the raw references, in tokens.
        name: their name in messages.
    """
    targets = {int(m[1]): m[2] for line in output if (m := re.match(r"T-(\d+)\t(.*)", line)) and "<<unk>>" not in m[2]}
    different = [
        number
        for number, target in sorted(targets.items())
        if target.split() != (tokens[number].lower() if lowercase else tokens[number]).split()
    ]
    if different:
        first = different[0]
        message = (
            f"{len(different)} of {len(targets)} raw references of {name} are not the text of the binary data, first "
            f"line {first + 1}:\n  raw:    {tokens[first]}\n  binary: {targets[first]}\nPrepare the data again"
        )
        if len(different) > len(targets) // 10:
            raise UserError(message)
        say(f"evaluate: warning: {message}")


def speed(output: Iterable[str]) -> dict[str, float] | None:
    """The speed that fairseq-generate states, or None."""
    for line in output:
        if match := re.search(r"Translated [\d,]+ sentences .* in ([\d.]+)s \(([\d.]+) sentences/s, ([\d.]+)", line):
            names = ("seconds", "sentences_per_second", "tokens_per_second")
            return dict(zip(names, map(float, match.groups()), strict=True))
    return None


def report(result: dict[str, Any]) -> None:
    """Print the result as people read it."""
    print(f"\n{result['data']} {result['direction']}, {result['subset']}: {result['sentences']} sentences")
    bits = "" if "int8" not in result else ", exported in 8 bits" if result["int8"] else ", exported"
    print(f"  {result['arch']}, {result['checkpoint']}{bits}, beam {result['beam']}, lenpen {result['lenpen']:g}")
    notes = {
        "cut": "source sentences are longer than the model reads: the rest of each was left out",
        "left_out": "sentences count as not translated: their references are too long for fairseq",
        "empty_references": "references are empty: BLEU counts their translations as wrong, and chrF leaves them out",
    }
    for name, note in notes.items():
        if result.get(name):
            print(f"  warning: {result[name]} {note}")
    for name, score in result["scores"].items():
        interval = f" ± {score['interval']['half_width']:.2f}" if "interval" in score else ""
        print(f"  {metrics.LABELS[name] + ' ':.<22} {score['score']:6.2f}{interval:7}  {score['signature']}")
    against = result.get("against", {})
    if against.get("identical"):
        print(f"  the translations are identical to those of {against['run']}, line for line")
        return
    for name in filter(against.get, metrics.LABELS):
        test = against[name]
        print(
            f"  {metrics.LABELS[name]} against {against['run']}: {test['difference']:+.2f}, "
            f"p = {test['p']:.3f} (paired bootstrap)  {test['signature']}"
        )


if __name__ == "__main__":
    main()
