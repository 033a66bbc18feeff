"""Helpers of the tests of data-prep/: small made-up corpora, and the pipeline on them."""

import contextlib
import io
import random

from ea_data import corpora, prepare, stages  # noqa: F401  (the tests take them from here)
from ea_data.corpora import Corpus, Part, Rules
from ea_data.pipeline import Pipeline
from helpers import REPO

PREP = REPO / "data-prep"

# Words that meet the tokenizer's special cases: abbreviations, numbers, quotes, entities, other scripts, odd spaces.
WORDS = """the Haus „Ja“ "no" it's l'été U.S. Mr. z.B. 3,000 3.14 1,5 foo-bar A-B e-mail ... a...b wait.. a/b 50% $5
(ok) [x] {y} <b> &amp; &quot; R&D |pipe| ¿qué? naïve Straße ÄÖÜ σοφία мир 東京 3-4 -5 '90s dogs' ’tis don’t – — …
«oui» http://x.org/a_b?c=1 me@x.org No. 5 Nr. 7 St. art. ﬁ ½ ™ € @-@ DOTMULTI THISISPROTECTED0
; : ! a,b ,x 5, '' `` ´""".split()


def sentences(number, seed=0, longest=12):
    """Random lines, most of them harmless words and some of them awkward; a few with odd spaces."""
    rng = random.Random(seed)
    lines = []
    for _ in range(number):
        words = [
            rng.choice(WORDS) if rng.random() < 0.4 else f"wort{rng.randrange(60)}"
            for _ in range(rng.randint(1, longest))
        ]
        lines.append(rng.choice([" "] * 6 + ["  ", "\u00a0", "\t"]).join(words))
    return lines


def pairs(number, seed=0):
    """Parallel lines of about the same length."""
    source = sentences(number, seed)
    return source, [" ".join(line.split()[: random.Random(i).randint(1, 20)]) for i, line in enumerate(source)]


def write(path, lines):
    """Writes lines of str or bytes, and gives the path back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join((line if isinstance(line, bytes) else line.encode()) + b"\n" for line in lines))
    return path


def read(path):
    return path.read_bytes().decode().split("\n")[:-1]


def parallel(folder, prefix, number=40, seed=0):
    """Writes folder/prefix.de and .en."""
    for lang, lines in zip(("de", "en"), pairs(number, seed), strict=True):
        write(folder / f"{prefix}.{lang}", lines)


def uniform(folder, lines, languages=("de", "en"), splits=("train", "valid", "test", "news.2016")):
    """Writes the same lines for each split and language."""
    for split in splits:
        for language in languages:
            write(folder / f"{split}.{language}", lines)


def recipe(source="de", target="en", **rules):
    """Training, validation and a test below the raw folder, as plain files."""
    return Corpus(
        name="toy",
        source_lang=source,
        target_lang=target,
        train=(Part("train.{lang}"),),
        valid=(Part("valid.{lang}"),),
        tests={"easy": (Part("test.{lang}"),)},
        rules=Rules(**{"merges": 60} | rules),
    )


def corpus(folder, train=200):
    for split, number in (("train", train), ("valid", 20), ("test", 20)):
        parallel(folder, split, number, seed=number)
    return folder


def text_only(recipe, raw, out, workers=1):
    """Run the first two stages; the pipeline, with the texts that it made."""
    pipeline = Pipeline(recipe, raw, out, workers)
    with stages.alone(out):
        stages.run(pipeline.chain[:-1])
    return pipeline


def prepared(recipe, raw, out, workers=1):
    """Run all stages in this process; the content of PREP.json."""
    with stages.alone(out):
        return Pipeline(recipe, raw, out, workers).run()


def script(name, *options):
    """Does what data-prep/NAME.sh does, in this process; returns its messages. It ends like a program if it fails."""
    with contextlib.redirect_stderr(io.StringIO()) as said, contextlib.redirect_stdout(said):
        prepare.main([name, "--workers", "1", *map(str, options)])
    return said.getvalue()


#: A command that lacks nothing; a later word replaces an earlier one.
CUSTOM = "custom --source-lang de --target-lang en --train x --valid y".split()


def custom(folder, out, *options, test="test"):
    """The messages of custom.sh for a folder's texts."""
    files = ("--train", folder / "train", "--valid", folder / "valid", "--test", folder / test)
    return script(*CUSTOM, *files, "--out", out, *options)


def corpus_of(*options):
    """The corpus that custom.sh makes of these options."""
    return prepare.parse(CUSTOM[0], [*CUSTOM[1:], *map(str, options)])[1]
