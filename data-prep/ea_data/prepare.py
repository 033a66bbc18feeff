"""The command behind the corpora in this folder. Run those instead, for example data-prep/multi30k.sh --help."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from ea_artifacts.command import Parser, UserError, at_least, positive, reporting, say
from ea_artifacts.preparation import Preparation

from . import corpora, download, stages
from .corpora import Corpus, Rules
from .languages import default_tokenizer, known
from .pipeline import Pipeline

HERE = Path(__file__).resolve().parents[1]
DATA = HERE.with_name("data")
#: An option of custom.sh -> other options whose values follow from it.
SETTLES = {
    "like": "tokenizer tokenised bpe_given lowercase split_dashes normalise merges vocabulary_threshold "
    "separate_dictionaries joint_dictionary".split(),
    "bpe_given": "merges vocabulary_threshold".split(),
    "tokenised": "split_dashes normalise tokenizer".split(),
}


def language(text: str) -> str:
    """An argparse type: a code of a language as file names have it."""
    if not re.fullmatch(r"[A-Za-z0-9]+(_[A-Za-z0-9]+)*", text):
        better = text.replace("-", "_")
        raise argparse.ArgumentTypeError(
            f"must be a language code like de or de_AT, not {text!r}; did you mean {better}?"
        )
    return text


def parse(command: str, words: Sequence[str]) -> tuple[argparse.Namespace, Corpus]:
    """The options of a command of data-prep/, and the corpus that they describe."""
    parser = Parser(prog=f"{command}.sh")
    if command == "custom":
        parser.description = inspect.getdoc(corpora.custom)
        add_custom_options(parser)
    else:
        make, pairs = corpora.PUBLIC[command]
        parser.description = inspect.getdoc(make)
        parser.add_argument("--raw", type=Path, metavar="DIR", help="archives or files (default: the corpus's own)")
        if pairs:
            parser.add_argument("pair", choices=pairs, help="source and target language")
    add_common_options(parser)
    args = parser.parse_args(words)
    args.command = command
    if command == "custom" and (mistake := mistake_in(args)):
        parser.error(mistake)
    try:
        corpus = corpus_of(args)
    except UserError as error:
        parser.error(str(error))
    options = {field.name: getattr(args, field.name, None) for field in dataclasses.fields(Rules)}
    changes = {name: value for name, value in options.items() if value}
    if args.joint_dictionary:
        changes["separate_dictionaries"] = False
    return args, dataclasses.replace(corpus, rules=dataclasses.replace(corpus.rules, **changes))


def add_common_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of every corpus."""
    group = parser.add_argument_group("options of every corpus")
    add = group.add_argument
    add("--out", type=Path, metavar="DIR", help="the finished data folder (default: data/NAME)")
    merges = "merges of BPE, or pieces (default: the corpus's; custom.sh: 10000)"
    add("--merges", type=positive, metavar="N", help=merges)
    rare = "split subwords again that occur fewer than N times on their side of the training text"
    add("--vocabulary-threshold", type=positive, metavar="N", help=rare)
    dictionaries = group.add_mutually_exclusive_group()
    joint = "one dictionary for both languages (default, except for IWSLT'14)"
    dictionaries.add_argument("--joint-dictionary", action="store_true", help=joint)
    separate = "a dictionary for each language; the model then shares no embeddings between them (default of IWSLT'14)"
    dictionaries.add_argument("--separate-dictionaries", action="store_true", help=separate)
    add("--workers", type=positive, metavar="N", default=os.cpu_count(), help="processes (default: one per core)")


def add_custom_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of your own text."""
    add = parser.add_argument
    add("--source-lang", type=language, required=True, metavar="XX")
    add("--target-lang", type=language, required=True, metavar="YY")
    add("--train", required=True, nargs="+", metavar="PREFIX", help="PREFIX.XX and PREFIX.YY, plain or .gz")
    valid = parser.add_mutually_exclusive_group(required=True)
    valid.add_argument("--valid", metavar="PREFIX", help="kept whole and aligned, as are tests")
    valid.add_argument("--valid-every", type=at_least(2), metavar="N", help="every N-th training pair is validation")
    add("--test", nargs="+", default=[], metavar="PREFIX", help="for fairseq: test, test1, ... in this order")
    add("--name", help="name of the data (default: that of --out, else custom-XX-YY)")
    none = "none: sentencepiece splits raw text (default: moses where it has rules for both languages, else none)"
    add("--tokenizer", choices=["moses", "none"], help=none)
    add("--tokenised", action="store_true", help="the text is in tokens already: its lines are taken as they are")
    given = "with --tokenised: it is also in subwords, by these codes of subword-nmt (plain or .gz)"
    add("--bpe-given", type=Path, metavar="CODE", help=given)
    like = "take rules, subwords and dictionary of a run, or of data prepared before; to train on, or to score"
    add("--like", type=Path, metavar="FOLDER", help=like)
    add("--lowercase", action="store_true", help="lower-case the text")
    add("--split-dashes", action="store_true", help="Moses' aggressive hyphen splitting, as the WMT corpora have it")
    add("--normalise", action="store_true", help="normalise punctuation of training text, as the WMT corpora do")
    overlap = "drop training pairs of which a side is a sentence of validation or a test"
    add("--drop-test-overlap", action="store_true", help=overlap)
    add("--max-length", type=positive, default=250, metavar="N", help="subwords of a training sentence (default: 250)")
    ratio = "drop training pairs with one side more than R times the other (default: none)"
    add("--max-ratio", type=at_least(1, float), metavar="R", help=ratio)


def mistake_in(args: argparse.Namespace) -> str | None:
    """The first mistake in the options of your own text, or None."""
    if args.source_lang == args.target_lang:
        return f"--source-lang and --target-lang must differ, both are {args.source_lang}"
    if args.bpe_given and not args.tokenised:
        return "--bpe-given goes with --tokenised: text in subwords is in tokens, too"
    for option, settled in SETTLES.items():
        for name in settled:
            if getattr(args, option) and getattr(args, name):
                return f"{_flag(name)} conflicts with {_flag(option)}, which already sets it"
    if tokenizer(args) == "none":
        why = "" if args.tokenizer else f" (the default for {args.source_lang} and {args.target_lang})"
        for name in ("split_dashes", "normalise", "vocabulary_threshold"):
            if getattr(args, name):
                return f"{_flag(name)} conflicts with --tokenizer none{why}: sentencepiece splits text as it is"
    for name in (*args.train, *args.test, args.valid or ""):
        stem, _, code = name.removesuffix(".gz").rpartition(".")
        if code in (args.source_lang, args.target_lang) and Path(name).is_file():
            return f"{name}: is a file; give the prefix of two files: {stem}"
    if args.like and not (args.name or args.out):
        return "--like needs a --name or --out for the new data"
    if args.like and args.like.resolve() == (args.out or DATA / args.name).resolve():
        return f"--like {args.like}: is the folder that the new data would replace; choose another --name or --out"
    return None


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def tokenizer(args: argparse.Namespace) -> str:
    """The tokenizer of your own text, as ea_data.corpora.Rules names it."""
    if args.tokenised:
        return "given"
    return args.tokenizer or default_tokenizer(args.source_lang, args.target_lang)


def corpus_of(args: argparse.Namespace) -> Corpus:
    """The corpus that the command line describes."""
    if args.command != "custom":
        make, pairs = corpora.PUBLIC[args.command]
        return make(*args.pair.split("-")) if pairs else make()
    like = Preparation.like(args.like) if args.like else None
    if like:
        if like.languages != (args.source_lang, args.target_lang):
            raise UserError(
                f"--like {args.like}: is {'-'.join(like.languages)}, and the text is to be "
                f"{args.source_lang}-{args.target_lang}"
            )
        rules = Rules.like(like)
    else:
        warn_of_unknown(args)
        splitter = tokenizer(args)
        bpe = "sentencepiece" if splitter == "none" else "subword_nmt"
        rules = Rules(tokenizer=splitter, nfc=splitter != "given", bpe=bpe)
    name = args.name or (args.out and args.out.resolve().name) or f"custom-{args.source_lang}-{args.target_lang}"
    rules = dataclasses.replace(rules, filter_on="subwords")
    corpus = corpora.custom(name, args.source_lang, args.target_lang, args.train, args.valid, args.test, rules)
    return dataclasses.replace(corpus, codes=args.bpe_given, like=like)


def warn_of_unknown(args: argparse.Namespace) -> None:
    """Warn of a code of no language: a typing error would take the language's rules from the text."""
    for option in ("source_lang", "target_lang"):
        if not known(code := getattr(args, option)):
            say(
                f"custom.sh: warning: {_flag(option)} {code}: is not an ISO 639 language code, such as de, deu or "
                "zho_Hans; its text gets no rules of a language"
            )


def raw_folder(args: argparse.Namespace, corpus: Corpus) -> Path:
    """The folder with the raw text, which is downloaded now where it is missing."""
    if args.command == "custom":
        return Path.cwd()
    if args.raw:
        return args.raw.resolve()
    if not corpus.downloads:
        return HERE / args.command
    folder = DATA / "downloads" / corpus.downloads
    missing = {path: url for url in corpus.urls() if not (path := folder / Path(url).name).exists()}
    if missing:
        with stages.locked(folder):  # two directions of a corpus share its downloads
            for path, url in sorted(missing.items()):
                if not path.exists():
                    download.fetch(url, path)
    return folder


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line: a corpus's name and its options."""
    name, *words = sys.argv[1:] if arguments is None else arguments
    args, corpus = parse(name, words)
    out = (args.out or DATA / corpus.name).resolve()
    command = [f"data-prep/{name}.sh", *words]
    with reporting(f"{name}.sh"), stages.alone(out):
        Pipeline(corpus, raw_folder(args, corpus), out, args.workers, command).run()
    print(f"{out}: ready")


if __name__ == "__main__":
    main()
