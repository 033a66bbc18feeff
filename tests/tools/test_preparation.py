"""A run keeps what its model needs of the data's preparation, and is used with no other."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ea_artifacts.checkpoints import load, of_model
from ea_artifacts.command import UserError
from ea_artifacts.preparation import Preparation
from ea_tools.training import run_folder

CHECKPOINT = "checkpoint3.pt"
RULES = {"split_dashes": False, "max_ratio": 1.5}


@pytest.fixture
def kept(data, run, tmp_path):
    """A run of one checkpoint that keeps its preparation; in its checkpoint, a path to data that are not there."""
    folder = tmp_path / "runs" / "kept"
    folder.mkdir(parents=True)
    state = load(run / CHECKPOINT)
    state["cfg"]["task"].update(data=str(tmp_path / "gone"), source_lang="de", target_lang="en")
    torch.save(state, folder / CHECKPOINT)
    Preparation.at(changed(data, tmp_path / "kept", "PREP.json", other_prep(rules=RULES))).keep(folder)
    return folder


def of(folder, data=None):
    data = data and Preparation.at(data)
    return of_model(folder / CHECKPOINT, load(folder / CHECKPOINT), folder, data)


def changed(data, tmp_path, name, change):
    """A copy of the data in which one file is another."""
    copy = Path(shutil.copytree(data, tmp_path / "changed", dirs_exist_ok=True))
    (copy / name).write_text(change((data / name).read_text()))
    return copy


def test_a_run_works_without_its_data(kept, data, tmp_path):
    found = of(kept)
    assert found.folder == kept / "prepared"
    assert found.rules == RULES
    for name in ("dict.de.txt", "dict.en.txt", "code"):
        assert (found.folder / name).read_bytes() == (data / name).read_bytes()
    assert of_model(kept / CHECKPOINT, load(kept / CHECKPOINT)).folder == found.folder
    # Rules that only choose sentences may differ.
    other = changed(data, tmp_path, "PREP.json", other_prep(name="another test set", rules={"max_ratio": 2.0}))
    assert of(kept, data).folder == of(kept, other).folder == found.folder


def test_every_file_that_splits_words_is_kept(data, tmp_path):
    """Also the list of allowed subwords, and the model of sentencepiece, where the data have them."""
    copy, run = Path(shutil.copytree(data, tmp_path / "data")), tmp_path / "run"
    more = ("vocabulary.de", "vocabulary.en", "sentencepiece.bpe.model")
    for name in more:
        (copy / name).write_text(f"of {name}\n")
    Preparation.at(copy).keep(run)
    names = {path.name for path in (run / "prepared").iterdir()}
    assert names == {"dict.de.txt", "dict.en.txt", "code", "PREP.json", "DIGEST", *more}
    for name in more:
        other = Path(shutil.copytree(copy, tmp_path / f"other {name}"))
        (other / name).write_text("others\n")
        with pytest.raises(UserError, match=f"{name}(, line 1|): "):
            Preparation.kept_by(run).require_same(Preparation.at(other), run)


def swap_words(text):
    """The same number of entries, two of them exchanged."""
    lines = text.splitlines(keepends=True)
    return "".join([lines[1], lines[0], *lines[2:]])


def other_prep(**settings):
    return lambda text: json.dumps({**json.loads(text), **settings})


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("dict.en.txt", swap_words, r"dict\.en\.txt, line 1: .* in the run's"),
        ("PREP.json", other_prep(lowercase=False), r"lowercase: the run's is True, that of .* is False"),
        ("PREP.json", other_prep(rules={"split_dashes": True}), "split_dashes: the run's is False, .* is True"),
        ("PREP.json", other_prep(source_lang="en", target_lang="de"), "source_lang: the run's is de, that of .* is en"),
    ],
)
def test_other_preparations_are_refused_with_the_difference(kept, data, tmp_path, name, change, message):
    other = changed(data, tmp_path, name, change)
    with pytest.raises(UserError, match=r"is not what .* was trained on") as refusal:
        of(kept, other)
    assert refusal.match(message)


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_a_checkpoint_of_other_words_than_the_run_keeps_is_refused(kept, side):
    """One that was put into the run's folder from elsewhere."""
    state = load(kept / CHECKPOINT)
    state["model"][f"{side}.embed_tokens.weight"] = state["model"][f"{side}.embed_tokens.weight"][:-1]
    torch.save(state, kept / CHECKPOINT)
    with pytest.raises(UserError, match=rf"was not trained on .*prepared: its {side} knows \d+ tokens"):
        of(kept)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [("code", swap_words, "code"), ("PREP.json", other_prep(source_lang="en", target_lang="de"), "source_lang")],
)
def test_a_checkpoint_of_a_run_that_was_prepared_otherwise_is_refused(kept, data, tmp_path, name, change, said):
    """Its dictionaries may be of the same size, as those of a corpus's two directions are."""
    other = tmp_path / "runs" / "other"
    other.mkdir()
    shutil.copyfile(kept / CHECKPOINT, other / CHECKPOINT)
    state = load(kept / CHECKPOINT)
    Preparation.at(changed(data, tmp_path, "PREP.json", other_prep(rules=RULES))).keep(other)
    assert of_model(other / CHECKPOINT, state, kept).folder == kept / "prepared"
    Preparation.at(changed(data, tmp_path / "else", name, change)).keep(other)
    with pytest.raises(UserError, match=rf"other/prepared is not what .*kept was trained on(.|\n)*{said}"):
        of_model(other / CHECKPOINT, state, kept)


@pytest.mark.parametrize(("source", "target"), [("en", "de"), ("de", "fr")])
def test_a_checkpoint_of_other_languages_is_refused(kept, tmp_path, source, target):
    """Also one that lies alone, without what its run kept."""
    state = load(kept / CHECKPOINT)
    state["cfg"]["task"].update(source_lang=source, target_lang=target)
    with pytest.raises(UserError, match=rf"c\.pt translates {source}-{target}, and .*prepared is de-en"):
        of_model(tmp_path / "c.pt", state, kept)


@pytest.mark.parametrize(
    ("name", "content"),
    [("code", "#version: 0.2\na b\n"), ("PREP.json", None)],
    ids=["changed", "missing"],
)
def test_what_is_kept_must_not_change(kept, name, content):
    path = kept / "prepared" / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UserError, match="prepared: has been changed since the run began"):
        of(kept)


def test_a_run_of_plain_fairseq_train_is_compared_by_its_languages(kept, data, tmp_path):
    shutil.rmtree(kept / "prepared")
    with pytest.raises(UserError, match=r"translates de-en, and .* is en-de"):
        of(kept, changed(data, tmp_path, "PREP.json", other_prep(source_lang="en", target_lang="de")))
    assert of(kept, data).folder == data
    assert not (kept / "prepared").exists(), "nothing says that these data are the run's"


def test_training_keeps_the_preparation_and_compares_it_on_a_resume(data, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    run_folder.claim(folder, {"data": "x"}, "", changed(data, tmp_path, "code", swap_words))
    run_folder.claim(folder, {"data": "y"}, "", data)  # nothing was trained yet: the new data are the run's
    assert (folder / "prepared" / "code").read_bytes() == (data / "code").read_bytes()
    (folder / CHECKPOINT).touch()
    run_folder.claim(folder, {"data": "y"}, "", data)
    other = changed(data, tmp_path, "PREP.json", other_prep(lowercase=False))
    for digest in "yz":
        with pytest.raises(UserError, match=r"lowercase: the run's is True"):
            run_folder.claim(folder, {"data": digest}, "", other)
