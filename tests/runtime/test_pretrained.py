"""The model in the box is whole, small, and translates."""

from helpers import REPO

from ea_runtime import Translator

FOLDER = REPO / "pretrained" / "multi30k-de-en"


def test_it_translates_captions():
    captions = ["Zwei junge Männer sind im Freien.", "", "Ein Hund rennt über die Wiese."]
    translations = Translator(FOLDER, threads=1).translate(captions)
    assert translations == ["two young men are outside.", "", "a dog runs through the grass."]


def test_it_is_small():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 6e6
