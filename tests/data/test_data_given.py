"""Text that comes in tokens or in subwords: custom.sh --tokenised [--bpe-given CODE] takes its lines as they are."""

import gzip
import json
import subprocess
from xml.sax.saxutils import escape

import pytest
from helpers import REPO
from helpers.data_toy import Rules, custom, pairs, read, script, uniform, write

from ea_artifacts.preparation import Preparation
from ea_data import rules, subwords
from ea_runtime.text import Text, words_of
from ea_tools.translating import evaluate

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


def prepare(folder, out, *options):
    return custom(folder, out, "--tokenised", *options, test="news.2016")


def same_lines(one, other):
    """Whether two files hold the same tokens; spaces at the ends of a line and between tokens do not count."""
    return [line.split() for line in read(one)] == [line.split() for line in read(other)]


def test_subwords_are_taken_as_they_are(published, tmp_path):
    out = tmp_path / "out"
    said = prepare(published / "subwords", out, "--bpe-given", published / "code.gz", "--lowercase")
    for split, name in (("train", "train"), ("valid", "valid"), ("test", "news.2016")):
        for lang in ("de", "en"):
            given = (published / "subwords" / f"{name}.{lang}").read_bytes()
            assert (out.with_name("out.work") / f"2-subwords/{split}.{lang}").read_bytes() == given
            if split != "train":
                assert same_lines(out / f"raw/{split}.{lang}", published / "tokens" / f"{name}.{lang}")
    assert (out / "code").read_bytes() == (published / "code").read_bytes()
    prep = json.loads((out / "PREP.json").read_text())
    expected = {"tokenizer": "given", "bpe": "subword_nmt", "bpe_merges": 80, "lowercase": True}
    assert prep | expected == prep
    assert "Moses" not in said
    assert prep["round_trip"]["de"]["same"] == SPLITS["valid"]
    # Tokenised BLEU compares with the very tokens that were given; sacreBLEU with their detokenised text.
    read_prep, given = Preparation.at(out), read(published / "tokens/news.2016.en")
    raw, tokens = evaluate.references(out / "raw/test.en", read_prep)
    assert [line.split() for line in tokens] == [line.split() for line in given]
    assert raw == list(map(words_of(read_prep, "en").detokenize, given)) != tokens
    split = Text(out).subwords
    assert split("Das Haus, WORT1 wort2!").split() == split("das haus, wort1 wort2!").split()
    assert "".join(split("Das Haus, WORT1!").split()).replace("@@", "") == "dashaus,wort1!"


def test_tokens_are_taken_as_they_are(published, tmp_path):
    """BPE is learnt from them; with validation taken from the training text, raw/ has the same lines as the data."""
    out = tmp_path / "out"
    files = ("--train", published / "tokens/train", "--valid-every", "10", "--test", published / "tokens/news.2016")
    languages = ("--source-lang", "de", "--target-lang", "en")
    script("custom", *languages, *files, "--out", out, "--tokenised", "--merges", "50")
    assert read(out / "raw/valid.de") == read(published / "tokens/train.de")[9::10]
    assert same_lines(out / "raw/test.en", published / "tokens/news.2016.en")
    joined = [line.replace("@@ ", "").split() for line in read(tmp_path / "out.work/2-subwords/valid.de")]
    assert joined == [line.split() for line in read(out / "raw/valid.de")]
    prep = json.loads((out / "PREP.json").read_text())
    assert (prep["tokenizer"], prep["bpe_merges"], prep["lowercase"]) == ("given", 50, False)
    assert prep["name"] == "out", "that of --out"


def test_white_space_of_any_kind_separates_tokens():
    """BPE would keep another one inside a word, at which fairseq splits it: 10, 000 would be joined as 10000."""
    line = "10\u00a0000 a\u2028b\u0085c\td\x0ce\u3000f  g \n".encode()
    for lowercase in (False, True):
        tokenise = rules.Tokenise(("de", "en"), Rules(tokenizer="given", lowercase=lowercase))
        assert tokenise(([line], [])) == ([b"10 000 a b c d e f  g \n"], [])


BARE = [f'she " has " & {number} < b >' for number in range(40)]


@pytest.mark.parametrize(("lines", "escapes"), [(BARE, False), ([escape(line, ESCAPES) for line in BARE], True)])
def test_tokens_without_moses_escapes_stay_without(tmp_path, lines, escapes):
    """A model that read bare apostrophes in training reads them in translation."""
    uniform(tmp_path / "raw", lines)
    out, one_side = tmp_path / "data", tmp_path / "one-side"
    assert "Moses" not in prepare(tmp_path / "raw", out, "--merges", "60")
    assert Preparation.at(out).escape is escapes
    assert json.loads((out / "PREP.json").read_text())["round_trip"]["en"]["same"] == 40
    command = ["bash", REPO / "data-prep/one-side.sh", out, "en", one_side]
    subprocess.run(command, check=True, capture_output=True)
    for data in (out, one_side):
        assert Text(data).subwords('she "has" & 7 < b >').replace("@@ ", "").split() == lines[7].split()


def test_tokens_that_moses_does_not_make_give_a_warning(tmp_path):
    uniform(tmp_path / "raw", [f"do n't 4.5% {number} ( a)b" for number in range(40)])
    said = prepare(tmp_path / "raw", tmp_path / "out", "--merges", "60")
    assert "warning: valid: only 0.0% of its en lines" in said and "Moses" in said


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("#version: 0.2\na b\na b c\n", "code, line 3: .* 'a b c'"),
        ("", "code: is empty"),
        ("#version: 0.2\nw o\n", "code: .* of 40 lines of the validation text"),
    ],
)
def test_wrong_codes_are_refused(published, tmp_path, code, message):
    (tmp_path / "code").write_text(code)
    with pytest.raises(SystemExit, match=message):
        prepare(published / "subwords", tmp_path / "out", "--bpe-given", tmp_path / "code")
    assert not (tmp_path / "out").exists()
