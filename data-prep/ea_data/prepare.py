"""The command behind the corpora in this folder. Run those instead, for example data-prep/multi30k.sh --help."""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

from . import corpora, sample, stages
from .command_line import Parser
from .corpus import Corpus, Rules
from .earlier import Earlier
from .languages import default_tokenizer, known
from .system import explained
from .text import PrepError

DATA = Path(__file__).resolve().parents[2] / "data"


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


def ratio(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 1 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number, at least 1, not {text!r}")
    return value


def two_or_more(text: str) -> int:
    if positive(text) == 1:
        raise argparse.ArgumentTypeError(
            "must be at least 2: with 1 every pair is validation and none is left to train on"
        )
    return int(text)


def language(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9]+(_[A-Za-z0-9]+)*", text):
        hint = f"; for a region write {text.replace('-', '_')}, in the files' names too" if "-" in text else ""
        raise argparse.ArgumentTypeError(f"must be a language code like de or de_AT, not {text!r}{hint}")
    return text


def folder_name(text: str) -> str:
    if not re.fullmatch(r"\w[\w.+-]*", text):
        raise argparse.ArgumentTypeError(
            f"must be the name of a folder in data/, of letters, digits and . + - _, not {text!r}; --out takes any path"
        )
    return text


def common_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    add = parser.add_argument_group("options of every corpus").add_argument
    add("--out", type=Path, metavar="DIR", help="the finished data folder (default: data/NAME)")
    add(
        "--bpe",
        choices=["subword_nmt", "sentencepiece"],
        help="kind of subwords (default: subword_nmt; sentencepiece where text is not tokenised)",
    )
    add(
        "--merges",
        type=positive,
        metavar="N",
        help="merges of BPE, or pieces of sentencepiece, of both languages (default: the corpus's; custom.sh: 10000)",
    )
    add("--vocabulary-threshold", type=positive, metavar="N",
        help="split subwords again that occur fewer than N times on their side of the training text")  # fmt: skip
    add("--workers", type=positive, metavar="N", default=os.cpu_count(), help="processes (default: one per core)")
    add("--force", choices=stages.NAMES, metavar="STAGE",
        help=f"make a finished stage again, and those after it: {', '.join(stages.NAMES)}")  # fmt: skip
    add("--strict", action="store_true", help="fail if the numbers of pairs are not the expected ones")
    return parser


def parse(arguments: list[str] | None = None) -> tuple[argparse.Namespace, Corpus]:
    """The arguments (default: those of the command line), and the corpus they amount to."""
    parser = Parser(prog="prepare.py", description=__doc__)
    common = common_options()
    commands = parser.add_subparsers(dest="command", required=True)

    def command(name: str, make: Callable[[argparse.Namespace], Corpus], description: str) -> Callable:
        child = commands.add_parser(
            name, prog=f"{name}.sh", parents=[common], description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )  # fmt: skip
        child.set_defaults(make=make)
        return child.add_argument

    add = command("sample", lambda args: corpora.sample(), sample.__doc__)
    add("--train", type=positive, default=12_000, metavar="N", help="training pairs (default: 12000)")
    add("--seed", type=int, default=1, metavar="N", help="(default: 1)")

    for name, (make, pairs) in corpora.PUBLIC.items():
        add = command(name, public, make.__doc__.replace("\n    ", "\n"))
        add("--raw", type=Path, metavar="DIR", help="folder with the archives or files (default: they are downloaded)")
        if pairs:
            add("pair", choices=pairs, help="source and target language")

    add = command("custom", custom, corpora.custom.__doc__)
    add("--source-lang", type=language, required=True, metavar="XX")
    add("--target-lang", type=language, required=True, metavar="YY")
    add("--train", required=True, nargs="+", metavar="PREFIX", help="PREFIX.XX and PREFIX.YY, plain or .gz")
    add("--valid", metavar="PREFIX", help="kept whole and aligned, as are tests")
    add("--valid-every", type=two_or_more, metavar="N", help="instead: every N-th training pair is validation")
    add("--test", nargs="+", default=[], metavar="PREFIX", help="for fairseq: test, test1, ... in this order")
    add("--name", type=folder_name, help="name of the data (default: that of --out, else custom-XX-YY)")
    add("--tokenizer", choices=["moses", "none"],
        help="none: subwords are made of raw text, by sentencepiece (default: moses where Moses has rules for both "
        "languages, else none)")  # fmt: skip
    add("--tokenised", action="store_true", help="the text is in tokens already: its lines are taken as they are")
    add("--bpe-given", type=Path, metavar="CODE",
        help="with --tokenised: it is also in subwords, by these codes of subword-nmt (plain or .gz)")  # fmt: skip
    add("--like", type=Path, metavar="FOLDER",
        help="prepare the text like that of a run, or like data that was prepared before: its rules, its subwords, its "
        "dictionary; to train a model further, or to score it on other text")  # fmt: skip
    add("--lowercase", action="store_true", help="lower-case the text; with --bpe-given: it is lower-case already")
    add("--split-dashes", action="store_true", help="Moses' aggressive hyphen splitting, as the WMT corpora have it")
    add("--normalise", action="store_true", help="normalise punctuation of training text, as the WMT corpora do")
    add(
        "--drop-test-overlap",
        action="store_true",
        help="drop training pairs of which the source or the target is a sentence of validation or a test",
    )
    add("--max-length", type=positive, default=250, metavar="N", help="subwords of a training sentence (default: 250)")
    add("--max-ratio", type=ratio, metavar="R",
        help="drop training pairs with one side more than R times the other (default: none)")  # fmt: skip

    args, unknown = parser.parse_known_args(arguments)
    parser = commands.choices[args.command]  # which names the script that was typed
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if args.command == "custom" and bool(args.valid) == bool(args.valid_every):
        parser.error("custom.sh needs either --valid PREFIX or --valid-every N")
    if args.command == "custom" and args.source_lang == args.target_lang:
        parser.error(f"--source-lang and --target-lang must differ, both are {args.source_lang}")
    if args.command == "custom":
        for error in filter(None, (like_error(args), given_text_error(args), raw_text_error(args), prefix_error(args))):
            parser.error(error)
    if args.vocabulary_threshold and args.bpe == "sentencepiece":
        parser.error("--vocabulary-threshold goes with --bpe subword_nmt; sentencepiece no longer has such an option")
    try:
        corpus = args.make(args)
    except PrepError as error:
        parser.error(str(error))
    changes = {key: getattr(args, key) for key in ("bpe", "merges", "vocabulary_threshold") if getattr(args, key)}
    return args, dataclasses.replace(corpus, rules=dataclasses.replace(corpus.rules, **changes))


def given_text_error(args: argparse.Namespace) -> str | None:
    """The mistake in the options for text that comes in tokens or subwords, or None."""
    if args.bpe_given and not args.tokenised:
        return "--bpe-given goes with --tokenised: text in subwords is in tokens, too"
    refused = {"split_dashes": "--tokenised", "normalise": "--tokenised", "tokenizer": "--tokenised"}
    refused |= {"bpe": "--bpe-given", "merges": "--bpe-given", "vocabulary_threshold": "--bpe-given"}
    for name, option in refused.items():
        if getattr(args, name) and getattr(args, option[2:].replace("-", "_")):
            return f"--{name.replace('_', '-')} cannot be had with {option}, which takes the text as it is"
    return None


def like_error(args: argparse.Namespace) -> str | None:
    """The mistake in the options beside --like, or None."""
    if not args.like:
        return None
    settled = ("tokenizer", "tokenised", "bpe_given", "lowercase", "split_dashes", "normalise", "bpe", "merges")
    for name in (*settled, "vocabulary_threshold"):
        if getattr(args, name):
            return f"--{name.replace('_', '-')} cannot be had with --like, by which it is as for {args.like}"
    if not (args.name or args.out):
        return "--like wants a --name or --out for the new data, beside those that it is like"
    out = (args.out or DATA / args.name).resolve()
    if args.like.resolve() == out:
        return f"--like {args.like}: is the folder that the new data would replace; choose another --name or --out"
    return None


def raw_text_error(args: argparse.Namespace) -> str | None:
    """The mistake in the options where subwords are made of raw text, or None."""
    if tokenizer(args) != "none":
        return None
    why = "" if args.tokenizer else f" (the default for {args.source_lang} and {args.target_lang})"
    refused = {
        "--split-dashes": args.split_dashes,
        "--normalise": args.normalise,
        "--bpe subword_nmt": args.bpe == "subword_nmt",
        "--vocabulary-threshold": args.vocabulary_threshold,
    }
    for option in (option for option, given in refused.items() if given):
        return f"{option} cannot be had with --tokenizer none{why}, by which sentencepiece splits the text as it is"
    return None


def prefix_error(args: argparse.Namespace) -> str | None:
    """The option that names a file instead of a prefix of two files, or a test twice; or None."""
    prefixes = [("--train", name) for name in args.train] + [("--test", name) for name in args.test]
    for option, name in [*prefixes, *([("--valid", args.valid)] if args.valid else [])]:
        stem, dot, language = name.removesuffix(".gz").rpartition(".")
        if dot and language in (args.source_lang, args.target_lang) and Path(name).is_file():
            both = f"{stem}.{args.source_lang} and {stem}.{args.target_lang}"
            return f"{option} {name}: is a file; the prefix of two files is wanted: {option} {stem}, for {both}"
    tests = [Path(name).resolve() for name in args.test]
    for name, path in zip(args.test, tests, strict=True):
        if tests.count(path) > 1:
            return f"--test {name}: is named twice; leave one of them out"
    return None


def tokenizer(args: argparse.Namespace) -> str:
    """The tokenizer of your own text, as ea_data.corpus.Rules names it."""
    if args.tokenised:
        return "given"
    return args.tokenizer or default_tokenizer(args.source_lang, args.target_lang)


def announce_unknown(args: argparse.Namespace) -> None:
    """Warn of a code of no language: it may be mistyped, and then the text is prepared without its language's rules."""
    for option, code in (("--source-lang", args.source_lang), ("--target-lang", args.target_lang)):
        if not known(code):
            print(
                f"custom.sh: warning: {option} {code}: is no code of a language in ISO 639, like de, deu or zho_Hans; "
                "its text gets no rules of a language",
                file=sys.stderr,
            )


def public(args: argparse.Namespace) -> Corpus:
    """One of corpora.PUBLIC, in the languages that were asked for."""
    make, pairs = corpora.PUBLIC[args.command]
    return make(*args.pair.split("-")) if pairs else make()


def custom(args: argparse.Namespace) -> Corpus:
    about_lines = {
        "filter_on": "subwords", "max_length": args.max_length, "max_ratio": args.max_ratio,
        "valid_every": args.valid_every, "drop_test_overlap": args.drop_test_overlap,
    }  # fmt: skip
    if args.like:
        earlier = Earlier.at(args.like)
        earlier.require_languages(args.source_lang, args.target_lang)
        rules = earlier.rules(**about_lines)
    else:
        chosen = tokenizer(args)
        announce_unknown(args)
        rules = Rules(
            tokenizer=chosen, nfc=chosen != "given", lowercase=args.lowercase, split_dashes=args.split_dashes,
            normalise=args.normalise, bpe="sentencepiece" if chosen == "none" else "subword_nmt", **about_lines,
        )  # fmt: skip
    name = args.name or (args.out and args.out.resolve().name) or f"custom-{args.source_lang}-{args.target_lang}"
    corpus = corpora.custom(name, args.source_lang, args.target_lang, args.train, args.valid, args.test, rules)
    return dataclasses.replace(corpus, codes=args.bpe_given, like=args.like)


def raw_folder(args: argparse.Namespace, corpus: Corpus, out: Path) -> Path:
    """The folder with the raw text; it is made or downloaded now if need be."""
    if args.command == "custom":
        return Path.cwd()
    if args.command == "sample":
        try:
            pairs = sample.corpus(args.train, 500, 500, args.seed)
        except ValueError as error:
            sys.exit(f"sample.sh: --train {args.train}: {error}")
        work = stages.work_folder(out)
        work.mkdir(parents=True, exist_ok=True)
        (work / stages.LOCK).touch()  # which marks the folder as made here
        sample.write(pairs, work / "raw")
        return work / "raw"
    if args.raw:
        return args.raw.resolve()
    from . import download

    folder = DATA / "downloads" / corpus.downloads
    for url, part in corpus.files().items():
        path = folder / Path(url).name
        if not path.exists():
            download.fetch(url, path, part.size)
    return folder


def main() -> None:
    args, corpus = parse()
    out = (args.out or DATA / corpus.name).resolve()
    # Only now, so that --help works before scripts/setup.sh has run.
    from .pipeline import Pipeline
    from .text import refuse_undecodable_names

    command = [f"data-prep/{args.command}.sh", *sys.argv[2:]]
    try:
        members = [part.member for parts in corpus.splits().values() for part in parts]
        refuse_undecodable_names([*sys.argv[1:], str(out), *members])
        stages.refuse_others(out)
        raw = raw_folder(args, corpus, out)
        Pipeline(corpus, raw, out, args.workers, command, args.strict).run(args.force)
    except OSError as error:
        sys.exit(f"{args.command}.sh: {explained(error)}")
    except PrepError as error:
        sys.exit(f"{args.command}.sh: {error}")
    except KeyboardInterrupt:
        print(f"\n{args.command}.sh: interrupted; run it again to go on", file=sys.stderr)
        sys.exit(130)
    print(f"{out}: ready")


if __name__ == "__main__":
    main()
