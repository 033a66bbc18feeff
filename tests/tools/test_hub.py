"""ea_fairseq.load: a run from Python translates raw text as scripts/translate.sh does."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from helpers import REPO, warm
from helpers.data_toy import sentences as awkward
from helpers.toy import script

import ea_fairseq
from ea_fairseq.text import Text
from ea_tools import preparation
from ea_tools.text import Source

CHECKPOINT = "checkpoint3.pt"
ODD = 'Der Arbeits\u00admarkt ist\u200b „gut“, 1\u00a0000 ,"x'
SENTENCES = ["Hund, Katze, Haus.", "", "Haus.", "  ", "GARTEN, Vogel.", "Haus."]


@pytest.fixture(scope="module")
def kept(data, run, tmp_path_factory):
    """A run that keeps its preparation."""
    folder = tmp_path_factory.mktemp("hub") / "kept"
    folder.mkdir()
    shutil.copyfile(run / CHECKPOINT, folder / "checkpoint_last.pt")
    preparation.keep(folder, data)
    return folder


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"lowercase": False, "rules": {"split_dashes": True, "plain_apostrophes": True}},
        {"source_lang": "en", "rules": {"normalise": True}},
        {"source_lang": "de_AT", "rules": {"normalise": True}},
        {"source_lang": "eng", "rules": {"normalise": True}, "languages": {"eng": "en"}},
        {"source_lang": "eng", "rules": {"normalise": True}},
        {"tokenizer": "given", "escape": False},
    ],
)
def test_text_becomes_what_the_tools_make_of_it(data, tmp_path, rules):
    prep = {**json.loads((data / "PREP.json").read_text()), **rules}
    for name in ("code", "dict.de.txt", "dict.en.txt"):
        shutil.copyfile(data / name, tmp_path / name)
    (tmp_path / "PREP.json").write_text(json.dumps(prep))
    ours, tools = Text(tmp_path), Source(tmp_path, prep)
    for line in [*awkward(150), "He lives in the U.S.", "don’t", "foo-bar", "ÄÖÜ", "", 'a & "b"', ODD]:
        assert ours.subwords(line) == tools(line), line


def test_codes_without_a_merge_split_words_into_characters(data, tmp_path):
    shutil.copyfile(data / "PREP.json", tmp_path / "PREP.json")
    (tmp_path / "code").write_text("#version: 0.2\n")
    for source in (Text(tmp_path).subwords, Source(tmp_path, json.loads((data / "PREP.json").read_text()))):
        assert source("Ab c") == "a@@ b c"


def test_decomposed_text_is_composed(data):
    assert Text(data).subwords("Gru\u0308n") == Text(data).subwords("Grün")


def test_order_and_empty_lines_are_kept_in_batches(kept):
    translator = ea_fairseq.load(kept)
    together = translator.translate(SENTENCES, beam=2, max_len_b=20)
    assert [bool(line) for line in together] == [bool(line.strip()) for line in SENTENCES]
    assert together == [translator.translate(line, beam=2, max_len_b=20) for line in SENTENCES]
    assert together[2] == together[5]
    assert translator.translate("HUND.", max_len_b=20) == translator.translate("hund.", max_len_b=20)
    assert translator.translate([]) == []


def test_a_long_sentence_is_cut_with_a_warning(kept, caplog):
    ea_fairseq.load(kept).translate(["Hund.", "Hund. " * 1100], beam=1, max_len_b=5)
    assert "Sentence 2 has" in caplog.text


def test_an_average_from_before_the_training_went_on_is_noted(kept, tmp_path, caplog):
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    average = Path(shutil.copy(run / "checkpoint_last.pt", run / "average1.pt"))
    for path, when in ((average, 1000), (run / "checkpoint_last.pt", 1010)):
        os.utime(path, (when, when))
    ea_fairseq.load(run)
    assert "went on" not in caplog.text, "times of a copied folder may lie so"
    os.utime(run / "checkpoint_last.pt", (2000, 2000))
    ea_fairseq.load(run)
    assert f"{average} was made before the training went on" in caplog.text


def test_of_several_checkpoints_the_best_one_is_loaded(kept, tmp_path):
    """The newest average, else the best, else the last: all others are torn here, and would not load."""
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    whole = (run / "checkpoint_last.pt").rename(tmp_path / "whole.pt")
    names = ["checkpoint_last.pt", "checkpoint_best.pt", "average9.pt", "average1.pt"]
    for when, name in enumerate(names, 1):
        for path in run.glob("*.pt"):
            path.write_bytes(b"torn")
            os.utime(path, (when, when))
        shutil.copyfile(whole, run / name)
        os.utime(run / name, (1000, 1000))
        ea_fairseq.load(run)


def test_several_checkpoints_are_an_ensemble(kept):
    translator = ea_fairseq.load(kept, "checkpoint_last.pt:checkpoint_last.pt")
    assert len(translator.hub.models) == 2
    assert translator.translate("Hund.", max_len_b=20) == ea_fairseq.load(kept).translate("Hund.", max_len_b=20)


def test_a_preparation_that_is_not_complete_is_not_read(data, kept, tmp_path):
    """Its digest is the last file to be written."""
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    (run / "prepared" / "DIGEST").unlink()
    (run / "prepared" / "dict.de.txt").unlink()
    assert ea_fairseq.load(run).hub.cfg.task.data == str(data)


def test_settings_of_the_search_are_used(kept):
    translator = ea_fairseq.load(kept)
    short, long = (len(translator.translate("Hund, Katze.", lenpen=penalty, max_len_b=30)) for penalty in (-5, 5))
    assert short < long
    assert len(translator.translate("Hund, Katze.", lenpen=5, max_len_a=0, max_len_b=1)) < long


def test_what_is_missing_is_named(data, run, tmp_path):
    with pytest.raises(FileNotFoundError, match="has no checkpoint"):
        ea_fairseq.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"average7\.pt: no such file"):
        ea_fairseq.load(run, "average7.pt")
    with pytest.raises(FileNotFoundError, match=r"PREP\.json: no such file"):
        ea_fairseq.load(run, CHECKPOINT, data=tmp_path)
    assert ea_fairseq.load(run, CHECKPOINT).text.prep["name"] == data.name  # from the folder that the checkpoint names


@pytest.mark.slow
def test_it_translates_as_the_script_does(kept):
    text = "".join(f"{line}\n" for line in SENTENCES)
    result = script("translate.sh", "--run", kept, "--beam", 2, "--", "--max-len-b", 20, input=text)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:-1] == ea_fairseq.load(kept).translate(SENTENCES, beam=2, max_len_b=20)


@pytest.mark.slow
def test_the_extension_knows_none_of_the_tools():
    code = "import ea_fairseq, sys; print(sorted({'ea_tools', 'prep'} & {name.split('.')[0] for name in sys.modules}))"
    result = warm.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"
