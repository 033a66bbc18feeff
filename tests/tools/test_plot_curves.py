"""scripts/plot_curves.sh: the curves are the logs', a resumed run is one run, and seeds become one line."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from helpers.mistakes import refusal
from matplotlib.figure import Figure

from ea_tools.figures import curves as plot_curves
from ea_tools.training.logs import join, parse_line

# The same three log lines as fairseq 0.12.2 writes them with --log-format simple and json, on the screen.
SIMPLE = [
    "2026-11-21 13:45:13 | INFO | train_inner | epoch 001:     50 / 129 loss=11.627, nll_loss=11.395, ppl=2693.06, "
    "wps=827.9, ups=0.24, wpb=3423.1, bsz=233.6, num_updates=50, lr=0.00025, gnorm=2.773, train_wall=207, wall=209",
    "2026-11-21 13:45:17 | INFO | valid | epoch 001 | valid on 'valid' subset | loss 10.199 | nll_loss 9.807 |"
    " ppl 895.6 | bleu 1.23 | wps 3400.8 | wpb 2525.8 | bsz 168 | num_updates 50 | best_loss 8.1e-05",
    "2026-11-21 13:48:36 | INFO | train | epoch 001 | loss 10.043 | nll_loss 9.587 | ppl 768.97 | wps 1059.6 | ups 0.31"
    " | wpb 3362.5 | bsz 224.8 | num_updates 129 | lr 0.000645 | gnorm 2.01 | train_wall 397 | wall 412",
]
JSON = [
    '2026-11-21 13:45:13 | INFO | train_inner | {"epoch": 1, "update": 0.388, "loss": "11.627", "nll_loss": "11.395", '
    '"wps": "827.9", "ups": "0.24", "wpb": "3423.1", "num_updates": "50", "wall": "209"}',
    '2026-11-21 13:45:17 | INFO | valid | {"epoch": 1, "valid_loss": "10.199", "valid_nll_loss": "9.807", '
    '"valid_bleu": "1.23", "valid_wps": "3400.8", "valid_wpb": "2525.8", "valid_num_updates": "50"}',
    '2026-11-21 13:48:36 | INFO | train | {"epoch": 1, "train_loss": "10.043", "train_nll_loss": "9.587", "train_wps": '
    '"1059.6", "train_wpb": "3362.5", "train_num_updates": "129", "train_wall": "412"}',
]
JOURNAL = [
    '{"time": 1.5, "tag": "train_inner", "step": 50, "loss": 11.627, "wps": 827.9, "wpb": 3423.1, "num_updates": 50.0}',
    '{"time": 2.5, "tag": "valid", "step": 50, "loss": 10.199, "bleu": 1.23, "wps": 3400.8, "wpb": 2525.8, '
    '"num_updates": 50.0}',
    '{"time": 3.5, "tag": "train", "step": 129, "loss": 10.043, "wps": 1059.6, "wpb": 3362.5, "num_updates": 129.0}',
]


def bare(lines):
    """Without date, level and tag, as fairseq writes to --log-file."""
    return [line.split(" | ", 3)[3] for line in lines]


@pytest.mark.parametrize("lines", [SIMPLE, JSON, bare(SIMPLE), bare(JSON), JOURNAL])
def test_every_form_of_log(lines):
    entries = [parse_line(line) for line in lines]
    assert [(tag, update, numbers["loss"]) for tag, update, numbers in entries] == [
        ("train_inner", 50, 11.627),
        ("valid", 50, 10.199),
        ("train", 129, 10.043),
    ]
    assert [(numbers["wps"], numbers["wpb"]) for _, _, numbers in entries] == [
        (827.9, 3423.1), (3400.8, 2525.8), (1059.6, 3362.5)
    ]  # fmt: skip
    assert [numbers.get("bleu") for _, _, numbers in entries] == [None, 1.23, None]


def test_lines_without_numbers():
    for line in (
        "", "2026-11-21 | INFO | fairseq_cli.train | {'_name': None, 'common': {'seed': 1}}", '{"time": 1, "tag": "tr',
        "2026-11-21 13:48:36 | INFO | fairseq_cli.train | end of epoch 1 (average epoch stats below)", "[1, 2]",
        "2026-11-21 | INFO | fairseq.trainer | begin training epoch 1", '{"tag": "valid"}', '{"loss": "x"}',
    ):  # fmt: skip
        assert parse_line(line) is None, line
    tag, update, numbers = parse_line('{"tag": "train", "step": 7, "num_updates": 7.0, "loss": NaN}')
    assert (tag, update) == ("train", 7)
    assert np.isnan(numbers["loss"])


# --- runs that are made here ------------------------------------------------------------------------------------------


def journal(updates, level=10.0, wps=100.0, wpb=200.0):
    """Lines of log.jsonl: every 10 updates a training loss, every 20 a validation, every 30 the end of an epoch."""
    for update in updates:
        numbers = {"step": update, "loss": level - update / 10, "wps": wps, "wpb": wpb, "num_updates": float(update)}
        if update % 10 == 0:
            yield json.dumps({"time": 1.0, "tag": "train_inner", **numbers})
        if update % 20 == 0:
            yield json.dumps({"time": 1.0, "tag": "valid", **numbers, "loss": level - update / 20, "bleu": update / 4})
        if update % 30 == 0:
            yield json.dumps({"time": 1.0, "tag": "train", **numbers})


def make(folder, lines=None, seed=1, arch="ea_transformer_lite", flags=None, **level):
    """The files of a run's folder that are read, as scripts/train.sh leaves them."""
    folder.mkdir(parents=True)
    lines = list(journal(range(1, 61), **level)) if lines is None else lines
    (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
    (folder / "train.log").write_text(
        "x | train_inner | epoch 001:  10 / 30 loss=9\nx | train_inner | epoch 002:  1 / 30 loss=8\n"
    )
    ours = {"recipe": "toy", "arch": arch, "data": "1925d0", "seed": str(seed)}
    ours |= {"ea-alpha": "0.1"} if arch.startswith("ea_") else {}
    starts = [{"flags": {"seed": str(seed), "cpu": "", **(flags or {})}}]
    (folder / "run.json").write_text(json.dumps({"identity": ours, "starts": starts}))
    return folder


def same(one, other):
    assert one.points.keys() == other.points.keys()
    for name in one.points:
        np.testing.assert_array_equal(one.points[name], other.points[name])
    np.testing.assert_allclose(one.clock, other.clock)


def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path):
    """Killed at 47 with a checkpoint of 30; then at 60, in the middle of a line; then a torn last line."""
    whole = list(journal(range(1, 101)))
    first, second, third = (list(journal(updates)) for updates in (range(1, 48), range(31, 61), range(51, 101)))
    torn = '{"time": 9.9, "tag": "train_inner", "step": 61, "lo'
    # The dropped lines have other losses, so that a kept one shows.
    first = [re.sub(r'"loss": [\d.]+', '"loss": 99', line) if '"step": 40' in line else line for line in first]
    lines = [*first, *second, torn + third[0], *third[1:], '{"time": 3, "tag": "valid", "step": 100, "loss": 1.']
    killed, undisturbed = make(tmp_path / "killed", lines), make(tmp_path / "undisturbed", whole)
    same(plot_curves.read(killed), plot_curves.read(undisturbed))


def test_a_run_of_the_records_by_its_name(tmp_path, capsys):
    names = [
        f"multi30k-laptop-en-de/{arch}-seed{seed}"
        for arch in ("transformer_lite", "ea_transformer_lite")
        for seed in "12"
    ]
    plot_curves.main([*names, "--out", str(tmp_path / "curves.png")])
    assert re.findall(r"^(\S+) +1,500 ", capsys.readouterr().out, re.M) == names
    labels = [line.label for line in plot_curves.group(plot_curves.read_all(map(Path, names)))]
    assert labels == ["transformer_lite (seeds 1, 2)", "ea_transformer_lite (seeds 1, 2)"]


def test_repeated_updates_replace_the_earlier_ones():
    def entries(*updates):
        return [("train_inner", update, {"loss": loss}) for update, loss in updates]

    assert join(entries((10, 1), (20, 2), (30, 3), (20, 7))) == entries((10, 1), (20, 7))
    assert join(entries((10, 1), (20, 2), (20, 7), (30, 8))) == entries((10, 1), (20, 7), (30, 8))
    assert join(entries((10, 1), (5, 7))) == entries((5, 7)), "started again"


def test_points_and_axes(tmp_path):
    """An update takes 200 tokens at 100 a second; losses stand in the middle of the 10 updates that they are of."""
    run = plot_curves.read(make(tmp_path / "run"))
    updates, losses = run.points["train"]
    assert updates.tolist() == [5, 15, 25, 35, 45, 55]
    assert losses.tolist() == [9, 8, 7, 6, 5, 4]
    assert run.points["valid"][0].tolist() == [20, 40, 60]
    assert run.points["bleu"][1].tolist() == [5, 10, 15]
    np.testing.assert_allclose(run.x("hours", updates), updates * 2 / 3600)
    np.testing.assert_allclose(run.x("epochs", updates), updates / 30)
    assert (run.seed, run.last) == ("1", 60)


def test_a_log_of_plain_fairseq(tmp_path):
    log = tmp_path / "screen.log"
    log.write_text("\n".join(["fairseq says hello", *SIMPLE]) + "\n")
    run = plot_curves.read(log)
    assert run.points["train"][1].tolist() == [11.627]
    assert run.epoch == 129
    np.testing.assert_allclose(run.clock[1][:2], [0, 50 * 3423.1 / 827.9 / 3600])
    (line,) = plot_curves.group([run])
    assert line.label == "screen"


# --- lines ------------------------------------------------------------------------------------------------------------


def lines_of(*folders):
    return [(line.label, len(line.runs)) for line in plot_curves.group([plot_curves.read(path) for path in folders])]


def test_runs_that_differ_in_the_seed_alone_are_one_line(tmp_path):
    ours = [make(tmp_path / f"ours{seed}", seed=seed) for seed in (1, 2, 3)]
    other = make(tmp_path / "other", seed=1, flags={"ea-beta": "0.3", "num-workers": "4"})
    precise = make(tmp_path / "precise", seed=4, flags={"bf16-products": ""})
    plain = [make(tmp_path / f"plain{seed}", seed=seed, arch="transformer_lite") for seed in (1, 2)]
    assert lines_of(*ours) == [("ea_transformer_lite (seeds 1, 2, 3)", 3)]
    assert len(lines_of(*ours, precise)) == 2, "another precision is another model"
    assert lines_of(*ours, *plain) == [("ea_transformer_lite (seeds 1, 2, 3)", 3), ("transformer_lite (seeds 1, 2)", 2)]
    assert lines_of(plain[0], *ours[:2], other) == [
        ("transformer_lite", 1),
        ("ea_transformer_lite (seeds 1, 2)", 2),
        ("ea_transformer_lite, ea-beta 0.3", 1),
    ]


def test_the_same_seed_twice_is_two_lines(tmp_path):
    twice = [make(tmp_path / name, seed=1) for name in ("before", "after")]
    assert lines_of(*twice) == [("ea_transformer_lite, before", 1), ("ea_transformer_lite, after", 1)]


def test_the_same_name_in_other_folders_is_two_labels(tmp_path):
    runs = [make(tmp_path / name / "run", seed=1) for name in ("one", "other")]
    assert [label for label, _ in lines_of(*runs)] == [f"ea_transformer_lite, run, {run}" for run in runs]


def test_other_data_are_told_by_the_runs_folder_and_not_by_a_digest(tmp_path):
    runs = [make(tmp_path / name) for name in ("one", "two")]
    record = json.loads((runs[1] / "run.json").read_text())
    record["identity"]["data"] = "77aa01"
    (runs[1] / "run.json").write_text(json.dumps(record))
    assert [label for label, _ in lines_of(*runs)] == [f"ea_transformer_lite, {run}" for run in runs]


def test_what_differs_between_architectures_is_named(tmp_path):
    runs = [make(tmp_path / arch, arch=arch, flags={"lr": lr}) for arch, lr in (("ea_bart", "0.1"), ("bart", "0.2"))]
    assert lines_of(*runs) == [("ea_bart, lr 0.1", 1), ("bart, lr 0.2", 1)]


def test_no_mean_leaves_out_a_seed(tmp_path):
    validated, young = make(tmp_path / "1"), make(tmp_path / "2", list(journal(range(1, 11))), seed=2)
    (line,) = plot_curves.group([plot_curves.read(validated), plot_curves.read(young)])
    assert len(plot_curves.band(line, "valid", "updates")[0]) == 0
    assert len(plot_curves.band(line, "train", "updates")[0]) == 1


def test_mean_and_range_as_far_as_all_seeds_have_got(tmp_path):
    long = make(tmp_path / "long", seed=1)
    short = make(tmp_path / "short", list(journal(range(1, 41), level=12)), seed=2)
    (line,) = plot_curves.group([plot_curves.read(long), plot_curves.read(short)])
    x, mean, lowest, highest = plot_curves.band(line, "train", "updates")
    assert x.tolist() == [5, 15, 25, 35]
    assert mean.tolist() == [10, 9, 8, 7]
    assert (lowest.tolist(), highest.tolist()) == ([9, 8, 7, 6], [11, 10, 9, 8])


def test_seeds_with_other_updates_are_compared_at_the_same_ones(tmp_path):
    fast, slow = make(tmp_path / "fast", seed=1), make(tmp_path / "slow", seed=2, wps=50.0)
    (line,) = plot_curves.group([plot_curves.read(fast), plot_curves.read(slow)])
    x, _, lowest, highest = plot_curves.band(line, "valid", "hours")
    np.testing.assert_allclose(x * 3600 / 2, [40, 60])  # from the first of the slow one to the last of the fast one
    np.testing.assert_allclose(lowest, 10 - x * 3600 / 2 / 20)
    np.testing.assert_allclose(highest, 10 - x * 3600 / 4 / 20)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".pdf"])
def test_picture_and_table(tmp_path, capsys, suffix):
    runs = [make(tmp_path / "runs" / str(seed), seed=seed, level=10 + seed) for seed in (1, 2)]
    out = tmp_path / "new" / f"curves{suffix}"
    plot_curves.main([*map(str, runs), "--out", str(out), "--x", "updates", "hours"])
    magic = {".png": b"\x89PNG", ".pdf": b"%PDF"}[suffix]
    assert out.read_bytes().startswith(magic)
    printed = capsys.readouterr().out
    assert re.search(r"runs/1 +60 +2\.0 +0\.03 +5\.000 +8\.000: 8\.000 @ 60 +15\.00: 15\.00 @ 60 +@ 60\n", printed)
    assert re.search(r"runs/2 .* -\n", printed)  # never as low as the first run
    assert list(out.parent.iterdir()) == [out]


def test_a_mistake_is_named_and_leaves_no_file(tmp_path, capsys):
    run = make(tmp_path / "run")
    empty, silent, foreign = (tmp_path / name for name in ("empty", "silent", "foreign"))
    empty.mkdir()
    make(silent, lines=[])
    make(foreign)
    (foreign / "run.json").write_text('{"arch": "x"}')
    (tmp_path / "notes.txt").write_text("what to buy: 3 apples")
    out, folder = tmp_path / "out" / "curves.png", tmp_path / "folder.png"
    folder.mkdir()
    for arguments, message in [
        ([tmp_path / "nowhere"], "nowhere: no such run folder or log file"),
        ([run, empty], "empty: has no log.jsonl, so scripts/train.sh did not make this run; give the file"),
        ([silent], "silent/log.jsonl: holds no loss"),
        ([tmp_path / "notes.txt"], "notes.txt: holds no loss; is it fairseq-train's log"),
        ([foreign], "run.json: not what scripts/train.sh writes: 'identity'"),
        ([run, run.parent / "silent" / ".." / "run"], f"given twice: {run}"),
        ([run, "--out", tmp_path / "curves.gif"], "curves.gif: the name must end in .png, .svg, .pdf"),
        ([run, "--out", folder], "folder.png: is a folder; give the name of a file"),
        ([run, "--x", "days"], "invalid choice: 'days'"),
    ]:
        words = [*arguments, *([] if "--out" in arguments else ["--out", out])]
        assert message in refusal(capsys, plot_curves.main, *words, writes_to=tmp_path)


def drawn(monkeypatch, tmp_path, *runs):
    """The figure of these runs' curves."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, **options: (figures.append(figure), path.touch()))
    plot_curves.main([*map(str, runs), "--x", "updates", "--out", str(tmp_path / "curves.png")])
    return figures[0]


def test_a_run_that_diverged_is_seen_and_said(monkeypatch, tmp_path):
    """Also one that ended in the first tenth of the others' time, all of which the picture used to crop."""
    good = make(tmp_path / "good", list(journal(range(1, 201), level=30.0)))
    lines = [*journal(range(1, 11), level=1e6)]
    figure = drawn(monkeypatch, tmp_path, good, make(tmp_path / "wild", lines, arch="transformer_lite"))
    panel = figure.axes[0]
    assert panel.get_ylim()[1] < 40, "it does not press the others together"
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels[0] == "ea_transformer_lite"
    assert labels[1].startswith("transformer_lite (above the picture: ")


def test_a_log_without_a_loss_is_left_out(tmp_path, capsys):
    silent, new = make(tmp_path / "silent", lines=[]), make(tmp_path / "new")
    (new / "log.jsonl").unlink()
    out = tmp_path / "curves.png"
    plot_curves.main([*map(str, (silent, make(tmp_path / "run"), new)), "--out", str(out)])
    assert out.exists()
    said = capsys.readouterr()
    assert [line for line in said.err.splitlines() if "warning" in line and "left out" in line] == said.err.splitlines()
    assert "silent/log.jsonl: holds no loss" in said.err
    assert str(new) in said.err
    assert "silent" not in said.out


def test_a_loss_that_is_no_number_is_said(monkeypatch, tmp_path):
    good = make(tmp_path / "good")
    lines = [line.replace('"loss": 4.0', '"loss": NaN') for line in journal(range(1, 61))]
    figure = drawn(monkeypatch, tmp_path, good, make(tmp_path / "lost", lines, arch="transformer_lite"))
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "transformer_lite (diverged: " in labels[1]
