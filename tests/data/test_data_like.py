"""custom.sh --like: other text by the rules, subwords and dictionary of a run, or of data prepared before."""

import json
import shutil

import pytest
from fairseq.data import Dictionary, data_utils
from helpers.data_toy import Pipeline, parallel, read, script, write
from helpers.models import model_args
from helpers.toy import TINY, save_model

from ea_artifacts.command import UserError
from ea_artifacts.preparation import Preparation
from ea_data import prepare
from ea_runtime.text import Text
from ea_tools.training.train import check_first_model

LANGUAGES = ("--source-lang", "de", "--target-lang", "en")


def custom(folder, out, *options, check=True):
    files = ("--train", folder / "train", "--valid", folder / "valid", "--test", folder / "test")
    return script("custom", *LANGUAGES, *files, "--workers", "1", "--out", out, *options, check=check)


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


RULES = ("--split-dashes --lowercase --vocabulary-threshold 3 --separate-dictionaries", "--tokenizer none")


@pytest.fixture(scope="module", params=RULES)
def first(text, tmp_path_factory, request):
    out = tmp_path_factory.mktemp("first") / "data"
    merges = ["--merges", 60 if "none" not in request.param else 150]
    custom(text / "one", out, *merges, *request.param.split())
    return out


@pytest.fixture(scope="module")
def before(text, tmp_path_factory):
    """Data of the first text by the usual rules; no test writes to it."""
    out = tmp_path_factory.mktemp("before") / "data"
    custom(text / "one", out, "--merges", 60)
    return out


def require_same(run, data):
    Preparation.kept_by(run).require_same(Preparation.at(data), run)


def numbers(folder, split, lang):
    """The sentences of binary data as subwords."""
    dictionary = Dictionary.load(str(folder / f"dict.{lang}.txt"))
    dataset = data_utils.load_indexed_dataset(str(folder / f"{split}.de-en.{lang}"), dictionary)
    return [dictionary.string(dataset[number]).split() for number in range(len(dataset))], dictionary


def test_text_becomes_what_the_first_model_reads(first, text, tmp_path):
    """By a run's folder and by a data folder: the same bytes; each test line is what ``translate`` makes of it."""
    Preparation.at(first).keep(tmp_path / "run")
    for like, out in ((first, "by-data"), (tmp_path / "run", "by-run")):
        custom(text / "two", tmp_path / out, "--like", like)
    one, other = tmp_path / "by-data", tmp_path / "by-run"
    for path in one.rglob("*"):
        if path.is_file() and path.name not in (".stamp.json", "PREP.json"):
            assert path.read_bytes() == (other / path.relative_to(one)).read_bytes(), path
    require_same(tmp_path / "run", one)

    made, dictionary = numbers(one, "test", "de")
    translator = Text(first)
    for line, found in zip(read(text / "two/test.de"), made, strict=True):
        wanted = translator.subwords(line).split()
        assert found == [word if word in dictionary else "<unk>" for word in wanted]
    assert any("<unk>" in found for found in made)  # or nothing new was in the text
    prep = json.loads((one / "PREP.json").read_text())
    assert prep["splits"]["test"]["unknown_percent"]["de"] > 0


@pytest.mark.parametrize("unicode", ["NFC", "as given"])
def test_data_of_a_corpus_whose_bytes_were_kept(text, before, tmp_path, unicode):
    """Published corpora are not brought to NFC; text like theirs has the form that text to translate gets."""
    first, new = shutil.copytree(before, tmp_path / "first"), tmp_path / "new"
    prep = json.loads((first / "PREP.json").read_text())
    prep["rules"]["nfc"], prep["unicode"] = False, unicode
    (first / "PREP.json").write_text(json.dumps(prep))
    Preparation.at(first).keep(tmp_path / "run")
    custom(text / "two", new, "--like", first, "--drop-test-overlap")
    require_same(tmp_path / "run", new)
    (tokens,) = read(tmp_path / "new.work/1-tokens/test.de")[1:2]
    assert tokens == {"NFC": "étude", "as given": "e \u0301 tude"}[unicode]


def test_validation_text_that_is_given_has_plain_apostrophes_too(text, before, tmp_path):
    """As in WMT'14: the model's training text had them from Moses' normalisation."""
    first, new = shutil.copytree(before, tmp_path / "first"), tmp_path / "new"
    prep = json.loads((first / "PREP.json").read_text())
    prep["rules"]["plain_apostrophes"] = True
    (first / "PREP.json").write_text(json.dumps(prep))
    shutil.copytree(text / "two", tmp_path / "two")
    for split in ("valid", "train"):
        path = tmp_path / f"two/{split}.de"
        write(path, ["Nr. 7 don’t", *read(path)[1:]])
    custom(tmp_path / "two", new, "--like", first)
    assert read(tmp_path / "new.work/1-tokens/valid.de")[0] == "Nr. 7 don &apos; t"
    assert read(tmp_path / "new.work/1-tokens/train.de")[0] == "Nr. 7 don ’ t", "as the corpus's own training text"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lowercase"], "--lowercase conflicts with --like"),
        (["--source-lang", "fr"], "is de-en, and the text is to be fr-en"),
        (["--like", "{tmp}/nothing"], "{tmp}/nothing/PREP.json: no such file"),
        (["--like", "{tmp}/differ"], "{tmp}/differ: the dictionaries of its two languages differ"),
        (["--like", "{tmp}/lacks"], "{tmp}/lacks/dict.en.txt: no such file"),
        (["--like", "{tmp}/other"], "{tmp}/other/PREP.json: source_lang: expected a language, found None"),
        (["--out", "{before}"], "is the folder that the new data would replace"),
    ],
)
def test_an_earlier_preparation_that_cannot_be_used_is_named(text, before, tmp_path, options, message):
    for name in ("differ", "lacks"):
        shutil.copytree(before, tmp_path / name)
    (tmp_path / "differ/dict.en.txt").write_text("other 1\n")
    (tmp_path / "lacks/dict.en.txt").unlink()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/PREP.json").write_text('{"task": "CoLA"}')  # as of data for other tasks
    names = {"tmp": tmp_path, "before": before}
    bytes_before = {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}
    options = [option.format(**names) for option in options]
    done = custom(text / "two", tmp_path / "out", "--like", before, *options, check=False)
    assert done.returncode != 0
    assert message.format(**names) in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert bytes_before == {path: path.read_bytes() for path in before.rglob("*") if path.is_file()}


def test_a_changed_earlier_preparation_makes_other_data(text, before, tmp_path):
    first = shutil.copytree(before, tmp_path / "first")

    def key():
        files = ["--train", text / "two/train", "--valid", text / "two/valid", "--out", tmp_path / "new"]
        _, corpus = prepare.parse(["custom", *LANGUAGES, *map(str, files), "--like", str(first)])
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
