"""The model in the box is whole, small, and translates; the runtime's options, tried with it."""

import subprocess
import sys

import pytest
from helpers import REPO

import evolving_attention
from ea_runtime import Translator
from ea_runtime.search import Settings

FOLDER = REPO / "pretrained" / "multi30k-de-en"


def test_it_translates_captions():
    captions = ["Zwei junge Männer sind im Freien.", "", "Ein Hund rennt über die Wiese."]
    translations = Translator(FOLDER, threads=1).translate(captions)
    assert translations == ["two young men are outside.", "", "a dog runs through the grass."]


def test_it_is_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6e6


def test_long_sentences_and_wide_searches_have_smaller_batches(monkeypatch):
    """So that the maps of a batch, N x S x S, have at most 2^20 entries, and its caches at most 2,000 hypotheses."""
    batches = []
    monkeypatch.setattr(Translator, "search_ids", lambda self, sources, *_: batches.append(len(sources)) or sources)
    translator = Translator(FOLDER, threads=1)
    batches.clear()
    translator.search_all([[5] * n for n in [9] * 40 + [300] * 12 + [1000, 1024]], Settings(), 32)
    assert batches == [1, 1, 11, 11, 30]
    batches.clear()
    translator.search_all([[5, 2]] * 9, Settings(beam=500), 32)
    assert batches == [4, 4, 1]


@pytest.mark.parametrize("threads", [0, 257])
def test_numbers_of_threads_that_are_none_are_refused(threads):
    with pytest.raises(ValueError, match="threads"):
        Translator(FOLDER, threads=threads)


@pytest.mark.parametrize(("policy", "spins"), [(None, "0"), ("passive", "0"), ("active", "1")])
def test_threads_wait_without_spinning_unless_asked_to(policy, spins, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    translator = Translator(FOLDER, threads=2)
    for session in (translator._encoder, translator._decoder):
        assert session.get_session_options().get_session_config_entry("session.intra_op.allow_spinning") == spins


def test_the_version_is_the_projects():
    done = subprocess.run([sys.executable, "-m", "ea_runtime", "--version"], capture_output=True, text=True, cwd=REPO)
    assert done.stdout == f"ea_runtime {evolving_attention.__version__}\n"
