"""The model in the box is whole, small, and translates; the runtime's options, tried with it."""

import pytest
from helpers import REPO

from ea_runtime import Translator

FOLDER = REPO / "pretrained" / "multi30k-de-en"


def test_it_translates_captions():
    captions = ["Zwei junge Männer sind im Freien.", "", "Ein Hund rennt über die Wiese."]
    translations = Translator(FOLDER, threads=1).translate(captions)
    assert translations == ["two young men are outside.", "", "a dog runs through the grass."]


def test_it_is_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6e6


def test_long_sentences_are_searched_in_smaller_batches(monkeypatch):
    """So that the maps of a batch, N x S x S, have at most 2^20 entries."""
    batches = []
    monkeypatch.setattr(Translator, "search_ids", lambda self, sources, *_: batches.append(len(sources)) or sources)
    Translator(FOLDER, threads=1).search_all([[5] * n for n in [9] * 40 + [300] * 12 + [1000, 1024]], None, 32)
    assert batches == [1, 1, 11, 11, 30]


def test_no_threads_are_refused():
    with pytest.raises(ValueError, match="threads"):
        Translator(FOLDER, threads=0)
