"""Leaks between splits, repeated pairs and unknown subwords are counted, warned about, and leaks dropped on request."""

from helpers.data_toy import prepared, read, recipe, write

from ea_data import report

SOURCES = [f"der {noun} ist {look}." for noun in ("Hund", "Baum", "Tisch", "Berg") for look in ("alt", "neu", "rot")]
TARGETS = [f"the {noun} is {look}." for noun in ("dog", "tree", "table", "hill") for look in ("old", "new", "red")]
VALID = (["der Hund ist.", "der Tisch ist Berg."], ["the dog is.", "the table is hill."])


def checked(folder, train, test, **rules):
    """Prepare these pairs of lists in this process; returns (PREP.json, the training pairs in words, the warnings)."""
    for split, sides in (("train", train), ("valid", VALID), ("test", test)):
        for language, lines in zip(("de", "en"), sides, strict=True):
            write(folder / "raw" / f"{split}.{language}", lines)
    corpus = recipe(**{"filter_on": "subwords", "merges": 40} | rules)
    prep = prepared(corpus, folder / "raw", folder / "out")
    sides = [read(folder / f"out.work/2-subwords/train.{language}") for language in ("de", "en")]
    words = [[line.replace("@@ ", "").replace(" .", ".") for line in side] for side in sides]
    return prep, list(zip(*words, strict=True)), report.warnings(prep)


def test_leaks_repetitions_and_empty_lines_are_counted_and_warned_of(tmp_path):
    """A test with one whole pair, one more source and two more targets of the training text, and one empty line."""
    test = (
        [SOURCES[0], SOURCES[1], "der See ist neu.", "die Tür ist neu.", ""],
        [TARGETS[0], "a dog that is new.", TARGETS[3], TARGETS[4], ""],
    )
    train = ([*SOURCES, SOURCES[5], SOURCES[5], ""], [*TARGETS, TARGETS[5], TARGETS[5], ""])
    prep, pairs, warnings = checked(tmp_path, train, test)
    assert len(pairs) == 14, "nothing is dropped unasked but the empty pair"
    assert prep["overlap_with_training"] == {
        "valid": {"source": 0, "target": 0, "both": 0},
        "test": {"source": 2, "target": 3, "both": 1},
    }
    assert prep["duplicate_training_pairs"] == 2
    (leak,) = [text for text in warnings if "--drop-test-overlap" in text]
    assert leak.startswith("warning: test: 20.0% of its pairs")
    (repeated,) = [text for text in warnings if "warning: train:" in text]
    assert " 2 pairs (14.3%" in repeated
    assert prep["splits"]["test"]["empty"] == {"de": 1, "en": 1}
    assert [text.split(":")[1] for text in warnings if "empty" in text] == [" test"] * 2
    (of_references,) = [text for text in warnings if "BLEU" in text]
    assert "1 of its 5 en sentences" in of_references
    assert '"duplicate_training_pairs": 2' in report.table(prep)


def test_clean_data_has_no_warning_and_unknown_subwords_have_one(tmp_path):
    english = ["the dog is old red."]
    assert checked(tmp_path / "clean", (SOURCES, TARGETS), (["der Hund ist rot alt."], english))[2] == []
    prep, _, (warning,) = checked(tmp_path, (SOURCES, TARGETS), (["Собака старая."], english))
    assert prep["splits"]["test"]["unknown_percent"]["de"] > 50
    assert warning.startswith("warning: test: ") and " de " in warning and "1%" in warning


def test_overlap_is_dropped_from_the_training_text(tmp_path):
    """Whichever side is shared, with a test or with validation; the tests stay whole."""
    test = ([SOURCES[0], "der See ist neu."], ["a dog that is new.", TARGETS[3]])
    train = ([*SOURCES, VALID[0][0]], [*TARGETS, "that dog is."])
    prep, pairs, warnings = checked(tmp_path, train, test, drop_test_overlap=True, merges=5)
    assert pairs == [pair for at, pair in enumerate(zip(SOURCES, TARGETS, strict=True)) if at not in (0, 3)]
    assert prep["dropped"] == {"in a held-out split": 3}
    assert not any(number for shared in prep["overlap_with_training"].values() for number in shared.values())
    assert prep["splits"]["test"]["pairs"] == 2
    assert not any("--drop-test-overlap" in text for text in warnings)
