"""Maps of words, and attention rollout, by loops over pixels; words in both kinds of subwords."""

import numpy as np
import pytest

from ea_tools.maps.words import merged, rollout, starts, words_of


def words(bpe, symbols, unknown=()):
    return words_of(symbols, [symbol not in unknown for symbol in symbols], starts(symbols, bpe), bpe)


def test_words_of_marked_subwords():
    found = words("subword_nmt", "ein Donau@@ dampf@@ schiff . </s>".split())
    assert found.numbers.tolist() == [0, 1, 1, 1, 2, 3]
    assert found.labels == ["ein", "Donaudampfschiff", ".", "</s>"]
    read = found.read("</s>")
    assert read.numbers.tolist() == [0, 1, 2, 2, 2, 3]
    assert read.labels == ["</s>", "ein", "Donaudampfschiff", "."]


def test_words_of_pieces():
    found = words("sentencepiece", "▁ein ▁Donau dampf ▁ .".split(), unknown=["dampf"])
    assert found.numbers.tolist() == [0, 1, 1, 2, 2]
    assert found.labels == ["ein", "⟨Donaudampf⟩", "."]
    assert words("sentencepiece", ["▁"]).labels == ["▁"]
    assert words("sentencepiece", []).labels == []


def test_merging_by_loops():
    rng = np.random.default_rng(0)
    maps = rng.random((2, 5, 4))
    maps[:, 0, 2:] = np.nan  # a row that sees less
    maps[:, :, 3] = np.nan  # a column that no row sees
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
