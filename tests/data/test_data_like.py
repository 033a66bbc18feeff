"""custom.sh --like: other text by the rules, subwords and dictionary of a run, or of data prepared before."""

import json
import shutil

import pytest
from fairseq.data import Dictionary, data_utils
from helpers.data_toy import CUSTOM, Pipeline, corpus_of, custom, parallel, prepare, read, write
from helpers.mistakes import check_refusal, mistakes
from helpers.models import model_args
from helpers.toy import TINY, save_model

from ea_artifacts.command import UserError
from ea_artifacts.preparation import Preparation
from ea_runtime.text import Text
from ea_tools.training.train import check_first_model


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """The text of the first data, and other text with words that the first has not."""
    folder = tmp_path_factory.mktemp("text")
    for place, seed in (("one", 1), ("two", 51)):
        for number, (split, lines) in enumerate({"train": 150, "valid": 20, "test": 15}.items()):
            parallel(folder / place, split, lines, seed=seed + number)
    lines = read(folder / "two/test.de")
    write(folder / "two/test.de", ["Quarz-Jux, 'ŋŋ' and Nr. 7 don’t", "e\u0301tude", *lines[2:]])
    return folder


@pytest.fixture(scope="module")
def before(text, tmp_path_factory):
    """Data of the first text by the usual rules; no test writes to it."""
    out = tmp_path_factory.mktemp("before") / "data"
    custom(text / "one", out, "--merges", 60)
    return out


def require_same(run, data):
    Preparation.kept_by(run).require_same(Preparation.at(data), run)


@pytest.mark.parametrize(
    "rules",
    [
        "--merges 60 --split-dashes --lowercase --vocabulary-threshold 3 --separate-dictionaries",
        "--merges 150 --tokenizer none",
    ],
)
def test_text_becomes_what_the_first_model_reads(text, tmp_path, rules):
    """By a run's folder and by a data folder: the same bytes; each test line is what ``translate`` makes of it."""
    first, run, one, other = (tmp_path / name for name in ("first", "run", "by-data", "by-run"))
    custom(text / "one", first, *rules.split())
    Preparation.at(first).keep(run)
    for like, out in ((first, one), (run, other)):
        custom(text / "two", out, "--like", like)
    for path in one.rglob("*"):
        if path.is_file() and path.name not in (".stamp.json", "PREP.json"):
            assert path.read_bytes() == (other / path.relative_to(one)).read_bytes(), path
    require_same(run, one)

    dictionary = Dictionary.load(str(one / "dict.de.txt"))
    made = data_utils.load_indexed_dataset(str(one / "test.de-en.de"), dictionary)
    translator = Text(first)
    for number, line in enumerate(read(text / "two/test.de")):
        wanted = [word if word in dictionary else "<unk>" for word in translator.subwords(line).split()]
        assert dictionary.string(made[number]).split() == wanted
    prep = json.loads((one / "PREP.json").read_text())
    assert len(made) == prep["splits"]["test"]["pairs"]
    assert prep["splits"]["test"]["unknown_percent"]["de"] > 0, "or nothing new was in the text"


def changed(before, folder, rules, **entries):
    """A copy of the data of the first text with another PREP.json."""
    shutil.copytree(before, folder)
    prep = json.loads((folder / "PREP.json").read_text())
    (folder / "PREP.json").write_text(json.dumps(prep | entries | {"rules": prep["rules"] | rules}))
    return folder


@pytest.mark.parametrize("unicode", ["NFC", "as given"])
def test_data_of_a_corpus_whose_bytes_were_kept(text, before, tmp_path, unicode):
    """Published corpora are not brought to NFC; text like theirs has the form that text to translate gets."""
    first, new = changed(before, tmp_path / "first", {"nfc": False}, unicode=unicode), tmp_path / "new"
    Preparation.at(first).keep(tmp_path / "run")
    custom(text / "two", new, "--like", first, "--drop-test-overlap")
    require_same(tmp_path / "run", new)
    tokens = read(tmp_path / "new.work/1-tokens/test.de")[1]
    assert tokens == {"NFC": "étude", "as given": "e \u0301 tude"}[unicode]


def test_validation_text_that_is_given_has_plain_apostrophes_too(text, before, tmp_path):
    """As in WMT'14: the model's training text had them from Moses' normalisation."""
    raw = shutil.copytree(text / "two", tmp_path / "two")
    for split in ("valid", "train"):
        write(raw / f"{split}.de", ["Nr. 7 don’t", *read(raw / f"{split}.de")[1:]])
    like = changed(before, tmp_path / "first", {"plain_apostrophes": True})
    custom(raw, tmp_path / "new", "--like", like)
    assert read(tmp_path / "new.work/1-tokens/valid.de")[0] == "Nr. 7 don &apos; t"
    assert read(tmp_path / "new.work/1-tokens/train.de")[0] == "Nr. 7 don ’ t", "as the corpus's own training text"


@mistakes("""
    --lowercase | --lowercase --like
    --source-lang fr | 'is de-en' fr-en
    --like {tmp}/nothing | {tmp}/nothing/PREP.json
    --like {tmp}/differ | '{tmp}/differ: the dictionaries'
    --like {tmp}/page | {tmp}/page/dict.de.txt:1:
    --like {tmp}/twice | {tmp}/twice/dict.de.txt:3:
    --like {tmp}/lacks | {tmp}/lacks/dict.en.txt
    --like {tmp}/torn | {tmp}/torn/code 'line 2'
    --like {tmp}/pieces | {tmp}/pieces/sentencepiece.bpe.model
    --like {tmp}/other | '{tmp}/other/PREP.json: source_lang' None
    --out {before} | '--like {before}: is the folder' --out
""")
def test_an_earlier_preparation_that_cannot_be_used_is_named(before, tmp_path, words, named, capsys):
    for name in ("differ", "lacks", "page", "torn", "twice"):
        shutil.copytree(before, tmp_path / name)
    write(changed(before, tmp_path / "pieces", {}, bpe="sentencepiece") / "sentencepiece.bpe.model", ["torn"])
    for language in ("de", "en"):
        (tmp_path / f"page/dict.{language}.txt").write_text("<html>\n")
        (tmp_path / f"twice/dict.{language}.txt").write_text("a 2\nb 1\na 1\n")
    (tmp_path / "differ/dict.en.txt").write_text("other 1\n")
    (tmp_path / "lacks/dict.en.txt").unlink()
    (tmp_path / "torn/code").write_text("#version: 0.2\na")
    write(tmp_path / "other/PREP.json", ['{"task": "CoLA"}'])  # as of data for other tasks
    words = [*CUSTOM, "--out", tmp_path / "out", "--like", before, *words]
    check_refusal(capsys, prepare.main, words, named, writes_to=tmp_path, tmp=tmp_path, before=before)


def test_a_changed_earlier_preparation_makes_other_data(text, before, tmp_path):
    first = shutil.copytree(before, tmp_path / "first")

    def key():
        files = ("--train", text / "two/train", "--valid", text / "two/valid")
        corpus = corpus_of(*files, "--out", tmp_path / "new", "--like", first)
        return Pipeline(corpus, text, tmp_path / "new").chain[-1].key

    earlier = key()
    assert key() == earlier
    with (first / "code").open("a") as file:
        file.write("w o\n")
    assert key() != earlier


def test_training_goes_on_with_the_same_subwords_only(text, before, tmp_path):
    """``train.sh --finetune-from-model`` of a run whose dictionary is another: its vectors would mean other words."""
    other, run = tmp_path / "other", tmp_path / "run"
    custom(text / "two", other, "--merges", 60)
    Preparation.at(before).keep(run)
    first = save_model(before, run / "average10.pt", "transformer")
    flags, model = {"finetune-from-model": [str(first)]}, model_args("transformer", *TINY)
    check_first_model(flags, before, model)
    with pytest.raises(UserError, match=f"custom.sh --like {run} prepares text for this model"):
        check_first_model(flags, other, model)
    check_first_model({}, other, model)
