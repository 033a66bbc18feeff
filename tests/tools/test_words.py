"""Maps of words, and attention rollout: both by loops over pixels; words in every kind of subwords."""

import json

import numpy as np
import pytest

from ea_tools.maps.words import merged, rollout, words_of
from ea_tools.text import Gpt2, Marked, Pieces


def words(kind, symbols, unknown=()):
    return words_of(symbols, [symbol not in unknown for symbol in symbols], kind.starts(symbols), kind.join)


def test_words_of_marked_subwords():
    found = words(Marked(str), "ein Donau@@ dampf@@ schiff . </s>".split())
    assert found.numbers.tolist() == [0, 1, 1, 1, 2, 3]
    assert found.labels == ["ein", "Donaudampfschiff", ".", "</s>"]
    read = found.read("</s>")
    assert read.numbers.tolist() == [0, 1, 2, 2, 2, 3]
    assert read.labels == ["</s>", "ein", "Donaudampfschiff", "."]


def test_words_of_pieces():
    found = words(Pieces(str), "▁ein ▁Donau dampf ▁ .".split(), unknown=["dampf"])
    assert found.numbers.tolist() == [0, 1, 1, 2, 2]
    assert found.labels == ["ein", "⟨Donaudampf⟩", "."]
    assert words(Pieces(str), ["▁"]).labels == ["▁"]
    assert words(Pieces(str), []).labels == []


def test_words_of_gpt2s_subwords(tmp_path):
    """Its dictionary holds numbers; a letter of several bytes may be in several of them."""
    from fairseq.data.encoders.gpt2_bpe_utils import bytes_to_unicode

    symbols = {character: number for number, character in enumerate(bytes_to_unicode().values())}
    symbols |= {"Ġt": 256, "Ġtr": 257}
    (tmp_path / "encoder.json").write_text(json.dumps(symbols))
    (tmp_path / "vocab.bpe").write_text("#version: 0.2\nĠ t\nĠt r\n")
    kind = Gpt2(tmp_path)
    split = kind.split("ü try").split()
    assert len(split) == 4  # two bytes, " tr", "y"
    assert [kind.label(symbol) for symbol in split] == ["\ufffd", "\ufffd", "▁tr", "y"]
    found = words(kind, split)
    assert found.numbers.tolist() == [0, 0, 1, 1]
    assert found.labels == ["ü", "try"]
    assert kind.label("madeupword0000") == "madeupword0000"


def test_merging_by_loops():
    rng = np.random.default_rng(0)
    maps = rng.random((2, 5, 4))
    maps[:, 0, 2:] = np.nan  # a row that sees less
    maps[:, :, 3] = np.nan  # a column that nobody sees
    rows, columns = np.array([0, 0, 1, 2, 2]), np.array([0, 1, 1, 2])
    found = merged(maps, rows, columns)
    assert found.shape == (2, 3, 3)
    for head, row, column in np.ndindex(found.shape):
        of_rows = [
            sum(maps[head, r, c] for c in range(4) if columns[c] == column and not np.isnan(maps[head, r, c]))
            for r in range(5)
            if rows[r] == row
        ]
        if column == 2:
            assert np.isnan(found[head, row, column])
        else:
            assert found[head, row, column] == pytest.approx(sum(of_rows) / len(of_rows))


def test_rollout_by_loops():
    """The share of token j in place i after two layers: over every way from one to the other."""
    rng = np.random.default_rng(2)
    layers = [rng.dirichlet(np.ones(4), size=(2, 4)) for _ in range(2)]
    found = rollout(layers)
    steps = [[[0.5 * maps[:, i, j].mean() + 0.5 * (i == j) for j in range(4)] for i in range(4)] for maps in layers]
    np.testing.assert_allclose(found[0], steps[0])
    for i, j in np.ndindex(4, 4):
        assert found[1][i, j] == pytest.approx(sum(steps[1][i][k] * steps[0][k][j] for k in range(4)))
    np.testing.assert_allclose(found[1].sum(axis=1), 1)
