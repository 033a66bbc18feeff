"""scripts/map_statistics.sh: each number on maps whose answer is known, and a test set by loops over its pixels."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.mistakes import check_refusal, mistakes
from helpers.toy import save_model
from scipy.spatial.distance import jensenshannon
from scipy.stats import entropy

from ea_artifacts.command import UserError
from ea_artifacts.preparation import Preparation
from ea_tools.maps import statistics as map_statistics
from ea_tools.maps.alignments import hard_alignment, read_gold
from ea_tools.maps.measures import PARTS, estimate, resamples, shares
from ea_tools.maps.models import Loaded, Sentence, load_model
from ea_tools.maps.statistics import main, read_sample, tally

RUNS = ["toy-ea/checkpoint_best.pt", "toy-stock/checkpoint_best.pt"]

# ---- alignments


def test_subwords_are_summed_before_the_largest_is_taken():
    # Words: [ab] [c] | [x] [yz]. The largest single pixel of x is c, but ab has more in all; yz looks at c.
    weights = np.array([[0.3, 0.25, 0.45], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    assert hard_alignment(weights, np.array([0, 0, 1]), np.array([0, 1, 1])) == {(0, 0), (1, 1)}
    assert hard_alignment(weights[:, :0], np.array([]), np.array([0, 1, 1])) == set()


GOLD = [({(0, 0)}, {(0, 0), (1, 2), (3, 1)}), ({(2, 10)}, {(2, 10)})]


@pytest.mark.parametrize(
    ("content", "first", "expected"),
    [
        ("0-0 1?2 3p1\n2-10\n", None, GOLD),
        ("1-1 2?3 4p2\n3-11\n", 1, GOLD),  # RWTH's German-English alignments are written in this way
        ("0-0\n0-1 a-b\n", None, "gold:2: 'a-b'"),
        ("1-1 2-2\n1-2\n", None, "gold: .* --gold-from 1"),
        ("1-1\n0-1\n", 1, "gold:2: the link 0-1: .* from 1"),
    ],
)
def test_words_of_gold_count_from_0_or_from_1(tmp_path, content, first, expected):
    (tmp_path / "gold").write_text(content)
    if expected is GOLD:
        assert read_gold(tmp_path / "gold", first) == expected
    else:
        with pytest.raises(UserError, match=expected):
            read_gold(tmp_path / "gold", first)


def test_intervals_over_sentences():
    sums, counts = np.array([1.0] * 50 + [3.0] * 50), np.ones(100)
    found = estimate((sums, counts))
    assert found["mean"] == 2
    assert (found["high"] - found["low"]) / 2 == pytest.approx(1.96 * 1 / math.sqrt(100), rel=0.15)
    first = resamples(100)
    resamples.cache_clear()
    np.testing.assert_array_equal(resamples(100), first)  # the same in every process
    # Paired: a constant difference has no interval at all, although both have one.
    difference = estimate((sums + 0.5, counts), (sums, counts))
    assert difference == pytest.approx({"mean": 0.5, "low": 0.5, "high": 0.5})
    # Rows count, not sentences.
    assert estimate((np.array([10.0, 0]), np.array([10, 30])))["mean"] == 0.25


def naive(loaded, number, dataset, gold):
    """{(statistic, kind, layer): (sum, count)} of one sentence alone, row by row."""
    pair, out, before = dataset[number], {}, {}
    for maps in loaded.force(*(Sentence(pair[side], [], None) for side in ("source", "target"))):

        def add(name, value, maps=maps):
            total, count = out.get((name, maps.kind, maps.layer), (0, 0))
            out[name, maps.kind, maps.layer] = total + value, count + 1

        w, earlier = maps.weights[0].double().numpy(), before.get(maps.kind)
        for row in range(w.shape[1]):
            keys = np.flatnonzero(~maps.masked[0, 0, row].numpy())
            if len(keys) < 2:
                continue
            for head in range(len(w)):
                add("entropy", entropy(w[head, row, keys]))
                add("normalised", entropy(w[head, row, keys]) / math.log(len(keys)))
                if earlier is not None:
                    add("same_head", 1 - jensenshannon(w[head, row, keys], earlier[head, row, keys], base=2) ** 2)
                parts = maps.parts.items()
                spreads = {name: (part.share * part.map[0, head, row, keys]).std(correction=0) for name, part in parts}
                for name, value in spreads.items() if len(spreads) > 1 else ():
                    add(PARTS[name], float(value / sum(spreads.values())))
            if earlier is not None:
                means = (one.mean(0)[row, keys] for one in (w, earlier))
                add("head_mean", 1 - jensenshannon(*means, base=2) ** 2)
        before[maps.kind] = w
        if maps.kind == "cross":
            words = [_words(pair[side], side, loaded) for side in ("source", "target")]
            out["aer", "cross", maps.layer] = _aer(w.mean(0), *words, *gold)
    return out


def _words(ids, side, loaded):
    """[[places of the first word's subwords], ...]"""
    words, symbols = [[]], getattr(loaded.task, f"{side}_dictionary")
    for place, number in enumerate(ids[:-1]):
        words[-1].append(place)
        if not symbols[int(number)].endswith("@@"):
            words.append([])
    return words[:-1]


def _aer(weights, source, target, sure, possible):
    found = set()
    for t, rows_of_word in enumerate(target):
        mass = [sum(float(weights[r, c]) for r in rows_of_word for c in columns) for columns in source]
        found.add((mass.index(max(mass)), t))
    return len(found) + len(sure) - len(found & sure) - len(found & possible), len(found) + len(sure)


def gold_of(folder):
    """The toy corpus's alignments: "Hund, Katze." is "the dog, the cat."."""
    for line in (folder / "raw" / "test.de").read_text().splitlines():
        nouns = line.count(",") + 1
        yield " ".join(f"{2 * n}?{3 * n} {2 * n}-{3 * n + 1} {2 * n + 1}-{3 * n + 2}" for n in range(nouns))


@pytest.fixture(scope="module")
def there(data, tmp_path_factory):
    """A folder with runs, one of them for short sentences, and the test set's gold alignments."""
    folder = tmp_path_factory.mktemp("statistics")
    layers = ("--encoder-layers", "3", "--decoder-layers", "2")
    short = ("--max-source-positions", "3", "--max-target-positions", "3")
    for name, *flags in (("ea", "ea_transformer_base"), ("stock", "transformer"), ("short", "transformer", *short)):
        (folder / f"toy-{name}").mkdir()
        save_model(data, folder / f"toy-{name}/checkpoint_best.pt", *flags, *layers)
    (folder / "gold").write_text("".join(f"{line}\n" for line in gold_of(data)))
    return folder


@pytest.mark.parametrize("name", ["toy-ea", "toy-stock"])
def test_a_test_set_by_loops_in_one_batch_and_one_by_one(there, name):
    loaded = load_model(there / name)
    gold = read_gold(there / "gold")
    sample = read_sample(loaded, "test", 6, there / "gold")
    together, alone = tally(loaded, sample, tokens=10_000), tally(loaded, sample, tokens=1)
    assert len(list(sample.batches(10_000))) == 1
    assert len(list(sample.batches(1))) == 6
    expected = [naive(loaded, number, loaded.task.dataset("test"), gold[number]) for number in range(6)]
    assert together.keys() == alone.keys() == expected[0].keys()
    assert ("skip", "encoder", 2) in together or name == "toy-stock"
    for place in together:
        np.testing.assert_allclose(together[place], alone[place], rtol=1e-4, atol=1e-6, err_msg=str(place))
        slow = np.transpose([one[place] for one in expected])
        np.testing.assert_allclose(together[place], slow, rtol=1e-4, atol=1e-6, err_msg=str(place))


def test_a_row_in_which_nothing_varies_has_no_shares():
    """The softmax does not see a summand that all keys of a row share."""
    ones = np.ones((1, 1, 1, 4))
    assert np.isnan(shares({"own": ones, "skip": ones}, ones > 0)["own"]).all()


@pytest.mark.slow
def test_from_the_command_line(there, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    files = [f"out/a{suffix}" for suffix in map_statistics.SUFFIXES]
    command = ["--run", there / "toy-ea", "--compare", there / "toy-stock", "--gold", there / "gold", "--out", *files]
    main([*map(str, command)])
    assert "written: out/a.md" in capsys.readouterr().out
    assert sorted(f"out/{path.name}" for path in (tmp_path / "out").iterdir()) == sorted(files)
    assert Path("out/a.png").read_bytes().startswith(b"\x89PNG")
    assert Path("out/a.svg").read_text().count('<g id="axes_') == 7
    found = json.loads(Path("out/a.json").read_text())
    assert (found["names"], found["sentences"], found["aligned_sentences"]) == (RUNS, 10, 10)
    numbers = found["statistics"]
    for layers in numbers["entropy"].values():
        for one in layers.values():
            assert one["difference"]["mean"] == pytest.approx(one["run"]["mean"] - one["compare"]["mean"])
    layers = {name: {kind: list(layers) for kind, layers in kinds.items()} for name, kinds in numbers.items()}
    assert (layers["aer"], layers["same_head"]["encoder"]) == ({"cross": ["1", "2"]}, ["2", "3"])
    assert (layers["skip"], list(numbers["skip"]["encoder"]["2"])) == ({"encoder": ["2", "3"]}, ["run"])
    lines = Path("out/a.md").read_text().splitlines()
    assert "10 sentences, 10 of them with gold alignments" in lines[0]
    runs = [one["run"] for one in numbers["aer"]["cross"].values()]
    cells = [f"{run['mean']:.3f} ± {(run['high'] - run['low']) / 2:.3f}" for run in runs]
    assert f"| cross: {RUNS[0]} | {' | '.join(cells)} |" in lines
    assert sum(line.startswith("| encoder: difference") for line in lines) == 4


def test_a_run_that_keeps_its_preparation_finds_its_text(there, data, tmp_path):
    """A run keeps no text: it is where the run was trained, or where --data says."""
    run, table = tmp_path / "run", tmp_path / "a.md"
    shutil.copytree(there / "toy-stock", run)
    Preparation.at(data).keep(run)
    command = ["--run", str(run), "--sentences", "3", "--out", *[str(table)] * 2]  # twice the same is once
    main(command)
    assert "3 sentences" in table.read_text()
    of_others = ("difference", "Difference", "alignment", "share of")
    assert not any(word in table.read_text() for word in of_others), "one model without gold"
    state = torch.load(run / "checkpoint_best.pt", weights_only=True)
    state["cfg"]["task"]["data"] = "/nowhere"
    torch.save(state, run / "checkpoint_best.pt")
    with pytest.raises(SystemExit, match="was trained on /nowhere, which is not there any more; say where by --data"):
        main(command)
    main([*command, "--data", str(data)])


@mistakes("""
    --run {tmp}/empty-run | '{tmp}/empty-run: has no checkpoint'
    --run {runs}/toy-ea --compare {tmp}/none | '{tmp}/none: no such file'
    --run {runs}/toy-ea --subset test7 | '--subset test7: ' 'available: test, train, valid'
    --run {runs}/toy-ea --sentences 1 | --sentences 'at least 2'
    --run {runs}/toy-ea --gold {tmp}/short | '{tmp}/short: has 9 lines' 'test 10'
    --run {runs}/toy-ea --gold {tmp}/wrong | '--gold, sentence 5: ' '77 and 0'
    --run {runs}/toy-short | 'sentence 1: ' toy-short/checkpoint_best.pt '(3, 3)' --sentences
    --run {runs}/toy-ea --compare {runs}/toy-short | 'sentence 1: ' toy-short/checkpoint_best.pt --sentences
""")
def test_a_run_subset_or_alignment_that_cannot_be_used_is_named(there, tmp_path, capsys, words, named, monkeypatch):
    monkeypatch.setattr(map_statistics, "tally", None)  # which takes long
    (tmp_path / "empty-run").mkdir()
    lines = (there / "gold").read_text().splitlines(keepends=True)
    (tmp_path / "short").write_text("".join(lines[:-1]))
    (tmp_path / "wrong").write_text("".join([*lines[:4], f"77-0 {lines[4]}", *lines[5:]]))
    words = [*words, "--out", tmp_path / "new/a.md", tmp_path / "new/a.json"]
    check_refusal(capsys, main, words, named, writes_to=tmp_path, tmp=tmp_path, runs=there)


def test_gold_for_a_language_without_spaces_is_refused(there, monkeypatch):
    monkeypatch.setattr(Loaded, "has_words", lambda loaded, side: side == "source")
    with pytest.raises(UserError, match="--gold: subwords of en "):
        read_sample(load_model(there / "toy-ea"), "test", 3, there / "gold")


def test_sentences_with_unknown_words_have_no_alignment(there, monkeypatch):
    loaded = load_model(there / "toy-ea")
    loaded.task.load_dataset("test")
    dataset = loaded.task.dataset("test")
    dataset.src = [sentence.clone() for sentence in dataset.src]
    dataset.src[1][0] = loaded.task.source_dictionary.unk()
    monkeypatch.setattr(map_statistics, "_load", lambda loaded, subset: dataset)
    sample = read_sample(loaded, "test", 3, there / "gold")
    assert list(sample.gold) == [0, 2]
    found = tally(loaded, sample)
    assert (found["aer", "cross", 1][1] > 0).tolist() == [True, False, True]
    assert (found["entropy", "cross", 1][1] > 0).all()
