"""scripts/map_statistics.sh: each number on maps whose answer is known, and a test set by loops over its pixels."""

import json
import math
import shutil
import statistics

import numpy as np
import pytest
import torch
from helpers.mistakes import refusal
from helpers.toy import save_model

from ea_artifacts.command import UserError
from ea_artifacts.preparation import Preparation
from ea_tools.maps import statistics as map_statistics
from ea_tools.maps.alignments import alignment_errors, hard_alignment, read_gold
from ea_tools.maps.measures import PARTS, estimate, resamples, shares
from ea_tools.maps.models import Loaded, load_model
from ea_tools.maps.statistics import main, read_sample, tally

RUNS = ["toy-ea/checkpoint_best.pt", "toy-stock/checkpoint_best.pt"]

# ---- alignments


def test_alignment_error_rate_of_an_example():
    # Och and Ney's formula: A = 4 links; 2 of them sure, 3 of them possible; S = 3: 1 - (2 + 3) / (4 + 3).
    sure, possible = {(0, 0), (1, 1), (2, 2)}, {(0, 0), (1, 1), (2, 2), (3, 3)}
    errors, links = alignment_errors({(0, 0), (1, 1), (3, 3), (0, 4)}, sure, possible)
    assert errors / links == pytest.approx(1 - 5 / 7)
    assert alignment_errors(sure, sure, sure)[0] == 0
    assert alignment_errors({(9, 9)}, sure, sure) == (4, 4)


def test_subwords_are_summed_before_the_largest_is_taken():
    # Words: [ab] [c] | [x] [yz]. The largest single pixel of x is c, but ab has more in all; yz looks at c.
    weights = np.array([[0.3, 0.25, 0.45], [0.1, 0.1, 0.8], [0.3, 0.4, 0.3]])
    assert hard_alignment(weights, np.array([0, 0, 1]), np.array([0, 1, 1])) == {(0, 0), (1, 1)}
    assert hard_alignment(weights[:, :0], np.array([]), np.array([0, 1, 1])) == set()


@pytest.mark.parametrize(
    "content, options",
    [
        ("0-0 1?2 3p1\n2-10\n", {}),
        ("1-1 2?3 4p2\n3-11\n", {"first": 1}),  # RWTH's German-English alignments are written in this way
    ],
)
def test_words_of_gold_count_from_0_or_from_1(tmp_path, content, options):
    path = tmp_path / "gold"
    path.write_text(content)
    assert read_gold(path, **options) == [({(0, 0)}, {(0, 0), (1, 2), (3, 1)}), ({(2, 10)}, {(2, 10)})]


@pytest.mark.parametrize(
    "content, options, message",
    [
        ("0-0\n0-1 a-b\n", {}, "gold:2: 'a-b' is no link"),
        ("1-1 2-2\n1-2\n", {}, r"gold: no link is of word 0, .* give --gold-from 1, or 0 if not"),
        ("1-1\n0-1\n", {"first": 1}, "gold:2: the link 0-1: expected words from 1 on"),
    ],
)
def test_gold_that_does_not_fit_is_named(tmp_path, content, options, message):
    path = tmp_path / "gold"
    path.write_text(content)
    with pytest.raises(UserError, match=message):
        read_gold(path, **options)


# ---- intervals


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


# ---- a whole test set


def naive(loaded, number, dataset, gold):
    """{(statistic, kind, layer): (sum, count)} of one sentence alone, pixel by pixel."""
    pair, out, before = dataset[number], {}, {}
    forced = loaded.force(_ids(pair["source"]), _ids(pair["target"]))
    for maps in forced:
        w, heads = maps.weights[0].double(), maps.weights.size(1)
        earlier = before.get(maps.kind)
        for row in range(w.size(1)):
            keys = [column for column in range(w.size(2)) if not maps.masked[0, 0, row, column]]
            if len(keys) < 2:
                continue
            for head in range(heads):
                _add(out, maps, "entropy", h := _entropy([w[head, row, key] for key in keys]))
                _add(out, maps, "normalised", h / math.log(len(keys)))
                if earlier is not None:
                    _add(out, maps, "same_head", _similarity(w[head, row], earlier[head, row], keys))
                spreads = {
                    PARTS[name]: statistics.pstdev(float(part.share * part.map[0, head, row, key]) for key in keys)
                    for name, part in maps.parts.items()
                }
                for name in spreads if len(spreads) > 1 else ():
                    _add(out, maps, name, spreads[name] / sum(spreads.values()))
            if earlier is not None:
                _add(out, maps, "head_mean", _similarity(w.mean(0)[row], earlier.mean(0)[row], keys))
        before[maps.kind] = w
        if maps.kind == "cross":
            words = [_words(pair[side], side, loaded) for side in ("source", "target")]
            out["aer", "cross", maps.layer] = _aer(w.mean(0), *words, *gold)
    return out


def _ids(ids):
    from ea_tools.maps.models import Sentence

    return Sentence(ids, [], None)


def _add(out, maps, name, value):
    total, count = out.get((name, maps.kind, maps.layer), (0, 0))
    out[name, maps.kind, maps.layer] = total + float(value), count + 1


def _entropy(row):
    return -sum(float(p) * math.log(p) for p in row if p > 0)


def _similarity(one, other, keys):
    one, other = [one[key] for key in keys], [other[key] for key in keys]
    middle = [(a + b) / 2 for a, b in zip(one, other, strict=True)]
    return 1 - (_entropy(middle) - (_entropy(one) + _entropy(other)) / 2) / math.log(2)


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
    """A folder with two runs and the test set's gold alignments."""
    folder = tmp_path_factory.mktemp("statistics")
    for name, arch in (("toy-ea", "ea_transformer_base"), ("toy-stock", "transformer")):
        (folder / name).mkdir()
        save_model(data, folder / name / "checkpoint_best.pt", arch, "--encoder-layers", "3", "--decoder-layers", "2")
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
    files = ["out/a.md", "out/a.png", "out/a.svg", "out/a.json"]
    command = ["--run", there / "toy-ea", "--compare", there / "toy-stock", "--gold", there / "gold", "--out", *files]
    main([*map(str, command)])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.json", "a.md", "a.png", "a.svg"]
    assert (tmp_path / "out" / "a.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "out" / "a.svg").read_text()
    assert svg.count('<g id="axes_') == 7
    found = json.loads((tmp_path / "out" / "a.json").read_text())
    assert (found["names"], found["sentences"], found["aligned_sentences"]) == (RUNS, 10, 10)
    numbers = found["statistics"]
    for layers in numbers["entropy"].values():
        for one in layers.values():
            assert one["difference"]["mean"] == pytest.approx(one["run"]["mean"] - one["compare"]["mean"])
    assert list(numbers["aer"]) == ["cross"]
    assert list(numbers["aer"]["cross"]) == ["1", "2"]
    assert list(numbers["same_head"]["encoder"]) == ["2", "3"]
    assert list(numbers["skip"]) == ["encoder"]
    assert list(numbers["skip"]["encoder"]["2"]) == ["run"]
    table = (tmp_path / "out" / "a.md").read_text()
    lines = table.splitlines()
    assert "10 sentences, 10 of them with gold alignments" in lines[0]
    aer = numbers["aer"]["cross"]
    cells = [f"{one['run']['mean']:.3f} ± {(one['run']['high'] - one['run']['low']) / 2:.3f}" for one in aer.values()]
    assert f"| cross: {RUNS[0]} | {' | '.join(cells)} |" in lines
    assert sum(line.startswith("| encoder: difference") for line in lines) == 4
    assert "checkpoint_best.pt" in table
    assert "written: out/a.md" in capsys.readouterr().out


def test_one_model_without_gold(there, tmp_path):
    out = [str(tmp_path / "a.md")] * 2  # twice the same is once
    main([*("--run", str(there / "toy-stock")), *("--sentences", "3", "--out", *out)])
    table = (tmp_path / "a.md").read_text()
    assert "3 sentences" in table
    assert not any(word in table for word in ("difference", "Difference", "alignment", "share of"))


def test_a_run_that_keeps_its_preparation_finds_its_text(there, data, tmp_path):
    """A run keeps no text: it is where the run was trained, or where --data says."""
    run = tmp_path / "run"
    shutil.copytree(there / "toy-stock", run)
    Preparation.at(data).keep(run)
    command = ["--run", str(run), "--sentences", "3", "--out", str(tmp_path / "a.md")]
    main(command)
    state = torch.load(run / "checkpoint_best.pt", weights_only=True)
    state["cfg"]["task"]["data"] = "/nowhere"
    torch.save(state, run / "checkpoint_best.pt")
    with pytest.raises(SystemExit, match="was trained on /nowhere, which is not there any more; say where by --data"):
        main(command)
    main([*command, "--data", str(data)])


def refused(capsys, tmp_path, *flags):
    out = tmp_path / "refused"
    return refusal(capsys, main, *flags, "--out", out / "a.md", out / "a.json", writes_to=tmp_path)


def test_a_run_subset_or_alignment_that_cannot_be_used_is_named(there, data, tmp_path, capsys):
    (tmp_path / "empty-run").mkdir()
    assert "empty-run: has no checkpoint" in refused(capsys, tmp_path, "--run", tmp_path / "empty-run")
    run = ("--run", there / "toy-ea")
    assert "none: no such file" in refused(capsys, tmp_path, *run, "--compare", tmp_path / "none")
    found = refused(capsys, tmp_path, *run, "--subset", "test7")
    assert "--subset test7" in found
    assert "available: test, train, valid" in found
    assert "--sentences: must be at least 2" in refused(capsys, tmp_path, *run, "--sentences", "1")
    gold = tmp_path / "gold"
    lines = (there / "gold").read_text().splitlines()
    gold.write_text("\n".join(lines[:-1]) + "\n")
    found = refused(capsys, tmp_path, *run, "--gold", gold)
    assert f"{gold}: has 9 lines, and test 10 sentences" in found
    gold.write_text("\n".join([*lines[:4], lines[4] + " 77-0", *lines[5:]]) + "\n")
    found = refused(capsys, tmp_path, *run, "--gold", gold)
    assert "--gold, sentence 5: the link between words 77 and 0, counted from 0, is out of range" in found


def test_gold_for_a_language_without_spaces_is_refused(there, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Loaded, "has_words", lambda loaded, side: side == "source")
    found = refused(capsys, tmp_path, "--run", there / "toy-ea", "--gold", there / "gold")
    assert "--gold: subwords of en do not show where a word begins" in found


def test_sentences_with_unknown_words_have_no_alignment(there, monkeypatch):
    loaded = load_model(there / "toy-ea")
    loaded.task.load_dataset("test")
    dataset = loaded.task.dataset("test")
    sentences = [dataset.src[number].clone() for number in range(len(dataset))]
    sentences[1][0] = loaded.task.source_dictionary.unk()
    dataset.src = sentences
    monkeypatch.setattr(map_statistics, "_load", lambda loaded, subset: dataset)
    sample = read_sample(loaded, "test", 3, there / "gold")
    assert list(sample.gold) == [0, 2]
    found = tally(loaded, sample)
    assert (found["aer", "cross", 1][1] > 0).tolist() == [True, False, True]
    assert (found["entropy", "cross", 1][1] > 0).all()
