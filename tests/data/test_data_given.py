"""Text that comes in tokens or in subwords: custom.sh --tokenised [--bpe-given CODE] takes its lines as they are."""

import gzip
import json
import subprocess
from xml.sax.saxutils import escape

import pytest
from helpers import REPO
from helpers.data_toy import Rules, pairs, read, script, write

from ea_artifacts.preparation import Preparation
from ea_data import rules, subwords
from ea_runtime.text import Text, words_of
from ea_tools import text

ESCAPES = {"'": "&apos;", '"': "&quot;"}
SPLITS = {"train": 200, "valid": 20, "news.2016": 15}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A corpus as others publish it: Moses tokens in lower case, and the same in subwords with their codes."""
    folder = tmp_path_factory.mktemp("published")
    tokenise = rules.Tokenise(("de", "en"), Rules(lowercase=True))
    sides = {
        split: tokenise(tuple([line.encode() + b"\n" for line in side] for side in pairs(number, seed=number)))
        for split, number in SPLITS.items()
    }
    subwords.learn(sum(subwords.count_words(sides["train"]), subwords.Counter()), 80, folder)
    apply = subwords.Apply(folder, "subword_nmt", ("de", "en"))
    for split, chunk in sides.items():
        for kind, given in (("tokens", chunk), ("subwords", apply(chunk))):
            for lang, lines in zip(("de", "en"), given, strict=True):
                write(folder / kind / f"{split}.{lang}", [line[:-1] for line in lines])
    (folder / "code.gz").write_bytes(gzip.compress((folder / "code").read_bytes()))
    return folder


def prepare(folder, out, *options, check=True):
    return script(
        "custom", "--source-lang", "de", "--target-lang", "en", "--train", folder / "train",
        "--valid", folder / "valid", "--test", folder / "news.2016", "--workers", "1", "--out", out, "--tokenised",
        *options, check=check,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_subwords(published, tmp_path_factory):
    """Data of the published subwords, and what the command said."""
    out = tmp_path_factory.mktemp("in-subwords") / "out"
    return out, prepare(published / "subwords", out, "--bpe-given", published / "code.gz", "--lowercase").stderr


def same_lines(one, other):
    """Whether two files hold the same tokens; spaces at the ends of a line and between tokens do not count."""
    return [line.split() for line in read(one)] == [line.split() for line in read(other)]


def test_subwords_are_taken_as_they_are(published, in_subwords):
    out, said = in_subwords
    for split, name in (("train", "train"), ("valid", "valid"), ("test", "news.2016")):
        for lang in ("de", "en"):
            given = (published / "subwords" / f"{name}.{lang}").read_bytes()
            assert (out.with_name("out.work") / f"2-subwords/{split}.{lang}").read_bytes() == given
            if split != "train":
                assert same_lines(out / f"raw/{split}.{lang}", published / "tokens" / f"{name}.{lang}")
    assert (out / "code").read_bytes() == (published / "code").read_bytes()
    prep = json.loads((out / "PREP.json").read_text())
    expected = {"tokenizer": "given", "bpe": "subword_nmt", "bpe_merges": 80, "lowercase": True}
    assert {name: prep[name] for name in expected} == expected
    assert "the tokens that Moses makes" not in said
    assert prep["round_trip"]["de"]["same"] == SPLITS["valid"]


def test_tokens_are_taken_as_they_are(published, tmp_path):
    """BPE is learnt from them; with validation taken from the training text, raw/ has the same lines as the data."""
    out = tmp_path / "out"
    script(
        "custom", "--source-lang", "de", "--target-lang", "en", "--train", published / "tokens/train", "--workers", "1",
        "--valid-every", "10", "--test", published / "tokens/news.2016", "--out", out, "--tokenised", "--merges", "50",
    )  # fmt: skip
    assert read(out / "raw/valid.de") == read(published / "tokens/train.de")[9::10]
    assert same_lines(out / "raw/test.en", published / "tokens/news.2016.en")
    joined = subwords.join(
        ([line + b"\n" for line in (tmp_path / "out.work/2-subwords/valid.de").read_bytes().split(b"\n")],)
    )
    assert [line.decode().split() for line in joined[0]][:-1] == [line.split() for line in read(out / "raw/valid.de")]
    prep = json.loads((out / "PREP.json").read_text())
    assert (prep["tokenizer"], prep["bpe_merges"], prep["lowercase"]) == ("given", 50, False)
    assert prep["name"] == "out", "that of --out"


def test_references_are_the_given_tokens(published, in_subwords):
    """Tokenised BLEU compares with the very tokens that were given; sacreBLEU with their detokenised text."""
    out, _ = in_subwords
    prep, given = Preparation.at(out), read(published / "tokens/news.2016.en")
    raw, tokens = text.references(out / "raw/test.en", prep)
    assert [line.split() for line in tokens] == [line.split() for line in given]
    assert raw == list(map(words_of(prep, "en").detokenize, given)) != tokens
    split = Text(out).subwords
    assert split("Das Haus, WORT1 wort2!").split() == split("das haus, wort1 wort2!").split()
    assert "".join(split("Das Haus, WORT1!").split()).replace("@@", "") == "dashaus,wort1!"


def test_white_space_of_any_kind_separates_tokens():
    """BPE would keep another one inside a word, at which fairseq splits it: 10, 000 would be joined as 10000."""
    line = "10\u00a0000 a\u2028b\u0085c\td\x0ce\u3000f  g \n".encode()
    for lowercase in (False, True):
        tokenise = rules.Tokenise(("de", "en"), Rules(tokenizer="given", lowercase=lowercase))
        assert tokenise(([line], [])) == ([b"10 000 a b c d e f  g \n"], [])


def test_upper_case_is_refused_where_lower_case_was_promised(published, tmp_path):
    for lang in ("de", "en"):
        for split in SPLITS:
            write(tmp_path / "raw" / f"{split}.{lang}", read(published / f"subwords/{split}.{lang}"))
    lines = read(published / "subwords/train.en")
    write(tmp_path / "raw/train.en", [*lines[:6], "The house", *lines[7:]])
    done = prepare(tmp_path / "raw", tmp_path / "out", "--bpe-given", published / "code", "--lowercase", check=False)
    assert done.returncode == 1
    assert f"{tmp_path}/raw/train.en, line 7: is not lower-case" in done.stderr
    assert not (tmp_path / "out").exists()


def test_tokens_without_moses_escapes_stay_without(tmp_path):
    """A model that read bare apostrophes in training reads them in translation."""
    lines = [f'she " has " & {number} < b >' for number in range(40)]
    for split in SPLITS:
        for lang in ("de", "en"):
            write(tmp_path / "bare" / f"{split}.{lang}", lines)
            write(tmp_path / "moses" / f"{split}.{lang}", [escape(line, ESCAPES) for line in lines])
    for kind, expected in (("bare", False), ("moses", True)):
        out = tmp_path / f"{kind}-data"
        done = prepare(tmp_path / kind, out, "--merges", "60")
        assert Preparation.at(out).escape is expected
        prep = json.loads((out / "PREP.json").read_text())
        assert prep["round_trip"]["en"]["same"] == 40
        assert "the tokens that Moses makes" not in done.stderr
        given = read(tmp_path / kind / "valid.de")[7]
        one_side = ["bash", REPO / "data-prep/one-side.sh", out, "en", tmp_path / f"{kind}-en"]
        subprocess.run(one_side, check=True, capture_output=True)
        for data in (out, tmp_path / f"{kind}-en"):
            assert Text(data).subwords('she "has" & 7 < b >').replace("@@ ", "").split() == given.split()


def test_tokens_that_moses_does_not_make_give_a_warning(tmp_path):
    for split in SPLITS:
        for lang in ("de", "en"):
            write(tmp_path / "raw" / f"{split}.{lang}", [f"do n't 4.5% {number} ( a)b" for number in range(40)])
    done = prepare(tmp_path / "raw", tmp_path / "out", "--merges", "60")
    assert "valid: only 0.0% of its en lines" in done.stderr and "the tokens that Moses makes" in done.stderr


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "#version: 0.2\na b\na b c\n",
            "code, line 3: a merge of BPE is two subwords with a space between, not 'a b c'",
        ),
        ("", "code: is empty"),
        ("#version: 0.2\nw o\n", "of 40 lines of the validation text are not in the subwords of these codes"),
    ],
)
def test_wrong_codes_are_refused(published, tmp_path, code, message):
    (tmp_path / "code").write_text(code)
    done = prepare(published / "subwords", tmp_path / "out", "--bpe-given", tmp_path / "code", check=False)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
