"""scripts/sweep.sh: every cell once, chosen on the validation set, and no best without other seeds."""

import itertools
import json
import re

import pytest
from helpers.toy import TINY, script
from matplotlib.figure import Figure

from ea_tools.figures import curves as plot_curves
from ea_tools.tables import sweep
from ea_tools.training import cells, fairseq_flags

ALPHA, BETA = ["--grid", "ea-alpha", "0", "0.1", "0.5"], ["--grid", "ea-beta", "0", "0.1"]
# Validation BLEU by (alpha, beta), to which a seed adds what SEEDS says.
SCORES = {("0", "0"): 30.0, ("0", "0.1"): 31.0, ("0.1", "0"): 30.5, ("0.1", "0.1"): 33.0, ("0.5", "0"): 32.8}
SEEDS = {"1": 0.0, "2": 0.5, "3": -0.4}


class Trainings:
    """What stands in for train.sh and evaluate.sh: writes the JSON of SCORES, and notes the calls."""

    def __init__(self):
        self.calls, self.fail, self.scores = [], set(), dict(SCORES)

    def __call__(self, table, cell, args, extra, slot, quiet):
        train, evaluate = cells.commands(table, cell, args, extra)
        flags = dict(itertools.pairwise(train))
        key, seed = (flags.get("--ea-alpha"), flags.get("--ea-beta")), flags["--seed"]
        self.calls.append((*key, seed))
        if self.calls[-1] in self.fail:
            return False
        assert evaluate[-2:] == ["--subset", "valid"], "the test set has no part in a choice"
        score = {"score": self.scores.get(key, 20.0) + SEEDS[seed], "signature": "s"}
        one = {"scores": {"sacrebleu": score, "tokenised_bleu": score}, "averaged": ["a"] * args.average, "beam": 5}
        one |= {"device": "d", "commit": "c" * 40, "date": "now", "command": "scripts/evaluate.sh"}
        (cell.folder / "eval").mkdir(parents=True, exist_ok=True)
        (cell.folder / "eval" / "valid.json").write_text(json.dumps(one))
        return True


@pytest.fixture
def toy(data, tmp_path):
    path = tmp_path / "toy.toml"
    path.write_text(
        f'inherit = "base"\ndata = "{data}"\nsource-lang = "de"\ntarget-lang = "en"\n'
        '[batch]\ntokens = 256\n[flags]\nmax-epoch = 2\n[arch.ea_transformer_lite]\nea-alpha = 0.1\nea-beta = 0.1\n'
    )  # fmt: skip
    return path


@pytest.fixture
def trainings(monkeypatch):
    stub = Trainings()
    monkeypatch.setattr(cells, "run_cell", stub)
    monkeypatch.setattr(cells, "cpu_runs", lambda args, extra: 1)  # one after another, in their order
    monkeypatch.setattr(fairseq_flags, "values", fairseq_flags.parsed)  # fairseq is in this process already
    return stub


def call(toy, *arguments, grid=(*ALPHA, *BETA)):
    folders = ["--runs", toy.parent / "runs", "--results", toy.parent / "results"]
    sweep.main([str(word) for word in (toy, "ea_transformer_lite", *grid, *folders, *arguments)])


def report(toy, name="toy-ea_transformer_lite-ea-alpha-ea-beta"):
    return (toy.parent / "results" / f"sweep-{name}.md").read_text()


def test_the_grid_with_one_seed_then_the_best_with_the_others(toy, trainings):
    call(toy)
    grid = [(alpha, beta, "1") for alpha in ("0", "0.1", "0.5") for beta in ("0", "0.1")]
    assert trainings.calls[:6] == grid
    assert trainings.calls[6:] == [(*cell, seed) for seed in "23" for cell in (("0.1", "0.1"), ("0.5", "0"))]
    text = report(toy)
    assert "| ea-alpha ↓, ea-beta → | 0 | 0.1 |" in text
    assert "| 0 | 30.00 | 31.00 |" in text
    assert "| 0.1 | 30.50 | **33.00 (default)** |" in text
    assert "| ea-alpha 0.5, ea-beta 0 | 32.80 | 33.30 | 32.40 | 32.83 ± 0.45 |" in text
    assert "**ea-alpha 0.1, ea-beta 0.1 (default)** has the highest mean, 33.03 ± 0.45 over seeds 1, 2, 3." in text
    assert "0.20 above ea-alpha 0.5, ea-beta 0: within the spread between seeds" in text
    assert (
        "over the other seeds alone: ea-alpha 0.1, ea-beta 0.1 (default) 33.05; ea-alpha 0.5, ea-beta 0 32.85." in text
    )
    assert text.count("| cccccccccc, now |") == 10
    assert (toy.parent / "results" / "sweep-toy-ea_transformer_lite-ea-alpha-ea-beta.png").stat().st_size > 20_000


@pytest.mark.slow
def test_what_is_finished_is_not_run_again(toy, trainings, capsys):
    call(toy, "--seeds", 1)
    assert len(trainings.calls) == 6
    text = report(toy)
    assert "ea-alpha 0.1, ea-beta 0.1 (default) is highest with one seed, which does not make it the best" in text
    assert "has the highest mean" not in text
    call(toy, "--seeds", 1, 2, "--confirm", 1)
    assert trainings.calls[6:] == [("0.1", "0.1", "2")]
    call(toy, "--seeds", 1, 2, "--confirm", 1)
    call(toy, "--collect")
    assert len(trainings.calls) == 7
    assert "None is called the best yet: not run with every seed: ea-alpha 0.1, ea-beta 0.1 (default);" in report(toy)


def test_flags_that_fill_a_line_have_names_that_a_disk_takes(toy, trainings):
    for letter in "ab":
        model = ["--finetune-from-model", f"{letter * 250}.pt"]
        call(toy, "--seeds", 1, *model, grid=["--grid", "ea-alpha", "0"])
    names = [path.name for folder in ("runs", "results") for path in (toy.parent / folder).rglob("*finetune*")]
    assert max(map(len, names)) < 200
    assert len(trainings.calls) == 2, "another long value is another run"


def test_flags_for_every_run_have_a_page_of_their_own(toy, trainings):
    call(toy, "--seeds", 1)
    before = report(toy)
    call(toy, "--seeds", 1, "--max-update", 500, grid=ALPHA)
    assert ", all with --max-update 500\n" in report(toy, "toy-ea_transformer_lite-ea-alpha-max-update500")
    call(toy, "--seeds", 1, "--max-update", 500)
    assert report(toy) == before


def test_no_cell_of_the_batch_is_called_the_default(toy, trainings):
    """train.sh chooses --update-freq by the recipe's batch and the machine; it does not take fairseq's default."""
    call(toy, "--seeds", 1, grid=("--grid", "update-freq", 1, 2))
    assert "(default)" not in report(toy, "toy-ea_transformer_lite-update-freq")


def test_a_difference_that_is_more_than_the_spread_between_seeds(toy, trainings, monkeypatch):
    """The best by the first seed is not the best by the mean; the default is run again although it is far behind."""
    trainings.scores |= {("0.1", "0.1"): 25.0, ("0.5", "0.1"): 33.1}
    original = dict(trainings.scores)

    def unlucky(table, cell, args, extra, slot, quiet):
        trainings.scores[("0.5", "0.1")] = original[("0.5", "0.1")] - 5 * (cell.seed > 1)
        return trainings(table, cell, args, extra, slot, quiet)

    monkeypatch.setattr(cells, "run_cell", unlucky)
    call(toy)
    assert {cell[:2] for cell in trainings.calls[6:]} == {("0.5", "0.1"), ("0.5", "0"), ("0.1", "0.1")}
    text = report(toy)
    assert "| **33.10** |" in text
    assert "**ea-alpha 0.5, ea-beta 0** has the highest mean, 32.83 ± 0.45" in text
    assert "3.03 above ea-alpha 0.5, ea-beta 0.1: within the spread between seeds" in text
    assert "7.80 above ea-alpha 0.1, ea-beta 0.1 (default): more than the spread between seeds" in text


def test_a_cell_that_fails_stops_no_other(toy, trainings, capsys):
    trainings.fail = {("0", "0.1", "1")}
    with pytest.raises(
        SystemExit, match=r"these failed; run the same command again.*\n  ea-alpha 0, ea-beta 0.1, .*seed 1"
    ):
        call(toy)
    assert len(trainings.calls) == 10
    text = report(toy)
    assert "| 0 | 30.00 | not run |" in text
    assert "1 of 6 cells have not been run; what follows is about the others." in text
    trainings.fail = set()
    call(toy)
    assert trainings.calls[10:] == [("0", "0.1", "1")]
    assert "not run" not in report(toy)


def test_a_grid_that_nobody_ran(toy, trainings):
    call(toy, "--collect")
    text = report(toy)
    assert text.count("not run") == 6
    assert text.count("Nothing has been run yet.") == 2
    assert not list((toy.parent / "results").glob("*.png"))


def test_one_flag_and_three(toy, trainings):
    call(toy, "--seeds", 1, "--name", "one", grid=BETA)
    assert "| ea-beta | score |" in report(toy, "one")
    three = [*ALPHA, *BETA, "--grid", "adam-betas", "(0.9, 0.98)", "(0.9, 0.999)"]
    call(toy, "--seeds", 1, "--name", "three", "--lr", "1e-4", grid=three)
    assert "| 0.1 | 0.1 | (0.9, 0.98) | **33.00 (default)** |" in report(toy, "three")
    assert len(trainings.calls) == 2 + 12
    assert len(list((toy.parent / "runs" / "toy").iterdir())) == 2 + 12
    assert (toy.parent / "results" / "sweep-three.png").exists()


def test_results_that_cannot_be_compared(toy, trainings):
    call(toy, "--seeds", 1, grid=BETA)
    trainings.scores[None, "0.5"] = 1.0
    call(toy, "--seeds", 1, "--average", 3, "--name", "mixed", grid=[*BETA, "0.5"])
    beware = "Beware: the cells were scored with different settings (beam5.average10, beam5.average3)."
    assert beware in report(toy, "mixed")
    for run in (toy.parent / "runs" / "toy").iterdir():
        (run / "checkpoint1.pt").touch()  # the runs were there no more; now they can be scored again
    call(toy, "--seeds", 1, "--average", 3, "--name", "mixed", grid=[*BETA, "0.5"])
    assert len(trainings.calls) == 3 + 2, "one had been scored in this way already"
    assert "Beware" not in report(toy, "mixed")


def test_a_training_that_had_not_ended_is_named(toy, trainings):
    call(toy, "--seeds", 1, grid=BETA)
    assert "before the end" not in report(toy, "toy-ea_transformer_lite-ea-beta")
    path = next((toy.parent / "runs").rglob("valid.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | {"unfinished": "7 of 80 updates"}))
    call(toy, "--collect", grid=BETA)
    assert "Scored before the end" in report(toy, "toy-ea_transformer_lite-ea-beta")
    assert "seed 1 (7 of 80 updates)." in report(toy, "toy-ea_transformer_lite-ea-beta")


def test_flags_that_train_sh_takes_itself_can_be_in_a_grid(toy, trainings, capsys):
    """fairseq-train knows nothing of them: to it these cells would be the same."""
    call(toy, "--dry-run", "--without", "patience", grid=["--grid", "precision", "fp32", "bf16", "auto"])
    said = capsys.readouterr().out
    assert re.findall(r"--precision (\w+) --without patience --seed 1\n", said) == ["fp32", "bf16", "auto"]


def test_an_unknown_architecture_is_one_line(toy):
    """As the process of its own says it that asks fairseq."""
    with pytest.raises(SystemExit, match=r"^sweep: ARCH ea_transformer_lit: there is no such [^\n]*_lite[^\n]*$"):
        sweep.main([str(toy), "ea_transformer_lit", *ALPHA, "--runs", str(toy.parent), "--dry-run"])


def test_a_dry_run_runs_nothing(toy, trainings, capsys):
    call(toy, "--dry-run", grid=["--grid", "adam-betas", "(0.9, 0.98)", "(0.8, 0.98)"])
    printed = capsys.readouterr()
    assert re.findall(r"train\.sh .*--adam-betas ('.*?') --seed 1\n", printed.out) == ["'(0.9, 0.98)'", "'(0.8, 0.98)'"]
    assert "and then the best 2 of them, and the default one, with --seeds 2 3" in printed.err
    call(toy, "--seeds", 1)
    capsys.readouterr()
    call(toy, "--dry-run", "--seeds", 1, 2)
    assert re.findall(r"train\.sh .*--seed (\d)\n", capsys.readouterr().out) == ["2", "2"]
    assert len(trainings.calls) == 6
    assert not list((toy.parent / "results").glob("*adam*"))


def test_nothing_half_written(toy, trainings, monkeypatch):
    def full_disk(figure, path, **options):
        path.write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", full_disk)
    with pytest.raises(SystemExit, match="No space left"):
        call(toy, "--seeds", 1)
    assert [path.suffix for path in (toy.parent / "results").iterdir()] == [".md"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--grid", "ea-alfa", "0", "1"], "sweep: --ea-alfa: there is no such flag; is --ea-alpha meant?"),
        (["--grid", "ea-alpha", "0", "1.5"], "argument --ea-alpha: "),
        (["--grid", "ea-alpha", "0.1", "0.10"], "are the same: ea-alpha 0.1; ea-alpha 0.10"),
        (["--grid", "num-workers", "0", "1"], "are the same: num-workers 0; num-workers 1"),
        (["--grid", "--ea-alpha", "0"], "--grid --ea-alpha: the flag's name without dashes is wanted, then its values"),
        (["--grid", "ea-alpha"], "--grid ea-alpha: the flag's name without dashes is wanted, then its values"),
        (["--grid", "ea-alpha", "0", "--grid", "ea-alpha", "1"], "--grid ea-alpha: given twice"),
        ([*ALPHA, "--ea-alpha", "0.3"], "--ea-alpha: is in the grid; it cannot be given to every run as well"),
        (["--grid", "seed", "1", "2"], "--grid seed: use --seeds"),
        ([*ALPHA, "--seed", "2"], "--seed: use --seeds"),
        ([*ALPHA, "--seeds", "1", "1"], "--seeds 1 1: given twice"),
        ([*ALPHA, "--run", "x"], "--run: use --runs"),
        (["--grid", "data", "x", "y"], "--grid data: name it in a recipe of your own"),
        ([*ALPHA, "--no-such-flag", "1"], "sweep: --no-such-flag: there is no such flag"),
        ([*ALPHA, "--save-dir", "x"], "--save-dir: use --runs"),
        ([*ALPHA, "--arch", "x"], "--arch: a table's rows name it, and ARCH of a sweep"),
        ([*ALPHA, "--score", "comet"], "--score comet: no table and no sweep makes it"),
        ([*ALPHA, "--score", "compound_split_bleu"], "is made for en-de alone, and toy is de-en"),
        ([*ALPHA, "-s", "de"], "-s: flags of fairseq-train are wanted in full"),
        ([], "the following arguments are required: --grid"),
    ],
)
def test_mistakes(toy, trainings, capsys, arguments, message):
    with pytest.raises(SystemExit) as refusal:
        call(toy, grid=arguments)
    assert refusal.value.code not in (0, None)
    assert message in f"{refusal.value}{capsys.readouterr().err}"
    assert not trainings.calls
    assert not (toy.parent / "results").exists()


def test_missing_pieces(toy, trainings, capsys):
    for words, message in [
        (["iwslt", "ea_transformer_lite"], "no recipe 'iwslt'"),
        (["sample"], "RECIPE and ARCH come first"),
        (["ea_transformer_lite", "sample", "--grid", "ea-alpha", "0"], "sample is a recipe, and stands where an"),
    ]:
        with pytest.raises(SystemExit) as refusal:
            sweep.main([*words, *BETA])
        assert message in f"{refusal.value}{capsys.readouterr().err}"
    toy.write_text(toy.read_text().replace('data = "', 'data = "/nowhere'))
    with pytest.raises(SystemExit, match=r"PREP\.json: no such file"):
        call(toy)


@pytest.mark.slow
def test_a_real_sweep(toy, monkeypatch, capsys):
    """Two tiny models, each trained and scored by the scripts themselves; then their curves."""
    flags = ["--average", 2, "--no-tensorboard", "--gpus", 0, "--num-workers", 0, "--log-interval", 2, *TINY]
    folders = ["--runs", toy.parent / "runs", "--results", toy.parent / "results"]
    result = script("sweep.sh", toy, "ea_transformer_lite", *BETA, *folders, "--name", "real", "--seeds", 1, *flags)
    assert result.returncode == 0, result.stderr[-3000:]
    assert "DEBUG" not in result.stderr
    assert len(re.findall(r"^\| 0(?:\.1)? \| \**\d+\.\d\d", report(toy, "real"), re.M)) == 2

    monkeypatch.setattr(cells, "run_cell", None)  # nothing is left to run
    call(toy, "--name", "real", "--seeds", 1, *flags, grid=BETA)
    assert capsys.readouterr().err.count("done already") == 2

    runs = map(str, sorted((toy.parent / "runs" / "toy").iterdir()))
    plot_curves.main([*runs, "--out", str(toy.parent / "curves.png")])
    assert len(re.findall(r"seed1 +\d+ +2\.0 +0\.0\d ", capsys.readouterr().out)) == 2
