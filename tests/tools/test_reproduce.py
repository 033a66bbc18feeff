"""scripts/reproduce.sh: what is missing is run, what is done is not, and the table says where its numbers are from."""

import json
import shutil

import pytest
from helpers.toy import TINY, data, run, script  # noqa: F401  (fixtures)

from ea_tools import recipes, reproduce, tables
from ea_tools.common import UserError

# ICML 2021, tables 5 and 6: De-En, En-De, En-Fr.
TABLE_5 = {
    "Transformer-Lite": (33.32, 21.11, 33.22),
    "EA-Transformer-Lite": (33.80, 21.63, 34.12),
    "Transformer-Base": (34.55, 27.47, 40.79),
    "EA-Transformer-Base": (35.30, 27.56, 41.54),
}
ABLATIONS = {
    "w/o encoder convolution": (["--ea-encoder-beta", "0"], (32.84, 21.07, 33.51)),
    "w/o decoder convolution": (["--ea-decoder-beta", "0"], (33.56, 21.45, 33.72)),
    "w/o encoder-decoder convolution": (["--ea-cross-beta", "0"], (33.59, 21.41, 33.73)),
    "w/o skip connection": (["--ea-alpha", "0"], (33.70, 21.43, 34.06)),
    "with 1x1 convolution": (["--ea-kernel-size", "1"], (33.15, 21.20, 33.52)),
    "with 5x5 convolution": (["--ea-kernel-size", "5"], (33.54, 21.40, 34.08)),
}


def published(table, row):
    return tuple(row.published(column) for column in table.columns)


def test_tables_hold_the_papers_numbers():
    five, six = tables.read("table5"), tables.read("table6")
    assert {row.label: published(five, row) for row in five.rows} == TABLE_5
    for label, (flags, numbers) in ABLATIONS.items():
        assert (six.row(label).flags, published(six, six.row(label))) == (flags, numbers)
        assert six.row(label).baseline == "EA-Transformer-Lite"
    assert published(six, six.row("EA-Transformer-Lite")) == TABLE_5["EA-Transformer-Lite"]
    assert published(six, six.row("Transformer-Lite")) == (33.21, 21.11, 33.22)
    for table in (five, six):
        assert [column.score for column in table.columns] == ["tokenised_bleu", "compound_split_bleu", "tokenised_bleu"]


def test_tables_share_their_runs():
    five, six = tables.read("table5"), tables.read("table6")
    cells = [table.cell(table.row("EA-Transformer-Lite"), "iwslt14-de-en", 1, "runs") for table in (five, six)]
    assert cells[0].folder == cells[1].folder
    other = six.cell(six.row("w/o skip connection"), "iwslt14-de-en", 1, "runs", ["--max-update", "9"])
    assert other.folder.name == "ea_transformer_lite-ea-alpha0-max-update9-seed1"
    folders = {six.cell(row, "iwslt14-de-en", seed, "runs").folder for row in six.rows for seed in (1, 2)}
    assert len(folders) == 2 * len(six.rows)


@pytest.fixture
def toy(data, run, tmp_path):  # noqa: F811
    """A table with one column and two rows over the toy corpus; the second row's run is there already."""
    (tmp_path / "toy.toml").write_text(
        f'inherit = "base"\ndata = "{data}"\nsource-lang = "de"\ntarget-lang = "en"\n'
        '[batch]\ntokens = 256\n[flags]\nmax-epoch = 2\n'
    )  # fmt: skip
    (tmp_path / "tiny.toml").write_text(
        f'title = "Tiny"\n[[column]]\nrecipe = "{tmp_path}/toy.toml"\nlabel = "Toy"\nscore = "tokenised_bleu"\n'
        f'[[row]]\nlabel = "Plain"\narch = "transformer"\nflags = {json.dumps(TINY)}\n'
        f'paper = {{ "{tmp_path}/toy.toml" = 12.3 }}\n'
        f'[[row]]\nlabel = "Evolving"\narch = "ea_transformer_base"\nflags = {json.dumps(TINY)}\nbaseline = "Plain"\n'
        f'[[row]]\nlabel = "Nobody"\narch = "ea_transformer_lite"\nflags = {json.dumps(TINY)}\n'
        f'[[run]]\nrow = "Evolving"\nrecipe = "{tmp_path}/toy.toml"\nseed = 1\npath = "{tmp_path}/made"\n'
    )  # fmt: skip
    shutil.copytree(run, tmp_path / "made", ignore=lambda folder, names: [n for n in names if n.startswith("average")])
    return tmp_path


def options(toy):
    return [toy / "tiny.toml", "--runs", toy / "runs", "--results", toy / "results", "--average", 2]


def test_a_table_that_nobody_ran(toy):
    reproduce.main([*map(str, options(toy)), "--collect"])
    text = (toy / "results" / "tiny.md").read_text()
    assert text.count("| not run |") == 2
    assert "| not run [12.30] |" in text
    assert "Nothing has been run yet." in text
    assert not (toy / "results" / "tiny.png").exists()


def test_numbers_in_the_table(toy, capsys):
    """Three seeds and a baseline: mean, deviation, difference, each seed's p."""
    table = tables.read(str(toy / "tiny.toml"))
    column, references = table.columns[0], (recipes.read(table.columns[0].recipe).data / "raw" / "test.en").read_text()
    for row, scores in (("Plain", (10.0, 12.0, 14.0)), ("Evolving", (11.0, 13.0, 18.0))):
        for seed, score in enumerate(scores, 2):
            folder = table.cell(table.row(row), column.recipe, seed, toy / "runs").folder / "eval"
            folder.mkdir(parents=True)
            (folder / "test.hyp.txt").write_text(references if row == "Evolving" else references.replace("the", "a"))
            kinds = {kind: {"score": score, "signature": "s"} for kind in ("sacrebleu", "tokenised_bleu")}
            one = {"scores": kinds, "averaged": [], "device": "d", "commit": "c" * 40, "date": "now", "command": "x"}
            (folder / "test.json").write_text(json.dumps(one))
    reproduce.main([*map(str, options(toy)), "--collect", "--seeds", "2", "3", "4"])
    text = (toy / "results" / "tiny.md").read_text()
    assert "| 12.00 ± 2.00 [12.30] |" in text
    assert "| 14.00 ± 3.61, Δ +2.00 (p 0.001, 0.001, 0.001) |" in text
    assert "cccccccccc; now" in text
    assert (toy / "results" / "tiny.png").stat().st_size > 5000


def test_gpus_that_are_free(tmp_path, monkeypatch):
    smi = tmp_path / "nvidia-smi"
    smi.write_text(
        '#!/bin/sh\ncase $1 in *compute*) echo GPU-b;; *) for i in a b c d e; do echo "$i, GPU-$i"; done;; esac\n'
    )
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert reproduce.slots(None) == [None]
    assert reproduce.slots(1) == ["a", "c", "d", "e"]
    assert reproduce.slots(2) == ["a,c", "d,e"]
    with pytest.raises(UserError, match="4 GPUs are free"):
        reproduce.slots(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table7"], "no such table; there are multi30k, table5, table6"),
        (["table5", "--recipes", "iwslt"], "the table has iwslt14-de-en, wmt14-en-de, wmt14-en-fr"),
        (["table5", "--rows", "huge"], "the table has Transformer-Lite"),
        (["table5", "--seed", "1"], "use --seeds"),
    ],
)
def test_mistakes(arguments, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        reproduce.main([*arguments, "--dry-run"])
    assert message in f"{refusal.value}{capsys.readouterr().err}"


@pytest.mark.slow
def test_missing_cells_are_run_once(toy):
    flags = [*options(toy), "--rows", "Plain", "Evolving", "--no-tensorboard", "--gpus", 0]
    first = script("reproduce.sh", *flags)
    assert first.returncode == 1, "the run that is named in the table was not made by train.sh, which says so"
    assert "scripts/train.sh did not make" in first.stderr
    prepared = recipes.read(f"{toy}/toy.toml").data
    assert script("evaluate.sh", "--data", prepared, "--run", toy / "made", "--average", 2).returncode == 0
    second = script("reproduce.sh", *flags)
    assert second.returncode == 0, second.stderr[-3000:]
    assert second.stderr.count("done already") == 2, "one trained by the first call, one evaluated by hand"
    assert "train.sh" not in second.stderr
    text = (toy / "results" / "tiny.md").read_text()
    assert "Δ" in text
    assert text.count("not run |") == 1
