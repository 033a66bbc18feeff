"""scripts/sweep.sh: every cell once, chosen on the validation set, and the best again with other seeds."""

import itertools
import re

import pytest
from helpers.mistakes import check_refusal, mistakes
from helpers.tables import evaluation, write_evaluation, write_recipe

from ea_tools.tables import reproduce, sweep

GRID = ["--grid", "ea-alpha", "0", "0.1", "0.5", "--grid", "ea-beta", "0", "0.1"]
# Validation BLEU by (alpha, beta), to which a seed adds its number in SEEDS.
SCORES = {("0", "0"): 30.0, ("0", "0.1"): 31.0, ("0.1", "0"): 30.5, ("0.1", "0.1"): 33.0, ("0.5", "0"): 32.8}
SEEDS = {"1": 0.0, "2": 0.5, "3": -0.4}


class Trainings:
    """In the place of train.sh and evaluate.sh: writes the JSON of SCORES, and notes the calls."""

    def __init__(self):
        self.calls, self.fail = [], set()

    def __call__(self, cell, *_):
        train, evaluate = cell.commands
        flags = dict(itertools.pairwise(train))
        key, seed = (flags.get("--ea-alpha"), flags.get("--ea-beta")), flags["--seed"]
        self.calls.append((*key, seed))
        if self.calls[-1] in self.fail:
            return False
        assert evaluate[-2:] == ["--subset", "valid"], "the test set has no part in a choice"
        score = SCORES.get(key, 20.0) + SEEDS[seed]
        ((subset, settings),) = cell.scores
        result = evaluation(score, subset=subset, settings_name=settings)
        write_evaluation(cell.folder, result, ["a"])
        return True


@pytest.fixture
def toy(data, tmp_path):
    return write_recipe(tmp_path / "toy.toml", data)


@pytest.fixture
def trainings(monkeypatch):
    stub = Trainings()
    monkeypatch.setattr(reproduce, "run_cell", stub)
    monkeypatch.setattr(reproduce, "slots", lambda *_: [{}])  # one after another, in their order
    return stub


def call(toy, *arguments, grid=GRID):
    folders = ["--runs", toy.parent / "runs", "--results", toy.parent / "results", "--name", "toy"]
    sweep.main([str(word) for word in (toy, "ea_transformer_lite", *grid, *folders, *arguments)])
    page = toy.parent / "results" / "sweep-toy.md"
    return page.read_text() if page.exists() else ""


def test_the_grid_has_one_seed_and_its_best_the_others(toy, trainings):
    text = call(toy)
    assert trainings.calls[:6] == [(alpha, beta, "1") for alpha in ("0", "0.1", "0.5") for beta in ("0", "0.1")]
    confirmed = (("0", "0"), ("0.1", "0.1"), ("0.5", "0"))
    assert trainings.calls[6:] == [(*cell, seed) for seed in "23" for cell in confirmed]
    assert re.search(r"\| ea-alpha 0.1, ea-beta 0.1 \|.*\| 33.03 ± 0.45, Δ \+3.00 ± 0.00 \(not tested\) \|", text)
    assert re.search(r"\| ea-alpha 0.1, ea-beta 0 \|.*\| 30.50, Δ \+0.50 \(not tested\) \|", text)
    of_five = r"\| ea-alpha 0.5, ea-beta 0 \| ea-alpha 0, ea-beta 0 \|.*, Δ \+2.80 ± 0.00 \(not tested\) \|"
    assert re.search(of_five, text)
    call(toy)
    assert len(trainings.calls) == 6 + 2 * len(confirmed), "finished runs stay"


def test_a_cell_that_fails_stops_no_other(toy, trainings):
    trainings.fail = {("0", "0.1", "1")}
    with pytest.raises(SystemExit, match=r"sweep: these failed; run the same.*\n  ea-alpha 0, ea-beta 0.1, .*seed 1"):
        call(toy)
    assert len(trainings.calls) == 12
    trainings.fail = set()
    assert "not run |" not in call(toy)
    assert trainings.calls[12:] == [("0", "0.1", "1")]


def test_a_dry_run_runs_nothing(toy, trainings, capsys):
    grid = ["--grid", "adam-betas", "(0.9, 0.98)", "(0.8, 0.98)"]
    assert call(toy, "--dry-run", grid=grid) == ""
    printed = capsys.readouterr()
    found = re.findall(r"train\.sh .*--adam-betas ('.*?') --seed 1 --run ", printed.out)
    assert found == ["'(0.9, 0.98)'", "'(0.8, 0.98)'"]
    assert "and then the baseline and the best 2, with --seeds 2 3" in printed.err
    assert not trainings.calls


def test_flags_that_fill_a_line_have_names_that_a_disk_takes(toy, trainings):
    for letter in "ab":
        call(toy, "--seeds", 1, "--finetune-from-model", f"{letter * 250}.pt", grid=["--grid", "ea-alpha", "0"])
    names = [path.name for folder in ("runs", "results") for path in (toy.parent / folder).rglob("*finetune*")]
    assert max(map(len, names)) < 200
    assert len(trainings.calls) == 2, "another long value is another run"


@mistakes("""
    --grid ea-alfa 0 1 | 'ea-alfa 0: --ea-alfa: ' --ea-alpha
    --grid ea-alpha 0 1.5 | 'ea-alpha 1.5: ' --ea-alpha:
    --grid ea-alpha | '--grid ea-alpha:'
    {GRID} --ea-alpha 0.3 | '--grid ea-alpha:'
    {GRID} --grid ea-alpha 0.3 | '--grid ea-alpha:'
    --grid seed 1 2 | '--grid seed: ' --seeds
    --grid ea-beta 0 0.1 --grid ea-kernel-size 3 | '--ea-kernel-size 3:'
    {GRID} --ea-rule realformer | '--ea-alpha 0.0:'
    --seeds 1 | --grid
""")
def test_a_mistake_names_the_flag_and_trains_nothing(toy, trainings, capsys, words, named):
    words = [part for word in words for part in (GRID if word == "{GRID}" else [word])]
    check_refusal(capsys, lambda words: call(toy, grid=words), words, named, writes_to=toy.parent)
    assert not trainings.calls
