"""Translate a prepared split with a trained run and score it.

Two kinds of BLEU come out, and they are not comparable with each other.
sacreBLEU: detokenised translations against the raw references. Report this one today.
tokenised BLEU: Moses tokens on both sides, as in the papers' tables; for En-De also with compounds split. Exact match,
for text that came in tokens: percent of equal lines, as for code.
All scores of a model of lower-cased text ignore case, and their signatures say so.

Results are named by their settings, RUN/eval/test.beam5.average10.json and .hyp.txt, so that none overwrites another;
test.json and test.hyp.txt hold the latest of a split. Results on other data than the run's have the data's name in
front: law.test.beam5.average10.json, law.test.json. Scoring the same translations again without --comet keeps
their COMET score. Results of a run that you may read and not write are printed alone.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ea_artifacts.checkpoints import peek, section, settings
from ea_artifacts.command import Parser, UserError, listed, portable, positive, reporting, say
from ea_artifacts.files import digest, read_json, read_lines, replacing, writable, write_json
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import AVERAGED, Run
from ea_data.languages import base_language
from ea_tools import metrics
from ea_tools.training.provenance import provenance
from ea_tools.training.run_folder import LAST, finished, updates
from ea_tools.translating.model import add_search, open_model, parse_both, whole

if TYPE_CHECKING:
    from ea_runtime.translator import Translator


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: translate, score, print, and keep the result in RUN/eval."""
    args = parse(arguments)
    with reporting("evaluate"):
        evaluate(args)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The flags; those after -- are fairseq-generate's for the search."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    parser = Parser(
        prog="evaluate.sh",
        description=__doc__,
        epilog="After -- stand fairseq-generate's flags of the search, --batch-size or --cpu: -- --max-len-b 50",
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
    args = parse_both(parser, arguments)
    args.command = ["scripts/evaluate.sh", *arguments]
    return args


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Translate and score one split; returns the content of the JSON file."""
    from ea_data.binary import read_sentences

    data, run = Preparation.at(args.data), Run(args.run)
    source, target = data.languages
    written, tokens = references(reference_file(data, args.subset), data)
    tokenizer = args.tok or metrics.tokenizer_for(target)
    metrics.check_tokenizer(tokenizer, target)
    if args.comet:
        metrics.comet_command()
    if not args.run.is_dir():
        raise UserError(f"--run {args.run}: no such folder")
    if not (args.average or args.best or args.checkpoint or run.is_export):
        # the model that training settled on
        args.average = len(run.last(AVERAGED))
        args.checkpoint = None if args.average else str(run.model())
    name = data.name
    split = split_name(args.run, name, args.subset)
    baseline = read_baseline(args, name, written) if args.against else None
    chosen = settings_name(args)
    results, stem = args.run / "eval", f"{split}.{chosen}"
    refuse_other_text(results / f"{stem}.json", digest(written))
    checkpoints, averaged = choose_checkpoints(args)
    translator, search = open_model(args, checkpoints, data)
    sources, targets = (read_sentences(data.binary(args.subset, language)) for language in data.languages)
    check_references(list(map(translator.words, without_unknown(targets))), tokens, data, args.subset)
    hypotheses, speed = translate(translator, search, sources, whole(args.search_flags, "batch-size"))
    detokenised = list(map(translator.text.detokenize, hypotheses))
    metric_options: dict[str, Any] = {"references": written, "lowercase": data.lowercase, "tokenizer": tokenizer}
    result = {
        "data": name,
        "preparation": translator.text.preparation.digest(),
        "run": str(args.run),
        "subset": args.subset,
        "sentences": len(written),
        # sources longer than the model reads: the rest of them is left out, as in translate.sh
        "cut": sum(len(source) - 1 > translator.room for source in sources),
        "empty_references": sum(not line.strip() for line in written),
        "direction": f"{source}-{target}",
        **description(checkpoints, averaged, run),
        "settings_name": chosen,
        "beam": args.beam,
        "lenpen": args.lenpen,
        "scores": metrics.compute(
            tokenised=None if data.tokenizer == "none" else hypotheses,
            detokenised=detokenised,
            tokenised_references=tokens,
            compounds=(base_language(source), base_language(target)) == ("en", "de"),
            exact=data.tokenizer == "given",
            **metric_options,
        ),
        "tokenizer": tokenizer,
        "references": digest(written),
        "speed": speed,
        "command": portable(args.command),
        **provenance(on_cpu=run.is_export or "cpu" in args.search_flags),
    }
    fault = None
    if args.comet:
        raw = as_written(args.data / "raw" / f"{args.subset}.{source}", data, source)
        gpu = not result["device"].startswith("CPU")
        try:
            result["scores"]["comet"] = metrics.comet(args.comet, raw, detokenised, written, gpu)
        except UserError as error:  # the other scores must not be lost
            fault = error
    if baseline:
        difference = metrics.compare(system=detokenised, baseline=baseline, **metric_options)
        result["against"] = {"run": str(args.against), **difference}
    if "comet" not in result["scores"] and (comet := comet_of_before(results / stem, result, detokenised)):
        result["scores"]["comet"] = comet
    report(result)
    if writable(results):
        for place in (stem, split):
            with replacing(results / f"{place}.hyp.txt") as temporary:
                temporary.write_text("".join(f"{line}\n" for line in detokenised), encoding="utf-8")
            write_json(results / f"{place}.json", result)
        last = f"as the last of its split also {split}.json, .hyp.txt"
        print(f"  written: {results / stem}.json, .hyp.txt beside it; {last}")
    else:
        say(f"evaluate: note: {results} cannot be written, so nothing is kept")
    if fault:
        raise fault
    return result


def split_name(run: Path, data: str, subset: str) -> str:
    """The name of a split in a run's results: "test", or "law.test" of other data than the run's own."""
    preparation = Run(run).preparation()
    own = preparation.name if preparation else data
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


def choose_checkpoints(args: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    """The checkpoints to translate with, none of an export; and those that the one is the average of, if any."""
    if Run(args.run).is_export:
        return [], []
    if args.checkpoint:
        return list(map(Path, args.checkpoint.split(":"))), []
    if args.best:
        return [args.run / "checkpoint_best.pt"], []
    path, averaged = Run(args.run).averaged(args.average)
    return [path], averaged


def translate(
    translator: Translator, settings: Any, sources: Sequence[list[int]], batch: int | None
) -> tuple[list[str], dict[str, float]]:
    """The best translation of each sentence of token ids, in words, and the speed."""
    cut = [translator.cut(source[:-1]) for source in sources]
    begin = time.perf_counter()
    with tqdm(total=len(sources), unit=" sentences", mininterval=0.1 if sys.stderr.isatty() else 10) as progress:
        try:
            searched = translator.search_all(cut, settings, batch, done=progress.update)
        except ValueError as error:  # settings that do not go together
            raise UserError(str(error)) from None
    seconds = time.perf_counter() - begin
    best = [hypotheses[0].tokens if hypotheses else () for hypotheses in searched]
    rates = {"sentences_per_second": len(best), "tokens_per_second": sum(len(tokens) + 1 for tokens in best)}
    speed = {"seconds": round(seconds, 1), **{name: round(count / seconds, 2) for name, count in rates.items()}}
    return list(map(translator.words, best)), speed


def description(checkpoints: Sequence[Path], averaged: Sequence[Path], run: Run) -> dict[str, Any]:
    """A score's record of what translated."""
    if not checkpoints:
        stated = read_json(run.path / "model.json")
        names = ("arch", "settings", "training_seed", "updates", "checkpoint", "averaged", "int8")
        return {name: stated[name] for name in names}
    state = peek(checkpoints[-1])
    return {
        **describe(state),
        "checkpoint": listed(checkpoints, ":"),
        "averaged": list(map(str, averaged)),
        # Other checkpoints than averaged ones need not be the run's last.
        "unfinished": unfinished(run.path, state) if averaged else None,
    }


def describe(state: dict) -> dict[str, Any]:
    """A score's record of the model: architecture, its own settings, how it was trained."""
    return {
        "arch": settings(state).get("arch"),
        "settings": {name: value for name, value in settings(state).items() if name.startswith("ea_")},
        "training_seed": section(state, "common").get("seed"),
        "updates": (state.get("optimizer_history") or [{}])[-1].get("num_updates"),
    }


def unfinished(run: Path, averaged: dict) -> str | None:
    """The updates of a training that has not ended; None where it has, or where its checkpoints do not tell.

    `averaged` is the average of checkpoints that may be older than the end of a training in the middle of an epoch.
    """
    state = averaged
    with contextlib.suppress(UserError):  # there is no last checkpoint, or a torn one
        state = peek(run / LAST)
    if "train_iterator" not in state.get("extra_state", {}):
        return None
    every = section(state, "optimization") | section(state, "checkpoint")
    limits = {name: every.get(name.replace("-", "_")) or 0 for name in ("max-update", "max-epoch", "patience")}
    if finished(state, {name: [str(limit)] for name, limit in limits.items()}):
        return None
    planned = f" of {limits['max-update']:,}" if limits["max-update"] else ""
    return f"{updates(state):,}{planned} updates"


def reference_file(data: Preparation, subset: str) -> Path:
    """The raw references of a split, or an error that names the splits there are."""
    path = data.folder / "raw" / f"{subset}.{data.target_lang}"
    if not path.is_file():
        available = sorted(path.stem for path in path.parent.glob(f"*.{data.target_lang}"))
        raise UserError(f"--subset {subset}: {path} does not exist; available: {', '.join(available) or 'none'}")
    return path


def as_written(path: Path, data: Preparation, language: str) -> list[str]:
    """The lines of a file in DATA/raw as people write them.

    Text that came in tokens is in tokens there, too, and is detokenised. Text of a corpus in Unicode's form NFC is
    brought to NFC, since a model cannot write any other.
    """
    from ea_runtime.text import composed, words_of

    lines = read_lines(path)
    if data.tokenizer == "given":
        return list(map(words_of(data, language).detokenize, lines))
    return [composed(line) for line in lines] if data.rules.get("nfc") else lines


def references(path: Path, data: Preparation) -> tuple[list[str], list[str]]:
    """The lines of a file in DATA/raw on the target side, twice: as people write them, and in tokens."""
    from ea_runtime.text import Normalizer, Tokens, words_of

    language, rules = data.target_lang, data.rules
    written = as_written(path, data, language)
    if data.tokenizer == "given":
        return written, read_lines(path)
    was_training_text = rules.get("valid_every") and path.name.startswith("valid.")
    normalise = was_training_text and rules.get("normalise")
    tokens = Tokens(
        words_of(data, language),
        normalizer=Normalizer(data.moses_language(language)) if normalise else None,
        plain_apostrophes=rules.get("plain_apostrophes", False) and not was_training_text,
    )
    return written, list(map(tokens, written))


def read_baseline(args: argparse.Namespace, data: str, references: Sequence[str]) -> list[str]:
    """The translations of --against: of the same text and, without --other-settings, made with the same settings."""
    folder = args.against / "eval"
    split = split_name(args.against, data, args.subset)
    stem = split if args.other_settings else f"{split}.{settings_name(args)}"
    if not all((folder / f"{stem}.{kind}").exists() for kind in ("json", "hyp.txt")):
        available = sorted(path.stem for path in folder.glob(f"{split}.*.json"))
        others = f". There are: {', '.join(available)}; --other-settings takes the last of them" if available else ""
        raise UserError(
            f"--against {args.against}: {folder / stem}.json does not exist; evaluate that run first, with the same "
            f"settings{others}"
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
    if Run(args.run).is_export:
        parts += _exported_name(args)
    elif args.best:
        parts.append("best")
    elif args.checkpoint:
        parts.append("+".join(_checkpoint_name(Path(path), args.run) for path in args.checkpoint.split(":")))
    else:
        parts.append(f"average{args.average or AVERAGED}")
    if args.precision != "fp32":
        parts.append(args.precision)
    others = sorted((name, values) for name, values in args.search_flags.items() if name not in ("batch-size", "cpu"))
    if others:
        parts.append("flags-" + hashlib.sha256(json.dumps(others).encode()).hexdigest()[:6])
    return ".".join(parts)


def _exported_name(args: argparse.Namespace) -> list[str]:
    """The name of the run's own evaluation with the checkpoint that was exported, so that the two can be compared.

    In 8 bits a translation depends on its batch.
    """
    from ea_runtime.translator import Translator

    described, size = read_json(args.run / "model.json"), whole(args.search_flags, "batch-size")
    name = Path(described["checkpoint"]).stem
    of_batch = [f"batch{size}"] if described["int8"] and size not in (None, Translator.BATCH) else []
    return [name.removeprefix("checkpoint_") if name == "checkpoint_best" else name, *of_batch]


def _checkpoint_name(path: Path, run: Path) -> str:
    """A checkpoint in a file name: by its own name where it is the run's, else with a digest of where it is."""
    if path.parent.resolve() == run.resolve():
        if path.stem == "checkpoint_best":
            return "best"  # as --best calls it
        # --average 10 and --best are called average10 and best, and need not be of these files.
        return f"file-{path.stem}" if re.fullmatch(r"average\d+|best", path.stem) else path.stem
    return f"{path.stem}-{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:6]}"


def without_unknown(targets: Iterable[list[int]]) -> list[list[int]]:
    """The words of target sentences; none of those with a word that the dictionary lacks, which no text can be like."""
    from ea_runtime.translator import UNK

    return [[] if UNK in target else target[:-1] for target in targets]


def check_references(targets: Sequence[str], tokens: Sequence[str], data: Preparation, subset: str) -> None:
    """The raw references must be the text that was made binary.

    Args:
        targets: the binary references in words, "" for one that cannot be compared.
        tokens: the raw references, in tokens.

    Raises:
        UserError: they are of other numbers, or many of them differ; a few give a warning.
    """
    name = f"{subset!r} in {data.folder}"
    if len(targets) != len(tokens):
        raise UserError(f"{name}: {len(tokens)} raw references, {len(targets)} in the binary data; prepare them again")
    different = [
        number
        for number, (target, raw) in enumerate(zip(targets, tokens, strict=True))
        if target and target.split() != (raw.lower() if data.lowercase else raw).split()
    ]
    if different:
        first = different[0]
        message = (
            f"{len(different)} of {sum(map(bool, targets))} raw references of {name} are not the text of the binary "
            f"data, first line {first + 1}:\n  raw:    {tokens[first]}\n  binary: {targets[first]}\nPrepare the data "
            "again"
        )
        if len(different) > len(targets) // 10:
            raise UserError(message)
        say(f"evaluate: warning: {message}")


def report(result: dict[str, Any]) -> None:
    """Print the result as people read it."""
    print(f"\n{result['data']} {result['direction']}, {result['subset']}: {result['sentences']} sentences")
    bits = "" if "int8" not in result else ", exported in 8 bits" if result["int8"] else ", exported"
    print(f"  {result['arch']}, {result['checkpoint']}{bits}, beam {result['beam']}, lenpen {result['lenpen']:g}")
    notes = {
        "cut": "source sentences are longer than the model reads: the rest of each was left out",
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
            f"  {metrics.LABELS[name]} against {against['run']}: {test['difference']:+z.2f}, "
            f"p = {test['p']:.3f} (paired bootstrap)  {test['signature']}"
        )
