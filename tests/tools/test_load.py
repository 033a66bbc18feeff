"""ea_fairseq.load: a run from Python translates raw text as scripts/translate.sh does."""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import REPO

import ea_fairseq
from ea_artifacts.checkpoints import load
from ea_artifacts.preparation import Preparation
from ea_artifacts.run import Run
from ea_runtime.text import Text

CHECKPOINT = "checkpoint3.pt"


@pytest.fixture(scope="module")
def kept(data, run, tmp_path_factory):
    """A run that keeps its preparation, and whose record names its model; the other checkpoint would not load."""
    folder = tmp_path_factory.mktemp("hub") / "kept"
    folder.mkdir()
    shutil.copyfile(run / CHECKPOINT, folder / "checkpoint_last.pt")
    Run(folder).record_model("checkpoint_last.pt")
    (folder / "average9.pt").write_bytes(b"torn")
    Preparation.at(data).keep(folder)
    return folder


@pytest.fixture(scope="module")
def translator(kept):
    return ea_fairseq.load(kept)


@pytest.mark.slow
def test_it_prints_nothing_and_leaves_the_logs_alone(kept):
    """fairseq would set the root logger up for debugging; PyTorch warns of pinned memory without a GPU."""
    code = "import logging, sys, ea_fairseq; ea_fairseq.load(sys.argv[1]).translate('Haus.'); "
    code += "print(logging.root.handlers, logging.root.level)"
    command = [sys.executable, "-P", "-c", code, str(kept)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[] 30\n", "")


def test_text_of_either_language_is_split_by_its_own_list_of_subwords(data, tmp_path):
    for name in ("PREP.json", "code"):
        shutil.copyfile(data / name, tmp_path / name)
    whole = Text(data).subwords("dog")
    (tmp_path / "vocabulary.en").write_text("d@@\no@@\ng\n")
    assert Text(tmp_path).subwords("dog") == whole != "d@@ o@@ g"
    assert Text(tmp_path, "en").subwords("dog") == "d@@ o@@ g"


def test_a_long_sentence_is_cut_with_a_warning_to_the_longest_that_fairseq_reads(kept, caplog):
    caplog.set_level("INFO")
    translator = ea_fairseq.load(kept)
    assert f"the model of {kept} is checkpoint_last.pt" in caplog.text
    assert repr(translator) == f"FairseqTranslator({kept / 'checkpoint_last.pt'})"
    short, long = translator.sources(["Hund.", "Hund. " * 1100], first=1)
    longest = translator.hub.max_positions[0]
    assert (len(long), long[-1], long[:2]) == (longest, translator.hub.task.source_dictionary.eos(), short[:2])
    assert translator.cut(long[:-1]) == long
    (warning,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert warning.getMessage().startswith("line 2: ")
    assert translator.translate("Hund. " * 1100, beam=1, max_len_b=5)


def test_progress_comes_by_small_batches_on_a_cpu(translator):
    done = []
    translator.search_all([[5, 2]] * 40, translator.settings({"beam": 1, "max_len_b": 2}), done=done.append)
    assert done == [32, 8]


def test_a_letter_that_no_dictionary_has_is_the_unknown_word(translator):
    hund, unknown = translator.encode("Hund ☃", "line 1")
    assert (hund, unknown) == (translator.encode("Hund", "line 1")[0], translator.hub.task.source_dictionary.unk())


def test_several_checkpoints_are_an_ensemble(kept, translator):
    ensemble = ea_fairseq.load(kept, "checkpoint_last.pt:checkpoint_last.pt")
    assert len(ensemble.hub.models) == 2
    assert ensemble.translate("Hund.", max_len_b=20) == translator.translate("Hund.", max_len_b=20)


def test_a_preparation_that_is_not_complete_is_not_read(data, kept, tmp_path):
    """Its digest is the last file to be written."""
    run = Path(shutil.copytree(kept, tmp_path / "run"))
    (run / "prepared" / "DIGEST").unlink()
    (run / "prepared" / "dict.de.txt").unlink()
    assert ea_fairseq.load(run).hub.cfg.task.data == str(data)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"bean": 5}, "bean: .*beam"),
        ({"nonsense": 5}, "nonsense: .*beam, lenpen, "),
        ({"prefix_size": 1}, "prefix_size: has no effect"),
        ({"lenpen": math.nan}, "lenpen=nan: must be a finite number"),
        ({"beam": "5"}, "beam='5': must be a whole number, not str"),
        ({"min_len": 999}, "min_len cannot be larger than max_len"),
        ({"sampling_topk": 5}, "--sampling-topk requires --sampling"),
    ],
)
def test_settings_that_would_be_ignored_or_fail_are_named(translator, settings, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        translator.translate("Hund.", **settings)


def test_lines_of_a_file_and_other_iterables_are_sentences(translator):
    expected = translator.translate(["Hund.", "Haus."], beam=1, max_len_b=9)
    assert translator.translate((line for line in ("Hund.\n", "Haus.\r\n")), beam=1, max_len_b=9) == expected


def test_a_model_that_does_not_translate_is_refused(kept, tmp_path):
    state = load(kept / "checkpoint_last.pt")
    state["cfg"]["task"]["_name"] = "language_modeling"
    torch.save(state, tmp_path / "lm.pt")
    with pytest.raises(ValueError, match=r"lm\.pt: .*language_modeling"):
        ea_fairseq.load(tmp_path, "lm.pt")


def test_a_missing_file_is_named(data, run, tmp_path):
    for place, options, named in (
        ((tmp_path,), {}, str(tmp_path)),
        ((run, "average7.pt"), {}, r"average7\.pt: no such file"),
        ((run, CHECKPOINT), {"data": tmp_path}, r"PREP\.json: no such file"),
    ):
        with pytest.raises(FileNotFoundError, match=named):
            ea_fairseq.load(*place, **options)
    # the folder that the checkpoint names has the rest
    assert ea_fairseq.load(run, CHECKPOINT).text.preparation.name == data.name
